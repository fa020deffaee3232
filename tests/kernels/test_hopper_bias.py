"""The Hopper kernel with a bias, worked through in plain PyTorch: what it copies and where it adds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import Options
from stof.kernels.tma_bias import copy_for_tma, may_be_tma_readable, tma_readable
from stof.layout import Layout, build_layout
from stof.runtime.launch import Launch
from stof.selection import IMPLEMENTATIONS
from stof.selection.gpu_candidates import _HOPPER_BIAS_TILES
from stof.testing import assert_attention
from tests.examples import examples
from tests.kernels.test_hopper_jobs import even_layout, layout_of, reads_unseen_keys
from tests.kernels.test_hopper_launch import LONG, Twin, check_call, inputs, twin, unaligned
from tests.strategies import dense_masks

__all__ = ["twin"]  # a fixture


def bias_of(form: str, dtype: torch.dtype) -> Tensor:
    """For inputs of 2 x 4 heads of 200 queries and 333 keys; values past the last key are NaN, rows 336 apart."""
    batch, heads = {"all": (2, 4), "heads": (1, 4), "batch": (2, 1), "one": (1, 1)}[form.split()[0]]
    rows = torch.randn(batch, heads, 200, 336, dtype=dtype)
    rows[..., 333:] = torch.nan
    rows[..., 7:9, :] = -torch.inf
    rows[..., 11, 128:256] = -torch.inf
    bias = rows[..., :333]
    if "row" in form:
        bias = bias[:, :, 12:13]
    return bias.expand(2, 4, 200, -1) if form.endswith("expanded") else bias


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "form", ["all", "heads", "batch", "one", "one expanded", "heads expanded", "heads row", "all row expanded"]
)
@pytest.mark.parametrize(
    ("head_dim", "tile", "options"),
    [
        (64, (128, 128), {}),
        (40, (192, 64), {"softcap": 5.0, "sinks": torch.randn(4)}),
        (64, (64, 64), {"scale": -0.2}),
        (128, (128, 64), {"sinks": torch.randn(4)}),
        (256, (64, 64), {"softcap": 5.0}),
    ],
)
def test_bias(twin: Twin, head_dim: int, tile: tuple[int, int], options: dict[str, Any], form: str) -> None:
    """Where several share one it is copied from the same place; -inf leaves keys out, in full tiles too."""
    bias = bias_of(form, torch.bfloat16 if head_dim == 128 else torch.float16)
    assert tma_readable(bias, 200, 333)
    keep = LONG.to_dense(200, 333).clone()
    keep[..., 100:110, :] = False
    keep[..., 64:, :100] = True
    layout = layout_of(keep, None, tile)
    for split_tiles in (0, 1):
        check_call(layout, *inputs(head_dim=head_dim), split_tiles=split_tiles, bias=bias, **options)
    assert (twin.constants["HAS_BIAS"], twin.constants["Q_STAGES"]) == (True, 1)


@pytest.mark.usefixtures("poisoned_memory", "twin")
def test_bias_at_any_address() -> None:
    """A bound call serves every bias of the same strides; one that TMA cannot read is copied, and so are others."""
    layout = build_layout(LONG, 200, 333, LayoutConfig(64, 64))
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, KernelConfig(4, 2))
    q, k, v = inputs()
    bias = bias_of("heads", torch.float16)
    call = IMPLEMENTATIONS["hopper"].bind(q, k, v, prepared, Options(0.125, bias=bias))
    moved = torch.full((bias.numel() // 333 * 336 + 1,), torch.nan, dtype=bias.dtype)
    moved = moved.as_strided(bias.shape, bias.stride(), 1).copy_(bias)
    assert moved.data_ptr() % 16
    for query, own in ((q, bias), (q, moved), (unaligned(q), moved), (unaligned(q), bias)):
        out, lse = call(query, k, v, own, None)
        assert_attention(out, lse, q, k, v, layout.to_dense(), bias=bias)


SCATTERED = ("odd rows", "heads last", "turned", "shared", "one for all keys")


def scattered(form: str, device: str = "cpu") -> Tensor:
    """Biases of 200 queries and 333 keys that TMA cannot read as they lie."""
    bias = torch.randn(2, 4, 200, 333, device=device).to(torch.float16)
    match form:
        case "odd rows":
            return bias
        case "heads last":  # as T5's relative positions are looked up
            return bias[:1].permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        case "turned":
            return bias.mT.contiguous().mT
        case "shared":
            return bias[:, :1].expand(2, 4, 200, 333)
        case "one for all keys":
            return bias[..., :1].expand(2, 4, 200, 333)
    raise AssertionError(form)


@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("form", SCATTERED)
def test_bias_that_is_copied(form: str) -> None:
    """A bound call serves others of the same strides."""
    layout = build_layout(LONG, 200, 333, LayoutConfig(64, 64))
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, KernelConfig(4, 2))
    q, k, v = inputs()
    bias = scattered(form)
    assert may_be_tma_readable(bias, 200, 333)
    assert not tma_readable(bias, 200, 333)
    assert tma_readable(copy_for_tma(bias), 200, 333)
    call = IMPLEMENTATIONS["hopper"].bind(q, k, v, prepared, Options(0.125, bias=bias))
    for query, own in ((q, bias), (q, scattered(form)), (unaligned(q), bias)):
        out, lse = call(query, k, v, own, None)
        assert_attention(out, lse, q, k, v, layout.to_dense(), bias=own)


@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("tile", [(64, 64), (128, 128)])
def test_row_blocks_that_keep_nothing(tile: tuple[int, int]) -> None:
    """What is copied for them lies past the last of 333 keys, and where TMA takes it from."""
    keep = LONG.to_dense(200, 333).clone()
    keep[..., 128:, :] = False
    check_call(layout_of(keep, None, tile), *inputs(), bias=bias_of("heads", torch.float16))


def test_bias_that_has_no_tiles() -> None:
    """Another kernel's business, or that of a copy."""
    bias = bias_of("all", torch.float16)
    for unlike in (bias.float(), bias[..., :1]):
        assert not tma_readable(unlike, 200, 333)
        assert not may_be_tma_readable(unlike, 200, 333)
    assert not tma_readable(bias.contiguous(), 200, 333)  # rows of 666 bytes
    assert not tma_readable(bias[..., :200].mT, 200, 200)
    assert tma_readable(bias[:, :, :1, :1], 1, 1)
    assert tma_readable(bias[:, :, :1], 200, 333)
    assert tma_readable(bias[:, :, :1].expand(-1, -1, 200, -1), 200, 333)


@pytest.mark.parametrize("layout", [build_layout(LONG, 200, 333, LayoutConfig(128, 128, 8)), even_layout(640, 5)])
def test_bias_needs_whole_tiles(layout: Layout) -> None:
    q, k, v = inputs(batch=1, q_len=layout.q_len, kv_len=layout.kv_len)
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, KernelConfig(4, 2))
    bias = torch.zeros(1, 1, layout.q_len, 640, dtype=torch.float16)[..., : layout.kv_len]
    with pytest.raises(UnfitLayoutError, match="a bias is copied in whole tiles"):
        IMPLEMENTATIONS["hopper"].bind(q, k, v, prepared, Options(0.125, bias=bias))


@given(data=st.data())
@examples(20)
def test_random_biases(data: st.DataObject) -> None:
    """Any strides that TMA takes, shared or not, under masks by batch entry and head."""
    q_len, kv_len = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    width, tiles = data.draw(st.sampled_from(sorted(_HOPPER_BIAS_TILES.items())))
    block_m, block_n, _ = data.draw(st.sampled_from(tiles))
    sizes = (data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 4])))
    layout = layout_of(data.draw(dense_masks(q_len, kv_len, *sizes)), None, (block_m, block_n))
    assume(not reads_unseen_keys(layout))
    shared = (*(data.draw(st.sampled_from([1, full])) for full in (2, 4, q_len)),)
    padded = -(-kv_len // 8) * 8 + 8 * data.draw(st.integers(0, 2))
    bias = torch.randn(*shared, padded, dtype=torch.float16)[..., :kv_len]
    order = data.draw(st.permutations([0, 1, 2]))
    bias = (
        torch.full((*[bias.shape[dim] for dim in order], padded), torch.nan, dtype=bias.dtype)[..., :kv_len]
        .permute(*[order.index(dim) for dim in range(3)], 3)
        .copy_(bias)
    )
    assert tma_readable(bias, q_len, kv_len)
    stands_in = Twin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch, *tensors, bases=(): stands_in(launch, *tensors, bases=bases))
        given_inputs = inputs(q_len=q_len, kv_len=kv_len, head_dim=data.draw(st.sampled_from([width - 8, width])))
        check_call(layout, *given_inputs, split_tiles=data.draw(st.sampled_from([0, 1])), bias=bias)
