"""The Hopper kernel with an additive bias, on a real GPU. Run with `pytest -m gpu` on compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.errors import ArgumentError, UnsupportedError
from stof.masks.tensors import as_mask
from stof.testing import assert_attention
from stof.testing.mask_grid import grid_mask
from tests.examples import examples
from tests.gpu.test_hopper import (
    BIAS_STAGES,
    HALVES,
    HEAVY,
    HOPPER,
    check,
    check_layout,
    layout_of,
    random_inputs,
    readable,
)
from tests.kernels.test_hopper_bias import SCATTERED, scattered
from tests.strategies import dense_masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

TILES = [(width, tile) for width, tiles in BIAS_STAGES.items() for tile in tiles]
FORMS = ("all", "heads", "batch", "one", "heads expanded", "heads row", "one row expanded")


def bias_of(form: str, q_len: int, kv_len: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """For 2 batch entries and 4 heads; memory past the last key holds NaN, and so do rows past the last query."""
    batch, heads = {"all": (2, 4), "heads": (1, 4), "batch": (2, 1), "one": (1, 1)}[form.split()[0]]
    generator = torch.Generator("cuda").manual_seed(seed)
    size = (batch, heads, q_len + 1, -(-kv_len // 8) * 8 + 8)
    whole = torch.randn(size, generator=generator, device="cuda").mul(3).to(dtype)
    whole[:, :, q_len:] = torch.nan
    whole[..., kv_len:] = torch.nan
    bias = whole[:, :, : 1 if "row" in form else q_len, :kv_len]
    return bias.expand(2, 4, q_len, -1) if form.endswith("expanded") else bias


@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
def test_every_tile(head_dim: int, tile: tuple[int, int], form: str, split_tiles: int) -> None:
    """From jobs of one tile, several to a thread block, to long ones; partial and full tiles."""
    for q_len, kv_len, mask in ((1, 1, masks.full()), (300, 900, HEAVY), (3001, 1531, HEAVY), (700, 640, masks.full())):
        q, k, v = random_inputs(q_len=q_len, kv_len=kv_len, head_dim=head_dim, memory="bshd")
        layout = layout_of(mask, q, k, None, tile=tile)
        check_layout(layout, q, k, v, split_tiles, bias=bias_of(form, q_len, kv_len))


@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
@pytest.mark.parametrize("kv_len", [1, 63, 700, 901])
def test_row_blocks_that_keep_nothing(kv_len: int, head_dim: int, tile: tuple[int, int]) -> None:
    q, k, v = random_inputs(q_len=500, kv_len=kv_len, head_dim=head_dim)
    keep = torch.ones(1, 1, 500, kv_len, dtype=torch.bool, device="cuda")
    keep[:, :, 192:] = False
    layout = layout_of(as_mask(keep), q, k, None, tile=tile)
    for split_tiles in (0, 2):
        check_layout(layout, q, k, v, split_tiles, bias=bias_of("heads", 500, kv_len))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["full", "causal", "longformer"])
def test_grid_masks(name: str, head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(q_len=1501, head_dim=head_dim, dtype=dtype)
    check(q, k, v, grid_mask(name).mask(1501), bias=bias_of("heads", 1501, 1501, dtype))


@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
def test_options(head_dim: int, tile: tuple[int, int]) -> None:
    """Together with everything else that changes scores; the bias in the other half precision."""
    q, k, v = random_inputs(q_len=333, kv_len=1531, head_dim=head_dim)
    layout, bias = layout_of(HEAVY, q, k, None, tile=tile), bias_of("heads", 333, 1531, torch.bfloat16)
    sinks = torch.randn(4, device="cuda")
    for options in (
        {"softcap": 5.0},
        {"sinks": sinks},
        {"scale": -0.2},
        {"scale": 0.0, "softcap": 9.0, "sinks": sinks},
    ):
        check_layout(layout, q, k, v, 3, bias=bias, **options)


@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
def test_minus_infinity_and_what_is_masked(head_dim: int, tile: tuple[int, int]) -> None:
    """-inf leaves keys out, whole rows of them too, in full tiles as well; where the mask does, anything may stand."""
    q, k, v = random_inputs(q_len=500, kv_len=700, head_dim=head_dim)
    bias = bias_of("heads", 500, 700).clone()
    bias[:, :, 7:9] = -torch.inf
    bias[:, :, 100, :650] = -torch.inf
    bias[:, 1] = -torch.inf
    layout = layout_of(masks.causal() | masks.global_tokens(70), q, k, None, tile=tile)
    keep = layout.to_dense()
    held = torch.where(keep, bias, torch.tensor(torch.nan, device="cuda", dtype=bias.dtype))
    # Rows of 700 halves are no multiple of 16 bytes.
    held = torch.nn.functional.pad(held, (0, 4), value=torch.nan)[..., :700]
    from tests.gpu.test_hopper import bound

    for split_tiles in (0, 2):
        out, lse = bound(layout, q, k, v, split_tiles, bias=held)(q, k, v, held, None)
        assert_attention(out, lse, q, k, v, keep, bias=bias)


@pytest.mark.parametrize("form", SCATTERED)
def test_bias_that_is_copied(form: str) -> None:
    q, k, v = random_inputs(q_len=200, kv_len=333)
    for own in (scattered(form, "cuda"), scattered(form, "cuda")):
        check(q, k, v, HEAVY, bias=own)


def test_addresses_and_strides() -> None:
    """What TMA cannot read is copied, and what has other values than 16 bits for each key refused."""
    q, k, v = random_inputs(q_len=300, kv_len=904)
    bias = bias_of("one", 300, 904)
    moved = torch.empty(bias.numel() + 300 * 8 + 1, dtype=bias.dtype, device="cuda")
    moved = moved.as_strided(bias.shape, bias.stride(), 1).copy_(bias)
    for own in (bias, moved, bias):
        check(q, k, v, HEAVY, bias=own)
    for refused in (bias.float(), bias[..., :1]):
        with pytest.raises(ArgumentError, match="takes a bias in 16 bits"):
            stof.attention(q, k, v, HEAVY, bias=refused, implementation="hopper")


@given(data=st.data())
@examples(25)
def test_random_masks_and_shapes(data: st.DataObject) -> None:
    q_len, kv_len = (data.draw(st.sampled_from([1, 63, 129, 300, 641])) for _ in range(2))
    sizes = (data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 4])))
    seed = data.draw(st.integers(0, 2**31 - 1))
    q, k, v = random_inputs(
        q_len=q_len, kv_len=kv_len, head_dim=data.draw(st.sampled_from([64, 128, 256])), seed=seed
    )  # fmt: skip
    keep = data.draw(dense_masks(q_len, kv_len, *sizes)).cuda()
    bias = bias_of(data.draw(st.sampled_from(FORMS)), q_len, kv_len, seed=seed)
    options: dict[str, Any] = data.draw(st.sampled_from([{}, {"softcap": 5.0}, {"scale": -0.2}]))
    try:
        out, lse = stof.attention(q, k, v, keep, bias=bias, return_lse=True, implementation="hopper", **options)
    except UnsupportedError:
        keep = readable(keep)
        try:
            out, lse = stof.attention(q, k, v, keep, bias=bias, return_lse=True, implementation="hopper", **options)
        except UnsupportedError:
            return  # an empty head: whole tiles read keys that no query of it sees
    keep = as_mask(keep).to_dense(q_len, kv_len, batch=2, heads=4, device="cuda")
    assert_attention(out, lse, q, k, v, keep, bias=bias, **options)
