"""Packed integers: what the int32 of the kernels' lists hold beside a number, and the functions that write and read it.

`Work.items`, field `row_block` (`triton/work_list.py`):

    r       row block r
    -1      no item
    -2 - r  the results of row block r become NaN

`TileLists.tile_columns` (`hopper/tile_lists.py`):

    c           from key column c on, c < 2**30
    2**30 + p   from position p of `TileLists.compacted_keys` on
    -1 - c      in every slab of a half tile: its 64 columns follow each other, from key column c on

`TileLists.tile_bitmap` of paired row blocks:

    bit  31 30      28 27                            0
         0  | skipped | row of `TileLists.bitmaps`    |

Two counts below 2**15 that one cumulative sum adds up (`dynamic/vertical_slash/triton_kernels.py`):

    bit  31             16 15              0
         | second count   | first count   |

`TileLists.ranges`, field `nan_or_zero`, and the work list hold the bits of a float32: `NAN_BITS` or 0.

`WorkBuffers.flags` (`dynamic/buffers.py`):

    bit  31        17 16         15                       0
         0          | OVERFLOW  | `masks.dynamic.PROBLEMS` |

The functions compute with tensors and Python integers. `triton/packed_integers.py` has them for kernels.
"""

from __future__ import annotations

from typing import no_type_check

# A float32 that is not a number.
NAN_BITS = 0x7FC00000


@no_type_check
def nan_row_block(row_block):
    """The field `row_block` that asks for NaN; of such a field, the row block."""
    return -2 - row_block


@no_type_check
def asks_for_nan(field):
    """Whether a field `row_block` asks for NaN."""
    return field < -1


@no_type_check
def run_column(column):
    """The entry of a run of 64 columns; of such an entry, the first column."""
    return -1 - column


@no_type_check
def is_run(entry):
    """Whether an entry of `tile_columns` is of a run of 64 columns."""
    return entry < 0


@no_type_check
def compacted_column(position):
    """The entry of a tile of compacted keys."""
    return 2**30 + position


@no_type_check
def is_compacted(entry):
    """Whether an entry of `tile_columns` is of compacted keys."""
    return entry >= 2**30


@no_type_check
def compacted_position(entry):
    """Where an entry of compacted keys begins in their list."""
    return entry - 2**30


@no_type_check
def pair_bitmap(row, skipped):
    """The entry of `tile_bitmap` for a row of `bitmaps` behind `skipped` tiles."""
    return row + (skipped << 28)


@no_type_check
def pair_bitmap_row(entry):
    """The row of `bitmaps` of an entry of paired row blocks."""
    return entry & (1 << 28) - 1


@no_type_check
def pair_skipped(entry):
    """The tiles that are skipped before that of an entry of paired row blocks."""
    return entry >> 28


@no_type_check
def two_counts(first, second):
    """Two counts in one integer."""
    return first + (second << 16)


@no_type_check
def first_count(counts):
    """The first one of two counts."""
    return counts & 0xFFFF


@no_type_check
def second_count(counts):
    """The second one of two counts."""
    return counts >> 16
