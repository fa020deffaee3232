"""Layouts of plans on the CPU: block sizes and row order are kept by the structure of a mask."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stof.layout import Layout, LayoutConfig
from stof.layout.head_mask import HeadMask
from stof.layout.limits import check_tiles
from stof.plans.kept_choices import kept_by_structure
from stof.selection import MaskGeometry, best_layout, default_config


class _Chosen(NamedTuple):
    """Block sizes, and the name of a row order or None."""

    config: LayoutConfig
    row_order: str | None


def host_layout(geometry: MaskGeometry, row_order: Tensor | None) -> Layout:
    """Return contiguous tiles that suit a mask on the CPU, as chosen for an earlier mask of its structure and alike.

    Arguments and errors as of `stof.plan`, which checked them.
    """
    # Schedules have each column of a tile, as layouts that gather columns do.
    head_mask = HeadMask(geometry.mask, geometry.q_len, geometry.kv_len, 0, 0, None, geometry.device)
    check_tiles(head_mask, default_config(geometry.device))
    outline = geometry.outline if row_order is None and geometry.device.type == "cpu" else None
    kept = None
    if outline is not None:
        lengths = (geometry.q_len - 1).bit_length(), (geometry.kv_len - 1).bit_length()
        kept = kept_by_structure.of(("layout", outline.structure, geometry.row_orders, lengths))
        near = kept.near(geometry.statistics)
        if near is not None:
            return geometry.build(*near.choice)
    best = best_layout(
        geometry.mask,
        geometry.q_len,
        geometry.kv_len,
        batch=geometry.batch,
        heads=geometry.heads,
        device=geometry.device,
        row_order=row_order,
    )
    if kept is not None and best.is_regular:
        kept.keep(geometry.statistics, _Chosen(best.layout.config, best.row_order), repr(geometry.mask))
    return best.layout
