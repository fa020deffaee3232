"""Tile sizes of the backward kernels, best first, by their estimated time under the mask.

A thread block is estimated to take a fixed time plus a time for each of its tiles. They are assigned, longest first, to
the slots that run at the same time; the estimate is when the last slot ends. `stof tune --device --backward` measures
the kernels and fits the constants, which lie with those of the forward kernels in `device_data/`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from stof.kernels.common import parts_of
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.backward_lists import ITEM_COST, longest_group, longest_item
from stof.kernels.hopper.backward_lists import LAYOUTS as HOPPER_LAYOUTS
from stof.layout import LayoutConfig
from stof.layout.survey import Survey, TileCounts
from stof.selection.capabilities import CallSpec
from stof.selection.compiled import compiled_or_best
from stof.selection.device_model import DEFAULT_DEVICE, BackwardTimes, DeviceModel, load_model
from stof.selection.mask_geometry import MaskGeometry
from stof.selection.resources import head_dim_class
from stof.selection.slot_assignment import last_slot


@dataclass(frozen=True)
class BackwardTiling:
    """Layouts and configurations of the kernels for dQ, and for dK and dV.

    Attributes:
        dq_layout: tile sizes for the layout of the mask, and the name of its row order (None: rows in order). None for
            the plan's own layout, and where the kernel for dK and dV computes dQ too.
        dkv_layout: the same for the transposed mask, whose rows are keys.
        dq, dkv: how the kernels are compiled and their work is cut; None where an implementation has no choice.
    """

    dq_layout: tuple[LayoutConfig, str | None] | None = None
    dkv_layout: tuple[LayoutConfig, str | None] | None = None
    dq: KernelConfig | None = None
    dkv: KernelConfig | None = None


class WeighedGeometry(Protocol):
    """What tile sizes are weighed by: a `MaskGeometry`, or tiles that were counted."""

    device: torch.device
    row_orders: tuple[str, ...]

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey: ...


@dataclass(frozen=True)
class BackwardTile:
    """A tile size of one kernel, and how the kernel is compiled for it.

    Attributes:
        rows, columns: of the tile; rows are queries for dQ, keys for dK and dV.
        num_warps, num_stages: of the kernel.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    @property
    def occupancy(self) -> int:
        """Thread blocks on a multiprocessor: with up to 255 registers a thread, 8 warps fit, or the 12 of Hopper's."""
        return max(1, 8 // self.num_warps)

    def key(self, kernel: str, call: CallSpec) -> str:
        """The key of its constants in `DeviceModel.backward`; `kernel` is "dq", "dkv" or "dqkv"."""
        precision = "float32-" if call.dtype == torch.float32 else ""
        width = head_dim_class(call.head_dim, call.value_dim)
        return f"{kernel}/{precision}{width}/{self.rows}x{self.columns}/{self.num_warps}w{self.num_stages}s"


# By kernel and head_dim class.
_TILES = {
    "dq": {
        64: (BackwardTile(64, 64, 4, 3), BackwardTile(64, 32, 4, 3), BackwardTile(128, 64, 8, 3)),
        128: (BackwardTile(128, 64, 8, 3), BackwardTile(64, 64, 4, 2), BackwardTile(64, 32, 4, 3)),
        256: (BackwardTile(128, 32, 8, 2), BackwardTile(32, 32, 4, 2)),
    },
    "dkv": {
        64: (BackwardTile(64, 64, 4, 3), BackwardTile(64, 32, 4, 3), BackwardTile(128, 64, 8, 3)),
        128: (BackwardTile(64, 32, 4, 3), BackwardTile(64, 64, 4, 2), BackwardTile(128, 64, 8, 3)),
        256: (BackwardTile(32, 32, 4, 2),),
    },
}
# In float32, larger tiles spill registers. For head_dim 256 the tile is smaller, so that it fits in shared memory.
_FLOAT32 = {
    64: (BackwardTile(64, 32, 4, 2), BackwardTile(32, 32, 4, 2)),
    128: (BackwardTile(32, 32, 4, 2),),
    256: (BackwardTile(16, 32, 4, 2),),
}
# Tile sizes that are tried last, for GPUs with less shared memory than an H200.
_SMALL = {64: (32, 32), 128: (32, 32), 256: (16, 32)}
# Most tiles of a chunk: row blocks with more are split; 0 splits none.
SPLITS = (0, 16, 64)


def tiles_of(kernel: str, call: CallSpec) -> tuple[BackwardTile, ...]:
    """Tile sizes that a kernel ("dq" or "dkv") has for a call."""
    tables = _FLOAT32 if call.dtype == torch.float32 else _TILES[kernel]
    return tables[head_dim_class(call.head_dim, call.value_dim)]


def head_groups(kernel: str, call: CallSpec) -> tuple[int, int]:
    """Independent groups of heads, and query heads that one thread block goes through."""
    if kernel != "dkv":
        return call.batch * call.heads, 1
    return call.batch * call.kv_heads, call.heads // call.kv_heads  # dK and dV add up those of a key head


def triton_tilings(call: CallSpec, geometry_of: Callable[[bool], MaskGeometry]) -> tuple[BackwardTiling, ...]:
    """Tile sizes to try.

    Args:
        call: the attention call.
        geometry_of: returns the `MaskGeometry` of the mask, or with True that of the transposed mask.
    """
    dq, dkv = _best_variants("dq", call, geometry_of(False)), _best_variants("dkv", call, geometry_of(True))
    ranked = sorted(product(dq, dkv), key=lambda pair: pair[0].us + pair[1].us)
    small = LayoutConfig(*_SMALL[head_dim_class(call.head_dim, call.value_dim)]), None
    least = KernelConfig(num_warps=4, num_stages=2, split_tiles=SPLITS[-1])
    return (
        *(BackwardTiling(one.layout, other.layout, one.kernel, other.kernel) for one, other in ranked),
        BackwardTiling(small, small, least, least),
    )


def one_pass_tile(call: CallSpec) -> BackwardTile:
    """The tile size of Hopper's kernel for all gradients, and its warps and stages."""
    layout = HOPPER_LAYOUTS[head_dim_class(call.head_dim, call.value_dim)]
    return BackwardTile(layout.block_m, layout.block_n, num_warps=12, num_stages=2)


def one_pass_tilings(call: CallSpec, geometry_of: Callable[[bool], MaskGeometry]) -> tuple[BackwardTiling, ...]:
    """The tile size of Hopper's kernel for all gradients, where it is faster than Triton's kernels; else nothing."""
    tile, transposed = one_pass_tile(call), geometry_of(True)
    layout = LayoutConfig(tile.rows, tile.columns)
    model = _model_of(transposed)
    times = model.backward.get(tile.key("dqkv", call))
    if times is None:  # a device that was measured without this kernel
        return ()
    counts = transposed.survey((layout,), None).counts[layout]
    load = one_pass_load(tile, counts, call, model, times)
    _, others = best_tiling(call, geometry_of, whole_tiles=False)
    return (BackwardTiling(dkv_layout=(layout, None)),) if float(load @ times.weights()) < others else ()


def _model_of(geometry: WeighedGeometry) -> DeviceModel:
    on_gpu = geometry.device.type == "cuda"
    return load_model(torch.cuda.get_device_name(geometry.device) if on_gpu else DEFAULT_DEVICE)


def best_tiling(
    call: CallSpec,
    geometry_of: Callable[[bool], WeighedGeometry],
    whole_tiles: bool,
    compiled: Collection[Hashable] = (),
) -> tuple[BackwardTiling, float]:
    """The first of `triton_tilings`, or of those with contiguous columns, rows in order and no row block split.

    Args:
        call, geometry_of: as for `triton_tilings`.
        compiled: of `compiled_by`; such sizes are taken unless others are much faster.

    Returns:
        The tiling, and its estimated time in microseconds.
    """

    def best(kernel: str, swap: bool) -> _Estimate:
        variants = {one: one.us for one in _best_variants(kernel, call, geometry_of(swap), whole_tiles)}
        return compiled_or_best(variants, lambda one: (kernel, one.layout) in compiled)

    dq, dkv = best("dq", False), best("dkv", True)
    return BackwardTiling(dq.layout, dkv.layout, dq.kernel, dkv.kernel), dq.us + dkv.us


def compiled_by(tiling: BackwardTiling) -> set[Hashable]:
    """The kernels that a tiling runs, each with its layout."""
    return {("dq", tiling.dq_layout), ("dkv", tiling.dkv_layout)}


def whole_tile_layouts(call: CallSpec) -> dict[bool, list[LayoutConfig]]:
    """Contiguous layouts of all tile sizes of a call, for dQ, and under True for dK and dV."""
    return {
        swap: [LayoutConfig(tile.rows, tile.columns) for tile in tiles_of(kernel, call)]
        for kernel, swap in (("dq", False), ("dkv", True))
    }


@dataclass(frozen=True)
class _Estimate:
    layout: tuple[LayoutConfig, str | None]
    kernel: KernelConfig
    us: float


def _best_variants(
    kernel: str, call: CallSpec, geometry: WeighedGeometry, whole_tiles: bool = False
) -> list[_Estimate]:
    """For each tile size the variant with the lowest estimate: contiguous or gathered columns, row order, splits.

    With `whole_tiles`, columns are contiguous, rows in order and row blocks in one piece.
    """
    model = _model_of(geometry)
    tiles = tiles_of(kernel, call)

    def variants(tile: BackwardTile) -> Iterator[_Estimate]:
        times = model.backward[tile.key(kernel, call)]
        orders: list[tuple[str | None, tuple[int | None, ...]]] = [(None, (None,))]
        if not whole_tiles:
            orders = [(None, (None, 1)), *((name, (1,)) for name in geometry.row_orders)]
        for order, slabs in orders:
            every = tuple(LayoutConfig(one.rows, one.columns, slab) for one in tiles for slab in slabs)
            counted = geometry.survey(every, order).counts
            for slab in slabs:
                layout = LayoutConfig(tile.rows, tile.columns, slab)
                counts = counted[layout]
                longest = max(1, int((counts.partial + counts.full).max()))
                for split in (0,) if whole_tiles else SPLITS:
                    if split < longest:
                        load = critical_load(tile, counts, split, *head_groups(kernel, call), model, times)
                        config = KernelConfig(tile.num_warps, tile.num_stages, split_tiles=split)
                        yield _Estimate((layout, order), config, float(load @ times.weights()))

    return [min(variants(tile), key=lambda one: one.us) for tile in tiles]


def one_pass_load(
    tile: BackwardTile, counts: TileCounts, call: CallSpec, model: DeviceModel, times: BackwardTimes
) -> Tensor:
    """`critical_load` of Hopper's kernel for all gradients, which splits the row blocks that are longest.

    Query heads that share a key head are work items of their own, or one item; masks that differ in them are not looked
    at. Items of their own add to dK and dV one after another, which is estimated as `ITEM_COST` full tiles.
    """
    group = call.heads // call.kv_heads
    tiles = (counts.partial + counts.full).double()
    longest = longest_item(tiles.amax(0), call.batch * call.heads, model.multiprocessors)
    parts = parts_of(tiles, longest)
    most = longest_group(float(tiles.mean()), call.batch * call.kv_heads * tiles.shape[1], model.multiprocessors)
    items = torch.where((parts == 1) & (tiles <= most), 1, parts * group)
    adding = ITEM_COST * ((items > 1) & (parts == 1)).double()
    kinds = torch.ones_like(tiles), group * counts.partial / items, group * counts.full / items + adding, parts > 1
    loads = torch.stack([kind.double().flatten() for kind in kinds], 1)
    copies = items.flatten().double() * (call.batch * call.kv_heads / len(tiles))
    return last_slot(loads, loads @ times.weights(), copies, model.multiprocessors * tile.occupancy)


def critical_load(
    tile: BackwardTile,
    counts: TileCounts,
    split: int,
    groups: int,
    heads_in_group: int,
    model: DeviceModel,
    times: BackwardTimes,
) -> Tensor:
    """Thread blocks, partial tiles, full tiles and chunks on the slot that ends last, float64 `[4]`.

    Args:
        tile, counts: the tile size, and how many tiles the mask's row blocks have.
        split: most tiles of a chunk, 0 for row blocks in one piece.
        groups, heads_in_group: see `head_groups`.
        model: of the device.
        times: constants by which thread blocks are placed.
    """
    tiles = counts.partial + counts.full
    parts = parts_of(tiles, split).flatten().double()
    kinds = (
        torch.ones_like(parts),
        heads_in_group * counts.partial.flatten() / parts,
        heads_in_group * counts.full.flatten() / parts,
        (parts > 1).double(),
    )
    loads = torch.stack(kinds, 1)
    copies = parts * (groups / len(tiles))
    return last_slot(loads, loads @ times.weights(), copies, model.multiprocessors * tile.occupancy)
