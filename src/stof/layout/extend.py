"""A layout for longer sequences from the one there is: only rows that are new are evaluated."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.layout.builders.build import build_layout, build_pattern, deduplicate, pack_layout
from stof.layout.builders.slabs import Pattern
from stof.layout.head_mask import HeadMask
from stof.layout.layout import Layout, gathered_row
from stof.masks import Mask
from stof.masks.base import check_lengths
from stof.masks.bounds import Interval


def extend_layout(layout: Layout, mask: Mask, q_len: int, kv_len: int, *, batch: int = 1, heads: int = 1) -> Layout:
    """The layout of `mask` for more queries or keys, equal to a fresh build.

    Old queries must not see new keys; new rows, and the last row block if it was not full, are built, and the tiles of
    the others copied. Where a mask cannot promise that (it draws from all keys there are, its closed form does not
    tell, or rows are permuted), everything is built anew.

    Args:
        layout: of the same mask, or of one that keeps the same scores of the old queries, for shorter sequences.
        mask: what to keep.
        q_len, kv_len: lengths, not below those of the layout.
        batch, heads: as for `build_layout`.

    Raises:
        ShapeError: the mask does not fit the lengths, batch or heads.
    """
    check_lengths(q_len, kv_len)
    mask.check(q_len, kv_len)
    mask_batch, mask_heads = mask.dims(batch, heads, layout.device)
    kept = layout.q_len // layout.config.block_m
    longer = q_len >= layout.q_len and kv_len >= layout.kv_len
    # Which columns are compacted depends on all rows.
    by_rows = layout.row_order is None and not layout.config.compact_columns
    alike = by_rows and (mask_batch, mask_heads) == (layout.mask_batch, layout.mask_heads)
    if not (longer and alike and kept and mask.grows and _old_see_nothing_new(layout, mask, q_len, kv_len)):
        return build_layout(mask, q_len, kv_len, layout.config, batch=batch, heads=heads, device=layout.device)
    first = kept * layout.config.block_m
    rest = mask.with_query_offset(first)
    distinct: list[tuple[int, Pattern]] = []
    pattern_of = torch.empty(mask_batch, mask_heads, dtype=torch.int32, device="cpu")
    old_pattern = layout.pattern_of.tolist()
    for b in range(mask_batch):
        for h in range(mask_heads):
            old = old_pattern[b][h]
            if q_len > first:
                new = build_pattern(HeadMask(rest, q_len - first, kv_len, b, h, None, layout.device), layout.config)
            else:
                new = _nothing(layout)
            places = (n for n, other in enumerate(distinct) if other[0] == old and other[1].equals(new))
            same = next(places, len(distinct))
            if same == len(distinct):
                distinct.append((old, new))
            pattern_of[b, h] = same
    return _joined(layout, distinct, kept, pattern_of.to(layout.device), q_len, kv_len)


def _old_see_nothing_new(layout: Layout, mask: Mask, q_len: int, kv_len: int) -> bool:
    """Whether the queries of the layout see none of the keys that it does not know."""
    if kv_len == layout.kv_len:
        return True

    def ends(low: int, high: int) -> Interval:
        first, last = (torch.tensor(end, device=layout.device).view(1, 1, 1, 1) for end in (low, high))
        return Interval(first, last)

    old, new = ends(0, layout.q_len - 1), ends(layout.kv_len, kv_len - 1)
    for b in range(layout.mask_batch):
        for h in range(layout.mask_heads):
            head_mask = HeadMask(mask, q_len, kv_len, b, h, None, layout.device)
            if not bool(head_mask.tile_bounds(old, new).empty.all()):
                return False
    return True


def _nothing(layout: Layout) -> Pattern:
    """No row blocks."""
    none = torch.zeros(0, dtype=torch.int64, device=layout.device)
    columns = none.view(0, layout.config.slabs_per_tile)
    return Pattern(none, none, columns, none.bool(), layout.bitmaps[:0])


def _joined(
    layout: Layout, distinct: list[tuple[int, Pattern]], kept: int, pattern_of: Tensor, q_len: int, kv_len: int
) -> Layout:
    """Old row blocks and new ones of every pattern; bitmaps that both have are stored once."""
    parts: list[Pattern] = []
    numbers: list[Tensor] = []
    known = len(layout.bitmaps)
    for old, new in distinct:
        blocks = slice(old * layout.row_blocks, old * layout.row_blocks + kept)
        pointers = layout.row_block_ptr[blocks.start : blocks.stop + 1].tolist()
        tiles = slice(pointers[0], pointers[-1])
        bitmap = layout.tile_bitmap[tiles].long()
        counts = layout.row_block_ptr.diff()[blocks].long()
        parts.append(
            Pattern(counts, layout.partial_count[blocks].long(), _slots(layout, tiles), bitmap >= 0, layout.bitmaps[:0])
        )
        parts.append(new)
        numbers += [bitmap[bitmap >= 0], torch.arange(len(new.bitmaps), device=layout.device) + known]
        known += len(new.bitmaps)
    joined = Pattern.join(parts)
    # Bitmaps of the last, unfinished row block may have no more users.
    number = torch.cat(numbers)
    used, number = number.unique(return_inverse=True)
    candidates = torch.cat([layout.bitmaps, *(new.bitmaps for _, new in distinct)])[used]
    bitmaps, renumbered = deduplicate(candidates)
    return pack_layout(joined, bitmaps, renumbered[number], pattern_of, q_len, kv_len, layout.config, None)


def _slots(layout: Layout, tiles: slice) -> Tensor:
    """First column of each slab of some tiles, -1 in unused slots: `Pattern.columns`."""
    base = layout.tile_base[tiles].long()
    steps = torch.arange(layout.config.slabs_per_tile, device=base.device) * layout.config.slab_columns
    columns = base[:, None] + steps
    columns = torch.where(columns < layout.kv_len, columns, -1)
    scattered = base < 0
    columns[scattered] = layout.gathered[gathered_row(base[scattered])].long()
    return columns
