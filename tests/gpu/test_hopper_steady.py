"""Full tiles on a real GPU: scores that outgrow the maximum so far, lists with cut ends, warpgroups without rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stof import LayoutConfig, masks
from stof.kernels.hopper.config import blocks_per_sm
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.kernels.hopper.tile_scheduler import chunk_slots, skips_empty_groups, work_list
from stof.layout import Layout, build_layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.testing import assert_attention, make_inputs
from tests.gpu.test_hopper import HOPPER, bound, check_layout

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
