"""NaN and infinite scores: each row gives what the definition gives for the keys it sees, and no other row changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig
from stof.kernels.cpu import make_schedule, row_block_attention
from stof.kernels.torch.batched import batched_attention, make_batched
from stof.kernels.torch.reference import reference_attention
from stof.testing import make_inputs
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.strategies import dense_masks, row_orders

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # NumPy tells of each NaN and infinity.
    pytest.mark.filterwarnings(
        "ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"
    ),
]
VALUES = (torch.nan, torch.inf, -torch.inf)
# A call's tensors, layout and options to its results.
Attend = Callable[..., tuple[Tensor, Tensor]]


class Drawn(NamedTuple):
    """A call; `keep` is its mask."""

    qkv: tuple[Tensor, Tensor, Tensor]
    keep: Tensor
    options: dict[str, Any]


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Drawn:
    """A call with NaN and infinities in queries, keys and the bias, and in keys and values that no row sees."""
    q_len, kv_len = draw(st.sampled_from(q_lens)), draw(st.sampled_from(kv_lens))
    batch, (kv_heads, group) = draw(st.integers(1, 2)), draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    heads, dim, value_dim = kv_heads * group, 16, draw(st.sampled_from([16, 16, 24]))
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": dim,
    }
    q, k, v = make_inputs(**sizes, value_dim=value_dim, dtype=dtype, seed=draw(st.integers(0, 99))).qkv
    keep = draw(dense_masks(q_len, kv_len, draw(st.sampled_from([1, batch])), 1))
    bias = None
    if draw(st.booleans()):
        bias = torch.randn([n if draw(st.booleans()) else 1 for n in (batch, heads, q_len, kv_len)]).to(dtype)
    for x in (q, k) if bias is None else (q, k, bias):
        for _ in range(draw(st.integers(0, 2))):
            spoil(x, draw(st.sampled_from(VALUES)), draw)
    unseen = ~keep.any(1).any(1).expand(batch, kv_len)  # by no row of the sequence
    for x in (k, v):
        x.masked_fill_(unseen[:, None, :, None], draw(st.sampled_from(VALUES)))
    sinks = torch.randn(heads) if draw(st.booleans()) else None
    softcap = draw(st.sampled_from([0.0, 0.0, 5.0]))
    return Drawn((q, k, v), keep, {"scale": 0.25, "bias": bias, "sinks": sinks, "softcap": softcap})


def spoil(x: Tensor, value: float, draw: st.DrawFn) -> None:
    """Write `value` to one element of some rows, or to all of them."""
    rows = x.shape[2]
    first = draw(st.integers(0, rows - 1))
    count = draw(st.sampled_from([1, 2, 16, rows]))
    columns = slice(None) if draw(st.booleans()) else draw(st.integers(0, x.shape[3] - 1))
    heads = slice(None) if draw(st.booleans()) else 0
    x[:, heads, first : first + count, columns] = value


def check(attend: Attend, drawn: Drawn, geometry: LayoutConfig, order: Tensor | None = None) -> None:
    q, k, v = drawn.qkv
    plan = stof.plan(drawn.keep, q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], config=geometry,
                     row_order=order)  # fmt: skip
    out, lse = attend(q, k, v, plan.layout, drawn.options)
    wanted, wanted_lse = reference_attention(
        q.double(), k.double(), v.double(), drawn.keep, compute_dtype=torch.float64, **drawn.options
    )
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[q.dtype]
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def row_block(q: Tensor, k: Tensor, v: Tensor, layout: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return row_block_attention(q, k, v, make_schedule(layout), **options)


def batched(q: Tensor, k: Tensor, v: Tensor, layout: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return batched_attention(q, k, v, make_batched(layout), **options)


def reference(q: Tensor, k: Tensor, v: Tensor, layout: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return reference_attention(q, k, v, layout.to_dense(), **options)


@pytest.mark.parametrize("attend", [row_block, batched, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(data=st.data())
@examples(40)
def test_on_the_cpu(data: st.DataObject, dtype: torch.dtype, attend: Attend) -> None:
    """Lengths at which PyTorch's fused attention computes in blocks, in vectors and in single scores."""
    drawn = data.draw(calls(dtype, (1, 3, 40, 150), (1, 3, 8, 17, 31, 64, 100, 520, 1040)))
    geometry = LayoutConfig(data.draw(st.sampled_from([16, 64])), 64, data.draw(st.sampled_from([None, 1, 8])))
    check(attend, drawn, geometry, data.draw(row_orders(drawn.keep.shape[2])))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("place", [0, 5, 500, 600, 1279])
@pytest.mark.parametrize("value", VALUES)
def test_long_rows_on_the_cpu(value: float, place: int, merged: bool) -> None:
    """One key among many: PyTorch's fused attention takes them in blocks, and causal rows are merged of two parts."""
    q, k, v = make_inputs(heads=1, q_len=1280, head_dim=16).qkv
    keep = torch.ones(1, 1, 1280, 1280, dtype=torch.bool)
    if merged:
        keep.tril_()
    k[:, :, place] = value
    check(row_block, Drawn((q, k, v), keep, {"scale": 0.25}), LayoutConfig(64, 64))


def test_only_suspect_rows_are_computed_again() -> None:
    """Rows that do not see the NaN have the same bits as without it."""
    q, k, v = make_inputs(batch=2, heads=2, q_len=300, head_dim=16).qkv
    layout = stof.plan(stof.masks.sliding_window(63), 300, batch=2, heads=2).layout
    clean, clean_lse = row_block(q, k, v, layout, {"scale": 0.25})
    q[1, 0, 17], q[0, 1, 250, 3] = torch.nan, torch.inf
    out, lse = row_block(q, k, v, layout, {"scale": 0.25})
    same = torch.ones(2, 2, 300, dtype=torch.bool)
    same[1, 0, 17] = same[0, 1, 250] = False
    assert torch.equal(out[same], clean[same])
    assert torch.equal(lse[same], clean_lse[same])
    assert bool(out[~same].isnan().all())


@IN_INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(data=st.data())
@examples(12)
def test_block_wise(data: st.DataObject, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from stof.kernels.config import KernelConfig
    from stof.kernels.implementation import Options, attend_once
    from stof.kernels.triton.block_wise import bind
    from stof.kernels.triton.work_list import prepare

    config = KernelConfig(split_tiles=data.draw(st.sampled_from([0, 1])), pack=data.draw(st.booleans()))

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return attend_once(bind, q, k, v, prepare(layout, config), Options(**options))

    drawn = data.draw(calls(dtype, (1, 17), (1, 16, 40, 70)))
    geometry = LayoutConfig(data.draw(st.sampled_from([8, 16])), 32, data.draw(st.sampled_from([None, 1])))
    check(attend, drawn, geometry, data.draw(row_orders(drawn.keep.shape[2])))


@IN_INTERPRETER
@given(data=st.data())
@examples(12)
def test_row_wise(data: st.DataObject) -> None:
    pytest.importorskip("triton")
    from stof.kernels.implementation import Options, attend_once
    from stof.kernels.triton.row_lists import RowWiseConfig, prepare
    from stof.kernels.triton.row_wise import bind

    config = RowWiseConfig(rows=16, cols=4, slots=data.draw(st.sampled_from([1, 2])), width=64)

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return attend_once(bind, q, k, v, replace(prepare(layout), config=config), Options(**options))

    check(attend, data.draw(calls(torch.float32, (1, 17), (1, 16, 40))), LayoutConfig(16, 32))
