"""Masks as numbers: short programs that a kernel runs on positions and on ranges of them.

A program is a list of instructions for a stack of truth values, in postfix order: every named pattern is a few tests of
the form `low <= x <= high`, where x comes from the query and key positions by one of the operations below. One compiled
kernel serves all masks that can be written so; see `stof.layout.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from stof.masks import rules
from stof.masks.base import And, Mask, Not, Or, PerHead, QueryOffset

# Numbers of an instruction: operation, low, high, then what the operation needs.
WIDTH = 8
# Truth values on the stack are bits of an int32.
DEPTH = 31
# Numbers of a program: beyond, looking them up costs more than evaluating the mask by its own code.
LONGEST = 2**16

_MOST = 2**31 - 1


class Op(IntEnum):
    """What an instruction does. i is the query position, shifted, and j the key position.

    Fields after low and high are `size`, `shift` (added to the query position), `table` (where the instruction's table
    begins in the program), `entries` and `extra`.
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


class _NotWritable(Exception):  # noqa: N818 (says what the mask is, and is caught here)
    """The mask has a part without an instruction."""


def program_of(mask: Mask, q_len: int, kv_len: int, b: int, h: int) -> list[int] | None:
    """Instructions of one (batch, head) mask, then their tables; None when it cannot be written so.

    The first number says how many instructions there are; tables are found by their place in the list.
    """
    writer = _Writer(q_len, kv_len, b, h)
    try:
        depth = writer.write(mask, 0)
    except _NotWritable:
        return None
    length = 1 + len(writer.code) * WIDTH
    if depth > DEPTH or length + len(writer.tables) > LONGEST:
        return None
    numbers = [len(writer.code)]
    for op, low, high, size, shift, table, entries, extra in writer.code:
        numbers += (op, low, high, size, shift, length + table, entries, extra)
    return numbers + writer.tables


class _Writer:
    """A program being written for queries and keys of one sequence and head."""

    def __init__(self, q_len: int, kv_len: int, b: int, h: int) -> None:
        self.q_len, self.kv_len, self.b, self.h = q_len, kv_len, b, h
        self.code: list[tuple[int, ...]] = []
        self.tables: list[int] = []

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
                    raise _NotWritable
                return self.rule(mask, shift)
        raise _NotWritable

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
                    raise _NotWritable
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
        raise _NotWritable

    def own(self, values: tuple[int, ...]) -> int:
        """The value of this sequence."""
        return values[self.b if len(values) > 1 else 0]

    def documents(self, mask: rules.Documents, shift: int) -> int:
        runs = mask.runs[self.b if len(mask.runs) > 1 else 0]
        if 2 * len(runs) > LONGEST:
            raise _NotWritable
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
        if (stop - first) * min(mask.blocks, key_blocks) > LONGEST:
            raise _NotWritable
        chosen = mask.choose(torch.arange(first, stop, device="cpu"), key_blocks)
        table = self.table(chosen.flatten().tolist())
        fields = {"size": size, "shift": shift, "table": table, "entries": chosen.shape[1], "extra": first}
        return self.add(Op.CHOSEN_BLOCK, 1, 1, **fields)


_FIELDS = ("size", "shift", "table", "entries", "extra")
