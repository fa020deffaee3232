"""Functions translated to tests and tables keep the scores that the functions keep."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.masks import Mask, translate
from stof.masks.functions import FunctionMask
from stof.masks.gpu_program import programs_of
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.masks import public_functions

Q, K = 40, 48
GENERATOR = torch.Generator().manual_seed(0)
SORTED = torch.randint(0, 6, (64,), generator=GENERATOR).sort().values
SHUFFLED = torch.randint(-2, 4, (2, 64), generator=GENERATOR)
FEW = torch.rand(64, generator=GENERATOR) < 0.5
BY_HEAD = torch.tensor([3, 9, 20])
BLOCKS = torch.rand(3, 5, 4, generator=GENERATOR) < torch.tensor([0.3, 0.8, 0.0]).view(3, 1, 1)
Value = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def expected_of(fn: Value, b: int, h: int) -> Tensor:
    """Single calls."""
    at = [torch.tensor(number) for number in (b, h)]
    q, kv = torch.arange(Q), torch.arange(K)
    return torch.stack([torch.stack([fn(*at, i, j).view(()) for j in kv.unbind()]) for i in q.unbind()])


def differences() -> st.SearchStrategy[Value]:
    shift, size = st.integers(-9, 9), st.integers(1, 12)
    return st.one_of(
        st.builds(lambda c: lambda b, h, q, k: q - k + c, shift),
        st.builds(lambda c: lambda b, h, q, k: c - q + k, shift),
        st.builds(lambda n: lambda b, h, q, k: q // n - k // n, size),
        st.builds(lambda n: lambda b, h, q, k: torch.remainder(q, n) - k % n, size),
        st.builds(lambda n, c: lambda b, h, q, k: (q - k + c) % n, size, shift),
        st.builds(lambda n, c: lambda b, h, q, k: torch.div(q - k + c, n, rounding_mode="floor"), size, shift),
        st.builds(lambda n: lambda b, h, q, k: n * (q - k), st.integers(-3, 3)),
        st.just(lambda b, h, q, k: SORTED[q] - SORTED[k]),
        st.just(lambda b, h, q, k: q),
        st.just(lambda b, h, q, k: k),
        st.just(lambda b, h, q, k: SHUFFLED[b, k]),
        st.builds(lambda n: lambda b, h, q, k: q % n, size),
        st.builds(lambda n: lambda b, h, q, k: k // n, size),
    )


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": torch.gt,
    "ge": lambda x, y: x.ge(y),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "flipped": lambda x, y: y > x,
    "near": lambda x, y: x.abs() <= y,
    "far": lambda x, y: torch.abs(x) > y,
}


def comparisons() -> st.SearchStrategy[Value]:
    return st.one_of(
        st.builds(
            lambda x, name, c: lambda b, h, q, k: COMPARE[name](x(b, h, q, k), c),
            differences(),
            st.sampled_from(list(COMPARE)),
            st.integers(-8, 30),
        ),
        st.builds(
            lambda x, name: lambda b, h, q, k: COMPARE[name](x(b, h, q, k), BY_HEAD[h]),
            differences(),
            st.sampled_from(list(COMPARE)),
        ),
        st.sampled_from(
            [
                lambda b, h, q, k: SORTED[q] == SORTED[k],
                lambda b, h, q, k: SORTED[q] >= SORTED[k],
                lambda b, h, q, k: SORTED[q] < SORTED[k],
                lambda b, h, q, k: SHUFFLED[b, q] == SHUFFLED[b, k],
                lambda b, h, q, k: SHUFFLED[b, q] != SHUFFLED[b, k],
                lambda b, h, q, k: FEW[q],
                lambda b, h, q, k: FEW[k],
                lambda b, h, q, k: FEW[q] == FEW[k],
                lambda b, h, q, k: q >= 0,
                lambda b, h, q, k: BLOCKS[h, q // 8, k // 12],
                lambda b, h, q, k: BLOCKS[h, k // 16, torch.div(q, 16, rounding_mode="floor")],
                lambda b, h, q, k: BLOCKS[0, q // 9, k // 48],
            ]
        ),
    )


def functions() -> st.SearchStrategy[Value]:
    return st.recursive(
        comparisons(),
        lambda inner: st.one_of(
            st.builds(lambda x, y: lambda *at: x(*at) & y(*at), inner, inner),
            st.builds(lambda x, y: lambda *at: torch.logical_or(x(*at), y(*at)), inner, inner),
            st.builds(lambda x, y: lambda *at: x(*at) ^ y(*at), inner, inner),
            st.builds(lambda x: lambda *at: ~x(*at), inner),
            st.builds(lambda x, y, z: lambda *at: torch.where(x(*at), y(*at), z(*at)), inner, inner, inner),
        ),
        max_leaves=4,
    )


@given(fn=functions(), b=st.integers(0, 1), h=st.integers(0, 2))
@examples(100)
def test_translations_keep_the_same_scores(fn: Value, b: int, h: int) -> None:
    try:  # without the comparison with the function, which looks at some scores alone
        program = translate.translated(fn, b, h, Q, K)
    except translate.NotTranslatableError:
        return
    assert torch.equal(program.to_dense(Q, K)[0, 0], expected_of(fn, b, h))


TRANSLATED: dict[str, tuple[Value, str]] = {
    "causal": (lambda b, h, q, k: q >= k, "causal()"),
    "documents": (
        lambda b, h, q, k: SORTED[q] == SORTED[k],
        f"documents(cu_seqlens={[0, *(SORTED[:48].diff().nonzero()[:, 0] + 1).tolist(), 48]})",
    ),
    "padding": (lambda b, h, q, k: k < BY_HEAD[h], "position_test(tested='key', low=0, high=8, size=1, shift=0)"),
    "constant": (lambda b, h, q, k: q >= 0, "full()"),
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_known_functions(name: str) -> None:
    fn, text = TRANSLATED[name]
    program = FunctionMask(fn).translated(0, 1, Q, 64 if name == "constant" else K)
    assert program is not None
    assert program.key == text
    assert programs_of(masks.from_function(fn), Q, K, [(0, 1)]) is not None


def in_place(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    keep = q >= k
    other = keep
    other &= q < 9
    return keep


REFUSED: dict[str, tuple[Value, str]] = {
    "in place": (in_place, "in place"),
    "two tables": (lambda b, h, q, k: SORTED[q] == SHUFFLED[0, k], "another one of the key"),
    "a table of pairs": (lambda b, h, q, k: FEW[:36].view(6, 6)[q % 6, k % 6], "looks up in a table of blocks"),
    "a product": (lambda b, h, q, k: q * k < 99, "product"),
    "logarithms": (lambda b, h, q, k: torch.log(q + 1.0) > 2, "round differently"),
    "floats": (lambda b, h, q, k: q * 0.5 - k > 1.5, "float"),
    "large numbers": (lambda b, h, q, k: (SORTED * 2**40)[q] - k > 5, r"2\*\*29"),
    "a lower precision": (lambda b, h, q, k: SORTED.to(torch.uint8)[q] - k.to(torch.uint8) > 5, "uint8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_translation_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fn, reason = REFUSED[name]

    def renamed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return fn(b, h, q, k)

    renamed.__qualname__ = name
    with caplog.at_level(logging.INFO, "stof.masks.functions"):
        assert FunctionMask(renamed).translated(0, 0, Q, K) is None
    (text,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert re.search(reason, text)


@pytest.mark.parametrize(
    ("fn", "orders"),
    [
        (lambda b, h, q, k: ((q - k) % 8 == 0) & (q >= k), ("remainder 8",)),
        (lambda b, h, q, k: ((q // 16 - k // 16).abs() <= 2) & ((q % 16 - k % 16).abs() <= 2), ("grid 16",)),
        (lambda b, h, q, k: q >= k, ()),
    ],
)
def test_row_orders(fn: Value, orders: tuple[str, ...]) -> None:
    assert masks.from_function(fn).row_orders(64, 64) == orders


def test_plans_of_functions_whose_tables_change() -> None:
    """Made anew in each step, and written to in place; with choices kept from earlier steps."""
    inputs = make_inputs(heads=2, q_len=300, kv_len=300, head_dim=8).qkv
    table = torch.zeros(300, dtype=torch.int64)

    def of(ids: Tensor) -> Mask | Value:
        return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)

    held = of(table)
    for seed in range(6):
        ids = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(seed)).sort().values
        table.copy_(ids)
        keep = (ids[:, None] == ids) & torch.ones(300, 300, dtype=torch.bool).tril()
        for fn in (of(ids), held):
            assert_attention(stof.attention(*inputs, fn), None, *inputs, keep)


@pytest.mark.parametrize("name", public_functions.FUNCTIONS)
def test_functions_of_public_code(name: str) -> None:
    """All that have a program are right: 56 of 62."""
    mask = FunctionMask(public_functions.FUNCTIONS[name])
    length, batch, heads = public_functions.LENGTH, public_functions.BATCH, public_functions.HEADS
    expected = mask.to_dense(length, batch=batch, heads=heads).expand(batch, heads, length, length)
    for b, h in ((0, 0), (1, 3)):
        program = mask.translated(b, h, length, length)
        assert (program is None) == (name in public_functions.WITHOUT_PROGRAM)
        if program is not None:
            assert torch.equal(program.to_dense(length)[0, 0], expected[b, h])
            assert programs_of(mask, length, length, [(b, h)]) is not None


WIDE = torch.tensor([3, 2**31 - 1])
BYTES = torch.arange(64, dtype=torch.uint8)
SMALL = torch.arange(64, dtype=torch.int32)
LOWEST = torch.where(torch.arange(64) == 0, -(2**31), torch.arange(64) // 3).int()
EXACT = {
    "open remainder": lambda b, h, q, k: (q - k) % 5 < 3,
    "flipped remainder": lambda b, h, q, k: 3 >= (q - k) % 5,  # noqa: SIM300
    "wide window": lambda b, h, q, k: (q - k <= WIDE[h]) & (k - q <= WIDE[h]),
    "widest window": lambda b, h, q, k: q - k <= 2**31 - 1 - 40,
    "large constant": lambda b, h, q, k: (q - k) + (2**31 - 40) > 0,
    "large quotient": lambda b, h, q, k: (q - k) // 2 < 2**31 - 1 - 20,
    "bytes and heads": lambda b, h, q, k: (BYTES[q] - h >= 0) & (q >= k),
    "32 bits and heads": lambda b, h, q, k: (k.int() < (WIDE + 2**31)[h]) & (q >= k),
    "8 bits and heads": lambda b, h, q, k: (q.to(torch.int8) + h * 100 >= 0) & (q >= k),
    "32-bit product": lambda b, h, q, k: (SMALL[q] * 2**23 - SMALL[k] * 2**23) * 5 >= 0,
    "32-bit constant": lambda b, h, q, k: (q.int() - k.int()) + (2**31 - 20) > 0,
    "lowest number": lambda b, h, q, k: LOWEST[q] - LOWEST[k] >= 0,
    "where as a method": lambda b, h, q, k: (q >= k).where(q - k < 30, k == 11),
    "blocks from the end": lambda b, h, q, k: BLOCKS[h - 2, q // 8, k // 12],
    "blocks of short rows": lambda b, h, q, k: BLOCKS[1, q // 64, k // 12] & BLOCKS[0, q // 40, k // 64],
}


def test_truth_values_select_in_no_translation() -> None:
    """In an index they are masks."""
    for fn in (lambda b, h, q, k: BLOCKS[h > 0, q // 8, k // 12], lambda b, h, q, k: BLOCKS[True, q // 8, k // 12]):
        with pytest.raises(translate.NotTranslatableError, match="something else than integers"):
            translate.translated(fn, 0, 1, Q, K)


@pytest.mark.parametrize("name", EXACT)
def test_translations_are_exact_or_refused(name: str) -> None:
    """Without the comparison with the function, which looks at some scores alone."""
    for b, h in ((0, 0), (1, 1)):
        try:
            program = translate.translated(EXACT[name], b, h, Q, K)
        except translate.NotTranslatableError:
            continue
        assert torch.equal(program.to_dense(Q, K)[0, 0], expected_of(EXACT[name], b, h))


def test_translations_ignore_the_state_of_the_thread() -> None:
    """The default device, and inference mode in an earlier call."""
    weights = torch.nn.Parameter(torch.randn(300, generator=GENERATOR))
    with torch.inference_mode():
        assert FunctionMask(lambda b, h, q, k: (q // 5 == k // 5) | (q >= k)).translated(0, 0, 300, 300) is not None
    fn = FunctionMask(lambda b, h, q, k: (weights[q] > 0) & (q >= k) | (k < 2))
    expected = fn.to_dense(300)
    with torch.device("meta"):
        program = FunctionMask(fn.fn).translated(0, 0, 300, 300)
    assert program is not None
    assert torch.equal(program.to_dense(300), expected)


def test_a_mask_keeps_few_translations() -> None:
    mask = masks.from_function(lambda b, h, q, k: SORTED[q % 64] == SORTED[k % 64]).frozen()
    assert isinstance(mask, FunctionMask)
    for length in range(64, 104):
        mask.translated(0, 0, length, length)
    assert len(mask.__dict__["_translations"]) <= 16
