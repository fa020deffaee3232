"""Triton functions that tell the bitmaps of a `Layout` apart and number them in the order of their first tiles.

Bitmaps are told apart by 127 bits of hash: 64 find a slot in a table, the other 63 must be equal for all tiles of the
slot. Tiles are numbered `row block * tile columns + tile column`, row blocks through all patterns.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# Codes of tiles.
EMPTY, PARTIAL, FULL = (tl.constexpr(code) for code in range(3))
# Tiles that the last thread block looks at together.
_SCANNED = tl.constexpr(512)
# Bitmaps that are numbered by comparing them with each other, and how many of them at once with all.
_FEW = tl.constexpr(128)
_COMPARED_AT_ONCE = tl.constexpr(32)
# Second hashes have 63 bits.
_MOST_HASH = tl.constexpr(2**63 - 1)


@triton.jit
@no_type_check
def _mixed(x):
    """Every bit of a number depends on all of it: xor-shifts and odd factors, one to one."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
@no_type_check
def _mixed_64(x):
    """The same for uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
@no_type_check
def hashed(words, at):
    """Two 64-bit numbers of each word and its place, to be summed; 0 of words that are 0, as rows past the end are."""
    x = words.to(tl.uint32, bitcast=True)
    place = (at.to(tl.uint32) + 1) * 0x9E3779B1
    a = _mixed(x ^ place)
    b = _mixed(x + place * 5)
    c = _mixed(a + 0x5BD1E995)
    d = _mixed(b ^ 0x3C6EF372)
    key = a.to(tl.int64) + (b.to(tl.int64) << 32)
    other = c.to(tl.int64) + (d.to(tl.int64) << 32)
    return tl.where(words != 0, key, 0), tl.where(words != 0, other, 0)


@triton.jit
@no_type_check
def table_pointers(state_ptr, code_ptr, tiles, slots):
    """Where the table lies in the state.

    - zero at first, at the beginning: int64, keys of slots, largest second hashes, and largest complements of second
      hashes; int32, how many tiles come after the first tile of a slot, plus 1;
    - anything at first, after the codes: int32, slots of tiles, numbers of slots, and slots as they were taken.
    """
    slot_ptr = code_ptr.to(tl.pointer_type(tl.int32)) + (tiles + 3) // 4
    return state_ptr.to(tl.pointer_type(tl.int64)), state_ptr + 6 * slots, slot_ptr, slot_ptr + tiles


@triton.jit
@no_type_check
def find_slot(state_ptr, code_ptr, taken_count_ptr, tile, key, other, tiles, slots):
    """Find or take the slot of a bitmap, and leave there what numbering it takes."""
    keys_ptr, after_ptr, _, number_ptr = table_pointers(state_ptr, code_ptr, tiles, slots)
    slot = (key & (slots - 1)).to(tl.int32)
    stored_key = tl.atomic_cas(keys_ptr + slot, key * 0, key, sem="relaxed")
    while (stored_key != 0) & (stored_key != key):
        slot = (slot + 1) & (slots - 1)
        stored_key = tl.atomic_cas(keys_ptr + slot, key * 0, key, sem="relaxed")
    if stored_key == 0:
        tl.store(number_ptr + slots + tl.atomic_add(taken_count_ptr, 1, sem="relaxed"), slot)
    tl.atomic_max(after_ptr + slot, tiles - tile, sem="relaxed")
    other = other & _MOST_HASH
    tl.atomic_max(keys_ptr + slots + slot, other, sem="relaxed")
    tl.atomic_max(keys_ptr + 2 * slots + slot, other ^ _MOST_HASH, sem="relaxed")
    return slot


@triton.jit
@no_type_check
def _hash_collisions(keys_ptr, slots, slot, exists):
    """How many slots have tiles with different second hashes."""
    most = tl.load(keys_ptr + slots + slot, mask=exists, other=0)
    complement = tl.load(keys_ptr + 2 * slots + slot, mask=exists, other=_MOST_HASH)
    return tl.sum((most + complement != _MOST_HASH).to(tl.int32), 0)


@triton.jit
@no_type_check
def number_bitmaps(state_ptr, code_ptr, taken_count_ptr, identity_ptr, row_blocks, columns, patterns, slots):
    """Number bitmaps in the order of their first tiles, in the thread block that ends last.

    Where there are several patterns, writes four numbers that identify what each keeps.

    Returns:
        How many bitmaps there are, and how many slots have several bitmaps.
    """
    tiles = patterns * row_blocks * columns
    keys_ptr, after_ptr, slot_ptr, number_ptr = table_pointers(state_ptr, code_ptr, tiles, slots)
    distinct = tl.load(taken_count_ptr)
    clash = 0
    if distinct <= _FEW:  # each compared with all
        n = tl.arange(0, _FEW)
        slot = tl.load(number_ptr + slots + n, mask=n < distinct, other=0)
        after = tl.load(after_ptr + slot, mask=n < distinct, other=0)
        number = n * 0
        for start in range(0, distinct, _COMPARED_AT_ONCE):
            m = start + tl.arange(0, _COMPARED_AT_ONCE)
            other = tl.load(number_ptr + slots + m, mask=m < distinct, other=0)
            other = tl.load(after_ptr + other, mask=m < distinct, other=0)
            number += tl.sum((other[None, :] > after[:, None]).to(tl.int32), 1)
        tl.store(number_ptr + slot, number, mask=n < distinct)
        clash = _hash_collisions(keys_ptr, slots, slot, n < distinct)
    else:  # by going through all tiles
        count = 0
        for start in range(0, tiles, _SCANNED):
            tile = start + tl.arange(0, _SCANNED)
            partial = tl.load(code_ptr + tile, mask=tile < tiles, other=0) == PARTIAL
            if tl.max(partial.to(tl.int32), 0) > 0:
                slot = tl.load(slot_ptr + tile, mask=partial, other=0)
                leads = partial & (tile == tiles - tl.load(after_ptr + slot, mask=partial, other=0))
                tl.store(number_ptr + slot, count + tl.cumsum(leads.to(tl.int32), 0) - 1, mask=leads)
                count += tl.sum(leads.to(tl.int32), 0)
                clash += _hash_collisions(keys_ptr, slots, slot, leads)
    if patterns > 1:
        # Other threads have written the numbers.
        tl.debug_barrier()
        each = row_blocks * columns
        for pattern in range(patterns):
            _write_identity(identity_ptr + 4 * pattern, code_ptr, slot_ptr, number_ptr, pattern * each, each)
    return distinct, clash


@triton.jit
@no_type_check
def _write_identity(identity_ptr, code_ptr, slot_ptr, number_ptr, first, count):
    """Write 128 bits that tell the tiles of a pattern, `count` from `first` on, from those of another."""
    a = tl.zeros([_SCANNED], tl.uint64)
    b = tl.zeros([_SCANNED], tl.uint64)
    for start in range(0, count, _SCANNED):
        n = start + tl.arange(0, _SCANNED)
        code = tl.load(code_ptr + first + n, mask=n < count, other=0).to(tl.int32)
        slot = tl.load(slot_ptr + first + n, mask=code == PARTIAL, other=0)
        bitmap = code + tl.load(number_ptr + slot, mask=code == PARTIAL, other=0) * 4
        tile = (n.to(tl.uint64) << 32) | bitmap.to(tl.uint64)
        a += tl.where(code == EMPTY, 0, _mixed_64(tile + 0x9E3779B97F4A7C15))
        b += tl.where(code == EMPTY, 0, _mixed_64(tile ^ 0xD1B54A32D192ED03))
    a = tl.sum(a.to(tl.int64, bitcast=True), 0)
    b = tl.sum(b.to(tl.int64, bitcast=True), 0)
    tl.store(identity_ptr, a.to(tl.int32))
    tl.store(identity_ptr + 1, (a >> 32).to(tl.int32))
    tl.store(identity_ptr + 2, b.to(tl.int32))
    tl.store(identity_ptr + 3, (b >> 32).to(tl.int32))
