"""What the kernels rule out or take whole, tile by tile, is so, and simple masks leave nothing undecided."""

from __future__ import annotations

from typing import no_type_check

import pytest
import torch
import triton
import triton.language as tl

from stof import masks
from stof.layout.fill.program import program_bounds
from stof.masks import Mask
from stof.masks.gpu_program import programs_of
from tests.interpreter import IN_INTERPRETER

SIZE, COLUMNS = 16, 8


@triton.jit
@no_type_check
def bounds(numbers_ptr, start, found_ptr, q_low, size: tl.constexpr, columns: tl.constexpr):
    n = tl.arange(0, columns)
    nothing, everything = program_bounds(numbers_ptr, start, q_low, q_low + size - 1, n * size, n * size + size - 1)
    tl.store(found_ptr + n, nothing)
    tl.store(found_ptr + columns + n, everything)


DOCUMENTS = masks.documents([0] * 50 + [1] * 30 + [2] * 48)
DECIDED = [masks.causal(), masks.sliding_window(20)]
OTHERS = [
    DOCUMENTS,
    masks.causal() & DOCUMENTS,
    masks.sliding_window(9) | masks.global_tokens(20),
    masks.prefix_lm(40),
    masks.strided(8, 16),
]


@IN_INTERPRETER
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("mask", [*DECIDED, *OTHERS], ids=lambda mask: type(mask).__name__)
def test_bounds(mask: Mask, inverted: bool) -> None:
    length = SIZE * COLUMNS
    simple = mask in DECIDED
    mask = ~mask if inverted else mask
    programs = programs_of(mask, length, length, [(0, 0)])
    assert programs is not None
    numbers = torch.tensor(programs.numbers, dtype=torch.int32)
    tiles = mask.to_dense(length)[0, 0].unfold(0, SIZE, SIZE).unfold(1, SIZE, SIZE).flatten(2)
    for row, kept in enumerate(tiles):
        found = torch.full((2, COLUMNS), -1, dtype=torch.int32)
        bounds[(1,)](numbers, int(numbers[0]), found, row * SIZE, SIZE, COLUMNS)
        nothing, everything = found.bool()
        assert not bool((nothing & kept.any(-1)).any())
        assert not bool((everything & ~kept.all(-1)).any())
        if simple:
            assert torch.equal(nothing, ~kept.any(-1))
            assert torch.equal(everything, kept.all(-1))
