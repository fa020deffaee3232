"""Triton code that runs a mask's program (`stof.masks.program`) on positions, and on ranges of positions."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.masks.program import WIDTH, Op

_WIDTH = tl.constexpr(WIDTH)
_AND = tl.constexpr(int(Op.AND))
_NOT = tl.constexpr(int(Op.NOT))
_DISTANCE = tl.constexpr(int(Op.DISTANCE))
_QUERY = tl.constexpr(int(Op.QUERY))
_KEY = tl.constexpr(int(Op.KEY))
_DISTANCE_REMAINDER = tl.constexpr(int(Op.DISTANCE_REMAINDER))
_KEY_REMAINDER = tl.constexpr(int(Op.KEY_REMAINDER))
_GRID_ROW = tl.constexpr(int(Op.GRID_ROW))
_GRID_COLUMN = tl.constexpr(int(Op.GRID_COLUMN))
_QUERY_LISTED = tl.constexpr(int(Op.QUERY_LISTED))
_KEY_LISTED = tl.constexpr(int(Op.KEY_LISTED))
_DOCUMENT = tl.constexpr(int(Op.DOCUMENT))
# Table entries looked at together.
_ENTRIES = tl.constexpr(32)


@triton.jit
@no_type_check
def _at_most(table_ptr, entries, steps, x):
    """How many entries of an ascending table are at most x; x is a number or a tensor."""
    low = x * 0
    high = low + entries
    for _ in range(steps):
        middle = (low + high) >> 1
        # Where the search has ended already, middle is low and may be past the last entry.
        entry = tl.load(table_ptr + tl.minimum(middle, entries - 1))
        above = (low < high) & (entry <= x)
        high = tl.where(above, high, middle)
        low = tl.where(above, middle + 1, low)
    return low


@triton.jit
@no_type_check
def kept(numbers_ptr, start, q, kv):
    """Where the program at `start` keeps scores of queries `[M, 1]` and keys `[1, N]`, all in range: int32, 0 or 1."""
    stack = q * 0 + kv * 0
    for n in range(tl.load(numbers_ptr + start)):
        code_ptr = numbers_ptr + start + 1 + n * _WIDTH
        op = tl.load(code_ptr)
        if op < _DISTANCE:
            rest = stack >> 1
            both = tl.where(op == _AND, stack & rest, stack | rest)
            stack = tl.where(op == _NOT, stack ^ 1, (rest & ~1) | (both & 1))
        else:
            x = _value(numbers_ptr, code_ptr, op, q + tl.load(code_ptr + 4), kv)
            test = (x >= tl.load(code_ptr + 1)) & (x <= tl.load(code_ptr + 2))
            stack = (stack << 1) | test.to(tl.int32)
    return stack & 1


@triton.jit
@no_type_check
def _value(numbers_ptr, code_ptr, op, i, j):
    """What an instruction tests, for every pair of positions."""
    size = tl.load(code_ptr + 3)
    extra = tl.load(code_ptr + 7)
    x = i - j
    if op == _QUERY:
        x = i + j * 0
    elif op == _KEY:
        x = j + i * 0
    elif op == _DISTANCE_REMAINDER:
        x = (x + extra) % size
    elif op == _KEY_REMAINDER:
        x = j % size + i * 0
    elif op == _GRID_ROW:
        x = i // size - j // size
    elif op == _GRID_COLUMN:
        x = i % size - j % size
    elif op >= _QUERY_LISTED:
        table_ptr = numbers_ptr + tl.load(code_ptr + 5)
        entries = tl.load(code_ptr + 6)
        if op == _QUERY_LISTED:
            x = _at_most(table_ptr, entries, size, i) - _at_most(table_ptr, entries, size, i - 1) + j * 0
        elif op == _KEY_LISTED:
            x = _at_most(table_ptr, entries, size, j) - _at_most(table_ptr, entries, size, j - 1) + i * 0
        elif op == _DOCUMENT:
            row = tl.load(table_ptr + entries + _at_most(table_ptr, entries, size, i))
            column = tl.load(table_ptr + entries + _at_most(table_ptr, entries, size, j))
            x = ((row == column) & (row >= 0)).to(tl.int32)
        else:
            row_ptr = table_ptr + (i // size - extra) * entries
            x = x * 0
            for n in range(entries):
                x = x | (tl.load(row_ptr + n) == j // size).to(tl.int32)
    return x


@triton.jit
@no_type_check
def kept_within(numbers_ptr, start, q_low, q_high, kv_low, kv_high):
    """Whether the program at `start` certainly keeps nothing, and everything, of rectangles: int32 `[N]`, 0 or 1.

    The rectangles lie side by side: `q_low` and `q_high` are numbers, `kv_low` and `kv_high` have N of them.
    """
    nothing = kv_low * 0
    everything = kv_low * 0
    for n in range(tl.load(numbers_ptr + start)):
        code_ptr = numbers_ptr + start + 1 + n * _WIDTH
        op = tl.load(code_ptr)
        if op == _NOT:
            top = nothing & 1
            nothing = (nothing & ~1) | (everything & 1)
            everything = (everything & ~1) | top
        elif op < _DISTANCE:
            # `&` keeps nothing where one part does, and everything where both do; `|` the other way around.
            below = nothing >> 1
            joined = tl.where(op == _AND, nothing | below, nothing & below)
            nothing = (below & ~1) | (joined & 1)
            below = everything >> 1
            joined = tl.where(op == _AND, everything & below, everything | below)
            everything = (below & ~1) | (joined & 1)
        else:
            shift = tl.load(code_ptr + 4)
            least, most = _range(numbers_ptr, code_ptr, op, q_low + shift, q_high + shift, kv_low, kv_high)
            low = tl.load(code_ptr + 1)
            high = tl.load(code_ptr + 2)
            nothing = (nothing << 1) | ((most < low) | (least > high)).to(tl.int32)
            everything = (everything << 1) | ((least >= low) & (most <= high)).to(tl.int32)
    return nothing & 1, everything & 1


@triton.jit
@no_type_check
def _remainders(low, high, size):
    """Smallest and largest remainder of numbers from low to high."""
    within = low // size == high // size
    return tl.where(within, low % size, 0), tl.where(within, high % size, size - 1)


@triton.jit
@no_type_check
def _listed(table_ptr, entries, steps, low, high):
    """Whether all, and whether any of the positions from low to high are in a table."""
    count = _at_most(table_ptr, entries, steps, high) - _at_most(table_ptr, entries, steps, low - 1)
    return (count == high - low + 1).to(tl.int32), (count > 0).to(tl.int32)


@triton.jit
@no_type_check
def _one_document(table_ptr, entries, steps, distinct, i_low, i_high, j_low, j_high):
    """Whether all, and whether perhaps some pairs of positions lie in one document."""
    top = _at_most(table_ptr, entries, steps, i_low)
    bottom = _at_most(table_ptr, entries, steps, i_high)
    left = _at_most(table_ptr, entries, steps, j_low)
    right = _at_most(table_ptr, entries, steps, j_high)
    row = tl.load(table_ptr + entries + top)
    column = tl.load(table_ptr + entries + left)
    one_row = top == bottom
    one_column = left == right
    apart = (distinct != 0) & ((bottom < left) | (right < top))
    unseen = (one_row & (row < 0)) | (one_column & (column < 0))
    same = one_row & one_column & (row == column) & (row >= 0)
    other = one_row & one_column & (row != column)
    return same.to(tl.int32), 1 - (apart | unseen | other).to(tl.int32)


@triton.jit
@no_type_check
def _range(numbers_ptr, code_ptr, op, i_low, i_high, j_low, j_high):
    """Bounds of what an instruction tests within rectangles, as for `kept_within`."""
    size = tl.load(code_ptr + 3)
    extra = tl.load(code_ptr + 7)
    least = i_low - j_high
    most = i_high - j_low
    none = j_low * 0
    if op == _QUERY:
        least = i_low + none
        most = i_high + none
    elif op == _KEY:
        least, most = j_low, j_high
    elif op == _DISTANCE_REMAINDER:
        least, most = _remainders(least + extra, most + extra, size)
    elif op == _KEY_REMAINDER:
        least, most = _remainders(j_low, j_high, size)
    elif op == _GRID_ROW:
        least = i_low // size - j_high // size
        most = i_high // size - j_low // size
    elif op == _GRID_COLUMN:
        i_least, i_most = _remainders(i_low, i_high, size)
        j_least, j_most = _remainders(j_low, j_high, size)
        least, most = i_least - j_most, i_most - j_least
    elif op >= _QUERY_LISTED:
        table_ptr = numbers_ptr + tl.load(code_ptr + 5)
        entries = tl.load(code_ptr + 6)
        if op == _QUERY_LISTED:
            least, most = _listed(table_ptr, entries, size, i_low + none, i_high + none)
        elif op == _KEY_LISTED:
            least, most = _listed(table_ptr, entries, size, j_low, j_high)
        elif op == _DOCUMENT:
            least, most = _one_document(table_ptr, entries, size, extra, i_low, i_high, j_low, j_high)
        else:
            least = none
            most = none
            # Rows of the table follow each other.
            stop = (i_high // size - extra + 1) * entries
            for start in range((i_low // size - extra) * entries, stop, _ENTRIES):
                n = start + tl.arange(0, _ENTRIES)
                block = tl.load(table_ptr + n, mask=n < stop, other=-1)
                hit = (block[:, None] >= (j_low // size)[None, :]) & (block[:, None] <= (j_high // size)[None, :])
                most = tl.maximum(most, tl.max(hit.to(tl.int32), 0))
    return least, most


@triton.jit
@no_type_check
def _mixed_31(x):
    """The hash of `stof.masks.rules`, of int64."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    x = ((x ^ (x >> 16)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return x ^ (x >> 15)


@triton.jit(do_not_specialize=["at", "first", "rows", "key_blocks", "picks", "seed"])
@no_type_check
def draw_blocks(numbers_ptr, at, first, rows, key_blocks, picks, seed, ROWS: tl.constexpr):
    """Draw the key blocks of some rows, as `rules.RandomBlocks.choose` does."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    table_ptr = numbers_ptr + at + row * picks
    own = (first + row).to(tl.int64) * 1000003 + seed.to(tl.int64) * 104729
    for turn in range(picks):
        top = key_blocks - picks + turn
        draw = (_mixed_31(_mixed_31((own + turn * 7919) & 0x7FFFFFFF) + 0x9E3779B) % (top + 1)).to(tl.int32)
        taken = draw < 0
        for earlier in range(turn):
            taken = taken | (tl.load(table_ptr + earlier, mask=ok, other=0) == draw)
        tl.store(table_ptr + turn, tl.where(taken, top, draw), mask=ok)
        # Later turns may read it by another thread.
        tl.debug_barrier()
