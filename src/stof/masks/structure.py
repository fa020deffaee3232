"""What masks have in common whose bounds and tables differ: their structure, and statistics to compare them by.

A structure is a program (`stof.masks.gpu_program`) without bounds, shifts, and the contents and sizes of its tables:
two packed batches with documents of other lengths have one structure, windows of other widths too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from stof.masks.compose import Mask
from stof.masks.gpu_program import WIDTH, Op, programs_of

DENSE: Hashable = "dense"
# Operations whose `size` is part of the structure: dilations, strides, widths of grids, sizes of blocks.
_SIZED = frozenset(
    (
        Op.DISTANCE_REMAINDER,
        Op.QUERY_REMAINDER,
        Op.KEY_REMAINDER,
        Op.GRID_ROW,
        Op.GRID_COLUMN,
        Op.CHOSEN_BLOCK,
        Op.CHOSEN_BLOCK_OF_KEY,
    )
)
# Of dense masks: rows of a row block, row blocks that are looked at, and columns that stand for tiles of any kind.
_ROWS, _ROW_BLOCKS, _WIDTHS = 64, 8, (1, 16, 64)
# Patterns of a batch whose statistics are taken: each takes up to 40 us, and those of one batch are much alike.
_ENTRIES = 4


class Outline(NamedTuple):
    """What is known of a mask without evaluating it.

    Attributes:
        structure: equal for masks that differ in bounds and tables alone. Sequences and heads may have several
            programs; their order and number do not matter. Of masks without programs, their text without its numbers.
        statistics: numbers by which masks of one structure are compared, as logarithms to base 2: queries, the keys
            that a row keeps on average, and, of one program, those that each test keeps and the longest document. About
            right is enough. None of a dense mask, whose tensor has to be read: see `dense_statistics`.
        is_regular: whether whole tiles suit all masks of the structure if they suit one: ranges of distances, documents
            and ranges of tokens that must all keep a score. Rows that see everything, and scattered keys, do not.
    """

    structure: Hashable
    statistics: tuple[float, ...] | None
    is_regular: bool


def outline(mask: Mask, evaluated: Mask, q_len: int, kv_len: int, entries: Sequence[tuple[int, int]]) -> Outline | None:
    """Return the outline of a mask, None for one that is neither a program nor a tensor.

    Args:
        mask, q_len, kv_len: the mask at lengths that it accepts.
        evaluated: the mask, or one of a tensor that holds its scores.
        entries: a batch entry and head of each pattern.
    """
    if evaluated is not mask:
        text = re.sub(r"[-\d., ]+", "", mask.key)
        return Outline(text, None, "from_dense" not in text)
    if mask.as_tensor(q_len, kv_len) is not None:
        return Outline(DENSE, None, False)
    programs = programs_of(mask, q_len, kv_len, entries) if entries else None
    if programs is None:
        return None
    numbers = programs.numbers
    codes = [numbers[at + 1 : at + 1 + numbers[at] * WIDTH] for at in numbers[: len(entries)]]
    structures = frozenset(map(_structure, codes))
    looked_at = codes[:: -(-len(codes) // _ENTRIES)]
    kept = [_kept_shares(code, numbers, q_len, kv_len) for code in looked_at]
    compared = len(kept[0]) if len(structures) == 1 else 1
    means = (kv_len * sum(shares[n] for shares in kept) / len(kept) for n in range(compared))
    is_regular = all(op in _RANGES for code in codes for op in code[::WIDTH])
    return Outline(structures, _octaves(q_len, *means), is_regular)


def dense_statistics(mask: Mask, q_len: int, kv_len: int) -> tuple[float, ...]:
    """The statistics of a dense mask, of some of its rows; on a GPU it waits for the device.

    Those are, as logarithms to base 2: queries, keys that a row keeps, and keys in columns, slabs and tiles of which
    some row of a row block keeps a key.
    """
    keep = mask.as_tensor(q_len, kv_len)
    assert keep is not None
    height = min(_ROWS, q_len)
    blocks = q_len // height
    taken = keep[:2, :2, : blocks * height].unflatten(2, (blocks, height))[:, :, :: -(-blocks // _ROW_BLOCKS)]
    rows, masks_and_blocks = taken.shape[:4].numel(), taken.shape[:3].numel()
    per_column = taken.view(torch.uint8).sum(3, dtype=torch.uint8)  # int64 takes a CPU 70 times as long
    seen = torch.nn.functional.pad(per_column > 0, (0, -kv_len % _WIDTHS[-1]))
    wide = [width * seen.unflatten(-1, (-1, width)).any(-1).sum() for width in _WIDTHS]
    kept, *touched = torch.stack([per_column.sum(), *wide]).tolist()
    return _octaves(q_len, kept / rows, *(keys / masks_and_blocks for keys in touched))


def _octaves(*numbers: float) -> tuple[float, ...]:
    return tuple(math.log2(max(1.0, number)) for number in numbers)


def _structure(code: list[int]) -> tuple[int, ...]:
    """The operations of a program, each with its size where that belongs to the structure."""
    parts: list[int] = []
    for at in range(0, len(code), WIDTH):
        op = code[at]
        parts.append(op)
        if op in _SIZED:
            parts.append(code[at + 3])
        elif op == _DOCUMENT:
            parts.append(code[at + 8] & 1)  # whether ids are distinct
    return tuple(parts)


def _kept_shares(code: list[int], numbers: list[int], q_len: int, kv_len: int) -> list[float]:
    """About the share of all scores that a program keeps, then those of its tests and the share of long documents.

    Of two tests that both must hold, the smaller share is left: windows and documents lie along the same diagonal.
    Those that keep scores all over the mask keep their share of what the other keeps.
    """
    stack: list[tuple[float, bool]] = []  # shares, and whether their scores are all over the mask
    tests: list[float] = []
    for at in range(0, len(code), WIDTH):
        op, low, high, size, i_shift, j_shift, table, entries, extra = code[at : at + WIDTH]
        share, everywhere = 1.0, False
        if op in (_AND, _OR):
            (right, right_everywhere), (left, left_everywhere) = stack.pop(), stack.pop()
            everywhere = left_everywhere and right_everywhere
            if op == _OR:
                share = min(1.0, left + right)
            else:
                share = left * right if left_everywhere or right_everywhere else min(left, right)
            stack.append((share, everywhere))
            continue
        if op == _NOT:
            share, everywhere = stack.pop()
            stack.append((1.0 - share, everywhere))
            continue
        if op == _DISTANCE:
            moved = j_shift - i_shift
            share = _nearer(high + moved, q_len, kv_len) - _nearer(low + moved - 1, q_len, kv_len)
        elif op == _DOCUMENT:
            share, longest = _of_documents(numbers[table : table + 2 * entries], entries, abs(extra >> 1))
            tests.append(longest)
        elif op in _SHARES:
            share, everywhere = _SHARES[op](low, high, size, entries, q_len, kv_len), op in _EVERYWHERE
        elif op in (_QUERY, _KEY):
            length, shift = (q_len, i_shift) if op == _QUERY else (kv_len, j_shift)
            share = (min(high, length + shift - 1) - max(low, shift) + 1) / length
        else:  # maps positions
            if op == _QUERY_IN_RANGES:
                q_len = extra
            continue
        share = min(1.0, max(0.0, share))
        tests.append(share)
        stack.append((share, everywhere))
    return [stack[0][0], *tests]


def _nearer(distance: int, q_len: int, kv_len: int) -> float:
    """The share of all pairs of a query i and a key j with i - j <= distance."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    # Query i drops its first i - distance keys.
    first, end = -distance - 1, q_len - distance - 1
    dropped = triangle(end) - triangle(first) - triangle(end - kv_len) + triangle(first - kv_len)
    return 1.0 - dropped / (q_len * kv_len)


def _of_documents(table: list[int], count: int, of_queries: int) -> tuple[float, float]:
    """The share of all pairs of tokens that are of one document, whose parts count by themselves; the longest's share.

    Args:
        table: where parts end, then their documents, below 0 for none.
        count: of parts.
        of_queries: how many parts are of queries, where as many of keys follow; 0 if each part is of both.
    """
    if of_queries:
        lengths = [end - begin for begin, end in itertools.pairwise([0, *table[:count]])]
        queries, keys = lengths[:of_queries], lengths[of_queries:]
        pairs = sum(q * k for q, k, n in zip(queries, keys, table[count:], strict=False) if n >= 0)
        return pairs / (sum(queries) * sum(keys)), max(keys) / sum(keys)
    begin = pairs = longest = 0
    for end, document in zip(table[:count], table[count:], strict=False):
        length = end - begin
        if document >= 0:
            pairs += length * length
            longest = max(longest, length)
        begin = end
    return pairs / begin**2, longest / begin


def _remainders(low: int, high: int, size: int, *rest: int) -> float:
    del rest
    return (min(high, size - 1) - max(low, 0) + 1) / size


_AND, _OR, _NOT, _DISTANCE, _QUERY, _KEY, _DOCUMENT, _QUERY_IN_RANGES = map(
    int, (Op.AND, Op.OR, Op.NOT, Op.DISTANCE, Op.QUERY, Op.KEY, Op.DOCUMENT, Op.QUERY_IN_RANGES)
)
# By operation: the share that a test keeps, of low, high, size, entries, q_len and kv_len.
_SHARES: dict[int, Callable[[int, int, int, int, int, int], float]] = {
    Op.DISTANCE_REMAINDER: _remainders,
    Op.QUERY_REMAINDER: _remainders,
    Op.KEY_REMAINDER: _remainders,
    Op.GRID_ROW: lambda low, high, size, entries, q_len, kv_len: (high - low + 1) * size / kv_len,
    Op.GRID_COLUMN: lambda low, high, size, entries, q_len, kv_len: (high - low + 1) / size,
    Op.QUERY_LISTED: lambda low, high, size, entries, q_len, kv_len: entries / q_len,
    Op.KEY_LISTED: lambda low, high, size, entries, q_len, kv_len: entries / kv_len,
    Op.CHOSEN_BLOCK: lambda low, high, size, entries, q_len, kv_len: entries * size / kv_len,
    Op.CHOSEN_BLOCK_OF_KEY: lambda low, high, size, entries, q_len, kv_len: entries * size / q_len,
}
_EVERYWHERE = frozenset(_SHARES) - {Op.GRID_ROW}
_RANGES = frozenset((_AND, _DISTANCE, _DOCUMENT, _QUERY, _KEY, _QUERY_IN_RANGES))
