"""Masks that compiled code makes of tensors and functions: values as they are at each call, or an error."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import stof
from stof import masks
from stof.testing import assert_attention, make_inputs


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attend(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return stof.attention(q, k, v, self.mask, return_lse=True)


def drawn(seed: int) -> Tensor:
    return torch.rand(40, 40, generator=torch.Generator().manual_seed(seed)) < 0.3


@pytest.mark.parametrize(
    "backend",
    [pytest.param("eager", marks=pytest.mark.slow), "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_tensors_have_the_values_of_the_call(backend: str) -> None:
    """An attribute written in place, then replaced; collected in between, as a mask of the trace would be."""
    inputs, attend = make_inputs(q_len=40).qkv, Attend(drawn(0))
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for step in range(4):
        if step == 2:
            attend.mask.copy_(drawn(1))
        if step == 3:
            attend.mask = drawn(2)
        gc.collect()
        assert_attention(*compiled(*inputs), *inputs, attend.mask)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensors_that_are_arguments_and_locals(backend: str) -> None:
    inputs = make_inputs(q_len=40).qkv

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return stof.attention(q, k, v, ~keep, return_lse=True)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for seed in range(3):
        gc.collect()
        assert_attention(*compiled(*inputs, drawn(seed)), *inputs, ~drawn(seed))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", ["function", "block mask"])
def test_functions_become_masks_outside(kind: str, fullgraph: bool) -> None:
    """A mask made within the trace would be gone at the call, so the graph breaks there."""

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() < 5

    given = near if kind == "function" else create_block_mask(near, 1, 1, 40, 40, device="cpu")
    inputs = make_inputs(q_len=40).qkv
    attend = torch.compile(Attend(given), backend="aot_eager", fullgraph=fullgraph)
    mask = masks.from_function(near) if kind == "function" else masks.from_block_mask(given)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of compiled code"):
            attend(*inputs)
    else:
        assert_attention(*attend(*inputs), *inputs, mask.to_dense(40))
    torch._dynamo.reset()
    made = torch.compile(Attend(mask), backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        gc.collect()
        assert_attention(*made(*inputs), *inputs, mask.to_dense(40))
