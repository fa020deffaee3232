"""Full tiles of split row blocks, on a GPU: chunks of unlike maxima, keys that are no numbers, rows that begin late."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stof import masks
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.layout import Layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.testing import assert_attention
from tests.gpu.test_hopper import HOPPER, bound, check_layout, layout_of, random_inputs
from tests.gpu.test_hopper_steady import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

Q_LEN, KV_LEN = 500, 2100
# A key in the middle of a tile of 64 or 128 columns.
BAD = 300


def inputs(head_dim: int, q_len: int = Q_LEN, kv_len: int = KV_LEN) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = random_inputs(q_len=q_len, kv_len=kv_len, head_dim=head_dim)
    return q.clone(), k.clone(), v.clone()


def split_layout(mask: Mask | Tensor, q: Tensor, k: Tensor, tile: tuple[int, int], split_tiles: int) -> Layout:
    """Whole tiles; where row blocks are to be split, some are."""
    layout = layout_of(as_mask(mask), q, k, None, tile=tile)
    assert not split_tiles or make_tile_lists(layout, split_tiles).chunks > 1
    return layout


@pytest.mark.parametrize("split_tiles", [1, 3, 8])
@pytest.mark.parametrize("growth", ["steady", "steep", "falling", "by row", "by chunk"])
@pytest.mark.parametrize(("head_dim", "tile"), KINDS, ids=str)
def test_scores_that_grow_across_chunks(head_dim: int, tile: tuple[int, int], growth: str, split_tiles: int) -> None:
    """Chunks are merged under maxima far apart or next to each other, whichever is the larger; so are tiles of one."""
    q, k, v = inputs(head_dim)
    size = float(head_dim) ** 0.5
    q[..., 0] = 8
    rising = torch.linspace(-1, 1, KV_LEN, device="cuda")
    # The scores' exponents, in natural units, from one end of the keys to the other.
    reach = {"steady": 6.0, "steep": 150.0, "falling": 150.0, "by row": 40.0, "by chunk": 40.0}[growth]
    if growth == "falling":
        rising = -rising
    elif growth == "by chunk":
        rising = torch.sin(rising * 40)
    k[..., 0] = (rising * (reach * size / 8)).half()
    if growth == "by row":
        q[:, :, ::2, 0] = -8
    partial = torch.rand(Q_LEN, KV_LEN, device="cuda") > 0.98
    partial[:, 256:] = True
    partial[1] = True  # each key is seen
    causal = torch.ones_like(partial).tril(KV_LEN - Q_LEN)
    holes = torch.rand(Q_LEN, KV_LEN, device="cuda") > 0.02  # no full tile
    for mask in (masks.full(), causal, partial, holes):
        check_layout(split_layout(mask, q, k, tile, split_tiles), q, k, v, split_tiles)


def spoilt_rows(q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    """Bool `[B, H, Sq]`: rows whose softmax in float64 is not a number: a score that they keep is NaN or +inf."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return (keep & (scores.isnan() | (scores == torch.inf))).any(3)


def assert_rows(result: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...], keep: Tensor, spoilt: Tensor) -> None:
    """Those rows are NaN through and through, their log-sum-exp no number either; all others are attention."""
    (out, lse), (q, k, v) = result, inputs
    assert torch.equal(out.isnan().all(3), spoilt)
    assert torch.equal(out.isnan().any(3), spoilt)
    assert not bool(lse[spoilt].isfinite().any())
    out, lse = out.masked_fill(spoilt[..., None], 0), lse.masked_fill(spoilt, -torch.inf)
    assert_attention(out, lse, q, k, v, keep & ~spoilt[..., None])


def late_block(tile: tuple[int, int]) -> Tensor:
    """Bool `[1, 1, Sq, Skv]`: partial tiles, then full ones; the first row block does not see those around BAD."""
    keep = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool, device="cuda")
    keep[..., :128] = torch.rand(Q_LEN, 128, device="cuda") > 0.5
    keep[:, :, -1, :128] = True  # each key is seen
    keep[:, :, : tile[0], 256:384] = False
    return keep


@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("bad", ["nan", "one nan", "inf", "minus inf", "some heads"])
@pytest.mark.parametrize(("head_dim", "tile"), KINDS, ids=str)
def test_keys_that_are_no_numbers(head_dim: int, tile: tuple[int, int], bad: str, split_tiles: int) -> None:
    """In full tiles, which go by the maximum so far, and in partial ones, where rows that do not see them are right.

    An infinite key whose score is -inf weighs nothing; +inf and NaN spoil the row, and no other.
    """
    q, k, v = inputs(head_dim)
    if bad == "nan":
        k[:, :, BAD] = torch.nan
    elif bad == "one nan":
        k[:, :, BAD, 3] = torch.nan
    elif bad == "some heads":
        k[0, 1, BAD] = torch.nan
        k[1, 0, BAD, 0] = torch.inf
    else:
        k[:, :, BAD, 0] = torch.inf if bad == "inf" else -torch.inf
    for cut, holes in ((False, False), (True, False), (False, True)):
        keep = late_block(tile)
        keep[:, :, 448::2, BAD] &= not cut
        if holes:  # no full tile
            keep[:, :, :-1] &= torch.rand(Q_LEN - 1, KV_LEN, device="cuda") > 0.02
        layout = split_layout(keep, q, k, tile, split_tiles)
        spoilt = spoilt_rows(q, k, layout.to_dense())
        assert 0 < int(spoilt.sum()) < spoilt.numel()
        assert_rows(bound(layout, q, k, v, split_tiles)(q, k, v, None, None), (q, k, v), layout.to_dense(), spoilt)


@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("head_dim", "tile"), KINDS, ids=str)
def test_values_that_are_no_numbers(head_dim: int, tile: tuple[int, int], bad: float, split_tiles: int) -> None:
    """In full tiles: rows that see them show it in that column, all else is as with any other value, to the bit."""
    q, k, v = inputs(head_dim)
    layout = split_layout(late_block(tile), q, k, tile, split_tiles)
    call = bound(layout, q, k, v, split_tiles)
    clean, lse = call(q, k, v, None, None)
    assert_attention(clean, lse, q, k, v, layout.to_dense())
    clean, spoilt_v = clean.clone(), v.clone()
    spoilt_v[:, :, BAD, 5] = bad
    out, lse_again = call(q, k, spoilt_v, None, None)
    sees = layout.to_dense()[..., BAD].expand(out.shape[:3])
    assert torch.equal(~out[..., 5].isfinite(), sees)
    assert torch.equal(lse_again, lse)
    clean[..., 5] = torch.where(sees, 0, clean[..., 5])
    out[..., 5] = torch.where(sees, 0, out[..., 5])
    assert torch.equal(out, clean)


@pytest.mark.parametrize("split_tiles", [0, 1, 2, 5])
@pytest.mark.parametrize("first", [0.0, 30.0, -30.0])
@pytest.mark.parametrize(("head_dim", "tile"), KINDS, ids=str)
def test_rows_that_keep_nothing_in_their_first_tiles(
    head_dim: int, tile: tuple[int, int], first: float, split_tiles: int
) -> None:
    """Then come full tiles, in the same chunk or in another; rows beside them have seen larger scores, or smaller."""
    q, k, v = inputs(head_dim)
    q[..., 0] = 8
    k[:, :, :256, 0] = first * head_dim**0.5 / 8
    keep = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool, device="cuda")
    keep[:, :, ::3, :256] = False
    keep[:, :, 1::3, :128] = False
    keep[:, :, : tile[0] : 2, :256] = False
    full = make_tile_lists(split_layout(keep, q, k, tile, split_tiles)).items
    assert bool((full[:, 3] > full[:, 2]).all())
    check_layout(split_layout(keep, q, k, tile, split_tiles), q, k, v, split_tiles)
    sinks = torch.randn(q.shape[1], device="cuda")
    check_layout(split_layout(keep, q, k, tile, split_tiles), q, k, v, split_tiles, sinks=sinks)
