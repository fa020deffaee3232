"""The layout of a plan that uses one for all calls: block sizes and row order that suit the mask."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stof.layout import Layout, LayoutConfig, build_layout, statistics
from stof.layout.orders.search import GOOD_ENOUGH, WORTH, RowOrders
from stof.masks import Mask


def own_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    heads: int,
    device: torch.device,
    row_order: Tensor | None = None,
) -> Layout:
    """The layout that suits a mask best on this device; arguments as for `build_layout`, whose errors it raises.

    Where the rows' own order computes more than `GOOD_ENOUGH` times what is needed, others are tried: those the mask
    names, then one found by looking at it. `row_order` leaves no choice.
    """

    def built(config: LayoutConfig, order: Tensor | None) -> Layout:
        return build_layout(mask, q_len, kv_len, config, batch=batch, heads=heads, device=device, row_order=order)

    layout = built(default_config(device), row_order)
    if row_order is None and statistics(layout).computed_over_needed > GOOD_ENOUGH:
        orders = RowOrders(mask, q_len, kv_len, batch=batch, heads=heads, device=device)
        reordered = [built(layout.config, orders.rows(name)) for name in orders.names]
        if not any(_denser(other, layout) for other in reordered):
            clustered = orders.searched_name()
            reordered += [] if clustered is None else [built(layout.config, orders.rows(clustered))]
        best = min(reordered, key=lambda other: statistics(other).computed, default=layout)
        if _denser(best, layout):
            return best
    better = refined_config(layout)
    return layout if better == layout.config else built(better, row_order)


def _denser(layout: Layout, than: Layout) -> bool:
    """Whether a layout leaves so much less to compute that taking rows out of order pays."""
    return statistics(layout).computed <= WORTH * statistics(than).computed


def default_config(device: torch.device) -> LayoutConfig:
    """Block sizes of a plan's own layout, which pictures, files and the CPU use; `refined_config` may improve on them.

    On the CPU 64 rows are fastest on Longformer and BigBird masks at S = 4096, and within 3 % of the best height on
    strided and causal ones (2 cores, fp32; benchmarks/attention/cpu_constants.py). Calls on a GPU get the layout of
    their choice.
    """
    del device
    return LayoutConfig(block_m=64, block_n=64, slab=1)


def refined_config(layout: Layout) -> LayoutConfig:
    """Block sizes for a mask, given its layout under the default ones.

    Where every row block keeps a contiguous range of columns, half the rows cost nothing to gather and waste less at
    the ends: a causal window of 512 takes 42.7 ms with 32 rows, 44.9 with 64 (S = 4096, H = 12, D = 64, fp32, 2 cores;
    benchmarks/attention/cpu_constants.py). Below 5 % waste there is nothing to gain.
    """
    config = layout.config
    if layout.device.type != "cpu" or layout.tiles == 0 or statistics(layout).computed_over_needed < 1.05:
        return config
    columns, owner = layout.tile_columns(), layout.tile_row_block()
    exists = columns >= 0
    blocks = layout.row_block_ptr.numel() - 1
    count = torch.zeros(blocks, dtype=torch.int64, device=layout.device).index_add_(0, owner, exists.sum(1))
    first = torch.full((blocks,), layout.kv_len, device=layout.device).scatter_reduce_(
        0, owner, torch.where(exists, columns, layout.kv_len).amin(1), "amin"
    )
    last = torch.full((blocks,), -1, device=layout.device).scatter_reduce_(0, owner, columns.amax(1), "amax")
    contiguous = bool(((last - first + 1 == count) | (count == 0)).all())
    return replace(config, block_m=32) if contiguous else config
