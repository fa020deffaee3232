"""What is recorded, when a recording serves, and when it is made again; tests/gpu has the recordings themselves."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import stof
from stof import masks
from stof.integrations.torch import cuda_graphs
from stof.integrations.torch.cuda_graphs import (
    MOST_RECORDED,
    CudaGraphRunner,
    CudaRecorder,
    _copy_in,
    _like,
    _memory,
    _same,
    signature,
)


class Recorder:
    """Records like a CUDA graph: what Python decided then is what every replay does, on memory of its own."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.made += 1
        inputs = [_like(x) for x in (*args, *kwargs.values())]
        named = dict(zip(kwargs, inputs[len(args) :], strict=True))
        kept = [x for x in inputs if isinstance(x, Tensor)]

        def replay(tensors: Sequence[Tensor]) -> Any:
            self.replayed += 1
            _copy_in([_memory(x) for x in kept], tensors)
            return call(*inputs[: len(args)], **named)

        return replay


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        out: Tensor = self.linear(x) * scale + self.shift
        return out if bias is None else out + bias


def whole(module: nn.Module, **options: Any) -> tuple[CudaGraphRunner, Recorder]:
    recorder = Recorder()
    return CudaGraphRunner(module, module, recorder=recorder, device_type="cpu", **options), recorder


def test_the_second_call_of_a_kind_is_recorded_and_replayed() -> None:
    module = Scaled().eval()
    calls, recorder = whole(module)
    with torch.no_grad():
        for turn in range(5):
            for args, kwargs in [
                ((torch.randn(3, 4),), {}),
                ((torch.randn(5, 4), 2.0), {}),
                ((torch.randn(3, 4),), {"scale": 3.0, "bias": torch.randn(4)}),
                ((torch.randn(3, 4),), {"bias": torch.randn(1, 4).expand(3, 4)}),
            ]:
                torch.testing.assert_close(calls(*args, **kwargs), module(*args, **kwargs), rtol=0, atol=0)
            assert (recorder.made, recorder.replayed) == (4 * (turn > 0), 4 * turn)


def test_modes_are_told_apart() -> None:
    calls, recorder = whole(Scaled().eval())
    x = torch.randn(3, 4)
    for _ in range(2):
        with torch.no_grad():
            calls(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert calls(x).dtype == torch.float32  # bfloat16 product, float32 shift
        with torch.inference_mode():
            calls(x)
            calls(torch.randn(3, 4))  # an inference tensor
    assert recorder.made == 4


@pytest.mark.parametrize("folded_weights", [False, True])
def test_weights_that_are_others_need_a_new_recording(folded_weights: bool) -> None:
    module = Scaled().eval()
    calls, recorder = whole(module, **({"folded_weights": True} if folded_weights else {}))  # False by default
    x = torch.randn(3, 4)

    def made() -> int:
        before = recorder.made
        for _ in range(3):
            torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
        return recorder.made - before

    with torch.no_grad():
        assert made() == 1
        assert made() == 0
        module.linear.weight = nn.Parameter(torch.randn(4, 4))
        assert made() == 1
        module.linear.weight.data = torch.randn(4, 4)
        assert made() == 1
        module.shift = torch.ones(4)
        assert made() == 1
        module.linear.weight.mul_(2)  # in its place: a replay reads it
        assert made() == int(folded_weights)
        del module.shift
        module.shift = torch.ones(4)
        assert made() == 1
        assert made() == 0


def test_a_replay_begun_for_other_weights_is_dropped() -> None:
    """It begins before the weights are looked at, and reads memory that is held until then."""
    module = Scaled().eval()
    calls, recorder = whole(module)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            calls(x)
        address = module.linear.weight.data_ptr()
        module.linear.weight.data = torch.randn(4, 4)
        assert address in [memory.data_ptr() for memory in calls._weights._memory]
        began = recorder.replayed
        torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
        assert (recorder.replayed, recorder.made) == (began + 1, 1)
        assert address not in [memory.data_ptr() for memory in calls._weights._memory]
        assert not calls._recorded


def test_modules_that_are_others_need_a_new_recording() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    module = nn.Sequential(Scaled(), layers, nn.Linear(4, 4, bias=False), nn.Sequential())
    calls, recorder = whole(module.eval())
    x = torch.randn(3, 4)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: setattr(module[1], "0", nn.Linear(4, 4)),
            lambda: setattr(module[2], "bias", nn.Parameter(torch.randn(4))),
            lambda: module[1].append(nn.Tanh()),
            lambda: module[1].pop(1),
            lambda: module[3].append(nn.Tanh()),  # which held nothing
            lambda: module.insert(0, nn.Linear(4, 4)),
            lambda: module.append(nn.Dropout(0.0).eval()),
            lambda: module[-1].train(),
        ):
            change()
            before = recorder.made
            for _ in range(3):
                torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
            assert recorder.made == before + 1


class Settings:
    def __init__(self) -> None:
        self.factor, self.signs, self.inner = 1.0, [1, -1], types.SimpleNamespace(shift=0.5)


class Set(nn.Module):
    """A module whose code reads attributes; some are written in every call, with the value they have."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.table, self.mask, self.scale = settings, {"by": 2.0}, masks.causal(), 0.5
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = float(str(self.scale))
        y = self.linear(x) * self.settings.factor * self.settings.signs[0] * self.table["by"] + self.scale
        return stof.attention(y, y, y, self.mask) + self.settings.inner.shift


def test_replays_know_the_masks_and_attributes_they_were_made_under() -> None:
    """A changed one leads to a new recording: a replay would go on with what it was."""
    settings = Settings()
    module = nn.Sequential(Set(settings), Set(settings)).eval()
    first = module[0]
    calls, recorder = whole(module)
    x = torch.randn(1, 1, 6, 4)
    hooks: list[Any] = []
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: setattr(first, "mask", masks.sliding_window(1)),
            lambda: setattr(first, "scale", 0.25),
            lambda: setattr(first, "new", 1),
            lambda: delattr(first, "new"),
            lambda: first.table.update(by=3.0),
            lambda: settings.signs.__setitem__(0, -1),
            lambda: setattr(settings, "factor", 2.0),
            lambda: setattr(settings.inner, "shift", 0.0),
            lambda: setattr(module[1], "settings", Settings()),
            lambda: hooks.append(first.register_forward_hook(lambda module, args, out: out + 1)),
            lambda: hooks.append(first.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))),
            lambda: hooks.pop().remove(),
            lambda: setattr(first, "forward", lambda x: x + 7),
        ):
            change()
            before = recorder.made
            for _ in range(4):
                torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
            assert recorder.made == before + 1


def test_replays_know_the_values_of_masks_that_are_tensors() -> None:
    """In attributes and elsewhere: written in place, counted by PyTorch or not, they are other masks."""
    keep, words = torch.ones(6, 6, dtype=torch.bool), torch.full((6, 1), 63, dtype=torch.int32)
    inside, outside = masks.from_function(lambda b, h, q, kv: keep[q, kv]), masks.from_bits(words, 6)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks = (inside,)

        def forward(self, x: Tensor) -> Tensor:
            return stof.attention(x, x, x, self.masks[0]) + stof.attention(x, x, x, outside)

    class Called(Recorder):
        """Runs what it records, as a GPU's does."""

        def __call__(self, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            call(*args, **kwargs)
            return super().__call__(call, args, kwargs)

    module, recorder = Masked().eval(), Called()
    calls = CudaGraphRunner(module, module, recorder=recorder, device_type="cpu")
    x = torch.randn(1, 1, 6, 4)
    with torch.no_grad():
        writes = [lambda: None, lambda: keep.data[:, :3].fill_(False), lambda: words.data.fill_(56)]
        for number, write in enumerate(writes):
            write()
            for _ in range(4):
                torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
            assert recorder.made == number + 1


def test_sparsified_models_are_recorded_again() -> None:
    pytest.importorskip("transformers")
    from stof.integrations import transformers as hf
    from tests.integrations import models

    model = models.bert()
    hf.enable(model)
    calls, recorder = whole(model)
    ids = torch.arange(40).view(2, 20) % models.VOCABULARY

    def made() -> int:
        before = recorder.made
        for _ in range(4):
            torch.testing.assert_close(calls(input_ids=ids)[0], model(input_ids=ids)[0], rtol=0, atol=0)
        return recorder.made - before

    with torch.no_grad():
        assert made() == 1
        with hf.sparsify(model, "sliding_window(2)"):
            assert made() == 1
            assert made() == 0
        assert made() == 1
        model.set_attn_implementation("sdpa")
        assert made() == 1
        assert made() == 0


def test_buffers_of_other_layouts_are_looked_at() -> None:
    module = Scaled().eval()
    module.register_buffer("sparse", torch.eye(4).to_sparse())
    calls, recorder = whole(module, folded_weights=True)
    with torch.no_grad():
        for _ in range(4):
            calls(torch.randn(3, 4))
        assert recorder.made == 1
        module.sparse = torch.eye(4).to_sparse()
        for _ in range(4):
            calls(torch.randn(3, 4))
    assert recorder.made == 2


@pytest.mark.parametrize("folded_weights", [False, True])
def test_weights_may_become_inference_tensors(folded_weights: bool) -> None:
    module = Scaled().eval()
    calls, recorder = whole(module, folded_weights=folded_weights)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            calls(x)
    with torch.inference_mode():
        module.double().float()
        for _ in range(3):
            torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
    with torch.no_grad():
        calls(x)
    assert recorder.made == 2


class Counts(Scaled):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.shift.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_writes_to_its_buffers_does_so_once_a_call(compiled: bool) -> None:
    module = Counts().eval()
    call = torch.compile(module, backend="aot_eager") if compiled else module
    recorder = Recorder()
    calls = CudaGraphRunner(call, module, recorder=recorder, device_type="cpu")
    with torch.inference_mode():
        for _ in range(4):
            calls(torch.randn(3, 4))
    assert recorder.made == 0
    assert module.shift.tolist() == [4.0] * 4


def test_inference_tensors_are_copied_outside_of_inference_mode() -> None:
    module = Scaled().eval()
    calls, recorder = whole(module)
    for _ in range(4):
        with torch.inference_mode():
            x = torch.randn(3, 4)
        with torch.no_grad():
            torch.testing.assert_close(calls(x), module(x), rtol=0, atol=0)
    assert (recorder.made, recorder.replayed) == (1, 3)


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CudaRecorder` on memory of this machine: it calls the function, and captures nothing."""
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    for name in ("Stream", "current_stream", "synchronize", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(cuda_graphs, "captured", lambda call, *_: (MagicMock(), call()))


@pytest.mark.usefixtures("no_capture")
def test_results_elsewhere_are_refused() -> None:
    x = torch.ones(2, 3)
    CudaRecorder()(lambda x: {"out": x + 1, "n": 2}, (x,), {})
    with pytest.raises(RuntimeError, match="returns a tensor on meta"):
        CudaRecorder()(lambda x: (x + 1, x.to("meta")), (x,), {})
    with pytest.raises(RuntimeError, match="returns a object"):
        CudaRecorder()(lambda x: (x + 1, object()), (x,), {})


@pytest.mark.usefixtures("no_capture")
def test_writing_what_was_there_counts_as_writing() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="writes to its arguments"):
        CudaRecorder()(lambda x: x.clamp_(min=0) + 1, (x,), {})
    assert x._version == 0


def test_results_with_gradients_are_not_replayed() -> None:
    module = Scaled().eval()
    calls, recorder = whole(module)
    for _ in range(3):
        calls(torch.randn(3, 4)).sum().backward()
    assert recorder.made == 0


def test_recording_keeps_nothing_of_autocast() -> None:
    """What autocast keeps of weights ends with its context; a recording made with it would read freed memory."""
    kept: list[bool] = []

    def recorder(call: Any, args: Any, kwargs: Any) -> Any:
        kept.append(torch.is_autocast_cache_enabled())
        return Recorder()(call, args, kwargs)

    module = Scaled().eval()
    calls = CudaGraphRunner(module, module, recorder=recorder, device_type="cpu")
    with torch.no_grad(), torch.autocast("cpu"):
        for _ in range(3):
            calls(torch.randn(3, 4))
        assert torch.is_autocast_cache_enabled()
    assert kept == [False]


def test_the_default_dtype_is_noticed() -> None:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() + torch.ones(2)

    calls, recorder = whole(Made().eval())
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            assert calls(x).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            for _ in range(3):
                assert calls(x).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
    assert recorder.made == 2


def test_transformed_calls_go_to_the_model() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = Scaled().eval()
    calls, recorder = whole(module)
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            calls(x)
        mapped = torch.func.vmap(calls)(torch.stack([x, tangent]))
        torch.testing.assert_close(mapped, module(torch.stack([x, tangent])))
        _, moved = torch.func.jvp(calls, (x,), (tangent,))
        torch.testing.assert_close(moved, torch.func.jvp(module, (x,), (tangent,))[1])
        with FlopCounterMode(display=False) as counter:
            calls(x)
        assert counter.get_total_flops() == 2 * 3 * 4 * 4
    with forward_ad.dual_level(), torch.no_grad():
        assert signature((forward_ad.make_dual(x, tangent),), {}, "cpu") == (None, [])
    assert (recorder.made, recorder.replayed) == (1, 2)


@pytest.mark.parametrize(
    "args",
    [
        ([1.0],),
        (torch.randn(2, 4).to_sparse(),),
        (torch.randn(2, 4, requires_grad=True),),
        (torch.randn(2, 4, device="meta"),),
        (1.0, 2),
        (nn.Parameter(torch.randn(2)),),
    ],
)
def test_what_cannot_be_recorded_has_no_signature(args: tuple[Any, ...]) -> None:
    assert signature(args, {}, "cpu") == (None, [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_signature() -> None:
    assert signature((torch.nested.as_nested_tensor([torch.randn(2, 4)]),), {}, "cpu") == (None, [])


def test_signatures_know_numbers_apart() -> None:
    x = torch.randn(2, 4)
    values = [0.0, -0.0, float("nan"), 0, False, None, "0"]
    assert len({signature((x, value), {}, "cpu")[0] for value in values}) == len(values)
    assert signature((x, float("nan")), {}, "cpu") == signature((x, float("nan")), {}, "cpu")
    assert signature((x,), {"a": 1}, "cpu")[0] != signature((x,), {"b": 1}, "cpu")[0]
    assert signature((x, x), {}, "cpu")[0] != signature((x,), {"x": x}, "cpu")[0]


def test_training_and_gradients_go_to_the_model() -> None:
    module = Scaled()
    calls, recorder = whole(module)
    for _ in range(3):
        calls(torch.randn(3, 4)).sum().backward()
    assert recorder.made == 0
    assert module.linear.weight.grad is not None


def test_a_call_that_cannot_be_recorded_runs_as_it_is() -> None:
    tries = []

    def recorder(call: Any, args: Any, kwargs: Any) -> Any:
        tries.append(args)
        raise RuntimeError("operation not permitted when stream is capturing")

    module = Scaled().eval()
    calls = CudaGraphRunner(module, module, recorder=recorder, device_type="cpu")
    x = torch.randn(3, 4)
    with torch.no_grad():
        calls(x)
        with pytest.warns(RuntimeWarning, match="cannot be recorded as a CUDA graph and runs unrecorded: operation"):
            calls(x)
        for _ in range(3):
            torch.testing.assert_close(calls(x), module(x))
    assert len(tries) == 1


def test_few_recordings_are_kept() -> None:
    module = Scaled().eval()
    calls, recorder = whole(module)
    with torch.no_grad():
        for _ in range(2):
            for length in range(1, MOST_RECORDED + 3):
                calls(torch.randn(length, 4))
        assert recorder.made == MOST_RECORDED + 2
        calls(torch.randn(MOST_RECORDED, 4))
        assert recorder.made == MOST_RECORDED + 2
        for _ in range(2):
            calls(torch.randn(1, 4))
        assert recorder.made == MOST_RECORDED + 3


def test_expanded_memory_is_copied_once() -> None:
    x = torch.randn(3, 1, 5).expand(3, 4, 5)
    new = _like(x)
    assert new.stride() == x.stride()
    assert _same(new, x)
    assert _memory(x).shape == (3, 1, 5)
    _memory(new).add_(1)
    torch.testing.assert_close(new, x + 1)
    assert not _same(new, x)


def test_an_optimised_model_takes_whole_calls() -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval()
    optimised = stof.optimize(module, cuda_graphs="whole")
    assert isinstance(optimised.forward, CudaGraphRunner)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 8)
            torch.testing.assert_close(optimised(x), module(x))
        other = copy.deepcopy(optimised)
        module[0].weight.zero_()
        assert other(x).std(0).norm() > 0
