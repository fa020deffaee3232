"""Encoders that leave out padding inside of CUDA graphs, whose documents are others in each replay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof.integrations.torch.cuda_graphs import CudaGraphRunner

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("stof.integrations.transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32")
        warnings.simplefilter("error", RuntimeWarning)
        yield


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**_SIZES, max_position_embeddings=1024))


def modernbert() -> Any:
    config = transformers.ModernBertConfig(
        **_SIZES, vocab_size=1000, pad_token_id=0, local_attention=64, global_attn_every_n_layers=2
    )
    return transformers.ModernBertModel(config)


def batch(rows: int, width: int, least: int = 1) -> dict[str, Tensor]:
    lengths = torch.randint(least, width + 1, (rows, 1))
    lengths[0] = width
    ids, mask = torch.randint(1, 999, (rows, width)), (torch.arange(width) < lengths).long()
    return {"input_ids": (ids * mask).cuda(), "attention_mask": mask.cuda()}


def close(out: Any, exact: Any, inputs: dict[str, Tensor]) -> None:
    expected = exact(**inputs).last_hidden_state
    real = inputs["attention_mask"].bool()
    cosines = torch.cosine_similarity(out.last_hidden_state.float(), expected, -1)[real]
    assert bool((cosines > 0.998).all()), cosines.min()
    assert not out.last_hidden_state[~real].any()


def recordings(model: Any) -> int:
    runner = model._stof_unpadding.recorded[1]
    assert isinstance(runner, CudaGraphRunner)
    return len(runner._recorded)


@pytest.mark.parametrize("make", [bert, modernbert])
def test_each_replay_has_the_mask_of_its_batch(make: Any) -> None:
    exact = make().cuda().eval()
    model = stof.optimize(copy.deepcopy(exact).half(), unpad=True, cuda_graphs="whole")
    kept = []
    with torch.inference_mode():
        for step in range(24):
            inputs = batch(8, (256, 512, 96)[step % 3], (1, 200, 96)[step % 3])
            kept.append((model(**inputs), inputs))
        for out, inputs in kept:  # results stay valid
            close(out, exact, inputs)
        assert recordings(model) >= 3


def test_replays_on_other_streams_wait_for_each_other() -> None:
    exact = bert().cuda().eval()
    model = stof.optimize(copy.deepcopy(exact).half(), unpad=True, cuda_graphs="whole")
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.inference_mode():
        batches = [batch(16, 512, 500) for _ in range(12)]
        torch.cuda.synchronize()
        kept = []
        for step, inputs in enumerate(batches):
            with torch.cuda.stream(streams[step % 2]):
                kept.append(model(**inputs))
        torch.cuda.synchronize()
        for out, inputs in zip(kept, batches, strict=True):
            close(out, exact, inputs)
        assert recordings(model) >= 1


def test_sparse_masks_by_distance() -> None:
    exact = hf.enable(bert().cuda().eval())
    mask = stof.masks.sliding_window(100)
    model = stof.optimize(copy.deepcopy(exact).half(), mask=mask, unpad=True, cuda_graphs="whole")
    hf.sparsify(exact, mask)
    with torch.inference_mode():
        for _ in range(6):
            inputs = batch(8, 256, 200)
            close(model(**inputs), exact, inputs)
        assert recordings(model) >= 1


def test_changed_weights_are_seen() -> None:
    exact = bert().cuda().eval()
    model = stof.optimize(copy.deepcopy(exact).half(), unpad=True, cuda_graphs="whole")
    with torch.inference_mode():
        inputs = batch(8, 256, 256)
        for _ in range(2):
            for _ in range(4):
                close(model(**inputs), exact, inputs)
            for one in (exact, model):
                one.encoder.layer[0].output.dense.weight.mul_(3)


def test_large_batches_run_unrecorded_and_say_so() -> None:
    exact = bert().cuda().eval()
    model = stof.optimize(copy.deepcopy(exact).half(), unpad=True, cuda_graphs="whole")
    inputs = batch(40, 1024, 1000)
    with torch.inference_mode():
        close(model(**inputs), exact, inputs)
        with pytest.warns(RuntimeWarning, match="at most 64 MB"):
            out = model(**inputs)
        close(out, exact, inputs)
        close(model(**inputs), exact, inputs)
    assert recordings(model) == 0
