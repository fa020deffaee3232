"""Documents whose ids are a tensor of compiled code, with Inductor and CUDA graphs. `pytest -m gpu`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import UnsupportedError
from stof.testing import assert_attention, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of Inductor's first CUDA graph, of a capture that an error ends, and of Inductor about products of float32.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

LENGTH = 300


def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return stof.attention(q * 1, k, v, masks.causal() & masks.documents(ids), return_lse=True)


def drawn_ids(seed: int, device: str) -> Tensor:
    ids = torch.randint(-1, 9, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return (ids.sort(1).values if seed % 2 else ids).to(device)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.cuda().half() for x in make_inputs(batch=2, q_len=LENGTH, head_dim=64).qkv)
    return q, k, v


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor(mode: str | None, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attend, mode=mode, fullgraph=True)
    for step in range(6):
        qkv, ids = inputs(), drawn_ids(step, device)
        mask = masks.causal() & masks.documents(ids)
        keep = mask.to_dense(LENGTH, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            assert_attention(*compiled(*qkv, ids), *qkv, keep)
        found, want = ([x.clone().requires_grad_() for x in qkv] for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*found, ids.clone())[0].square().sum().backward()
        stof.attention(*want, mask).square().sum().backward()
        for x, other in zip(found, want, strict=True):
            torch.testing.assert_close(x.grad, other.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_captures_are_refused(device: str) -> None:
    torch.compiler.reset()
    compiled, qkv, ids = torch.compile(attend, fullgraph=True), inputs(), drawn_ids(1, device)
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        compiled(*qkv, ids)
    torch.cuda.synchronize()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side),
    ):
        compiled(*qkv, ids)


@pytest.mark.parametrize("options", [{"cuda_graphs": "whole"}, {"cuda_graphs": True}, {}])
def test_packed_positions_of_optimized_models(options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from tests.integrations import models

    torch.compiler.reset()
    model = models.llama().cuda()
    reference = models.llama().cuda()
    reference.load_state_dict(model.state_dict())
    reference.set_attn_implementation("eager")
    fast = stof.optimize(model, store=False, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a call that cannot be recorded
        for lengths in ([20, 28], [5, 30, 13], [48], [47, 1]):
            ids = torch.randint(1, models.VOCABULARY, (1, 48), device="cuda")
            positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
            parts = [reference(part, use_cache=False).logits for part in ids.split(lengths, 1)]
            found = fast(input_ids=ids, position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-2, atol=1e-2)
