"""Layouts whose scattered columns make one list: every score once, dense tiles, and the list the same for all rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.errors import ArgumentError
from stof.layout import build_layout, compaction, statistics
from stof.layout.extend import extend_layout
from stof.layout.io import load_layout, save_layout
from stof.masks.tensors import as_mask
from stof.testing.mask_grid import grid_mask
from tests.examples import examples
from tests.strategies import line_masks, row_orders

pytestmark = pytest.mark.usefixtures("poisoned_memory")

STRIDED = masks.strided(40, 64, 3)
CONFIG = LayoutConfig(64, 64, 1, compact_columns=True)


@given(
    data=st.data(),
    q_len=st.sampled_from([1, 64, 130, 500]),
    kv_len=st.sampled_from([1, 65, 500, 900]),
    config=st.builds(
        LayoutConfig, st.sampled_from([16, 64, 192]), st.sampled_from([16, 64, 128]), st.just(1), st.just(True)
    ),
)
@examples(60)
def test_every_score_once(data: st.DataObject, q_len: int, kv_len: int, config: LayoutConfig) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    keep = data.draw(line_masks(q_len, kv_len, batch, heads))
    order = data.draw(row_orders(q_len))
    layout = build_layout(as_mask(keep), q_len, kv_len, config, batch=batch, heads=heads, row_order=order)
    layout.validate()
    assert torch.equal(layout.to_dense().expand_as(keep), keep)
    plain = build_layout(as_mask(keep), q_len, kv_len, config.contiguous(), batch=batch, heads=heads, row_order=order)
    if not bool((layout.tile_base < 0).any()):
        assert layout.tiles == plain.tiles
    # Tiles that are not of the list are aligned.
    assert not bool((layout.tile_base[layout.tile_base >= 0] % config.block_n).any())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_use_by_taller_row_blocks(count: int) -> None:
    keep = torch.rand(50, 90) < torch.tensor([0.05, 0.98])[torch.arange(90) % 2]

    def use(height: int) -> compaction.ColumnUse:
        blocks = keep.split(height)
        return compaction.ColumnUse(torch.stack([x.any(0) for x in blocks]), torch.stack([x.all(0) for x in blocks]))

    joined = use(8).joined(count)
    assert torch.equal(joined.some, use(8 * count).some)
    assert torch.equal(joined.every, use(8 * count).every)


@pytest.mark.parametrize("block_m", [64, 128])
def test_strided_tiles_are_nearly_as_dense_as_gathered_ones(block_m: int) -> None:
    mask = grid_mask("strided").mask(4096)
    tiles = {
        config: statistics(build_layout(mask, 4096, 4096, config))
        for config in (
            LayoutConfig(block_m, 64),
            LayoutConfig(block_m, 64, 8),
            LayoutConfig(block_m, 64, 1, compact_columns=True),
        )
    }
    contiguous, slabs, listed = tiles.values()
    assert listed.computed < 1.06 * slabs.computed < 0.5 * contiguous.computed
    # Rows far down see all of the list's first tiles.
    assert listed.full_tiles > 0.9 * slabs.full_tiles


def test_what_is_listed() -> None:
    """Lines that most row blocks see alone; not the edge of a window, nor lines that few rows see."""
    rows, columns = torch.arange(640)[:, None], torch.arange(640)[None, :]
    window = ((rows - columns) >= 0) & ((rows - columns) < 97)
    keep = window | ((columns % 40 == 5) & (columns < rows))
    keep |= (columns == 7) & (rows > 200) & (rows < 250)
    some = torch.stack([block.any(0) for block in keep.split(64)])
    division = compaction.find_compaction(some, 64)
    assert division is not None
    # Row blocks that see the later ones have most of them in their window.
    assert division.keys.tolist() == [column for column in range(640) if column % 40 == 5 and column < 285]
    assert compaction.find_compaction(torch.stack([block.any(0) for block in window.split(64)]), 64) is None
    assert compaction.find_compaction(torch.zeros(3, 100, dtype=torch.bool), 64) is None
    assert compaction.find_compaction(torch.ones(3, 100, dtype=torch.bool), 64) is None


def test_problems_too_large_to_look_at_are_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_MOST_PAIRS", 10)
    layout, plain = (build_layout(STRIDED, 700, 700, config) for config in (CONFIG, CONFIG.contiguous()))
    layout.validate()
    assert torch.equal(layout.tile_base, plain.tile_base)
    assert torch.equal(layout.to_dense(), plain.to_dense())


def test_functions_that_take_one_rectangle() -> None:
    """Not several at once: then each is asked for by itself."""

    def one(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        if kv.dim() > 1 and kv.shape[0] > 1:
            raise RuntimeError("one rectangle, please")
        return (kv % 64 < 3) | ((q - kv).abs() < 40)

    mask = masks.from_function(one)
    layout = build_layout(mask, 600, 600, CONFIG)
    assert bool((layout.tile_base < 0).any())
    assert torch.equal(layout.to_dense(), mask.to_dense(600, 600))


def test_growing_lists_anew() -> None:
    """More rows may list other columns."""
    layout = extend_layout(build_layout(STRIDED, 700, 700, CONFIG), STRIDED, 900, 900)
    fresh = build_layout(STRIDED, 900, 900, CONFIG)
    assert all(torch.equal(value, fresh.tensors()[name]) for name, value in layout.tensors().items())


def test_files(tmp_path: Path) -> None:
    layout = build_layout(STRIDED, 700, 700, CONFIG)
    save_layout(layout, tmp_path / "plan")
    again, _ = load_layout(tmp_path / "plan")
    assert again.config == CONFIG
    assert all(torch.equal(value, layout.tensors()[name]) for name, value in again.tensors().items())


def test_slabs_are_not_compacted() -> None:
    with pytest.raises(ArgumentError, match="one by one, so slab is 1, got 8"):
        LayoutConfig(64, 64, 8, compact_columns=True)
