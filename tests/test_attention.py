"""`stof.attention` against float64, over masks, shapes, dtypes, memory orders and options, for all implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.errors import UnsupportedError
from stof.kernels.implementation import Options
from stof.layout import orders
from stof.selection import IMPLEMENTATIONS
from stof.testing import MEMORY_LAYOUTS, assert_attention, make_inputs, oracle_attention, spread
from tests.examples import examples
from tests.strategies import calls, configs, dense_masks, mask_trees, row_orders

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The Triton kernels have tests of their own, in tests/kernels and tests/gpu.
IMPLS = tuple(name for name, impl in IMPLEMENTATIONS.items() if impl.capabilities.devices != ("cuda",))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(
    inputs: tuple[Tensor, Tensor, Tensor], mask: Any, keep: Tensor, implementation: str | None = None, **options: Any
) -> None:
    out, lse = stof.attention(*inputs, mask, return_lse=True, implementation=implementation, **options)
    # Parts are merged by their log-sum-exps. In float32 a rounding of one is several roundings of its exponential;
    # plain PyTorch has none of those, and may be lucky besides.
    merged = implementation == "batched" and inputs[0].dtype == torch.float32
    assert_attention(out, lse, *inputs, keep, factor=6.0 if merged else 2.0, **options)


def served(implementation: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call without those that an implementation declares not to take."""
    limits = IMPLEMENTATIONS[implementation].capabilities
    takes = {"bias": limits.bias, "sinks": limits.sinks, "softcap": limits.softcap}
    return {name: value if takes.get(name, True) else None for name, value in options.items()}


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@examples(40)
def test_against_float64(data: st.DataObject, dtype: torch.dtype, implementation: str) -> None:
    call = data.draw(calls(dtype))
    options = served(implementation, call.options())
    sizes = call.sizes
    inputs = make_inputs(**sizes).qkv
    mask_batch, mask_heads = data.draw(st.sampled_from([(1, 1), (sizes["batch"], 1), (sizes["batch"], sizes["heads"])]))
    keep = data.draw(dense_masks(sizes["q_len"], sizes["kv_len"], mask_batch, mask_heads))
    if data.draw(st.booleans()):
        plan = stof.plan(
            keep,
            sizes["q_len"],
            sizes["kv_len"],
            batch=sizes["batch"],
            heads=sizes["heads"],
            config=data.draw(configs),
            row_order=data.draw(row_orders(sizes["q_len"])),
        )
        check(inputs, plan, keep, implementation, **options)
    else:
        check(inputs, keep, keep, implementation, **options)


@pytest.mark.parametrize("implementation", IMPLS)
def test_one_kept_score_whose_terms_cancel(implementation: str) -> None:
    """A score of -0.14 from terms that add up to 18 has roundings of 18; float32 can be exact here by luck."""
    inputs = make_inputs(
        heads=4, kv_heads=2, q_len=15, kv_len=3, head_dim=32, dtype=torch.float64, memory="strided", seed=2439259
    ).qkv
    keep = torch.zeros(1, 4, 15, 3, dtype=torch.bool)
    keep[0, 1, 2, 1] = True
    options: dict[str, Any] = {"softcap": 0.5, "scale": -0.7}
    check(inputs, keep, keep, implementation, **options)
    # What float32 anywhere on the way would leave stays far outside.
    out, lse = oracle_attention(*inputs, keep, **options)
    with pytest.raises(AssertionError, match="lse is off by"):
        assert_attention(out, lse * (1 + 1e-12), *inputs, keep, **options)
    with pytest.raises(AssertionError, match="out is off by"):
        assert_attention(out * (1 + 1e-12), lse, *inputs, keep, **options)


@pytest.mark.parametrize("implementation", IMPLS)
@given(data=st.data())
@examples(25)
def test_mask_expressions(data: st.DataObject, implementation: str) -> None:
    kv_len, batch = data.draw(st.sampled_from([12, 64, 70])), data.draw(st.integers(1, 2))
    q_len = data.draw(st.integers(1, kv_len))
    mask = data.draw(mask_trees(kv_len, batch))
    if data.draw(st.booleans()):
        mask = mask.with_query_offset(kv_len - q_len)
    inputs = make_inputs(batch=batch, heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len).qkv
    check(inputs, mask, mask.to_dense(q_len, kv_len), implementation)


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("q_len", [1, 63, 65, 1000])
@pytest.mark.parametrize("kv_len", [1, 65, 1000])
def test_lengths(q_len: int, kv_len: int, implementation: str) -> None:
    mask = masks.sliding_window(20, 5) | masks.sink_tokens(3)
    inputs = make_inputs(heads=2, q_len=q_len, kv_len=kv_len).qkv
    check(inputs, mask, mask.to_dense(q_len, kv_len), implementation)


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_memory_orders(memory: str, implementation: str) -> None:
    """Gaps between elements are NaN: reading with the wrong stride shows."""
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=90, memory=memory).qkv
    check(inputs, masks.causal(), masks.causal().to_dense(70, 90), implementation)
    bias = spread(torch.randn(2, 4, 70, 90), memory)
    check(inputs, masks.causal(), masks.causal().to_dense(70, 90), implementation, bias=bias)


@pytest.mark.parametrize("mixed", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("implementation", IMPLS)
def test_one_tensor_with_a_strided_last_dimension(mixed: int, implementation: str) -> None:
    inputs = list(make_inputs(q_len=70).qkv)
    inputs[mixed] = spread(inputs[mixed], "strided")
    check(tuple(inputs), masks.sliding_window(9), masks.sliding_window(9).to_dense(70), implementation)


BIAS_SHAPES = [
    (),
    (90,),
    (1, 90),
    (70, 1),
    (70, 90),
    (4, 1, 1),
    (4, 70, 90),
    (2, 1, 1, 90),
    (2, 4, 70, 90),
    (2, 1, 70, 1),
]


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_shapes(shape: tuple[int, ...], implementation: str) -> None:
    mask = masks.causal() | masks.global_tokens(2)
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=90).qkv
    check(inputs, mask, mask.to_dense(70, 90), implementation, bias=torch.randn(shape))


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_bias_of_half_inputs_keeps_its_range(dtype: torch.dtype, implementation: str) -> None:
    """A float32 bias is not squeezed into 16 bits: 1e5 overflows float16, and bfloat16 has 8 bits of mantissa."""
    q, k, v = make_inputs(q_len=70, dtype=dtype).qkv
    bias = 1e5 + torch.arange(70.0)
    out, lse = stof.attention(q, k, v, bias=bias, return_lse=True, implementation=implementation)
    expected, expected_lse = oracle_attention(q, k, v, bias=bias)
    assert (out.double() - expected).abs().max() < 0.05
    assert (lse.double() - expected_lse).abs().max() < 0.5


@pytest.mark.sampled(5)
@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("columns", [(0, 700), (600, 1200), (0, 1200)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_bias_that_drops_whole_rows(columns: tuple[int, int], kv_heads: int, implementation: str) -> None:
    """-inf in the bias empties rows as the mask does, also where shared columns are merged with the rest."""
    inputs = make_inputs(heads=2, kv_heads=kv_heads, q_len=1100, kv_len=1200, head_dim=8).qkv
    bias = torch.zeros(1200)
    bias[columns[0] : columns[1]] = -torch.inf
    rows = torch.zeros(1100, 1)
    rows[7] = -torch.inf
    for mask in (masks.full(), masks.prefix_lm(700), ~masks.sliding_window(4, 4)):
        check(inputs, mask, mask.to_dense(1100, 1200), implementation, bias=bias + rows)


@pytest.mark.parametrize("implementation", IMPLS)
def test_bias_counts_only_where_the_mask_keeps(implementation: str) -> None:
    """+inf and NaN under dropped scores change nothing."""
    q, k, v = make_inputs(q_len=70).qkv
    keep = masks.causal().to_dense(70)[0, 0]
    bias = torch.randn(70, 70)
    wild = bias.masked_fill(~keep, torch.inf)
    wild[0, 5] = torch.nan
    out = stof.attention(q, k, v, masks.causal(), bias=wild, implementation=implementation)
    assert_attention(out, None, q, k, v, keep, bias=bias)


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("sink", [-torch.inf, -100.0, 0.0, 100.0])
def test_sinks(sink: float, implementation: str) -> None:
    """Also with rows that keep nothing, which stay 0."""
    inputs = make_inputs(heads=4, kv_heads=2, q_len=130).qkv
    mask = masks.sliding_window(0, 0) & ~masks.sink_tokens(100)
    check(inputs, mask, mask.to_dense(130), implementation, sinks=torch.tensor([sink, 1.0, sink, -1.0]))


@pytest.mark.parametrize("implementation", IMPLS)
def test_empty_masks(implementation: str) -> None:
    inputs = make_inputs(batch=2, q_len=70).qkv
    out, lse = stof.attention(*inputs, ~masks.full(), return_lse=True, implementation=implementation)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    # one empty sequence in the batch
    lengths = masks.padding([0, 33])
    check(inputs, lengths, lengths.to_dense(70), implementation)


SHARED = {
    "full": masks.full(),
    "prefix": masks.prefix_lm(800),
    "scattered": masks.strided(100, 5, 3, causal=False),
    "anti_window": ~masks.sliding_window(30, 30),
    "per_head": masks.per_head([masks.full(), masks.causal()]),
    "some_empty_rows": masks.full()
    & ~masks.from_dense(torch.eye(1200, dtype=torch.bool)[:, [5]].expand(-1, 1200).clone()),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_shared_columns(name: str, dtype: torch.dtype) -> None:
    """512 and more columns that neighbouring row blocks all keep run unmasked, and merge by log-sum-exp."""
    mask = SHARED[name]
    q_len, kv_len = (1200, 1200) if name == "some_empty_rows" else (1100, 1230)
    inputs = make_inputs(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=8, dtype=dtype).qkv
    keep = mask.to_dense(q_len, kv_len)
    check(inputs, mask, keep, "row_block")
    check(
        inputs, mask, keep, "row_block", sinks=torch.tensor([0.5, 7.0]), softcap=5.0, bias=torch.randn(1, 1, 1, kv_len)
    )
    permuted = stof.plan(mask, q_len, kv_len, heads=2, row_order=orders.by_remainder(q_len, 7))
    check(inputs, permuted, keep, "row_block")


def test_the_shared_path_is_taken() -> None:
    """Guards the test above: its masks do reach the merging step."""
    from stof.kernels.cpu.schedule import COLUMNS, MASK_OFFSET, MERGE, make_schedule

    for name in ("prefix", "scattered"):
        layout = stof.plan(SHARED[name], 1100, 1230).layout
        assert int(make_schedule(layout).steps[:, MERGE].sum()) > 0, name
    # The last tile's columns, fewer than a tile has, are shared as well: nothing is left to merge.
    steps = make_schedule(stof.plan(SHARED["full"], 1100, 1230).layout).steps
    assert steps[:, [COLUMNS, MASK_OFFSET, MERGE]].tolist() == [[1230, -1, 0]] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [0.03, 0.3])
def test_scattered_masks(kept: float, dtype: torch.dtype) -> None:
    """Row blocks that share no full columns, with nearly all columns each, run 1024 rows at a time."""
    from stof.kernels.cpu.schedule import ROW_START, ROW_STOP, make_schedule

    keep = torch.rand(2, 1100, 1230, generator=torch.Generator().manual_seed(5)) < kept
    keep[:, 40:43] = False  # empty rows
    keep[0, :, 100:300] = keep[1, :, 900:] = False  # columns that a head never sees
    mask = masks.from_dense(keep)
    steps = make_schedule(stof.plan(mask, 1100, 1230).layout).steps
    assert int((steps[:, ROW_STOP] - steps[:, ROW_START]).max()) == 1024
    q, k, v = make_inputs(heads=4, kv_heads=2, q_len=1100, kv_len=1230, head_dim=8, dtype=dtype).qkv
    keep = keep.repeat_interleave(2, 0)
    k[:, 0, 100:300] = v[:, 0, 100:300] = k[:, 1, 900:] = torch.nan
    check((q, k, v), masks.from_dense(keep), keep, "row_block")
    check((q, k, v), masks.from_dense(keep), keep, "row_block", sinks=torch.randn(4), bias=torch.randn(4, 1100, 1))


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_patterns_that_split_key_head_groups(kv_heads: int, implementation: str) -> None:
    a, b, c = masks.causal(), masks.sliding_window(5), ~masks.full()
    heads = [a, b, b, b, c, a, a, a]
    inputs = make_inputs(batch=2, heads=8, kv_heads=kv_heads, q_len=70, memory="bshd").qkv
    mask = masks.per_head(heads) & masks.padding([70, 9])
    keep = mask.to_dense(70)
    check(inputs, mask, keep, implementation)
    plan = stof.plan(mask, 70, batch=2, heads=8, row_order=orders.by_remainder(70, 3))
    assert plan.layout.patterns == 6 - 1  # c is the same in both sequences
    check(inputs, plan, keep, implementation, bias=torch.randn(8, 70, 70), sinks=torch.randn(8))


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("slab", [None, 1, 8, 16])
@pytest.mark.parametrize("kv_len", [9, 100, 129])
def test_lengths_that_no_block_divides(kv_len: int, slab: int | None, implementation: str) -> None:
    mask = masks.strided(11, 7, 2, causal=False)
    inputs = make_inputs(q_len=21, kv_len=kv_len).qkv
    plan = stof.plan(mask, 21, kv_len, config=LayoutConfig(128, 32, slab))
    check(inputs, plan, mask.to_dense(21, kv_len), implementation)


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("slab", [None, 1])
def test_row_blocks_of_one_row_take_their_own_bias(slab: int | None, implementation: str) -> None:
    inputs = make_inputs(heads=4, kv_heads=2, q_len=40).qkv
    for mask in (masks.full(), masks.sliding_window(9)):
        plan = stof.plan(mask, 40, config=LayoutConfig(1, 16, slab))
        for bias in (torch.randn(40, 40), torch.randn(4, 40, 1), torch.randn(4, 1, 40)):
            check(inputs, plan, mask.to_dense(40), implementation, bias=bias)


@pytest.mark.parametrize("implementation", IMPLS)
def test_large_scores_do_not_overflow(implementation: str) -> None:
    q, k, v = (x * 100 for x in make_inputs(q_len=70, dtype=torch.float32).qkv)
    check((q, k, v), masks.causal(), masks.causal().to_dense(70), implementation)
    check((q, k, v), masks.causal(), masks.causal().to_dense(70), implementation, softcap=30.0)


def test_plan_to_and_repeated_use() -> None:
    inputs = make_inputs(heads=2, q_len=70)
    plan = stof.plan(masks.per_head([masks.causal(), masks.full()]), 70, heads=2)
    moved = plan.to("cpu")
    assert torch.equal(stof.attention(*inputs.qkv, plan), stof.attention(*inputs.qkv, moved))
    assert torch.equal(stof.attention(*inputs.qkv, plan), stof.attention(*inputs.qkv, plan))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("shape", [(4, 1, 70), (70, 70), (1, 4, 70, 70), None], ids=str)
def test_like_calls_are_bound_once(
    shape: tuple[int, ...] | None, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation = IMPLS[0]
    bound: list[None] = []
    original = IMPLEMENTATIONS[implementation]

    def counting(q: Tensor, k: Tensor, v: Tensor, prepared: Any, options: Options) -> Any:
        bound.append(None)
        return original.bind(q, k, v, prepared, options)

    monkeypatch.setitem(IMPLEMENTATIONS, implementation, replace(original, bind=counting))
    mask = masks.sliding_window(9) if planned else masks.sliding_window(8)  # plans of masks are kept
    keep = mask.to_dense(70)
    sinks = torch.empty(8)[::2]
    for seed in range(3):
        inputs = make_inputs(heads=4, q_len=70, seed=seed).qkv
        sinks.normal_()
        bias = None if shape is None else torch.randn(shape)
        check(inputs, stof.plan(mask, 70) if planned else mask, keep, implementation, bias=bias, sinks=sinks)
    assert len(bound) == 1


def test_like_calls_under_autocast_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[None] = []
    original = IMPLEMENTATIONS[IMPLS[0]]

    def counting(q: Tensor, k: Tensor, v: Tensor, prepared: Any, options: Options) -> Any:
        bound.append(None)
        return original.bind(q, k, v, prepared, options)

    monkeypatch.setitem(IMPLEMENTATIONS, IMPLS[0], replace(original, bind=counting))
    plan = stof.plan(masks.causal(), 70)
    for seed in range(3):
        q, k, v = make_inputs(heads=2, q_len=70, seed=seed).qkv
        with torch.autocast("cpu", torch.bfloat16):
            out = stof.attention(q, k, v, plan, implementation=IMPLS[0])
        half = [x.bfloat16() for x in (q, k, v)]
        assert torch.equal(out, stof.attention(*half, plan, implementation=IMPLS[0]))
    assert len(bound) == 1


def test_inputs_are_not_written() -> None:
    inputs = make_inputs(q_len=1100, heads=2)
    before = [x.clone() for x in inputs.qkv]
    bias, sinks = torch.randn(1, 1, 1, 1100), torch.randn(2)
    kept = (bias.clone(), sinks.clone())
    for implementation in IMPLS:
        stof.attention(
            *inputs.qkv, masks.prefix_lm(700), bias=bias, sinks=sinks, softcap=3.0, implementation=implementation
        )
    assert all(torch.equal(a, b) for a, b in zip(before, inputs.qkv, strict=True))
    assert torch.equal(bias, kept[0])
    assert torch.equal(sinks, kept[1])


DRAWN = torch.rand(1100, 1100, generator=torch.Generator().manual_seed(0)) < 0.1


@pytest.mark.parametrize(
    "mask",
    [
        masks.bigbird(7, 3) | masks.prefix_lm(600),
        masks.sliding_window(17),
        masks.strided(16, 16),
        masks.dilated_window(50, dilation=4),
        masks.neighborhood_2d(44, 25, 5),
        masks.documents(cu_seqlens=[0, 100, 1100]),
        pytest.param(masks.from_dense(DRAWN), id="dense"),
        pytest.param(masks.from_function(lambda b, h, q, kv: (q - kv).abs() < 20), id="function"),
    ],
    ids=str,
)
def test_the_default_device_does_not_matter(mask: masks.Mask) -> None:
    """Every tensor is made on the inputs' device: here a default device that holds no data."""
    inputs = make_inputs(q_len=1100).qkv
    keep = mask.to_dense(1100)
    with torch.device("meta"):
        results = [stof.attention(*inputs, mask, return_lse=True, implementation=name) for name in IMPLS]
    for out, lse in results:
        assert_attention(out, lse, *inputs, keep)


def test_a_transform_of_torch_func_is_told_what_to_do() -> None:
    q, k, v = make_inputs(q_len=20).qkv
    with pytest.raises(UnsupportedError, match="batch dimension"):
        torch.vmap(lambda q: stof.attention(q, k, v, "causal"))(torch.stack([q, q]))
    for transform in (torch.func.grad(lambda q: stof.attention(q, k, v, "causal").sum()),
                      lambda q: torch.func.jvp(lambda q: stof.attention(q, k, v, "causal"), (q,), (q,))):  # fmt: skip
        with pytest.raises(UnsupportedError, match="first order in reverse mode"):
            transform(q)


def test_the_poison_works() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2, 2).T).isnan().all()
    assert torch.zeros(1).new_empty(3).isnan().all()
