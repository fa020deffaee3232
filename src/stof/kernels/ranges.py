"""Which rectangles of (batch entry, head) share a pattern: the outermost loop of host-driven kernels."""

from __future__ import annotations


def pattern_ranges(pattern_of: list[list[int]], group: int) -> list[tuple[slice, slice, int]]:
    """`(batches, heads, pattern)` rectangles that cover `pattern_of [B, H]`.

    Head ranges are whole groups of `group` query heads (the heads of one key head), or lie inside one group.
    """
    out: list[tuple[slice, slice, int]] = []
    first = 0
    for b in range(1, len(pattern_of) + 1):
        if b < len(pattern_of) and pattern_of[b] == pattern_of[first]:
            continue
        row, start = pattern_of[first], 0
        while start < len(row):
            stop = start + 1
            while stop < len(row) and row[stop] == row[start]:
                stop += 1
            if start % group:
                stop = min(stop, start - start % group + group)
            elif stop - start > group:
                stop -= (stop - start) % group
            out.append((slice(first, b), slice(start, stop), row[start]))
            start = stop
        first = b
    return out
