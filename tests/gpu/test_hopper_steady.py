"""Full tiles on a real GPU: scores that outgrow the maximum so far, lists with cut ends, warpgroups without rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stof import LayoutConfig, masks
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import blocks_per_sm, padded_width
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.kernels.hopper.tile_scheduler import chunk_slots, skips_empty_groups, work_list
from stof.kernels.implementation import Options, attend_once
from stof.layout import Layout, build_layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention, make_inputs
from tests.gpu.test_hopper import HOPPER, STAGES, bound, check_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

# Head dimension and tile; each has another loop over full tiles.
KINDS = ((64, (192, 128)), (64, (64, 128)), (128, (128, 128)), (128, (64, 64)), (256, (128, 64)), (256, (64, 64)))


def inputs(length: int, head_dim: int, heads: int = 3) -> list[Tensor]:
    sizes = {"batch": 2, "heads": heads, "kv_heads": heads, "q_len": length, "kv_len": length, "head_dim": head_dim}
    return [x.clone() for x in make_inputs(**sizes, device="cuda", dtype=torch.float16).qkv]


def layout_of(mask: Mask, length: int, tile: tuple[int, int]) -> Layout:
    return build_layout(mask, length, length, LayoutConfig(*tile, None), device="cuda")


@pytest.mark.parametrize("growth", ["steps", "jump", "one key", "large", "all rows late"])
@pytest.mark.parametrize(("head_dim", "tile"), KINDS, ids=str)
def test_scores_that_grow(head_dim: int, tile: tuple[int, int], growth: str) -> None:
    """By little, by more than half precision holds, and by more than single precision does, in some rows or all."""
    length = 1000
    q, k, v = inputs(length, head_dim)
    if growth == "steps":
        k *= torch.linspace(0.5, 12, length, device="cuda")[:, None].half()
    elif growth == "jump":
        k[:, :, 700:] *= 30
    elif growth == "one key":
        k[:, :, 900] *= 200
        q *= 3
    elif growth == "large":
        q *= 40
    else:
        k[..., 0] = -30
        k[:, :, 900:, 0] = 10
        q[..., 0] = 10
    kept = torch.rand(length, length, device="cuda") > 0.98
    kept[:, 128:] = True
    for mask in (masks.full(), masks.causal(), as_mask(kept)):
        check_layout(layout_of(mask, length, tile), q, k, v)
    for share in (0.98, 0.02):
        layout = layout_of(as_mask(torch.rand(length, length, device="cuda") < share), length, tile)
        assert not make_tile_lists(layout).has_full
        check_layout(layout, q, k, v)


@pytest.mark.parametrize("exact", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("head_dim", "tile"), [*KINDS[:4], (64, (128, 128)), (64, (64, 64)), (96, (128, 128))], ids=str
)
def test_first_tiles_without_lazy_rescaling(head_dim: int, tile: tuple[int, int], exact: int) -> None:
    """Any number of them is right, in work tiles of one tile and more, split or not, with full tiles behind or none."""
    length = 700
    q, k, v = inputs(length, head_dim)
    k *= torch.linspace(0.5, 12, length, device="cuda")[:, None].half()
    few, most = (torch.rand(length, length, device="cuda") < share for share in (0.02, 0.98))
    late = most.clone()
    late[:, 256:] = True
    for mask in (as_mask(few), as_mask(most), as_mask(late), masks.sliding_window(40, 40)):
        layout = layout_of(mask, length, tile)
        for split_tiles in (0, 1, 3):
            lists = replace(make_tile_lists(layout, split_tiles), exact_tiles=exact)
            config = KernelConfig(4, STAGES[padded_width(head_dim)][tile], split_tiles=split_tiles)
            bind = IMPLEMENTATIONS["hopper"].bind
            out, lse = attend_once(bind, q, k, v, PreparedTiles(lists, config), Options(head_dim**-0.5))
            assert_attention(out, lse, q, k, v, layout.to_dense())


@pytest.mark.parametrize(("head_dim", "tile"), KINDS, ids=str)
def test_lists_with_cut_ends(head_dim: int, tile: tuple[int, int]) -> None:
    """Chunks of the last jobs are merged, and the results are the same every time."""
    length, blocks = 2500, 132 * blocks_per_sm(*tile, head_dim)
    row_blocks = -(-length // tile[0])
    heads = -(-int(2.4 * blocks) // (2 * row_blocks))
    q, k, v = inputs(length, head_dim, heads)
    layout = layout_of(masks.full(), length, tile)
    jobs = work_list(make_tile_lists(layout), 2, heads, blocks, 2 * heads)
    assert chunk_slots(jobs) > 0
    assert len(jobs) - 1 > blocks
    call = bound(layout, q, k, v)
    out, lse = call(q, k, v, None, None)
    some = slice(heads - 2, None)
    assert_attention(out[:, some], lse[:, some], q[:, some], k[:, some], v[:, some])
    assert_attention(out[:, :1], lse[:, :1], q[:, :1], k[:, :1], v[:, :1])
    for _ in range(50):
        again, lse_again = call(q, k, v, None, None)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)


@pytest.mark.parametrize(
    ("length", "tile", "head_dim"), [(200, (192, 128), 64), (400, (192, 128), 64), (130, (128, 128), 128)]
)
def test_warpgroups_without_rows(length: int, tile: tuple[int, int], head_dim: int) -> None:
    assert skips_empty_groups(length, tile[0])
    q, k, v = inputs(length, head_dim, 150)
    for mask in (masks.full(), masks.causal(), masks.sliding_window(100)):
        check_layout(layout_of(mask, length, tile), q, k, v)
