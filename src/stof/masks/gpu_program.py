"""Masks as numbers: short programs that a kernel runs on positions and on ranges of them.

A program is a list of instructions for a stack of truth values, in postfix order: every named mask is a few tests of
the form `low <= x <= high`, where x comes from the query and key positions by one of the operations below. One compiled
kernel serves all masks that can be written so; see `stof.layout.fill`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from stof.masks import rules
from stof.masks.aligned import AlignedDocuments
from stof.masks.compose import And, Mask, Not, Or, Placed, Transposed
from stof.masks.functions import FunctionMask
from stof.masks.per_head import EntryRange, PerHead
from stof.masks.position_tests import ChosenBlocks, Listed, PositionTest
from stof.masks.reorder import InRanges, begins_of

# Numbers of an instruction: operation, low, high, then what the operation needs.
WIDTH = 9
# Truth values on the stack. Parts that need most of it come first, so n of them are enough for fewer than 2**n tests.
DEPTH = 5
# Most numbers of all programs of a mask: writing more takes longer than they save.
LONGEST = 2**18

_MOST = 2**31 - 1
# Keys that kernels look at together: bits of a word.
_WORD = 32
# Positions in a tile past the last key.
_PAST_THE_END = 2**9
# Positions, distances and what is added to them stay below 2**31, those of a tile past the last key as well.
_FURTHEST = _MOST - _PAST_THE_END

# Batch entries and heads for which a function is translated, each by a call.
_MOST_TRANSLATED = 16
T = TypeVar("T")


class Op(IntEnum):
    """What an instruction does. i is the position of the program's query and j that of its key, both moved.

    Fields after low and high are `size`, `i_shift` and `j_shift` (what i and j are moved by), `table` (where the
    instruction's table begins among the numbers, or before them), `entries` and `extra`. Instructions with a table test
    for 1. Those of a transposed mask have operands swapped.
    """

    AND = 0
    OR = 1
    NOT = 2
    DISTANCE = 3  # i - j
    QUERY = 4  # i
    KEY = 5  # j
    DISTANCE_REMAINDER = 6  # (i - j + extra) mod size, where extra is a multiple of size and keeps it from below 0
    QUERY_REMAINDER = 7  # i mod size
    KEY_REMAINDER = 8  # j mod size
    GRID_ROW = 9  # i div size - j div size
    GRID_COLUMN = 10  # i mod size - j mod size
    # Ascending tables are halved `size` times to find a number.
    QUERY_LISTED = 11  # 1 when i is in the table of `entries` numbers
    KEY_LISTED = 12  # 1 when j is
    # 1 in one document: the table has `entries` ends, then their ids and -1. extra: 1 if ids are distinct, plus twice
    # the runs that separate the run of a query from that of a key of the same document.
    DOCUMENT = 13
    CHOSEN_BLOCK = 14  # 1 when j div size is among the `entries` numbers of row i div size - extra of the table
    CHOSEN_BLOCK_OF_KEY = 15  # 1 when i div size is among the `entries` numbers of row j div size - extra
    # These are no tests. They map queries or keys, for the rest of the program: consecutive ranges of another sequence
    # to positions in that sequence of `extra` tokens. Those of keys come first in a program. The table has the
    # positions where the `entries` ranges begin, then the shift of each range.
    QUERY_IN_RANGES = 16
    KEY_IN_RANGES = 17


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
        numbers: where the program of each mask begins; tables; the programs. The first number of a program says how
            many instructions it has.
        draws: tables for the device to fill; they come before the numbers, the first of them last.
        drawn: numbers of these tables.
    """

    numbers: list[int]
    draws: list[Draw]
    drawn: int


def programs_of(mask: Mask, q_len: int, kv_len: int, entries: Sequence[tuple[int, int]]) -> Programs | None:
    """Programs of these batch entries and heads; None when the mask cannot be written so.

    The last programs of a mask are kept with it: its layouts and their kernels ask for the same ones.
    """
    if mask.may_change:  # what a function reads may be another in the next call
        return _written(mask, q_len, kv_len, entries)
    key = (q_len, kv_len, tuple(entries))
    last: tuple[Any, Programs | None] | None = mask.__dict__.get("_programs")
    if last is None or last[0] != key:
        mask.__dict__["_programs"] = last = (key, _written(mask, q_len, kv_len, entries))
    return last[1]


def _written(mask: Mask, q_len: int, kv_len: int, entries: Sequence[tuple[int, int]]) -> Programs | None:
    writer = _Writer(q_len, kv_len, len(entries))
    try:
        codes = [writer.program(mask, b, h) for b, h in entries]
    except _NotWritableError:
        return None
    numbers = writer.numbers
    if len(numbers) + sum(1 + len(code) for code in codes) + writer.drawn > LONGEST:
        return None
    for n, code in enumerate(codes):
        numbers[n] = len(numbers)
        numbers.append(len(code) // WIDTH)
        numbers += code
    return Programs(numbers, writer.draws, writer.drawn)


class _Place(NamedTuple):
    """Where a mask is: its query is the program's query (if `swapped` the program's key), moved by `q_shift`.

    Attributes:
        q_len, kv_len: lengths of the mask; None where it ends with the program's queries or keys.
    """

    q_shift: int
    kv_shift: int
    swapped: bool
    q_len: int | None = None
    kv_len: int | None = None

    @property
    def i_shift(self) -> int:
        """What the program's query is moved by."""
        return self.kv_shift if self.swapped else self.q_shift

    @property
    def j_shift(self) -> int:
        """What the program's key is moved by."""
        return self.q_shift if self.swapped else self.kv_shift

    def moved(self, q_offset: int, kv_offset: int) -> _Place:
        return self._replace(q_shift=self.q_shift + q_offset, kv_shift=self.kv_shift + kv_offset)

    def within(self, mask: Placed) -> _Place:
        """Where the inner mask of a placed one is."""
        lengths = (
            (mask.q_len, self.q_len, mask.q_offset),
            (mask.kv_len, self.kv_len, mask.kv_offset),
        )
        q_len, kv_len = (
            outer + offset if inner is None and outer is not None else inner for inner, outer, offset in lengths
        )
        return self.moved(mask.q_offset, mask.kv_offset)._replace(q_len=q_len, kv_len=kv_len)

    def transposed(self) -> _Place:
        return _Place(self.kv_shift, self.q_shift, not self.swapped, self.kv_len, self.q_len)


_ORIGIN = _Place(0, 0, False)


class _Writer:
    """Programs being written."""

    def __init__(self, q_len: int, kv_len: int, patterns: int) -> None:
        self.q_len, self.kv_len, self.patterns = q_len, kv_len, patterns
        self.code: list[int] = []
        self.numbers: list[int] = [0] * patterns  # of `Programs`: tables follow
        self.draws: list[Draw] = []
        self.drawn = 0
        self.checked: tuple[_Place, int, int] | None = None  # the last place whose positions fit 32 bits

    def program(self, mask: Mask, b: int, h: int) -> list[int]:
        """Instructions of one (batch, head) mask."""
        self.b, self.h, self.code = b, h, []
        at, lengths = _ORIGIN, (self.q_len, self.kv_len)
        if type(mask) is Transposed and type(mask.mask) is InRanges:
            mask, at = mask.mask, at.transposed()
        if type(mask) is InRanges:
            self.map_ranges(mask, at.swapped)
            mask = mask.mask
        deepest = self.write(mask, at)
        self.q_len, self.kv_len = lengths
        if deepest > DEPTH:
            raise _NotWritableError
        return self.code

    def map_ranges(self, mask: InRanges, swapped: bool) -> None:
        """Add the instructions that map positions to those of the inner mask, for which the rest is written."""
        parts = ((mask.rows, mask.q_len), (mask.columns, mask.kv_len))
        (queries, self.q_len), (keys, self.kv_len) = parts[::-1] if swapped else parts
        if any(begin % _WORD for begin in begins_of(keys)):
            raise _NotWritableError
        for op, ranges, length in (
            (Op.QUERY_IN_RANGES, queries, self.q_len),
            (Op.KEY_IN_RANGES, keys, self.kv_len),
        ):
            begins = begins_of(ranges)
            table = self.table([*begins, *(first - begin for (first, _), begin in zip(ranges, begins, strict=True))])
            self.add(op, size=len(ranges).bit_length(), table=table, entries=len(ranges), extra=length)

    def write(self, mask: Mask, at: _Place) -> int:
        """Add the instructions of `mask` at some positions; returns how deep the stack gets."""
        writer = _WRITERS.get(type(mask))
        if writer is None:
            raise _NotWritableError
        place = (at, self.q_len, self.kv_len)
        if place != self.checked:
            ends = (self.q_len + at.i_shift, self.kv_len + at.j_shift, -at.i_shift, -at.j_shift)
            if sum(max(end, 0) for end in ends) >= _FURTHEST:
                raise _NotWritableError
            self.checked = place
        return writer(self, mask, at)

    def add(
        self,
        op: Op,
        low: int = -_MOST,
        high: int = _MOST,
        *,
        at: _Place | None = None,
        size: int = 0,
        table: int = 0,
        entries: int = 0,
        extra: int = 0,
    ) -> int:
        i_shift, j_shift = (0, 0) if at is None else (at.i_shift, at.j_shift)
        self.code += (op, low, high, size, i_shift, j_shift, table, entries, extra)
        return 1

    def distance(self, at: _Place, low: int = -_MOST, high: int = _MOST) -> int:
        """Test the query's position less the key's."""
        return self.add(Op.DISTANCE, -high, -low, at=at) if at.swapped else self.add(Op.DISTANCE, low, high, at=at)

    def query(self, at: _Place, low: int, high: int) -> int:
        """Test the query's position."""
        return self.add(Op.KEY if at.swapped else Op.QUERY, low, high, at=at)

    def key(self, at: _Place, low: int = -_MOST, high: int = _MOST) -> int:
        """Test the key's position."""
        return self.query(at.transposed(), low, high)

    def both(self, op: Op) -> int:
        """Combine the last two tests."""
        self.add(op)
        return 2

    def table(self, values: Sequence[int]) -> int:
        self.numbers += values
        return len(self.numbers) - len(values)

    def of_sequence(self, values: Sequence[T]) -> T:
        """The value of this sequence."""
        return values[self.b if len(values) > 1 else 0]


def _composite(to: _Writer, mask: And | Or, at: _Place) -> int:
    before, parts = to.code, []
    for part in mask.masks:
        to.code = []
        parts.append((to.write(part, at), to.code))
    parts.sort(key=itemgetter(0), reverse=True)
    deepest, code = parts[0]
    to.code = before
    before += code
    for depth, code in parts[1:]:
        deepest = max(deepest, 1 + depth)
        before += code
        to.add(Op.AND if type(mask) is And else Op.OR)
    return deepest


def _not(to: _Writer, mask: Not, at: _Place) -> int:
    deepest = to.write(mask.mask, at)
    to.add(Op.NOT)
    return deepest


def _sink_tokens(to: _Writer, mask: rules.SinkTokens, at: _Place) -> int:
    to.key(at, 0, mask.tokens - 1)
    to.distance(at, 0)
    return to.both(Op.AND)


def _prefix_lm(to: _Writer, mask: rules.PrefixLM, at: _Place) -> int:
    to.key(at, 0, to.of_sequence(mask.prefix) - 1)
    to.distance(at, 0)
    return to.both(Op.OR)


def _neighborhood_2d(to: _Writer, mask: rules.Neighborhood2D, at: _Place) -> int:
    down, across = (reach // 2 for reach in mask.kernel)
    to.add(Op.GRID_ROW, -down, down, size=mask.width, at=at)
    to.add(Op.GRID_COLUMN, -across, across, size=mask.width, at=at)
    return to.both(Op.AND)


def _dilated_window(to: _Writer, mask: rules.DilatedWindow, at: _Place) -> int:
    lift = _multiple(mask.dilation, to.kv_len + at.j_shift - at.i_shift)
    if to.q_len + max(at.i_shift - at.j_shift, 0) + lift >= _FURTHEST:
        raise _NotWritableError
    to.distance(at, -mask.right, mask.left)
    to.add(Op.DISTANCE_REMAINDER, 0, 0, size=mask.dilation, extra=lift, at=at)
    return to.both(Op.AND)


def _multiple(size: int, least: int) -> int:
    """The smallest multiple of `size` that is at least `least`, and not below 0."""
    return -(-max(least, 0) // size) * size


def _strided(to: _Writer, mask: rules.Strided, at: _Place) -> int:
    to.distance(at, 1 - mask.local, mask.local - 1)
    # Triton's remainders of negative numbers are negative.
    lifted = at.moved(0, _multiple(mask.stride, -at.kv_shift))
    if max(to.q_len, to.kv_len) + lifted.kv_shift >= _FURTHEST:
        raise _NotWritableError
    remainder = Op.QUERY_REMAINDER if at.swapped else Op.KEY_REMAINDER
    to.add(remainder, mask.stride - mask.width, size=mask.stride, at=lifted)
    deepest = to.both(Op.OR)
    if mask.causal:
        to.distance(at, 0)
        to.add(Op.AND)
    return deepest


def _global_tokens(to: _Writer, mask: rules.GlobalTokens, at: _Place) -> int:
    if isinstance(mask.tokens, int):
        to.query(at, 0, mask.tokens - 1)
        to.key(at, 0, mask.tokens - 1)
    else:
        table, count = to.table(mask.tokens), len(mask.tokens)
        for op in (Op.QUERY_LISTED, Op.KEY_LISTED):
            to.add(op, 1, 1, size=count.bit_length(), at=at, table=table, entries=count)
    return to.both(Op.OR)


def _documents(to: _Writer, mask: rules.Documents, at: _Place) -> int:
    runs = to.of_sequence(mask.runs)
    # The kernels take positions before the first document for some of it.
    if min(at.q_shift, at.kv_shift) < 0 or 2 * len(runs) > LONGEST:
        raise _NotWritableError
    ids, lengths = zip(*runs, strict=True)
    table = to.table([*itertools.accumulate(lengths), *ids, -1])
    distinct = rules.are_distinct(ids)
    return to.add(
        Op.DOCUMENT, 1, 1, size=len(runs).bit_length(), at=at, table=table, entries=len(runs), extra=int(distinct)
    )


def _aligned_documents(to: _Writer, mask: AlignedDocuments, at: _Place) -> int:
    """Documents in one table, of queries and then of keys; then distances, of the program's queries when aligned."""
    q_ends, kv_ends, ids = mask.runs
    if min(at.q_shift, at.kv_shift) < 0 or 4 * len(ids) > LONGEST:
        raise _NotWritableError
    table = to.table([*q_ends, *(q_ends[-1] + end for end in kv_ends), *ids, *ids, -1])
    apart = -len(ids) if at.swapped else len(ids)
    joint = at.moved(0, q_ends[-1])
    entries = 2 * len(ids)
    to.add(Op.DOCUMENT, 1, 1, size=entries.bit_length(), at=joint, table=table, entries=entries, extra=2 * apart + 1)
    if type(mask.mask) is rules.Full:
        return 1
    # The program's queries, which are keys of a transposed mask, are moved to be aligned with its keys.
    lengths = mask.kv_lengths if at.swapped else mask.q_lengths
    shifts = [-shift for shift in mask.shifts] if at.swapped else mask.shifts
    begins = [0, *itertools.accumulate(lengths)]
    low = min(begin + shift for begin, shift in zip(begins, shifts, strict=False))
    high = max(end + shift for end, shift in zip(begins[1:], shifts, strict=True))
    lift = max(0, -low)  # kernels take positions below 0 for others
    q_len, to.q_len = to.q_len, max(high + lift, 1)
    begins = [begin - at.i_shift for begin in begins[:-1]]
    table = to.table([*begins, *(shift + lift + at.i_shift for shift in shifts)])
    count = len(begins)
    to.add(Op.QUERY_IN_RANGES, size=count.bit_length(), table=table, entries=count, extra=to.q_len)
    aligned = at._replace(kv_shift=-lift) if at.swapped else at._replace(q_shift=-lift)
    deepest = 1 + to.write(mask.mask, aligned)
    to.add(Op.AND)
    to.q_len = q_len
    return deepest


def _position_test(to: _Writer, mask: PositionTest, at: _Place) -> int:
    low, high, size = mask.low, mask.high, mask.size
    if mask.tested == "distance":
        return to.distance(at, low, high)
    if mask.tested == "query":
        return to.query(at, low, high)
    if mask.tested == "key":
        return to.key(at, low, high)
    if min(at.q_shift, at.kv_shift) < 0:  # Triton's quotients and remainders of negative numbers are others
        raise _NotWritableError
    if mask.tested in ("grid_row", "grid_column"):
        low, high = (-high, -low) if at.swapped else (low, high)
        return to.add(Op.GRID_ROW if mask.tested == "grid_row" else Op.GRID_COLUMN, low, high, size=size, at=at)
    if mask.tested in ("query_remainder", "key_remainder"):
        of_key = (mask.tested == "key_remainder") is not at.swapped
        return to.add(Op.KEY_REMAINDER if of_key else Op.QUERY_REMAINDER, low, high, size=size, at=at)
    shift, low, high = mask.shift, max(low, 0), min(high, size - 1)
    if at.swapped:  # -x is congruent to one of low .. high where x + high is to one of 0 .. high - low
        shift, low, high = high - shift, 0, high - low
    extra = shift + _multiple(size, to.kv_len + at.j_shift - at.i_shift - shift)
    if to.q_len + max(at.i_shift - at.j_shift, 0) + extra >= _FURTHEST:
        raise _NotWritableError
    return to.add(Op.DISTANCE_REMAINDER, low, high, size=size, extra=extra, at=at)


def _listed(to: _Writer, mask: Listed, at: _Place) -> int:
    if len(mask.tokens) > LONGEST:
        raise _NotWritableError
    of_keys = mask.of_keys is not at.swapped
    table, count = to.table(mask.tokens), len(mask.tokens)
    op = Op.KEY_LISTED if of_keys else Op.QUERY_LISTED
    return to.add(op, 1, 1, size=count.bit_length(), at=at, table=table, entries=count)


def _function(to: _Writer, mask: FunctionMask, at: _Place) -> int:
    lengths = (to.kv_len, to.q_len) if at.swapped else (to.q_len, to.kv_len)
    q_len = lengths[0] + at.q_shift if at.q_len is None else at.q_len
    kv_len = lengths[1] + at.kv_shift if at.kv_len is None else at.kv_len
    program = mask.translated(to.b, to.h, q_len, kv_len) if to.patterns <= _MOST_TRANSLATED else None
    if program is None:
        raise _NotWritableError
    return to.write(program, at)


def _blocks_of(to: _Writer, size: int, at: _Place) -> tuple[int, int, int]:
    """The first block of queries that a program asks about, the one after the last, and how many blocks of keys are."""
    if min(at.q_shift, at.kv_shift) < 0:  # Triton rounds quotients of negative numbers towards 0
        raise _NotWritableError
    queries, keys = to.q_len, to.kv_len
    if at.swapped:  # kernels look at whole words of the program's keys, which are this mask's queries
        queries, keys = to.kv_len + _PAST_THE_END, to.q_len
    first, stop = at.q_shift // size, (queries + at.q_shift - 1) // size + 1
    return first, stop, -(-(keys + at.kv_shift if at.kv_len is None else at.kv_len) // size)


def _chosen_blocks(to: _Writer, mask: ChosenBlocks, at: _Place) -> int:
    size = mask.size
    first, stop, key_blocks = _blocks_of(to, size, at)
    entries = max(1, *map(len, mask.blocks))
    none = key_blocks + _PAST_THE_END  # a block that no key is in
    if (stop - first) * entries > LONGEST or (none + 1) * size >= _MOST:
        raise _NotWritableError
    rows = (mask.blocks[n] if n < len(mask.blocks) else () for n in range(first, stop))
    table = to.table([block for row in rows for block in (*row, *[none] * (entries - len(row)))])
    op = Op.CHOSEN_BLOCK_OF_KEY if at.swapped else Op.CHOSEN_BLOCK
    return to.add(op, 1, 1, size=size, at=at, table=table, entries=entries, extra=first)


def _random_blocks(to: _Writer, mask: rules.RandomBlocks, at: _Place) -> int:
    size = mask.block_size
    first, stop, key_blocks = _blocks_of(to, size, at)
    picks = min(mask.blocks, key_blocks)
    to.drawn += (stop - first) * picks
    seed = (mask.seed & 0xFFFF_FFFF ^ 0x8000_0000) - 0x8000_0000
    to.draws.append(Draw(-to.drawn, first, stop - first, key_blocks, picks, seed))
    op = Op.CHOSEN_BLOCK_OF_KEY if at.swapped else Op.CHOSEN_BLOCK
    return to.add(op, 1, 1, size=size, at=at, table=-to.drawn, entries=picks, extra=first)


def _entry_range(to: _Writer, mask: EntryRange, at: _Place) -> int:
    b, h = to.b, to.h
    to.b, to.h = (b, h + mask.first) if mask.dim else (b + mask.first, h)
    deepest = to.write(mask.mask, at)
    to.b, to.h = b, h
    return deepest


# By exact class: other masks, subclasses of these among them, may evaluate in their own way.
_WRITERS: dict[type[Mask], Callable[[_Writer, Any, _Place], int]] = {
    And: _composite,
    Or: _composite,
    Not: _not,
    Placed: lambda to, mask, at: to.write(mask.mask, at.within(mask)),
    EntryRange: _entry_range,
    Transposed: lambda to, mask, at: to.write(mask.mask, at.transposed()),
    PerHead: lambda to, mask, at: to.write(mask.masks[to.h], at),
    rules.Full: lambda to, mask, at: to.key(at),
    rules.Causal: lambda to, mask, at: to.distance(at, 0),
    rules.SlidingWindow: lambda to, mask, at: to.distance(at, -mask.right, mask.left),
    rules.Padding: lambda to, mask, at: to.key(at, 0, to.of_sequence(mask.lengths) - 1),
    rules.SinkTokens: _sink_tokens,
    rules.PrefixLM: _prefix_lm,
    rules.Neighborhood2D: _neighborhood_2d,
    rules.DilatedWindow: _dilated_window,
    rules.Strided: _strided,
    rules.GlobalTokens: _global_tokens,
    rules.Documents: _documents,
    AlignedDocuments: _aligned_documents,
    rules.RandomBlocks: _random_blocks,
    PositionTest: _position_test,
    Listed: _listed,
    ChosenBlocks: _chosen_blocks,
    FunctionMask: _function,
}
