"""Masks as numbers: short programs that a kernel runs on positions and on ranges of them.

A program is a list of instructions for a stack of truth values, in postfix order: every named pattern is a few tests of
the form `low <= x <= high`, where x comes from the query and key positions by one of the operations below. One compiled
kernel serves all masks that can be written so; see `stof.layout.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from stof.masks import rules
from stof.masks.base import And, Mask, Not, Or, PerHead, QueryOffset

# Numbers of an instruction: operation, low, high, then what the operation needs.
WIDTH = 8
# Truth values on the stack are bits of an int32.
DEPTH = 31
# Numbers of all programs of a mask: beyond, making them costs more than they save.
LONGEST = 2**18

_MOST = 2**31 - 1


class Op(IntEnum):
    """What an instruction does. i is the query position, shifted, and j the key position.

    Fields after low and high are `size`, `shift` (added to the query position), `table` (where the instruction's table
    begins among all numbers), `entries` and `extra`.
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

    It begins at number `at` and has `picks` entries for each of `rows` rows, the first of which is row `first`.
    """

    at: int
    first: int
    rows: int
    key_blocks: int
    picks: int
    seed: int


@dataclass(frozen=True)
class Programs:
    """Programs of some (batch, head) masks.

    Attributes:
        numbers: where the program of each mask begins, the programs, and their tables. The first number of a program
            says how many instructions it has.
        draws: tables that follow, for the device to fill.
        length: numbers there are with these tables.
    """

    numbers: list[int]
    draws: list[Draw]
    length: int


def programs_of(mask: Mask, q_len: int, kv_len: int, entries: Sequence[tuple[int, int]]) -> Programs | None:
    """Programs of these batch entries and heads; None when the mask cannot be written so."""
    writer = _Writer(q_len, kv_len)
    try:
        codes = [writer.program(mask, b, h) for b, h in entries]
    except _NotWritableError:
        return None
    starts, at = [], len(codes)
    for code in codes:
        starts.append(at)
        at += 1 + len(code) * WIDTH
    drawn = at + len(writer.tables)
    length = drawn + writer.drawn
    if length > LONGEST:
        return None
    numbers = starts
    for code in codes:
        numbers.append(len(code))
        for op, low, high, size, shift, table, count, extra in code:
            numbers += (op, low, high, size, shift, table + (drawn if op == Op.CHOSEN_BLOCK else at), count, extra)
    draws = [draw._replace(at=drawn + draw.at) for draw in writer.draws]
    return Programs(numbers + writer.tables, draws, length)


class _Writer:
    """Programs being written."""

    def __init__(self, q_len: int, kv_len: int) -> None:
        self.q_len, self.kv_len = q_len, kv_len
        self.code: list[tuple[int, ...]] = []
        self.tables: list[int] = []
        self.draws: list[Draw] = []
        self.drawn = 0

    def program(self, mask: Mask, b: int, h: int) -> list[tuple[int, ...]]:
        """Instructions of one (batch, head) mask."""
        self.b, self.h, self.code = b, h, []
        if self.write(mask, 0) > DEPTH:
            raise _NotWritableError
        return self.code

    def write(self, mask: Mask, shift: int) -> int:
        """Add the instructions of `mask` for queries moved by `shift`; returns how deep the stack gets."""
        match mask:
            case And() | Or():
                deepest = self.write(mask.masks[0], shift)
                for part in mask.masks[1:]:
                    deepest = max(deepest, 1 + self.write(part, shift))
                    self.add(Op.AND if isinstance(mask, And) else Op.OR)
                return deepest
            case Not():
                deepest = self.write(mask.mask, shift)
                self.add(Op.NOT)
                return deepest
            case QueryOffset():
                return self.write(mask.mask, shift + mask.offset)
            case PerHead():
                return self.write(mask.masks[self.h], shift)
            case rules.Rule():
                # Positions, distances and what is added to them stay below 2**31.
                if self.q_len + shift + self.kv_len >= _MOST:
                    raise _NotWritableError
                return self.rule(mask, shift)
        raise _NotWritableError

    def add(self, op: Op, low: int = -_MOST, high: int = _MOST, **fields: int) -> int:
        self.code.append((op, low, high, *(fields.get(name, 0) for name in _FIELDS)))
        return 1

    def both(self, op: Op) -> int:
        """Combine the last two tests."""
        self.add(op)
        return 2

    def table(self, values: Sequence[int]) -> int:
        self.tables += values
        return len(self.tables) - len(values)

    def rule(self, mask: rules.Rule, shift: int) -> int:
        add, at = self.add, {"shift": shift}
        match mask:
            case rules.Full():
                return add(Op.KEY)
            case rules.Causal():
                return add(Op.DISTANCE, 0, **at)
            case rules.SlidingWindow():
                return add(Op.DISTANCE, -mask.right, mask.left, **at)
            case rules.SinkTokens():
                add(Op.KEY, high=mask.tokens - 1)
                add(Op.DISTANCE, 0, **at)
                return self.both(Op.AND)
            case rules.PrefixLM():
                add(Op.KEY, high=self.own(mask.prefix) - 1)
                add(Op.DISTANCE, 0, **at)
                return self.both(Op.OR)
            case rules.Padding():
                return add(Op.KEY, high=self.own(mask.lengths) - 1)
            case rules.Neighborhood2D():
                down, across = (reach // 2 for reach in mask.kernel)
                add(Op.GRID_ROW, -down, down, size=mask.width, **at)
                add(Op.GRID_COLUMN, -across, across, size=mask.width, **at)
                return self.both(Op.AND)
        return self.spread_rule(mask, shift)

    def spread_rule(self, mask: rules.Rule, shift: int) -> int:
        """Rules that keep scattered positions."""
        add, at = self.add, {"shift": shift}
        match mask:
            case rules.DilatedWindow():
                lift = -(-self.kv_len // mask.dilation) * mask.dilation
                if self.q_len + shift + lift >= _MOST:
                    raise _NotWritableError
                add(Op.DISTANCE, -mask.right, mask.left, **at)
                add(Op.DISTANCE_REMAINDER, 0, 0, size=mask.dilation, extra=lift, **at)
                return self.both(Op.AND)
            case rules.Strided():
                add(Op.DISTANCE, 1 - mask.local, mask.local - 1, **at)
                add(Op.KEY_REMAINDER, mask.stride - mask.width, size=mask.stride)
                self.both(Op.OR)
                if mask.causal:
                    add(Op.DISTANCE, 0, **at)
                    self.both(Op.AND)
                return 2
            case rules.GlobalTokens(tokens=int(tokens)):
                add(Op.QUERY, high=tokens - 1, **at)
                add(Op.KEY, high=tokens - 1)
                return self.both(Op.OR)
            case rules.GlobalTokens(tokens=tuple(tokens)):
                listed = {"table": self.table(tokens), "entries": len(tokens), "size": len(tokens).bit_length()}
                add(Op.QUERY_LISTED, 1, 1, **listed, **at)
                add(Op.KEY_LISTED, 1, 1, **listed)
                return self.both(Op.OR)
            case rules.Documents():
                return self.documents(mask, shift)
            case rules.RandomBlocks():
                return self.random_blocks(mask, shift)
        raise _NotWritableError

    def own(self, values: tuple[int, ...]) -> int:
        """The value of this sequence."""
        return values[self.b if len(values) > 1 else 0]

    def documents(self, mask: rules.Documents, shift: int) -> int:
        runs = mask.runs[self.b if len(mask.runs) > 1 else 0]
        if 2 * len(runs) > LONGEST:
            raise _NotWritableError
        ends, end = [], 0
        for _, length in runs:
            end += length
            ends.append(end)
        ids = [doc for doc, _ in runs]
        seen = [doc for doc in ids if doc >= 0]
        distinct = len(set(seen)) == len(seen)
        table = self.table([*ends, *ids, -1])
        fields = {"size": len(runs).bit_length(), "shift": shift, "table": table, "entries": len(runs)}
        return self.add(Op.DOCUMENT, 1, 1, extra=int(distinct), **fields)

    def random_blocks(self, mask: rules.RandomBlocks, shift: int) -> int:
        size = mask.block_size
        first, stop = shift // size, (self.q_len + shift - 1) // size + 1
        key_blocks = -(-self.kv_len // size)
        picks = min(mask.blocks, key_blocks)
        table, self.drawn = self.drawn, self.drawn + (stop - first) * picks
        self.draws.append(Draw(table, first, stop - first, key_blocks, picks, mask.seed & 0xFFFF_FFFF))
        return self.add(Op.CHOSEN_BLOCK, 1, 1, size=size, shift=shift, table=table, entries=picks, extra=first)


_FIELDS = ("size", "shift", "table", "entries", "extra")
