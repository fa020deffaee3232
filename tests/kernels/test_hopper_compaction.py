"""Compacted columns for the Hopper kernel: lists decoded again are the mask, and the kernel's twin is attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import LayoutError, UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.kernels.implementation import Options, attend_once
from stof.kernels.packed_integers import is_compacted
from stof.layout import build_layout
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention
from stof.testing.mask_grid import grid_mask
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.kernels.test_hopper_jobs import TILES, check_lists, counted, seen_keys
from tests.kernels.test_hopper_launch import Twin, check_call, inputs, twin
from tests.strategies import line_masks

__all__ = ["twin"]

STRIDED = masks.strided(40, 64, 3)


def config_of(tile: tuple[int, int]) -> LayoutConfig:
    return LayoutConfig(*tile, 1, compact_columns=True)


@pytest.mark.parametrize("split_tiles", [0, 1, 3])
@pytest.mark.parametrize("tile", TILES)
def test_strided_masks(tile: tuple[int, int], split_tiles: int) -> None:
    for length in (1000, 2048):
        layout = build_layout(grid_mask("strided").mask(length), length, length, config_of(tile))
        lists = check_lists(layout, split_tiles)
        assert lists is not None
        assert lists.slab == lists.block_n
        assert lists.compacted_keys.shape[:2] == (1, 1)
        assert lists.compacted_keys.shape[2] % lists.block_n == 0
        listed = lists.compacted_keys[lists.compacted_keys >= 0]
        assert bool((listed % 128 >= 120).all())
        assert bool((listed.diff() > 0).all())


@given(
    data=st.data(),
    q_len=st.sampled_from([1, 64, 130, 300, 700]),
    kv_len=st.sampled_from([1, 65, 500, 900]),
    tile=st.sampled_from(TILES),
    split_tiles=st.sampled_from([0, 1, 2]),
)
@examples(60)
def test_every_kept_score_once(
    data: st.DataObject, q_len: int, kv_len: int, tile: tuple[int, int], split_tiles: int
) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    keep = data.draw(line_masks(q_len, kv_len, batch, heads))
    layout = build_layout(as_mask(keep), q_len, kv_len, config_of(tile), batch=batch, heads=heads)
    lists = check_lists(layout, split_tiles)
    assert lists is None or not lists.compacted_keys.numel() or bool(is_compacted(lists.tile_columns).any())


@given(
    data=st.data(),
    q_len=st.sampled_from([1, 64, 300]),
    kv_len=st.sampled_from([1, 65, 500]),
    tile=st.sampled_from(TILES),
    split_tiles=st.sampled_from([0, 2]),
)
@examples(40)
def test_unseen_keys_as_zeros(
    data: st.DataObject, q_len: int, kv_len: int, tile: tuple[int, int], split_tiles: int
) -> None:
    """Contiguous tiles of any mask, every kept score once, and no key that no query of the pattern sees."""
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    keep = data.draw(line_masks(q_len, kv_len, batch, heads))
    layout = build_layout(as_mask(keep), q_len, kv_len, LayoutConfig(*tile), batch=batch, heads=heads)
    lists = make_tile_lists(layout, split_tiles, zero_unseen=True)
    if lists.slab:
        tiles = lists.compacted_keys.unflatten(-1, (-1, lists.block_n))
        assert bool((tiles < 0).any(-1).all()), "only tiles with such keys are copied"
    assert torch.equal(counted(lists, seen_keys(layout)), layout.to_dense().int())


@pytest.mark.parametrize("config", [LayoutConfig(64, 64, 16), LayoutConfig(64, 64, 1)], ids=str)
def test_unseen_keys_of_gathered_columns_are_not_zeroed(config: LayoutConfig) -> None:
    with pytest.raises(UnfitLayoutError, match="in contiguous tiles only"):
        make_tile_lists(build_layout(STRIDED, 700, 700, config), zero_unseen=True)


def test_lists_that_are_alike_are_copied_once() -> None:
    """Equal lists of heads or sequences that see other keys besides; others stay apart."""
    near = [masks.sliding_window(9, 0), masks.sliding_window(30, 0)]
    lines = masks.strided(0, 64, 3)
    same = build_layout(masks.per_head([one | lines for one in near]), 700, 700, config_of((64, 64)), heads=2)
    assert same.patterns == 2
    assert make_tile_lists(same).compacted_keys.shape[:2] == (1, 1)
    other = build_layout(masks.per_head([near[0] | lines, near[1] | masks.strided(0, 64, 5)]), 700, 700,
                         config_of((64, 64)), heads=2)  # fmt: skip
    assert make_tile_lists(other).compacted_keys.shape[:2] == (1, 2)


def test_tiles_of_no_list_are_refused() -> None:
    """A row block whose gathered columns skip one that others list between them."""
    layout = build_layout(STRIDED, 700, 700, config_of((64, 64)))
    gathered = layout.gathered.clone()
    row, slot = (gathered >= 0).nonzero()[40].tolist()
    gathered[row, slot - 1 :] = torch.nn.functional.pad(gathered[row, slot:], (0, 1), value=-1)
    broken = replace(layout, gathered=gathered)
    with pytest.raises(UnfitLayoutError, match="not stretches of one list"):
        make_tile_lists(broken)
    with pytest.raises(LayoutError, match="not stretches of one list of compacted columns"):
        broken.validate()


@pytest.mark.sampled(5)
@IN_INTERPRETER
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("memory_layout", ["bhsd", "bshd", "packed", "transposed"])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(64, (128, 128)), (72, (128, 128)), (128, (64, 64)), (40, (192, 128)), (64, (64, 128)), (40, (64, 64))],
)
def test_memory(twin: Twin, memory_layout: str, head_dim: int, tile: tuple[int, int]) -> None:
    layout = build_layout(STRIDED, 700, 700, config_of(tile))
    check_call(layout, *inputs(batch=1, q_len=700, kv_len=700, head_dim=head_dim, memory=memory_layout))
    assert (twin.constants["SLAB"], twin.constants["GROUPS"]) == (tile[1], tile[0] // 64)


@pytest.mark.sampled(3)
@IN_INTERPRETER
@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("split_tiles", [0, 1])
@pytest.mark.parametrize("tile", TILES)
def test_masks_by_head_and_sequence(tile: tuple[int, int], split_tiles: int) -> None:
    """Lists of their own, one head without any tile, grouped heads; sinks and softcap as well."""
    generator, q_len = torch.Generator().manual_seed(0), tile[0] + 13
    lines = torch.rand(2, 4, 1, 333, generator=generator) < torch.tensor([0.0, 0.02, 0.1, 0.2]).view(1, 4, 1, 1)
    keep = lines.expand(2, 4, q_len, 333)
    options: dict[str, Any] = {"softcap": 5.0, "sinks": torch.randn(4)}
    for kept in (keep, keep[:, 1:2], keep[:1], keep[:1, 2:3]):
        layout = build_layout(as_mask(kept.clone()), q_len, 333, config_of(tile), batch=len(kept), heads=kept.shape[1])
        check_call(layout, *inputs(q_len=q_len), split_tiles=split_tiles, **options)


@IN_INTERPRETER
@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("mask_heads", [1, 4])
def test_what_no_query_sees_is_read_as_zeros(mask_heads: int) -> None:
    """Keys in the middle, at the front and at the end, and NaN in them."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.rand(2, mask_heads, 1, 333, generator=generator) < 0.9
    seen[:, :, :, 300:] = False
    seen[1, :, :, :40] = False
    keep = seen & (torch.rand(2, mask_heads, 200, 333, generator=generator) < 0.5)
    layout = build_layout(as_mask(keep), 200, 333, LayoutConfig(64, 64), batch=2, heads=mask_heads)
    q, k, v = inputs(kv_heads=4)
    unseen = ~layout.to_dense().any(2)[:, :, :, None]
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, KernelConfig(4, 2, zero_unseen=True))
    stale: list[Tensor] = [x.masked_fill(unseen, torch.nan) for x in (k, v)]
    out, lse = attend_once(IMPLEMENTATIONS["hopper"].bind, q, *stale, prepared, Options(0.125))
    assert_attention(out, lse, q, k, v, layout.to_dense())


@IN_INTERPRETER
@pytest.mark.usefixtures("poisoned_memory", "twin")
def test_keys_that_no_query_sees() -> None:
    """Lines that are compacted alone: whatever else the keys hold is not read."""
    layout = build_layout(masks.strided(0, 64, 3, causal=False), 320, 333, config_of((64, 64)))
    q, k, v = inputs(q_len=320)
    unseen = ~layout.to_dense().any(2)[:, :, :, None]
    assert float(unseen.double().mean()) > 0.9
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, KernelConfig(4, 2))
    stale: list[Tensor] = [x.masked_fill(unseen, torch.nan) for x in (k, v)]
    out, lse = attend_once(IMPLEMENTATIONS["hopper"].bind, q, *stale, prepared, Options(0.125))
    assert_attention(out, lse, q, k, v, layout.to_dense())
