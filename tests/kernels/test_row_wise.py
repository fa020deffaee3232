"""The row-wise Triton kernel against float64: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.errors import ArgumentError
from stof.kernels.common import L2_SHARE
from stof.kernels.implementation import Options, attend_once, tensors_of
from stof.kernels.triton import row_lists
from stof.kernels.triton.row_lists import RowWiseConfig, default_config, prepare
from stof.kernels.triton.row_wise import bind
from stof.layout import Layout
from stof.testing import MEMORY_LAYOUTS, assert_attention, make_inputs, spread
from tests.examples import examples
from tests.strategies import configs, dense_masks, row_orders

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 64, 80, 128, 192)
# Programs are slow under the interpreter: few of them, with many rows each.
FEW_PROGRAMS = RowWiseConfig(rows=16, cols=4, slots=2, width=64)

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


def layout_of(mask: Any, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, **options: Any) -> Layout:
    return stof.plan(mask, q_len, kv_len, batch=batch, heads=heads, device=DEVICE, **options).layout


def check(
    inputs: tuple[Tensor, Tensor, Tensor], mask: Any, keep: Tensor, config: RowWiseConfig = FEW_PROGRAMS, **options: Any
) -> tuple[Tensor, Tensor]:
    """Run the kernel on `mask` and compare with float64 under `keep`; options as for `stof.attention`."""
    q, k, v = (x.to(DEVICE) for x in inputs)
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items() if x is not None}
    keep = keep.to(DEVICE)
    layout = mask if isinstance(mask, Layout) else layout_of(mask, q.shape[2], k.shape[2], q.shape[0], q.shape[1])
    called = Options(**{"scale": q.shape[-1] ** -0.5, **options})
    out, lse = attend_once(bind, q, k, v, replace(prepare(layout), config=config), called)
    assert_attention(out, lse, q, k, v, keep, **options)
    return out, lse


@st.composite
def kernel_configs(draw: st.DrawFn) -> RowWiseConfig:
    slots, unroll = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (4, 2), (16, 1)]))
    return RowWiseConfig(
        rows=draw(st.sampled_from([4, 16])),
        cols=slots * unroll,
        slots=slots,
        width=draw(st.sampled_from([16, 64])),
        num_warps=draw(st.sampled_from([1, 4])),
    )


@given(data=st.data())
@examples(200 if ON_GPU else 30)
def test_against_float64(data: st.DataObject) -> None:
    q_len, kv_len = data.draw(st.sampled_from([1, 2, 15, 17])), data.draw(st.sampled_from([1, 3, 17, 33]))
    batch, (kv_heads, group) = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    heads, head_dim = kv_heads * group, data.draw(st.sampled_from([*HEAD_DIMS, 5]))
    inputs = make_inputs(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=data.draw(st.sampled_from([head_dim, 24])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        memory=data.draw(st.sampled_from(MEMORY_LAYOUTS)),
        seed=data.draw(st.integers(0, 99)),
    )
    mask_batch, mask_heads = data.draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
    keep = data.draw(dense_masks(q_len, kv_len, mask_batch, mask_heads))
    layout = layout_of(
        keep.to(DEVICE), q_len, kv_len, batch, heads, config=data.draw(configs), row_order=data.draw(row_orders(q_len))
    )
    every = (batch, heads, q_len, kv_len)
    bias = None
    if data.draw(st.booleans()):
        bias = torch.randn(
            [n if data.draw(st.booleans()) else 1 for n in every], dtype=data.draw(st.sampled_from(DTYPES))
        )
        if data.draw(st.booleans()):
            bias = bias.masked_fill(torch.rand(bias.shape) < 0.2, -torch.inf)
    sinks = data.draw(st.sampled_from([None, 0.0, -torch.inf]))
    # How many heads run side by side: one, some, all of these small ones.
    with mock.patch("stof.kernels.triton.row_wise.L2_SHARE", data.draw(st.sampled_from([0, 4096, L2_SHARE]))):
        check(
            inputs.qkv,
            layout,
            keep,
            data.draw(kernel_configs()),
            bias=bias,
            sinks=None if sinks is None else torch.cat([torch.full((1,), sinks), torch.randn(heads - 1)]),
            softcap=data.draw(st.sampled_from([None, None, 0.5, 20.0])),
            scale=data.draw(st.sampled_from([None, None, 0.0, -0.7])),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_default_config(head_dim: int, dtype: torch.dtype) -> None:
    """What runs when nobody chooses: odd sizes, grouped heads, and a value width of its own."""
    mask = masks.sliding_window(4) | masks.sink_tokens(2)
    inputs = make_inputs(heads=2, kv_heads=1, q_len=9, kv_len=21, head_dim=head_dim, value_dim=40, dtype=dtype)
    config = dataclasses.replace(default_config(head_dim, 7, dtype.itemsize), rows=16)
    check(inputs.qkv, mask, mask.to_dense(9, 21), config)


@pytest.mark.parametrize("config", [FEW_PROGRAMS, RowWiseConfig(16, 8, 2, 16), RowWiseConfig(8, 1, 1, 8)], ids=str)
def test_options(config: RowWiseConfig) -> None:
    mask = masks.sliding_window(6) | masks.global_tokens(1)
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=11, kv_len=14, head_dim=16, value_dim=24)
    keep = mask.to_dense(11, 14)
    check(inputs.qkv, mask, keep, config, sinks=torch.randn(4, dtype=torch.float64))
    check(inputs.qkv, mask, keep, config, bias=torch.randn(1, 4, 11, 14), softcap=3.0, sinks=torch.randn(4), scale=0.4)
    check(inputs.qkv, mask, keep, config, bias=torch.randn(2, 1, 1, 14, dtype=torch.float16))


def test_masks_per_batch_entry_and_head() -> None:
    keep = torch.rand(2, 4, 13, 20) < torch.tensor([0.0, 0.05, 0.3, 1.0]).view(1, 4, 1, 1)
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=13, kv_len=20, head_dim=16)
    check(inputs.qkv, keep.to(DEVICE), keep)


def test_rows_with_one_key_return_its_value() -> None:
    inputs = make_inputs(heads=2, q_len=16, kv_len=30, head_dim=64, dtype=torch.float16)
    columns = torch.randint(30, (16,))
    keep = torch.zeros(16, 30, dtype=torch.bool)
    keep[torch.arange(16), columns] = True
    out, _ = check(inputs.qkv, keep[None, None].to(DEVICE), keep)
    assert torch.equal(out.cpu(), inputs.v[:, :, columns])


def test_rows_that_keep_nothing() -> None:
    inputs = make_inputs(heads=2, q_len=20, kv_len=10, head_dim=16)
    nothing = masks.full() & ~masks.full()
    out, lse = check(inputs.qkv, nothing, torch.zeros(20, 10, dtype=torch.bool), sinks=torch.tensor([3.0, -torch.inf]))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize(
    "config", [FEW_PROGRAMS, RowWiseConfig(16, 1, 1, 16), RowWiseConfig(4, 32, 16, 32, 4)], ids=str
)
def test_keys_nobody_keeps_are_not_read(config: RowWiseConfig) -> None:
    inputs = make_inputs(heads=2, kv_heads=1, q_len=12, kv_len=40, head_dim=80, dtype=torch.bfloat16)
    keep = torch.rand(12, 40) < 0.2
    keep[:, ::3] = False
    keep[3] = False
    unseen = ~keep.any(0)
    clean = check(inputs.qkv, keep[None, None].to(DEVICE), keep, config)
    k, v = (x.masked_fill(unseen[:, None], torch.nan) for x in (inputs.k, inputs.v))
    layout = layout_of(keep[None, None].to(DEVICE), 12, 40, heads=2)
    q, k, v = (x.to(DEVICE) for x in (inputs.q, k, v))
    poisoned = attend_once(bind, q, k, v, replace(prepare(layout), config=config), Options(80**-0.5))
    assert torch.equal(clean[0], poisoned[0])
    assert torch.equal(clean[1], poisoned[1])


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_memory_orders(memory: str) -> None:
    inputs = make_inputs(batch=2, heads=2, q_len=5, kv_len=9, head_dim=16, memory=memory)
    out, _ = check(inputs.qkv, masks.causal(), masks.causal().to_dense(5, 9))
    assert out.stride() == torch.empty_like(inputs.q).stride()
    bias = spread(torch.randn(2, 2, 5, 9), memory)
    check(inputs.qkv, masks.causal(), masks.causal().to_dense(5, 9), bias=bias)


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_softcap_over_all_sizes(softcap: float, size: float) -> None:
    inputs = make_inputs(heads=1, q_len=16, kv_len=16, head_dim=16)
    check((inputs.q * size, inputs.k, inputs.v), masks.causal(), masks.causal().to_dense(16), softcap=softcap)


def test_scores_far_apart() -> None:
    """Scores of 10^5: exponentials must take differences, and no state may overflow when it meets a larger score."""
    inputs = make_inputs(heads=1, q_len=16, kv_len=24, head_dim=16)
    for scale in (1e4, -1e4):
        check(inputs.qkv, masks.full(), masks.full().to_dense(16, 24), scale=scale)


def test_equal_calls_give_equal_bits() -> None:
    length = 500 if ON_GPU else 16
    mask = masks.longformer(3, 2)
    q, k, v = (x.to(DEVICE) for x in make_inputs(heads=2, q_len=length, head_dim=64, dtype=torch.float16).qkv)
    prepared = prepare(layout_of(mask, length, length))
    first = attend_once(bind, q, k, v, prepared, Options(0.125))
    for _ in range(200 if ON_GPU else 1):
        again = attend_once(bind, q, k, v, prepared, Options(0.125))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def far_apart(length: int, width: int, distance: int) -> Tensor:
    """`[1, 1, length, width]` of which rows are `distance` elements apart; on the CPU untouched pages cost nothing."""
    buffer = torch.empty(0, dtype=torch.float16, device=DEVICE)
    buffer.untyped_storage().resize_(2 * ((length - 1) * distance + width))
    return buffer.as_strided((1, 1, length, width), (0, 0, distance, 1))


def test_offsets_past_31_bits() -> None:
    inputs = make_inputs(heads=1, q_len=4, kv_len=3, head_dim=16, dtype=torch.float16)
    k, v = far_apart(3, 16, 2**30 + 64), far_apart(3, 16, 2**30 + 64)
    k.copy_(inputs.k)
    v.copy_(inputs.v)
    check((inputs.q, k, v), masks.full(), masks.full().to_dense(4, 3))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 72, 256])
@pytest.mark.parametrize(
    "mask", [masks.dilated_window(300, dilation=16), masks.bigbird(40, 20), masks.causal()], ids=str
)
def test_large(mask: Any, head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(batch=2, heads=6, kv_heads=2, q_len=1003, head_dim=head_dim, dtype=dtype, memory="bshd")
    keep, options = mask.to_dense(1003).to(DEVICE), {"sinks": torch.randn(6), "softcap": 30.0}
    layout = layout_of(mask, 1003, 1003)
    default = default_config(head_dim, int(keep.sum(-1).max()), dtype.itemsize)
    for config in (default, dataclasses.replace(default, rows=1, slots=default.cols)):
        check(inputs.qkv, layout, keep, config, **options)


@given(data=st.data())
@examples(40)
def test_prepared_rows_are_the_mask(data: st.DataObject) -> None:
    q_len, kv_len, heads = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90)), data.draw(st.integers(1, 3))
    keep = data.draw(dense_masks(q_len, kv_len, 1, heads)).to(DEVICE)
    layout = layout_of(keep, q_len, kv_len, 1, heads, config=data.draw(configs), row_order=data.draw(row_orders(q_len)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_lists, "STRIP_SCORES", data.draw(st.sampled_from([1, 10_000, row_lists.STRIP_SCORES])))
        prepared = prepare(layout)
    pattern_of, rows, row_ptr, columns = tensors_of(prepared)
    assert all(tensor.dtype == torch.int32 for tensor in (pattern_of, rows, row_ptr, columns))
    assert len(row_ptr) == len(rows) + 1 == layout.patterns * q_len + 1
    assert int(row_ptr[0]) == 0
    assert int(row_ptr[-1]) == len(columns)
    counts = row_ptr.diff()
    assert prepared.most == int(counts.max()) == int(keep.sum(-1).max())
    dense = torch.zeros(layout.patterns, q_len, kv_len, dtype=torch.bool, device=DEVICE)
    for place, (start, stop) in enumerate(zip(row_ptr[:-1].tolist(), row_ptr[1:].tolist(), strict=True)):
        mine = columns[start:stop]
        assert bool((mine.diff() > 0).all())
        dense[place // q_len, int(rows[place]), mine.long()] = True
    assert torch.equal(dense[pattern_of.long()].expand(1, heads, -1, -1), keep)
    classes = -(-counts.view(layout.patterns, q_len) // row_lists.COUNT_STEP)
    assert bool((classes.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("max_count", [0, 1, 2, 17, 128, 129, 5000])
def test_default_configs_are_valid(max_count: int, itemsize: int) -> None:
    for head_dim in range(1, 257):
        config = default_config(head_dim, max_count, itemsize)
        assert (
            config.rows * config.slots * config.width * itemsize >= 512 * config.num_warps
        )  # 16 bytes for each thread


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 3}, "rows is a power of two between 1 and 16, got 3"),
        ({"num_warps": 0}, "num_warps is a power of two"),
        ({"cols": 4, "slots": 8}, "cols is a multiple of slots, got 4 and 8"),
    ],
)
def test_invalid_configs(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RowWiseConfig(**fields)
