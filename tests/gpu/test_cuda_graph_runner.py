"""Whole calls recorded as CUDA graphs, compared with the model in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stof
from stof.integrations.torch.cuda_graphs import MOST_RECORDED, CudaGraphRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)
        self.register_buffer("shift", torch.randn(64))

    def forward(self, x: Tensor, scale: float = 1.0, add: Tensor | None = None) -> dict[str, Any]:
        hidden = self.norm(x + self.down(nn.functional.gelu(self.up(x)))) * scale + self.shift
        return {"hidden": hidden if add is None else hidden + add, "pair": (hidden.sum(-1), None), "count": x.shape[0]}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def optimised(**options: Any) -> tuple[nn.Module, nn.Module]:
    module = Block().cuda().half().eval()
    return module, stof.optimize(module, cuda_graphs="whole", **options)


def close(out: Any, module: nn.Module, x: Tensor, **kwargs: Any) -> None:
    expected = module(x, **kwargs)
    torch.testing.assert_close(out["hidden"], expected["hidden"], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out["pair"][0], expected["pair"][0], rtol=1e-2, atol=1e-1)
    assert out["pair"][1] is None
    assert out["count"] == expected["count"]


def recorded(fast: nn.Module) -> int:
    assert isinstance(fast.forward, CudaGraphRunner)
    return len(fast.forward._recorded)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_right_and_stay_valid(mode: Any) -> None:
    module, fast = optimised(dynamic=True)
    kept = []
    with mode():
        for _ in range(4):
            for rows in (3, 40, 129):
                x = torch.randn(2, rows, 64, device="cuda", dtype=torch.half)
                add = torch.randn(2, 1, 64, device="cuda", dtype=torch.half).expand(2, rows, 64)
                for kwargs in ({}, {"scale": 0.5}, {"add": add}):
                    kept.append((fast(x, **kwargs), x, kwargs))
        for out, x, kwargs in kept:
            close(out, module, x, **kwargs)
    assert recorded(fast) == 9


def test_inference_tensors_outside_of_inference_mode() -> None:
    module, fast = optimised()
    for _ in range(4):
        with torch.inference_mode():
            x = torch.randn(2, 40, 64, device="cuda", dtype=torch.half)
        with torch.no_grad():
            close(fast(x), module, x)
    assert recorded(fast) == 1


def test_changed_weights_are_seen() -> None:
    module, fast = optimised()
    x = torch.randn(5, 64, device="cuda", dtype=torch.half)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: module.up.weight.mul_(1.5),
            lambda: setattr(module.up, "weight", nn.Parameter(torch.randn_like(module.up.weight))),
            lambda: setattr(module.norm.weight, "data", torch.randn_like(module.norm.weight)),
            lambda: setattr(module, "shift", torch.randn_like(module.shift)),
            lambda: module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()}),
            lambda: module.cpu().cuda(),
        ):
            change()
            for _ in range(4):
                close(fast(x), module, x)
            assert recorded(fast) == 1


def test_folded_weights_are_made_again() -> None:
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.RMSNorm(256, eps=1e-6), nn.Linear(256, 512, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.up(self.norm(x))
            return out

    module = Rms().cuda().half().eval()
    fast = stof.optimize(module, cuda_graphs="whole", fold=True)
    x = torch.randn(2048, 256, device="cuda", dtype=torch.half)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(4):
                torch.testing.assert_close(fast(x), module(x), rtol=1e-2, atol=1e-2)
            module.norm.weight.mul_(0.5)


def test_streams_wait_for_each_other() -> None:
    module, fast = optimised()
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(4000, 64, device="cuda", dtype=torch.half) for _ in range(30)]
    torch.cuda.synchronize()
    outs = []
    with torch.no_grad():
        for i, x in enumerate(xs):
            with torch.cuda.stream(streams[i % 3]):
                outs.append(fast(x))
        torch.cuda.synchronize()
        for x, out in zip(xs, outs, strict=True):
            close(out, module, x)


def test_many_shapes() -> None:
    module, fast = optimised(dynamic=True)
    with torch.no_grad():
        for _ in range(2):
            for rows in range(2, MOST_RECORDED + 5):
                for _ in range(2):
                    x = torch.randn(rows, 64, device="cuda", dtype=torch.half)
                    close(fast(x), module, x)
    assert recorded(fast) == MOST_RECORDED


class Synchronises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


@pytest.mark.filterwarnings("ignore:.*Graph break.*")
@pytest.mark.parametrize(("make", "reason"), [(Synchronises, "captur"), (Writes, "writes to its arguments")])
def test_what_cannot_be_recorded_runs_as_it_is(make: Any, reason: str) -> None:
    module = make().cuda().eval()
    fast = stof.optimize(module, cuda_graphs="whole")
    stream = torch.cuda.current_stream()
    with torch.no_grad():
        for turn in range(5):
            x = torch.randn(8, device="cuda")
            mine, theirs = x.clone(), x.clone()
            if turn == 1:
                with pytest.warns(RuntimeWarning, match=reason):
                    out = fast(mine)
            else:
                out = fast(mine)
            torch.testing.assert_close(out, module(theirs))
            torch.testing.assert_close(mine, theirs)
    # Everything is in order afterwards: the current stream, drawing, freeing, capturing.
    assert torch.cuda.current_stream() == stream
    assert torch.rand(1000, device="cuda").max().item() < 1
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del block
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - 2**28
    test_results_are_right_and_stay_valid(torch.no_grad)


def test_attention_under_a_mask() -> None:
    t = pytest.importorskip("transformers")
    config = t.BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
    model = t.BertModel(config, add_pooling_layer=False).cuda().eval()
    ids = torch.randint(1, 30000, (2, 512), device="cuda")
    mask = stof.masks.sliding_window(64) | stof.masks.global_tokens(16)
    with torch.no_grad():
        dense = mask.to_dense(512, device="cuda").expand(2, 1, 512, 512)
        expected = model(ids, attention_mask=dense)[0]
        model.half()
        fast = stof.optimize(model, mask=mask, cuda_graphs="whole")
        for _ in range(4):
            out = fast(input_ids=ids).last_hidden_state
            assert torch.nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), 0) > 0.9999
    assert recorded(fast) == 1


def test_replays_know_the_masks_and_attributes_they_were_made_under() -> None:
    t = pytest.importorskip("transformers")
    from stof.integrations import transformers as hf

    config = t.BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
    model = t.BertModel(config, add_pooling_layer=False).cuda().half().eval()
    ids = torch.randint(1, 30000, (2, 512), device="cuda")
    keep = stof.masks.sliding_window(200).to_dense(512, device="cuda")[0, 0]
    written = stof.masks.from_function(lambda b, h, q, kv: keep[q, kv])
    with torch.no_grad():
        fast = stof.optimize(model, cuda_graphs="whole")

        def agrees() -> None:
            expected = model(ids).last_hidden_state.float().flatten()
            for _ in range(3):
                out = fast(input_ids=ids).last_hidden_state.float().flatten()
                assert torch.nn.functional.cosine_similarity(out, expected, 0) > 0.9999

        agrees()
        with hf.sparsify(model, stof.masks.sliding_window(8)):
            agrees()
        agrees()
        with hf.sparsify(model, written):
            agrees()
            keep.data[:, :300] = False
            agrees()
        hook = model.embeddings.register_forward_hook(lambda module, args, out: out * 0.1)
        agrees()
        hook.remove()
        agrees()
    assert recorded(fast) == 1
