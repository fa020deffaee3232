"""Tile sizes of the backward kernels, best first, by their estimated time under the mask.

A program is estimated to take a fixed time plus a time for each of its tiles. Programs are assigned, longest first, to
the slots that run at the same time; the estimate is when the last slot ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from stof.kernels.common import parts_of
from stof.kernels.config import KernelConfig
from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts
from stof.selection.capabilities import CallSpec
from stof.selection.cost_model import last_slot
from stof.selection.mask_geometry import MaskGeometry
from stof.selection.resources import head_dim_class


@dataclass(frozen=True)
class BackwardTiling:
    """Layouts and configurations of the kernels for dQ, and for dK and dV.

    Attributes:
        dq_layout: tile sizes for the layout of the mask, and the name of its row order (None: rows in order). None for
            the plan's own layout.
        dkv_layout: the same for the transposed mask, whose rows are keys.
        dq, dkv: how the kernels are compiled and their work is cut; None where an implementation has no choice.
    """

    dq_layout: tuple[LayoutConfig, str | None] | None = None
    dkv_layout: tuple[LayoutConfig, str | None] | None = None
    dq: KernelConfig | None = None
    dkv: KernelConfig | None = None


@dataclass(frozen=True)
class _Tile:
    """A tile size of one kernel, and what its programs take.

    Attributes:
        rows, columns, num_warps, num_stages: of the tile and the kernel.
        times: microseconds of a program, of a partial tile, of a full tile, and the extra time of a chunk of a split
            row block, whose partial sums are written and then merged.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    times: tuple[float, float, float, float]

    @property
    def programs(self) -> int:
        """Programs on a multiprocessor: with up to 255 registers a thread, 8 warps fit."""
        return 8 // self.num_warps


# By head_dim class. Times are fitted to those of an H200 (bf16; the masks of the benchmark grid and random ones of 1
# and 5 %), and only rank variants. For head_dim 256 and float32 the times of
# partial tiles and chunks are set in proportion to those of full tiles, of which alone there were enough measurements.
_DQ = {
    64: (
        _Tile(64, 64, 4, 3, (3.2, 0.83, 0.70, 0.1)),
        _Tile(64, 32, 4, 3, (1.8, 0.51, 0.46, 0.5)),
        _Tile(128, 64, 8, 3, (4.6, 1.01, 0.64, 0.3)),
    ),
    128: (
        _Tile(128, 64, 8, 3, (6.9, 1.37, 1.28, 2.6)),
        _Tile(64, 64, 4, 2, (5.2, 1.57, 1.46, 7.0)),
        _Tile(64, 32, 4, 3, (5.3, 0.83, 0.74, 4.3)),
    ),
    256: (_Tile(128, 32, 8, 2, (5.4, 2.2, 1.8, 5.4)), _Tile(32, 32, 4, 2, (6.0, 2.5, 2.1, 6.0))),
}
_DKV = {
    64: (
        _Tile(64, 64, 4, 3, (4.8, 1.71, 1.16, 5.5)),
        _Tile(64, 32, 4, 3, (4.2, 1.06, 0.67, 2.7)),
        _Tile(128, 64, 8, 3, (5.6, 1.86, 1.41, 5.0)),
    ),
    128: (
        _Tile(64, 32, 4, 3, (6.8, 1.27, 1.06, 6.1)),
        _Tile(64, 64, 4, 2, (8.0, 3.09, 2.02, 5.8)),
        _Tile(128, 64, 8, 3, (6.8, 2.93, 2.02, 2.1)),
    ),
    256: (_Tile(32, 32, 4, 2, (7.2, 2.9, 2.4, 7.2)),),
}
# In float32, larger tiles spill registers. For head_dim 256 the tile is smaller, so that it fits in shared memory.
_FLOAT32 = {
    64: (_Tile(64, 32, 4, 2, (12.0, 5.7, 4.5, 12.0)), _Tile(32, 32, 4, 2, (7.5, 3.0, 2.6, 7.5))),
    128: (_Tile(32, 32, 4, 2, (7.5, 3.0, 2.6, 7.5)),),
    256: (_Tile(16, 32, 4, 2, (7.5, 3.0, 2.6, 7.5)),),
}
# Tile sizes that are tried last, for GPUs with less shared memory than an H200.
_SMALL = {64: (32, 32), 128: (32, 32), 256: (16, 32)}
# Most tiles of a chunk: row blocks with more are split; 0 splits none.
_SPLITS = (0, 16, 64)


def triton_tilings(call: CallSpec, geometry_of: Callable[[bool], MaskGeometry]) -> tuple[BackwardTiling, ...]:
    """Tile sizes to try.

    Args:
        call: the attention call.
        geometry_of: returns the `MaskGeometry` of the mask, or with True that of the transposed mask.
    """
    width = head_dim_class(call.head_dim, call.value_dim)
    tables = (_FLOAT32, _FLOAT32) if call.dtype == torch.float32 else (_DQ, _DKV)
    # Independent groups of heads, and query heads in one program: dK and dV add up those of a key head.
    head_groups = (call.batch * call.heads, 1), (call.batch * call.kv_heads, call.heads // call.kv_heads)
    dq, dkv = (
        _best_variants(table[width], geometry_of(transposed), *groups)
        for transposed, table, groups in zip((False, True), tables, head_groups, strict=True)
    )
    ranked = sorted(product(dq, dkv), key=lambda pair: pair[0].us + pair[1].us)
    small = LayoutConfig(*_SMALL[width]), None
    least = KernelConfig(num_warps=4, num_stages=2, split_tiles=_SPLITS[-1])
    return (
        *(BackwardTiling(one.layout, other.layout, one.kernel, other.kernel) for one, other in ranked),
        BackwardTiling(small, small, least, least),
    )


@dataclass(frozen=True)
class _Estimate:
    layout: tuple[LayoutConfig, str | None]
    kernel: KernelConfig
    us: float


def _best_variants(
    tiles: tuple[_Tile, ...], geometry: MaskGeometry, groups: int, heads_in_group: int
) -> list[_Estimate]:
    """For each tile size the variant with the lowest estimate: contiguous or gathered columns, row order, splits."""
    device = geometry.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132

    def variants(tile: _Tile) -> Iterator[_Estimate]:
        for order, slabs in ((None, (None, 1)), *((name, (1,)) for name in geometry.row_orders)):
            every = tuple(LayoutConfig(one.rows, one.columns, slab) for one in tiles for slab in slabs)
            counted = geometry.survey(every, order).counts
            for slab in slabs:
                layout = LayoutConfig(tile.rows, tile.columns, slab)
                counts = counted[layout]
                longest = max(1, int((counts.partial + counts.full).max()))
                for split in _SPLITS:
                    if split < longest:
                        us = _estimate(tile, counts, split, groups, heads_in_group, processors)
                        kernel = KernelConfig(tile.num_warps, tile.num_stages, split_tiles=split)
                        yield _Estimate((layout, order), kernel, us)

    return [min(variants(tile), key=lambda one: one.us) for tile in tiles]


def _estimate(tile: _Tile, counts: TileCounts, split: int, groups: int, heads_in_group: int, processors: int) -> float:
    """Microseconds of one kernel."""
    tiles = counts.partial + counts.full
    parts = parts_of(tiles, split).flatten().double()
    kinds = (
        torch.ones_like(parts),
        heads_in_group * counts.partial.flatten() / parts,
        heads_in_group * counts.full.flatten() / parts,
        (parts > 1).double(),
    )
    loads = torch.stack(kinds, 1)
    times = torch.tensor(tile.times, dtype=torch.float64, device="cpu")
    copies = parts * (groups / len(tiles))
    return float(last_slot(loads, loads @ times, copies, processors * tile.programs) @ times)
