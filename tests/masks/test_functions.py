"""Mask functions mean what they return for single scores, however they are evaluated."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, noop_mask, or_masks
from torch.utils._pytree import tree_leaves

import stof
from stof import masks
from stof.errors import MaskError, MaskFunctionError, ShapeError
from stof.layout.builders.build import build_layout
from stof.masks import Index, Mask, elementwise, functions, single_calls
from stof.masks.gpu_program import programs_of
from stof.testing import assert_attention, make_inputs

B, H, Q, K = 2, 3, 11, 14
GENERATOR = torch.Generator().manual_seed(0)
DOC = (torch.arange(B * K).view(B, K) // 5).int()
LENGTHS = torch.tensor([7, 12], dtype=torch.int32)
SLOPES = torch.tensor([3, 9, 1])
INTERVALS = torch.stack([torch.arange(K) - 3, torch.arange(K) + 4], 1)
VECTORS = torch.randn(K, 8, generator=GENERATOR)
CHOSEN = torch.randint(0, 6, (H, 5, 2), generator=GENERATOR)
TABLE = torch.randint(0, 9, (K,), generator=GENERATOR)
ONE = (torch.tensor([4]), torch.tensor([9]))
SOME = (torch.tensor([2, 6, 9]), torch.tensor([5, 8, 13]))
LIKE_QUERIES = (torch.arange(Q), torch.arange(Q) + 4)
WEIGHT = torch.nn.Parameter(VECTORS[:, 0].clone())
SOME32 = SOME[0].int()
FEW = torch.tensor([3, 5, 12])


def spans(st: Tensor, en: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (q >= kv) | ((q >= st) & (q < en) & (kv >= st) & (kv < en)).any()


def written(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    q += 3
    return q >= kv


def combined_in_place(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    keep = q >= kv
    keep &= q - kv < 5
    return keep


# What each function is, and whether it may be called on broadcast tensors; which of b and h it depends on.
FUNCTIONS: dict[str, tuple[Callable[..., Any], bool, str]] = {
    "causal": (lambda b, h, q, kv: q >= kv, True, ""),
    "arithmetic": (lambda b, h, q, kv: (q // 4 == kv // 4) | ((q - kv).abs() % 3 == 0) & (3 - q < kv), True, ""),
    "true division": (lambda b, h, q, kv: q / 3 > kv * 0.5, True, ""),
    "where": (lambda b, h, q, kv: torch.where(q < 5, kv < 9, q >= kv), True, ""),
    "where of numbers": (lambda b, h, q, kv: torch.where(q < 5, 1, kv) == 1, True, ""),
    "table": (lambda b, h, q, kv: TABLE[q] == TABLE[kv], True, ""),
    "table in all dimensions": (lambda b, h, q, kv: DOC[b, q] == DOC[b, kv], True, "b"),
    "column of a table": (lambda b, h, q, kv: (INTERVALS[q, 0] <= kv) & (kv < INTERVALS[:, 1][q]), True, ""),
    "lengths": (lambda b, h, q, kv: kv < LENGTHS[b], True, "b"),
    "by head": (lambda b, h, q, kv: q - kv < SLOPES[h], True, "h"),
    "by both": (lambda b, h, q, kv: (q - kv < SLOPES[h]) & (kv < LENGTHS[b]), True, "bh"),
    "tensors of one element": (lambda b, h, q, kv: (q >= ONE[0]) & (kv < ONE[1]), True, ""),
    "a tensor without dimensions": (lambda b, h, q, kv: q - kv < torch.tensor(7), True, ""),
    "a parameter": (lambda b, h, q, kv: WEIGHT[q] > WEIGHT[kv].detach(), True, ""),
    "isin": (lambda b, h, q, kv: torch.isin(kv, FEW) | torch.isin(q, FEW, invert=True), True, ""),
    "isin of a number": (lambda b, h, q, kv: torch.isin(q, 3) | torch.isin(3, kv), False, ""),
    "bucketize": (lambda b, h, q, kv: torch.bucketize(q, FEW) == torch.bucketize(kv, FEW, right=True), True, ""),
    "searchsorted": (lambda b, h, q, kv: torch.searchsorted(FEW, q) == torch.searchsorted(FEW, kv), True, ""),
    "in place": (combined_in_place, True, ""),
    "likes": (lambda b, h, q, kv: torch.zeros_like(b).bool() | torch.ones_like(h).bool() & (q >= kv), True, ""),
    "noop_mask": (noop_mask, True, ""),
    "and_masks": (and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < LENGTHS[b]), True, "b"),
    "or_masks of none": (or_masks(), True, ""),
    "a constant": (lambda b, h, q, kv: torch.tensor(True), True, ""),
    "a constant of one element": (lambda b, h, q, kv: torch.ones(1, 1, dtype=torch.bool), True, ""),
    "one interval": (spans(*ONE), False, ""),
    "some intervals": (spans(*SOME), False, ""),
    "intervals as many as queries": (spans(*LIKE_QUERIES), False, ""),
    "chosen blocks": (lambda b, h, q, kv: (CHOSEN[h, q // 4] == kv // 4).any(), False, "h"),
    "stack": (lambda b, h, q, kv: torch.stack([q >= kv, kv < 3, LENGTHS[b] < q]).any(), False, "b"),
    "stack, all": (lambda b, h, q, kv: torch.stack([q >= kv, kv < 13]).all(0), False, ""),
    "cat": (lambda b, h, q, kv: torch.cat([q[None], kv[None]]).max() < 9, False, ""),
    "vectors": (lambda b, h, q, kv: (VECTORS[q] * VECTORS[kv]).sum() > 0, False, ""),
    "dot": (lambda b, h, q, kv: torch.dot(VECTORS[q], VECTORS[kv]) > 0, False, ""),
    "einsum": (lambda b, h, q, kv: torch.einsum("d,d->", VECTORS[q], VECTORS[kv]) > 0, False, ""),
    "row of a table": (lambda b, h, q, kv: DOC[b][q] == DOC[b][kv], False, "b"),
    "pair of a table": (lambda b, h, q, kv: (INTERVALS[q][0] <= kv) & (kv < INTERVALS[q][1]), False, ""),
    "slices": (lambda b, h, q, kv: (INTERVALS[q, :].sum() > kv) | (CHOSEN[h, ..., 0].max() < q), False, "h"),
    "isin of a row": (lambda b, h, q, kv: torch.isin(kv, DOC[b, :5]) | torch.isin(q, CHOSEN[h]), False, "bh"),
    "sum of an index": (lambda b, h, q, kv: q.sum() >= kv, False, ""),
    "with a dimension": (lambda b, h, q, kv: (q >= kv)[None], False, ""),
    "written": (written, False, ""),
    "by the number of elements": (lambda b, h, q, kv: q * torch.tensor(q.numel()) >= kv, False, ""),
    "promotion in single calls": (lambda b, h, q, kv: ((q >= SOME32) & (kv < SOME32 + 4)).any(), False, ""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    functions._warn_once.cache_clear()
    caplog.set_level(logging.CRITICAL, logger="stof")


def one_at_a_time(fn: Callable[..., Any], q_len: int = Q, kv_len: int = K) -> Tensor:
    """The definition: bool `[B, H, q_len, kv_len]` from a call for each score."""
    out = torch.empty(B, H, q_len, kv_len, dtype=torch.bool)
    for place in itertools.product(range(B), range(H), range(q_len), range(kv_len)):
        out[place] = bool(fn(*(torch.tensor(n) for n in place)))
    return out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_mean_single_calls(name: str) -> None:
    fn, elementwise_, used = FUNCTIONS[name]
    mask, expected = masks.from_function(fn), one_at_a_time(fn)
    assert isinstance(mask, functions.FunctionMask)
    assert torch.equal(mask.to_dense(Q, K, batch=B, heads=H).expand(B, H, Q, K), expected)
    assert functions._KNOWN[fn].calling.elementwise == elementwise_
    assert (mask.depends_on_batch, mask.depends_on_heads) == ("b" in used, "h" in used)
    assert mask.dims(B, H) == (B if "b" in used else 1, H if "h" in used else 1)
    for config in (stof.LayoutConfig(16, 16), stof.LayoutConfig(16, 16, 1)):
        layout = build_layout(mask, Q, K, config, batch=B, heads=H)
        assert torch.equal(layout.to_dense().expand(B, H, Q, K), expected)
    both = (mask & masks.causal()) | ~mask.with_query_offset(0)
    dense = both.to_dense(Q, K, batch=B, heads=H)
    assert torch.equal(dense.expand(B, H, Q, K), expected & masks.causal().to_dense(Q, K) | ~expected)
    for b, h in ((0, 0), (B - 1, H - 1)):
        program = mask.translated(b, h, Q, K)
        assert (programs_of(mask, Q, K, [(b, h)]) is None) == (program is None)
        assert program is None or torch.equal(program.to_dense(Q, K)[0, 0], expected[b, h])


REDUCING = [name for name, (_, elementwise_, _) in FUNCTIONS.items() if not elementwise_]


@pytest.mark.parametrize("name", ["causal", "table in all dimensions", "isin", *REDUCING])
def test_several_rectangles(name: str) -> None:
    """Queries and keys of other positions in each."""
    fn, *_ = FUNCTIONS[name]
    mask, expected = masks.from_function(fn), one_at_a_time(fn)[1, 2]
    q = torch.randint(0, Q, (4, 1, 5, 1), generator=GENERATOR)
    kv = torch.randint(0, K, (4, 1, 1, 7), generator=GENERATOR)
    b, h = torch.tensor(1).view(1, 1, 1, 1), torch.tensor(2).view(1, 1, 1, 1)
    for rows, columns in ((q, kv), (q, kv[:1]), (q[:1], kv), (q[:1, :, :1], kv[:1, :, :, :1])):
        found = mask.evaluate(Index(b, h, rows, columns, Q, K))
        wanted = expected[rows, columns]
        assert torch.equal(found.expand_as(wanted), wanted)


@pytest.mark.parametrize(
    "name", ["causal", "one interval", "intervals as many as queries", "chosen blocks", "dot", "row of a table"]
)
def test_block_masks_and_combinations(name: str) -> None:
    fn, *_ = FUNCTIONS[name]

    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() < 6

    for mod in (fn, and_masks(fn, window), or_masks(window, fn)):
        expected = one_at_a_time(mod)
        assert torch.equal(create_mask(mod, B, H, Q, K, device="cpu"), expected)
        assert torch.equal(masks.from_function(mod).to_dense(Q, K, batch=B, heads=H).expand(B, H, Q, K), expected)
        block_mask = create_block_mask(mod, B, H, Q, K, device="cpu", BLOCK_SIZE=16)
        plan = stof.plan(block_mask, Q, K, batch=B, heads=H)
        assert torch.equal(plan.to_dense().expand(B, H, Q, K), expected)
    q, k, v = (torch.randn(B, H, n, 8, generator=GENERATOR) for n in (Q, K, K))
    found = stof.attention(q, k, v, create_block_mask(fn, B, H, Q, K, device="cpu", BLOCK_SIZE=16))
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), one_at_a_time(fn))
    torch.testing.assert_close(found.double(), wanted.nan_to_num(0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["causal", "some intervals", "row of a table"])
def test_functions_of_compiled_code(name: str, backend: str) -> None:
    """The first call of compiled code evaluates them inside an operator, under a dispatch mode of PyTorch's."""
    fn = functools.partial(FUNCTIONS[name][0])  # nothing is known of it yet
    mask = masks.from_function(fn)
    q, k, v = (torch.randn(B, H, n, 8, generator=GENERATOR) for n in (Q, K, K))
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, mask), backend=backend, fullgraph=True)
    found = compiled(q, k, v)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), one_at_a_time(fn))
    torch.testing.assert_close(found.double(), wanted.nan_to_num(0.0), atol=1e-5, rtol=1e-5)
    assert functions._KNOWN[fn].calling.elementwise == FUNCTIONS[name][1]


def test_block_masks_depend_on_what_their_lists_have() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    for batch, heads in ((None, None), (B, None), (None, H), (B, H)):
        mask: Any = masks.from_block_mask(create_block_mask(causal, batch, heads, 32, 32, device="cpu", BLOCK_SIZE=16))
        assert (mask.depends_on_batch, mask.depends_on_heads) == (batch is not None, heads is not None)
        assert mask.dims(B, H) == (batch or 1, heads or 1)
    by_head: Any = masks.from_block_mask(create_block_mask(FUNCTIONS["by head"][0], None, None, 32, 32, device="cpu"))
    assert (by_head.depends_on_batch, by_head.depends_on_heads) == (False, True)
    with pytest.raises(ShapeError, match="batch size of 2, the inputs have 3"):
        masks.from_block_mask(create_block_mask(causal, B, H, 32, 32, device="cpu")).dims(3, H)


def test_functions_may_read_their_own_tables_in_python() -> None:
    widths = torch.tensor([4, 2])

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv < widths.tolist()[0]) & (kv < len(widths.nonzero()) + q) & (kv >= int(widths.numpy()[1]))

    at = torch.arange(16)
    want = (at[:, None] - at < 4) & (at < 2 + at[:, None]) & (at >= 2)
    assert torch.equal(masks.from_function(fn).to_dense(16)[0, 0], want)


@torch.jit.script
def scripted_width(h: Tensor) -> Tensor:
    return h * 5 + 1


def test_constant_selections_and_scripted_functions() -> None:
    table, chosen = torch.tensor([[1, 7], [6, 7], [11, 7]]), torch.tensor([True, False])
    at = torch.arange(16)
    distance = at[:, None] - at
    want = (distance < torch.tensor([1, 6, 11]).view(3, 1, 1)) & (distance >= 0)
    fns: tuple[Any, ...] = (
        lambda b, h, q, kv: (q - kv < table[h, chosen].sum()) & (kv <= q),
        lambda b, h, q, kv: (q - kv < table[h][chosen].sum()) & (kv <= q),
        lambda b, h, q, kv: (q - kv < scripted_width(h)) & (kv <= q),
        lambda b, h, q, kv: (q - kv < torch.tensor(data=[1, 6, 11])[h]) & (kv <= q),
        lambda b, h, q, kv: (q - kv < h.new_tensor([1])[0] + torch.as_tensor(h * 5)) & (kv <= q),
    )
    for fn in fns:
        assert torch.equal(stof.plan(fn, 16, heads=3, batch=1).to_dense()[0], want)


def test_cleared_functions_are_traced_again() -> None:
    by_head = False

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv <= h) & (kv <= q) if by_head else kv <= q

    q, k, v = make_inputs(heads=3, q_len=32, kv_len=32).qkv
    stof.attention(q, k, v, fn)
    by_head = True
    stof.plan_cache.clear()
    out, lse = stof.attention(q, k, v, fn, return_lse=True)
    distance = torch.arange(32)[:, None] - torch.arange(32)
    assert_attention(out, lse, q, k, v, (distance <= torch.arange(3).view(1, 3, 1, 1)) & (distance >= 0))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b, h, q, kv: (q >= kv) if q > 3 else (q < kv), r"decides in Python.*not and / or / if"),
        (lambda b, h, q, kv: q >= kv and kv > 2, "decides in Python"),
        (lambda b, h, q, kv: kv < [5, 9][int(b)], "decides in Python"),
        (lambda b, h, q, kv: kv < h.item(), "decides in Python"),
        (lambda b, h, q, kv: (q >= kv) if torch.equal(q, kv) else (q < kv), "decides in Python"),
        (lambda b, h, q, kv: kv < torch.tensor(q.tolist()), "decides in Python"),
        (lambda b, h, q, kv: kv < int(b.numpy().max()) + q, "decides in Python"),
        (lambda b, h, q, kv: kv < [5, 9, 3, 7][h.tolist()], "decides in Python"),
        (lambda b, h, q, kv: kv < int(np.asarray(h)) + q, "decides in Python"),
        (lambda b, h, q, kv: kv < len(h.nonzero()) + q, "decides in Python"),
        (lambda b, h, q, kv: kv < torch.tensor([5, h + 9])[1] + q, "decides in Python"),
        (lambda b, h, q, kv: kv < torch.as_tensor([h * 5])[0] + q, "decides in Python"),
        (lambda b, h, q, kv: kv < torch.tensor(data=[h])[0] + q, "decides in Python"),
        (lambda b, h, q, kv: kv < DOC.new_tensor([h])[0] + q, "decides in Python"),
        (lambda b, h, q, kv: kv < torch.ones(1).repeat_interleave(h + 1).numel() + q, "decides in Python"),
        (lambda b, h, q, kv: kv < len(torch.arange(9)[h > torch.arange(9)]) + q, "decides in Python"),
        (lambda b, h, q, kv: TABLE[q >= kv].sum() > 0, "raised RuntimeError"),
        (lambda b, h, q, kv: (TABLE > 3)[None], r"returned shape \[1, 14\] for one score"),
        (lambda b, h, q, kv: (TABLE > 3)[None] & (q >= kv), r"returned shape \[1, 14\] for one score"),
        (lambda b, h, q, kv: q[0, 0] >= kv[0, 0], "raised IndexError"),
        (lambda b, h, q, kv: q >= kv + torch.randn(()), "raised RuntimeError.*random"),
        (lambda b, h, q, kv: q.int() * torch.tensor(100000) >= kv, "int64 for one score, in torch.int32 for many"),
        (lambda b, h, q, kv: q / 3 <= torch.tensor(1 / 3).double(), "float64 for one score, in torch.float32 for many"),
        (lambda b, h, q, kv: q >= torch.tensor([9], dtype=torch.int8), "int8 for one score, in torch.int64 for many"),
        (lambda b, h, q, kv: torch.isin(q, torch.tensor([9]).byte()), "uint8 for one score, in torch.int64 for many"),
        (lambda b, h, q, kv: True, "returned bool"),
    ],
)
def test_what_is_not_a_function_of_single_scores(fn: Any, message: str) -> None:
    mask = masks.from_function(fn)
    with pytest.raises(MaskFunctionError, match=message):
        mask.to_dense(Q, K, batch=B, heads=H)
    for length, batch in ((32, 1), (1, B)):
        with pytest.raises(MaskFunctionError, match=message):
            stof.plan(fn, length, batch=batch, heads=1)


def test_the_largest_tensor_of_a_single_call_is_known() -> None:
    """Per indices that it depends on, wherever in the function it comes; results in parts rely on it."""
    wide, at = torch.arange(7), [torch.tensor(n) for n in (0, 0, 3, 2)]

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        rows = (q + wide[:2]).sum() + (q + wide).sum() + (q + wide[:3]).sum()
        return (rows + (wide[:5] * q * kv).sum() + b) > 4

    elements = elementwise.traits_of(fn, at).elements
    assert elements == {
        frozenset({0}): 1, frozenset({1}): 1, frozenset({2}): 7, frozenset({3}): 1,
        frozenset({2, 3}): 5, frozenset({0, 2, 3}): 1,
    }  # fmt: skip


def test_functions_inside_of_custom_operators() -> None:
    """PyTorch passes composite operators, such as `&`, undecomposed there."""
    index = torch.tensor(0)
    at = (index, index, index, index)

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q - kv).abs() <= 3) & (q != 7) | (kv == 0)

    outside = elementwise.traits_of(fn, at)
    traits = []

    @torch.library.custom_op("stof_test::trace", mutates_args=())
    def trace(x: Tensor) -> Tensor:
        traits.append(elementwise.traits_of(fn, at))
        return x.clone()

    trace(index)
    (inside,) = traits
    assert inside.obstacle is None
    assert inside.record.operations == outside.record.operations


def test_large_results_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a part is larger than it may be, if a part is more than one score."""
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket not in (torch.ops.aten.cat, torch.ops.aten.view):
                largest = max([largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
            return out

    for name in ("some intervals", "dot", "row of a table", "chosen blocks"):
        fn, *_ = FUNCTIONS[name]
        mask = masks.from_function(fn)
        expected = mask.to_dense(Q, K, batch=B, heads=H)
        for limit in (1000, 60):
            monkeypatch.setattr(single_calls, "_AT_ONCE", limit)
            largest = 0
            with Sizes():
                found = mask.to_dense(Q, K, batch=B, heads=H)
            assert torch.equal(found, expected)
            assert largest <= max(expected.numel(), limit)


CUBE = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
ROWS = torch.tensor([2, 0])
INDEXED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda i, j: CUBE[i],
    lambda i, j: CUBE[i, j],
    lambda i, j: CUBE[i, :, j],
    lambda i, j: CUBE[..., i, j],
    lambda i, j: CUBE[i, ..., j],
    lambda i, j: CUBE[:, i, ..., 2],
    lambda i, j: CUBE[1, i, 1:3, j],
    lambda i, j: CUBE[None, i, None, ..., -1],
    lambda i, j: CUBE[i, ROWS, :, j],
    lambda i, j: CUBE[i, :, ROWS],
    lambda i, j: CUBE[i, [0, 2], j],
    lambda i, j: CUBE[i, CUBE[0, :, :, 0] > 9, j],
    lambda i, j: CUBE[CUBE[:, :, 0, 0] > 9, ..., i],
    lambda i, j: CUBE[-i - 1, 0, -1, j.int()],
]


@pytest.mark.parametrize("n", range(len(INDEXED)))
def test_tensors_without_dimensions_as_indices(n: int) -> None:
    """Under vmap as in single calls."""
    i, j = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])
    expected = torch.stack([INDEXED[n](a, b) for a, b in zip(i, j, strict=True)])
    with single_calls.Indexing():
        assert torch.equal(torch.vmap(INDEXED[n])(i, j), expected)


def test_slow_functions_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="stof")

    def slow(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q >= SOME[0]) & (kv < SOME[1])).any()

    def fast(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    for fn in (slow, fast, slow, fast):
        masks.from_function(fn).to_dense(Q, K)
        masks.from_function(fn).to_dense(4 * Q, 4 * K)
    (record,) = caplog.records
    assert "slow is evaluated score by score under torch.vmap" in record.getMessage()
    assert "aten.ge" in record.getMessage()


def test_what_ranges_say_is_compared() -> None:
    """A function that takes ranges for something else is not asked about them."""

    def odd(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv if isinstance(q, Tensor) else q < kv

    mask = masks.from_function(odd)
    layout = build_layout(mask, 256, 256, stof.LayoutConfig(16, 16))
    assert torch.equal(layout.to_dense(), masks.causal().to_dense(256))
    assert functions._KNOWN[odd].calling.elementwise
    assert not functions._KNOWN[odd].closed_form


def test_what_broadcast_tensors_give_is_compared() -> None:
    """A function that treats tensors with dimensions otherwise is evaluated as it is defined."""

    def odd(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv if q.dim() == 0 else q < kv

    mask = masks.from_function(odd)
    assert torch.equal(mask.to_dense(64), masks.causal().to_dense(64))
    assert not functions._KNOWN[odd].calling.elementwise


def test_functions_whose_tables_fit_some_positions_only() -> None:
    """Nothing is asked for elsewhere: queries that begin after a cache, say."""
    table = torch.tensor([3, 1, 9, 2])
    mask: Mask = masks.from_function(lambda b, h, q, kv: kv < table[q - 30]).with_query_offset(30)
    expected = torch.arange(34) < table[:, None]
    assert torch.equal(mask.to_dense(4, 34)[0, 0], expected)
    assert torch.equal(stof.plan(mask, 4, 34).to_dense()[0, 0], expected)
    assert torch.equal(stof.plan(mask, 4, 34, batch=2, heads=2).to_dense().expand(2, 2, 4, 34)[1, 1], expected)


def test_random_numbers_of_others_are_left_alone() -> None:
    state = torch.get_rng_state()
    masks.from_function(lambda b, h, q, kv: q >= kv).to_dense(64)
    assert torch.equal(torch.get_rng_state(), state)


def test_functions_are_not_kept() -> None:
    def one(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    masks.from_function(one).to_dense(8)
    alive = weakref.ref(one)
    del one
    gc.collect()
    assert alive() is None


def test_a_function_whose_result_changes_is_refused() -> None:
    """Rather than one of the wrong shape taken for a mask."""
    held = [torch.tensor(3)]
    mask = masks.from_function(lambda b, h, q, kv: q - kv < held[0])
    mask.to_dense(Q, K)
    held[0] = torch.tensor([3, 4, 5])
    with pytest.raises(MaskError):
        mask.to_dense(Q, K)
