"""Triton code that runs a mask's program (`stof.masks.gpu_program`) on positions, and on ranges of positions."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.masks.gpu_program import WIDTH, Op

_WIDTH = tl.constexpr(WIDTH)
_AND = tl.constexpr(int(Op.AND))
_NOT = tl.constexpr(int(Op.NOT))
_DISTANCE = tl.constexpr(int(Op.DISTANCE))
_QUERY = tl.constexpr(int(Op.QUERY))
_KEY = tl.constexpr(int(Op.KEY))
_DISTANCE_REMAINDER = tl.constexpr(int(Op.DISTANCE_REMAINDER))
_QUERY_REMAINDER = tl.constexpr(int(Op.QUERY_REMAINDER))
_KEY_REMAINDER = tl.constexpr(int(Op.KEY_REMAINDER))
_GRID_ROW = tl.constexpr(int(Op.GRID_ROW))
_GRID_COLUMN = tl.constexpr(int(Op.GRID_COLUMN))
_QUERY_LISTED = tl.constexpr(int(Op.QUERY_LISTED))
_KEY_LISTED = tl.constexpr(int(Op.KEY_LISTED))
_DOCUMENT = tl.constexpr(int(Op.DOCUMENT))
_CHOSEN_BLOCK = tl.constexpr(int(Op.CHOSEN_BLOCK))
_QUERY_IN_RANGES = tl.constexpr(int(Op.QUERY_IN_RANGES))
# Table entries looked at together.
_ENTRIES = tl.constexpr(32)


@triton.jit
@no_type_check
def _upper_bound(table_ptr, entries, steps, x):
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
def _range_of(numbers_ptr, code_ptr, steps, x):
    """The number of the range that holds each position, and the shift from there to the inner mask's position."""
    table_ptr = numbers_ptr + tl.load(code_ptr + 6)
    entries = tl.load(code_ptr + 7)
    number = _upper_bound(table_ptr, entries, steps, x) - 1
    return number, tl.load(table_ptr + entries + number)


@triton.jit
@no_type_check
def _moved(numbers_ptr, code_ptr, steps, low, high):
    """Bounds of the inner mask's positions, of positions from low to high; the whole sequence if these span ranges."""
    first, shift = _range_of(numbers_ptr, code_ptr, steps, low)
    last, _ = _range_of(numbers_ptr, code_ptr, steps, high)
    length = tl.load(code_ptr + 8)
    return tl.where(first == last, low + shift, 0), tl.where(first == last, high + shift, length - 1)


@triton.jit
@no_type_check
def program_bits(numbers_ptr, start, q, kv):
    """Bits of the scores that the program at `start` keeps, of queries `[M, 1]` and 32 keys from each of `[1, W]` on.

    int32 `[M, W]`. Queries are in range; what keys past the last one get means nothing.
    """
    none = q * 0 + kv * 0
    # The stack, from its top; as many as `stof.masks.gpu_program.DEPTH`.
    s0, s1, s2, s3, s4 = none, none, none, none, none
    for n in range(tl.load(numbers_ptr + start)):
        code_ptr = numbers_ptr + start + 1 + n * _WIDTH
        op = tl.load(code_ptr)
        low, high = tl.load(code_ptr + 1), tl.load(code_ptr + 2)
        size, i_shift, j_shift = tl.load(code_ptr + 3), tl.load(code_ptr + 4), tl.load(code_ptr + 5)
        if op == _QUERY_IN_RANGES:
            _, shift = _range_of(numbers_ptr, code_ptr, size, q)
            q += shift
        elif op > _QUERY_IN_RANGES:
            _, shift = _range_of(numbers_ptr, code_ptr, size, kv)
            kv += shift
        elif op == _NOT:
            s0 = ~s0
        elif op < _DISTANCE:
            s0 = tl.where(op == _AND, s0 & s1, s0 | s1)
            s1, s2, s3 = s2, s3, s4
        else:
            s1, s2, s3, s4 = s0, s1, s2, s3
            s0 = _word(numbers_ptr, code_ptr, op, low, high, size, q + i_shift, kv + j_shift)
    return s0


@triton.jit
@no_type_check
def run_of_bits(first, last):
    """A word with bits `first` to `last`, both included, as far as it has them."""
    first = tl.maximum(first, 0)
    last = tl.minimum(last, 31)
    # Shifts by 32 or more mean nothing.
    above = tl.full([], -1, tl.int32) << tl.minimum(first, 31)
    below = (tl.full([], 0xFFFFFFFF, tl.uint32) >> (31 - tl.maximum(last, 0)).to(tl.uint32)).to(tl.int32, bitcast=True)
    return tl.where(first <= last, above & below, 0)


@triton.jit
@no_type_check
def _word(numbers_ptr, code_ptr, op, low, high, size, i, j):
    """Where an instruction's test holds: it keeps runs of a row's keys, seldom more than two of them in a word."""
    none = i * 0 + j * 0
    away = i - j  # in each branch, Triton 3.6 fails to compile rows of one query ("does not dominate this use")
    word = none
    if op >= _QUERY_LISTED:
        word = _word_of_table(numbers_ptr, code_ptr, op, size, i, j)
    elif (op == _DISTANCE_REMAINDER) | (op == _KEY_REMAINDER) | (op == _GRID_COLUMN):
        remainder = j % size + none
        least = low + none
        most = tl.minimum(high, size - 1) + none
        if op == _DISTANCE_REMAINDER:
            # The remainder falls from key to key; `size - 1 - remainder` rises, so one test serves both directions.
            remainder = size - 1 - (away + tl.load(code_ptr + 8)) % size
            least, most = size - 1 - most, size - 1 - least
        elif op == _GRID_COLUMN:
            # The key's column lies between the query's less `high` and less `low`; in an order that cannot overflow.
            column = i % size
            least = column - tl.minimum(high, column) + none
            most = tl.minimum(column, size - 1 + low) - low + none
        for turn in range(30 // size + 2):
            word |= run_of_bits(turn * size - remainder + least, turn * size - remainder + most)
    else:
        # Differences are taken in an order that cannot overflow.
        first = away - tl.minimum(high, away)
        last = away - tl.maximum(low, away - 31)
        if op == _QUERY:
            first = none
            last = tl.where((i >= low) & (i <= high), 31, -1) + none
        elif op == _QUERY_REMAINDER:
            first = none
            last = tl.where((i % size >= low) & (i % size <= high), 31, -1) + none
        elif op == _KEY:
            first = tl.maximum(low, j) - j + none
            last = tl.minimum(high, j + 31) - j + none
        elif op == _GRID_ROW:
            row = (i // size).to(tl.int64)
            first = tl.maximum((row - high) * size - j, 0)
            last = tl.minimum((row - low + 1) * size - 1 - j, 31)
            first, last = tl.minimum(first, 32).to(tl.int32), tl.maximum(last, -1).to(tl.int32)
        word = run_of_bits(first, last)
    return word


@triton.jit
@no_type_check
def _word_of_table(numbers_ptr, code_ptr, op, size, i, j):
    """The same for instructions with a table, which all test for 1."""
    table_ptr = numbers_ptr + tl.load(code_ptr + 6)
    entries = tl.load(code_ptr + 7)
    extra = tl.load(code_ptr + 8)
    word = i * 0 + j * 0
    if op == _QUERY_LISTED:
        count = _upper_bound(table_ptr, entries, size, i) - _upper_bound(table_ptr, entries, size, i - 1)
        word -= count
    elif op == _KEY_LISTED:
        at = _upper_bound(table_ptr, entries, size, j - 1)
        for _ in range(tl.minimum(entries, 32)):
            bit = tl.load(table_ptr + tl.minimum(at, entries - 1)) - j
            word |= tl.where(at < entries, run_of_bits(bit, bit), 0)
            at += 1
    elif op == _DOCUMENT:
        row_document = tl.load(table_ptr + entries + _upper_bound(table_ptr, entries, size, i))
        run = _upper_bound(table_ptr, entries, size, j)
        runs = _upper_bound(table_ptr, entries, size, j + 31) - run + 1
        for _ in range(tl.max(runs)):
            inside = run < entries
            begin = tl.load(table_ptr + tl.minimum(run, entries) - 1, mask=run > 0, other=0)
            end = tl.load(table_ptr + run, mask=inside, other=0)
            document = tl.load(table_ptr + entries + run, mask=inside, other=-1)
            word |= tl.where((document == row_document) & (row_document >= 0), run_of_bits(begin - j, end - 1 - j), 0)
            run += 1
    elif op == _CHOSEN_BLOCK:
        row_ptr = table_ptr + (i // size - extra) * entries
        for n in range(entries):
            first = tl.load(row_ptr + n) * size - j
            word |= run_of_bits(first, first + size - 1)
    else:
        for block in range(31 // size + 2):
            first = block * size - j % size
            row_ptr = table_ptr + (j // size + block - extra) * entries
            hit = word * 0
            for n in range(entries):
                # A block that begins past the word may have no row in the table.
                hit |= (tl.load(row_ptr + n, mask=first < 32, other=-1) == i // size).to(tl.int32)
            word |= tl.where(hit != 0, run_of_bits(first, first + size - 1), 0)
    return word


@triton.jit
@no_type_check
def program_bounds(numbers_ptr, start, q_low, q_high, kv_low, kv_high):
    """Whether the program at `start` certainly keeps nothing, and everything, of rectangles: int32 `[N]`, 0 or 1.

    The rectangles lie side by side: `q_low` and `q_high` are numbers, `kv_low` and `kv_high` have N of them.
    """
    nothing = kv_low * 0
    everything = kv_low * 0
    for n in range(tl.load(numbers_ptr + start)):
        code_ptr = numbers_ptr + start + 1 + n * _WIDTH
        op = tl.load(code_ptr)
        low, high = tl.load(code_ptr + 1), tl.load(code_ptr + 2)
        size, i_shift, j_shift = tl.load(code_ptr + 3), tl.load(code_ptr + 4), tl.load(code_ptr + 5)
        if op == _QUERY_IN_RANGES:
            q_low, q_high = _moved(numbers_ptr, code_ptr, size, q_low, q_high)
        elif op > _QUERY_IN_RANGES:
            kv_low, kv_high = _moved(numbers_ptr, code_ptr, size, kv_low, kv_high)
        elif op == _NOT:
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
            i_low, i_high, j_low, j_high = q_low + i_shift, q_high + i_shift, kv_low + j_shift, kv_high + j_shift
            least, most = _range(numbers_ptr, code_ptr, op, size, i_low, i_high, j_low, j_high)
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
    count = _upper_bound(table_ptr, entries, steps, high) - _upper_bound(table_ptr, entries, steps, low - 1)
    return (count == high - low + 1).to(tl.int32), (count > 0).to(tl.int32)


@triton.jit
@no_type_check
def _one_document(table_ptr, entries, steps, extra, i_low, i_high, j_low, j_high):
    """Whether all, and whether perhaps some pairs of positions lie in one document."""
    top = _upper_bound(table_ptr, entries, steps, i_low)
    bottom = _upper_bound(table_ptr, entries, steps, i_high)
    left = _upper_bound(table_ptr, entries, steps, j_low)
    right = _upper_bound(table_ptr, entries, steps, j_high)
    row = tl.load(table_ptr + entries + top)
    column = tl.load(table_ptr + entries + left)
    one_row = top == bottom
    one_column = left == right
    between = extra >> 1
    apart = ((extra & 1) != 0) & ((bottom + between < left) | (right < top + between))
    unseen = (one_row & (row < 0)) | (one_column & (column < 0))
    same = one_row & one_column & (row == column) & (row >= 0)
    other = one_row & one_column & (row != column)
    return same.to(tl.int32), 1 - (apart | unseen | other).to(tl.int32)


@triton.jit
@no_type_check
def _range(numbers_ptr, code_ptr, op, size, i_low, i_high, j_low, j_high):
    """Bounds of what an instruction tests within rectangles, as for `program_bounds`."""
    extra = tl.load(code_ptr + 8)
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
    elif op == _QUERY_REMAINDER:
        least, most = _remainders(i_low, i_high, size)
        least += none
        most += none
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
        table_ptr = numbers_ptr + tl.load(code_ptr + 6)
        entries = tl.load(code_ptr + 7)
        if op == _QUERY_LISTED:
            least, most = _listed(table_ptr, entries, size, i_low + none, i_high + none)
        elif op == _KEY_LISTED:
            least, most = _listed(table_ptr, entries, size, j_low, j_high)
        elif op == _DOCUMENT:
            least, most = _one_document(table_ptr, entries, size, extra, i_low, i_high, j_low, j_high)
        elif op == _CHOSEN_BLOCK:
            least = none
            most = none
            # Rows of the table follow each other.
            stop = (i_high // size - extra + 1) * entries
            for start in range((i_low // size - extra) * entries, stop, _ENTRIES):
                n = start + tl.arange(0, _ENTRIES)
                block = tl.load(table_ptr + n, mask=n < stop, other=-1)
                hit = (block[:, None] >= (j_low // size)[None, :]) & (block[:, None] <= (j_high // size)[None, :])
                most = tl.maximum(most, tl.max(hit.to(tl.int32), 0))
        else:
            least = none
            most = none
            row = j_low // size - extra
            rows = j_high // size - extra - row + 1
            for _ in range(tl.max(rows, 0)):
                for n in range(entries):
                    block = tl.load(table_ptr + row * entries + n, mask=rows > 0, other=-1)
                    most |= ((block >= i_low // size) & (block <= i_high // size)).to(tl.int32)
                row += 1
                rows -= 1
    return least, most


@triton.jit
@no_type_check
def _mixed_31(x):
    """The hash of `stof.masks.rules`, of int64."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    x = ((x ^ (x >> 16)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return x ^ (x >> 15)


@triton.jit
@no_type_check
def draw_blocks(table_ptr, row, first, rows, key_blocks, picks, seed):
    """Draw the key blocks of some rows of a table that begins with row `first`, as `rules.RandomBlocks.choose` does."""
    ok = row < rows
    row_ptr = table_ptr + row * picks
    row_seed = (first + row).to(tl.int64) * 1000003 + seed.to(tl.int64) * 104729
    for turn in range(picks):
        top = key_blocks - picks + turn
        draw = (_mixed_31(_mixed_31((row_seed + turn * 7919) & 0x7FFFFFFF) + 0x9E3779B) % (top + 1)).to(tl.int32)
        taken = draw < 0
        for earlier in range(turn):
            taken = taken | (tl.load(row_ptr + earlier, mask=ok, other=0) == draw)
        tl.store(row_ptr + turn, tl.where(taken, top, draw), mask=ok)
        # Another thread may read it in a later iteration.
        tl.debug_barrier()
