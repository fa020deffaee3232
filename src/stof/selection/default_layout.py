"""The layout of a plan that uses one for all calls: block sizes and row order that suit the mask."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from stof.layout import Layout, LayoutConfig, build_layout
from stof.layout import bitmaps as bits
from stof.layout.orders.search import CLUSTERED, GOOD_ENOUGH, WORTH, RowOrders
from stof.masks import Mask


class BestLayout(NamedTuple):
    """A layout of contiguous tiles.

    Attributes:
        layout: the layout.
        row_order: name of its row order, None where rows keep theirs or were given one.
        is_regular: whether masks of the same structure may take the same block sizes and row order.
    """

    layout: Layout
    row_order: str | None
    is_regular: bool


def best_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    heads: int,
    device: torch.device,
    row_order: Tensor | None = None,
) -> BestLayout:
    """The layout that suits a mask best on the CPU, whose kernel reads the columns of tiles that row blocks keep.

    Where the rows' own order computes more than `GOOD_ENOUGH` times what is needed, others are tried: those the mask
    names, then one found by looking at it. `row_order` leaves no choice. Other arguments are those of `build_layout`,
    whose errors it raises.
    """

    def built(config: LayoutConfig, order: Tensor | None) -> Layout:
        return build_layout(mask, q_len, kv_len, config, batch=batch, heads=heads, device=device, row_order=order)

    layout = built(default_config(device).contiguous(), row_order)
    count = _column_scores(layout)
    if row_order is None and count.computed > GOOD_ENOUGH * count.needed:
        orders = RowOrders(mask, q_len, kv_len, batch=batch, heads=heads, device=device)
        most = WORTH * count.computed  # taking rows out of order pays if it leaves no more to compute
        reordered = {name: built(layout.config, orders.rows(name)) for name in orders.names}
        computed = {name: _column_scores(other).computed for name, other in reordered.items()}
        if min(computed.values(), default=most + 1) > most and (searched := orders.searched_name()) is not None:
            reordered[searched] = built(layout.config, orders.rows(searched))
            computed[searched] = _column_scores(reordered[searched]).computed
        best = min(computed, key=lambda name: computed[name], default=None)
        if best is not None and computed[best] <= most:
            return BestLayout(reordered[best], best, best != CLUSTERED)
    better = _refined_config(layout, count)
    return BestLayout(layout if better == layout.config else built(better, row_order), None, row_order is None)


def default_config(device: torch.device) -> LayoutConfig:
    """Block sizes of a plan's own layout, which pictures, files and the CPU use; `best_layout` may improve on them.

    On the CPU 64 rows are fastest on Longformer and BigBird masks at S = 4096, and within 3 % of the best height on
    strided and causal ones (2 cores, fp32; benchmarks/attention/cpu_constants.py). Calls on a GPU get the layout of
    their choice.
    """
    del device
    return LayoutConfig(block_m=64, block_n=64, slab=1)


class _ColumnScores(NamedTuple):
    """Scores that row blocks compute if they read the columns that some row keeps, and those that are kept."""

    computed: int
    needed: int


def _column_scores(layout: Layout) -> _ColumnScores:
    """Those of a layout of contiguous tiles, each pattern counted once for each batch entry and head under it."""
    numbers = layout.tile_bitmap.long()
    partial = (numbers >= 0).nonzero()[:, 0]
    owner = layout.tile_row_block()
    rows = (layout.rows().view(-1, layout.config.block_m) >= 0).sum(1)[owner]
    columns = torch.full_like(numbers, layout.config.block_n)
    kept = rows * columns
    if len(partial):
        columns[partial] = bits.live_columns(layout.bitmaps, layout.config.block_n).sum(1)[numbers[partial]]
        ones = torch.cat(
            [bits.unpack(piece, layout.config.block_n).sum((1, 2)) for piece in bits.pieces(layout.bitmaps)]
        )
        kept[partial] = ones[numbers[partial]]
    uses = torch.bincount(layout.pattern_of.flatten().long(), minlength=layout.patterns)
    weight = uses[torch.div(owner, layout.row_blocks, rounding_mode="floor")]
    return _ColumnScores(int((columns * rows * weight).sum()), int((kept * weight).sum()))


def _refined_config(layout: Layout, count: _ColumnScores) -> LayoutConfig:
    """Block sizes for a mask, given its layout under the default ones.

    Where every row block keeps a contiguous range of columns, half the rows waste less at the ends: a causal window of
    512 takes 42.7 ms with 32 rows, 44.9 with 64 (S = 4096, H = 12, D = 64, fp32, 2 cores;
    benchmarks/attention/cpu_constants.py). Below 5 % waste there is nothing to gain.
    """
    config = layout.config
    if layout.device.type != "cpu" or layout.tiles == 0 or count.computed < 1.05 * count.needed:
        return config
    columns, owner = layout.tile_columns(), layout.tile_row_block()
    exists = (columns >= 0) & layout.tile_live()
    blocks = layout.row_block_ptr.numel() - 1
    held = torch.zeros(blocks, dtype=torch.int64, device=layout.device).index_add_(0, owner, exists.sum(1))
    first = torch.full((blocks,), layout.kv_len, device=layout.device).scatter_reduce_(
        0, owner, torch.where(exists, columns, layout.kv_len).amin(1), "amin"
    )
    last = torch.full((blocks,), -1, device=layout.device).scatter_reduce_(
        0, owner, torch.where(exists, columns, -1).amax(1), "amax"
    )
    contiguous = bool(((last - first + 1 == held) | (held == 0)).all())
    return replace(config, block_m=32) if contiguous else config
