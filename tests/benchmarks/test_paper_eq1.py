"""Eq. 1 of the paper against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper.selector import paper_choice
from stof import LayoutConfig, masks
from stof.layout import Layout, build_layout
from stof.masks.tensors import as_mask

BLOCKS = LayoutConfig(16, 16)


def with_blocks(n: int, loaded: int) -> Layout:
    """A mask of `n x n` blocks of 16 of which the first `loaded` hold one score."""
    keep = torch.zeros(1, 1, 16 * n, 16 * n, dtype=torch.bool)
    for block in range(loaded):
        keep[0, 0, 16 * (block // n), 16 * (block % n)] = True
    layout = build_layout(as_mask(keep), 16 * n, 16 * n, BLOCKS)
    assert layout.tiles == loaded
    return layout


@pytest.mark.parametrize(
    ("n", "loaded", "expected"),
    [
        (4, 4, "row_wise"),  # 4 / 16 = 0.25 < 1.2 / 2^2 = 0.3
        (4, 5, "block_wise"),  # 0.3125
        (16, 19, "row_wise"),  # 19 / 256 = 0.0742 < 1.2 / 4^2 = 0.075
        (16, 20, "block_wise"),  # 0.0781
        (64, 136, "row_wise"),  # 136 / 4096 = 0.03320 < 1.2 / 6^2 = 0.03333
        (64, 137, "block_wise"),  # 0.03345
        (64, 0, "row_wise"),
        (2, 4, "row_wise"),  # 1 < 1.2: two blocks are never worth tiles
    ],
)
def test_by_hand(n: int, loaded: int, expected: str) -> None:
    assert paper_choice(with_blocks(n, loaded)) == expected


@pytest.mark.parametrize("length", [1, 16, 17, 32])
def test_one_or_two_blocks(length: int) -> None:
    """log2 of one block is 0: counted as two."""
    assert paper_choice(build_layout(masks.full(), length, length, BLOCKS)) == "row_wise"


def test_the_longer_length_counts() -> None:
    """4 x 16 blocks: n = 16, so 20 loaded blocks are too many."""
    assert paper_choice(build_layout(masks.full(), 64, 80, BLOCKS)) == "block_wise"
    assert paper_choice(build_layout(masks.sliding_window(1), 64, 256, BLOCKS)) == "row_wise"


def test_the_evaluation_grid_of_the_paper_is_block_wise() -> None:
    """What DESIGN.md says of the rule: on the paper's own masks it never picks row-wise."""
    for length in (512, 1024):
        for mask in (masks.causal(), masks.sliding_window(32, 32), masks.longformer(32, 32), masks.bigbird(32, 32)):
            assert paper_choice(build_layout(mask, length, length, BLOCKS)) == "block_wise"


@pytest.mark.parametrize("config", [LayoutConfig(64, 16), LayoutConfig(16, 64), LayoutConfig(16, 16, 1)])
def test_other_tiles_are_refused(config: LayoutConfig) -> None:
    with pytest.raises(ValueError, match="counts 16 x 16 blocks"):
        paper_choice(build_layout(masks.causal(), 64, 64, config))
