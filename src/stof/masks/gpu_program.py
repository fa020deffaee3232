"""Masks as numbers: short programs that a kernel runs on positions and on ranges of them.

A program is a list of instructions for a stack of truth values, in postfix order: every named pattern is a few tests of
the form `low <= x <= high`, where x comes from the query and key positions by one of the operations below. One compiled
kernel serves all masks that can be written so; see `stof.layout.build.gpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from stof.masks import rules
from stof.masks.compose import And, Mask, Not, Or, PerHead, QueryOffset

# Numbers of an instruction: operation, low, high, then what the operation needs.
WIDTH = 8
# Truth values on the stack. Parts that need most of it come first, so n of them are enough for fewer than 2**n tests.
DEPTH = 5
# Numbers of all programs of a mask: beyond, making them costs more than they save.
LONGEST = 2**18

_MOST = 2**31 - 1
# Positions, distances and what is added to them stay below 2**31, those of a tile past the last key as well.
_FURTHEST = _MOST - 2**9

T = TypeVar("T")


class Op(IntEnum):
    """What an instruction does. i is the query position, shifted, and j the key position.

    Fields after low and high are `size`, `shift` (added to the query position), `table` (where the instruction's table
    begins among the numbers, or before them), `entries` and `extra`. Instructions with a table test for 1.
    """

    AND = 0
    OR = 1
    NOT = 2
    DISTANCE = 3  # i - j
    QUERY = 4  # i
    KEY = 5  # j
    DISTANCE_REMAINDER = 6  # (i - j + extra) mod size, where extra is a multiple of size and keeps it from below 0
    KEY_REMAINDER = 7  # j mod size
    GRID_ROW = 8  # i div size - j div size
    GRID_COLUMN = 9  # i mod size - j mod size
    # Ascending tables are halved `size` times to find a number.
    QUERY_LISTED = 10  # 1 when i is in the table of `entries` numbers
    KEY_LISTED = 11  # 1 when j is
    DOCUMENT = 12  # 1 in one document: the table has `entries` ends, then their ids and -1; extra: ids are distinct
    CHOSEN_BLOCK = 13  # 1 when j div size is among the `entries` numbers of row i div size - extra of the table


class _NotWritableError(Exception):
    """The mask has a part without an instruction."""


class Draw(NamedTuple):
    """A table that the device fills: the key blocks that `rules.RandomBlocks` draws for rows of blocks.

    It has `picks` entries for each of `rows` rows, the first of which is row `first`, and begins `-at` numbers before
    the programs. The lower 32 bits of the seed, as an int32.
    """

    at: int
    first: int
    rows: int
    key_blocks: int
    picks: int
    seed: int


class Programs(NamedTuple):
    """Programs of some (batch, head) masks.

    Attributes:
        numbers: tables; then where the program of each mask begins; then the programs. The first number of a program
            says how many instructions it has.
        first: where the programs' places are among the numbers.
        draws: tables for the device to fill; they come before the numbers, the first of them last.
        drawn: numbers of these tables.
    """

    numbers: list[int]
    first: int
    draws: list[Draw]
    drawn: int


def programs_of(mask: Mask, q_len: int, kv_len: int, entries: Sequence[tuple[int, int]]) -> Programs | None:
    """Programs of these batch entries and heads; None when the mask cannot be written so."""
    writer = _Writer(q_len, kv_len)
    try:
        codes = [writer.program(mask, b, h) for b, h in entries]
    except _NotWritableError:
        return None
    first = len(writer.tables)
    numbers, at = writer.tables, first + len(codes)
    for code in codes:
        numbers.append(at)
        at += 1 + len(code)
    if at + writer.drawn > LONGEST:
        return None
    for code in codes:
        numbers.append(len(code) // WIDTH)
        numbers += code
    return Programs(numbers, first, writer.draws, writer.drawn)


class _Writer:
    """Programs being written."""

    def __init__(self, q_len: int, kv_len: int) -> None:
        self.q_len, self.kv_len = q_len, kv_len
        self.code: list[int] = []
        self.tables: list[int] = []
        self.draws: list[Draw] = []
        self.drawn = 0

    def program(self, mask: Mask, b: int, h: int) -> list[int]:
        """Instructions of one (batch, head) mask."""
        self.b, self.h, self.code = b, h, []
        if self.write(mask, 0) > DEPTH:
            raise _NotWritableError
        return self.code

    def write(self, mask: Mask, shift: int) -> int:
        """Add the instructions of `mask` for queries moved by `shift`; returns how deep the stack gets."""
        writer = _WRITERS.get(type(mask))
        if writer is None or max(self.q_len + shift, 0) + self.kv_len + max(-shift, 0) >= _FURTHEST:
            raise _NotWritableError
        return writer(self, mask, shift)

    def add(
        self,
        op: Op,
        low: int = -_MOST,
        high: int = _MOST,
        *,
        size: int = 0,
        shift: int = 0,
        table: int = 0,
        entries: int = 0,
        extra: int = 0,
    ) -> int:
        self.code += (op, low, high, size, shift, table, entries, extra)
        return 1

    def both(self, op: Op) -> int:
        """Combine the last two tests."""
        self.add(op)
        return 2

    def table(self, values: Sequence[int]) -> int:
        self.tables += values
        return len(self.tables) - len(values)

    def own(self, values: Sequence[T]) -> T:
        """The value of this sequence."""
        return values[self.b if len(values) > 1 else 0]


def _composite(to: _Writer, mask: And | Or, shift: int) -> int:
    before, parts = to.code, []
    for part in mask.masks:
        to.code = []
        parts.append((to.write(part, shift), to.code))
    parts.sort(key=itemgetter(0), reverse=True)
    deepest, code = parts[0]
    to.code = before
    before += code
    for depth, code in parts[1:]:
        deepest = max(deepest, 1 + depth)
        before += code
        to.add(Op.AND if type(mask) is And else Op.OR)
    return deepest


def _not(to: _Writer, mask: Not, shift: int) -> int:
    deepest = to.write(mask.mask, shift)
    to.add(Op.NOT)
    return deepest


def _sink_tokens(to: _Writer, mask: rules.SinkTokens, shift: int) -> int:
    to.add(Op.KEY, high=mask.tokens - 1)
    to.add(Op.DISTANCE, 0, shift=shift)
    return to.both(Op.AND)


def _prefix_lm(to: _Writer, mask: rules.PrefixLM, shift: int) -> int:
    to.add(Op.KEY, high=to.own(mask.prefix) - 1)
    to.add(Op.DISTANCE, 0, shift=shift)
    return to.both(Op.OR)


def _neighborhood_2d(to: _Writer, mask: rules.Neighborhood2D, shift: int) -> int:
    down, across = (reach // 2 for reach in mask.kernel)
    to.add(Op.GRID_ROW, -down, down, size=mask.width, shift=shift)
    to.add(Op.GRID_COLUMN, -across, across, size=mask.width, shift=shift)
    return to.both(Op.AND)


def _dilated_window(to: _Writer, mask: rules.DilatedWindow, shift: int) -> int:
    lift = -(-(to.kv_len + max(-shift, 0)) // mask.dilation) * mask.dilation
    if to.q_len + shift + lift >= _FURTHEST:
        raise _NotWritableError
    to.add(Op.DISTANCE, -mask.right, mask.left, shift=shift)
    to.add(Op.DISTANCE_REMAINDER, 0, 0, size=mask.dilation, extra=lift, shift=shift)
    return to.both(Op.AND)


def _strided(to: _Writer, mask: rules.Strided, shift: int) -> int:
    to.add(Op.DISTANCE, 1 - mask.local, mask.local - 1, shift=shift)
    to.add(Op.KEY_REMAINDER, mask.stride - mask.width, size=mask.stride)
    deepest = to.both(Op.OR)
    if mask.causal:
        to.add(Op.DISTANCE, 0, shift=shift)
        to.add(Op.AND)
    return deepest


def _global_tokens(to: _Writer, mask: rules.GlobalTokens, shift: int) -> int:
    if isinstance(mask.tokens, int):
        to.add(Op.QUERY, 0, mask.tokens - 1, shift=shift)
        to.add(Op.KEY, high=mask.tokens - 1)
    else:
        table, count = to.table(mask.tokens), len(mask.tokens)
        to.add(Op.QUERY_LISTED, 1, 1, size=count.bit_length(), shift=shift, table=table, entries=count)
        to.add(Op.KEY_LISTED, 1, 1, size=count.bit_length(), table=table, entries=count)
    return to.both(Op.OR)


def _documents(to: _Writer, mask: rules.Documents, shift: int) -> int:
    runs = to.own(mask.runs)
    if shift < 0 or 2 * len(runs) > LONGEST:  # the kernels take queries before the first document for some of it
        raise _NotWritableError
    ids = [doc for doc, _ in runs]
    seen = [doc for doc in ids if doc >= 0]
    table = to.table([*itertools.accumulate(length for _, length in runs), *ids, -1])
    return to.add(
        Op.DOCUMENT, 1, 1, size=len(runs).bit_length(), shift=shift, table=table, entries=len(runs),
        extra=int(len(set(seen)) == len(seen)),
    )  # fmt: skip


def _random_blocks(to: _Writer, mask: rules.RandomBlocks, shift: int) -> int:
    if shift < 0:  # Triton rounds quotients of negative numbers towards 0
        raise _NotWritableError
    size = mask.block_size
    first, stop = shift // size, (to.q_len + shift - 1) // size + 1
    key_blocks = -(-to.kv_len // size)
    picks = min(mask.blocks, key_blocks)
    to.drawn += (stop - first) * picks
    seed = (mask.seed & 0xFFFF_FFFF ^ 0x8000_0000) - 0x8000_0000
    to.draws.append(Draw(-to.drawn, first, stop - first, key_blocks, picks, seed))
    return to.add(Op.CHOSEN_BLOCK, 1, 1, size=size, shift=shift, table=-to.drawn, entries=picks, extra=first)


# By exact class: other masks, subclasses of these among them, may evaluate in their own way.
_WRITERS: dict[type[Mask], Callable[[_Writer, Any, int], int]] = {
    And: _composite,
    Or: _composite,
    Not: _not,
    QueryOffset: lambda to, mask, shift: to.write(mask.mask, shift + mask.offset),
    PerHead: lambda to, mask, shift: to.write(mask.masks[to.h], shift),
    rules.Full: lambda to, mask, shift: to.add(Op.KEY),
    rules.Causal: lambda to, mask, shift: to.add(Op.DISTANCE, 0, shift=shift),
    rules.SlidingWindow: lambda to, mask, shift: to.add(Op.DISTANCE, -mask.right, mask.left, shift=shift),
    rules.Padding: lambda to, mask, shift: to.add(Op.KEY, high=to.own(mask.lengths) - 1),
    rules.SinkTokens: _sink_tokens,
    rules.PrefixLM: _prefix_lm,
    rules.Neighborhood2D: _neighborhood_2d,
    rules.DilatedWindow: _dilated_window,
    rules.Strided: _strided,
    rules.GlobalTokens: _global_tokens,
    rules.Documents: _documents,
    rules.RandomBlocks: _random_blocks,
}
