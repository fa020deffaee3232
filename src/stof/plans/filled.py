"""Lists of new masks, filled on the device under a choice that was made for another mask of their structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from stof.kernels.hopper.filled_lists import prepare_filled
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.kernels.triton.filled_tiles import filled_backward_tiles
from stof.layout import LayoutConfig
from stof.layout.fill.mask_input import on_device
from stof.layout.fill.tiles import FilledTiles, TileFill, start_fill
from stof.plans.kept_choices import KeptChoices
from stof.selection import CallSpec, Candidate, KernelChoice, MaskGeometry, failures
from stof.selection.backward_tilings import BackwardTiling, whole_tile_tiling
from stof.selection.gpu_choices import for_call
from stof.selection.select import LayoutErrors

# Maximum ratio of a fillable choice's estimate to the best estimate.
_MOST_SLOWER = 1.2


def is_fillable(choice: KernelChoice) -> bool:
    """Whether the lists of a choice can be filled: whole tiles of the Hopper kernel in 16 bits, rows in order."""
    kernel, layout = choice.kernel, choice.layout
    return (
        choice.implementation == "hopper"
        and layout is not None
        and _has_whole_tiles((layout, choice.row_order))
        and kernel is not None
        and not (kernel.split_tiles or kernel.paired or kernel.zero_unseen)
    )


def is_fillable_backward(tiling: BackwardTiling) -> bool:
    """The same of the Triton kernels for gradients."""
    layouts, kernels = (tiling.dq_layout, tiling.dkv_layout), (tiling.dq, tiling.dkv)
    whole = all(layout is not None and _has_whole_tiles(layout) for layout in layouts)
    return whole and all(kernel is not None and not kernel.split_tiles for kernel in kernels)


def _has_whole_tiles(layout: tuple[LayoutConfig, str | None]) -> bool:
    config, row_order = layout
    return row_order is None and config.slab is None and config.block_n % 32 == 0


class ServingChoice(NamedTuple):
    """A kept choice for another mask.

    Attributes:
        choice: the choice.
        prepared: the lists that were filled; None where layouts are built.
        mask_text: repr of the mask that it was made for.
    """

    choice: KernelChoice
    prepared: PreparedTiles | None
    mask_text: str


class ServingTiling(NamedTuple):
    """The same for gradients."""

    tiling: BackwardTiling
    prepared: PreparedBackward | None


def kept_choice(
    kept: KeptChoices,
    geometry: MaskGeometry,
    call: CallSpec,
    device: torch.device,
    prepared: Mapping[KernelChoice, Any],
    layout_errors: LayoutErrors,
) -> ServingChoice | None:
    """The kept choice that serves a mask, with filled lists if it can have them; None if the mask must be surveyed.

    Args:
        device: the plan's.
        prepared: choices with lists of this mask.
        layout_errors: choices whose layouts do not fit. Filled lists may: their tiles hold no key that no query sees.
    """
    near = kept.near(geometry.statistics)
    if near is None:
        return None
    wide = call.widened() if near.choice.widened else None
    choice = for_call(near.choice, wide or call)
    if failures.reason(choice, wide or call, device) is not None:
        return None
    if choice.row_order not in (None, *geometry.row_orders):  # an order that a search gave
        return None
    if is_fillable(choice) and not call.has_bias:
        filled = replace(choice, filled=True)
        if filled in prepared and choice.layout_key not in layout_errors:
            return ServingChoice(filled, None, near.mask_text)
        lists = None if filled in prepared else _filled_tiles(geometry, choice, device=geometry.device)
        if lists is not None:
            return ServingChoice(filled, lists, near.mask_text)
    return None if choice.layout_key in layout_errors else ServingChoice(choice, None, near.mask_text)


@on_device
def _filled_tiles(geometry: MaskGeometry, choice: KernelChoice, *, device: torch.device) -> PreparedTiles | None:
    """The lists of a fillable choice; None for masks that cannot be filled."""
    assert choice.layout is not None
    assert choice.kernel is not None
    [counted] = _count_tiles(device, (geometry, choice.layout))
    if counted is None:
        return None
    lengths = geometry.q_len, geometry.kv_len
    return prepare_filled(counted.write(False), lengths, choice.layout.block_n, choice.kernel)


def keep_choice(
    kept: KeptChoices, geometry: MaskGeometry, ranked: list[Candidate], best: KernelChoice, mask_text: str
) -> None:
    """Keep the choice for later masks: the best whose lists can be filled, unless it is much slower than the best."""
    times = {one.choice: one.estimate_us for one in ranked if one.choice is not None and not one.refusals}
    best_us = times.get(best)
    if best_us is None:
        return
    choice = next((one for one in times if is_fillable(one)), best)
    if (times[choice] or 0.0) > _MOST_SLOWER * best_us:
        choice = best
    kept.keep(geometry.statistics, choice, mask_text)


def kept_tiling(kept: KeptChoices, geometry_of: Callable[[bool], MaskGeometry]) -> ServingTiling | None:
    """As `kept_choice`, for gradients."""
    geometry, transposed = geometry_of(False), geometry_of(True)
    near = kept.near(geometry.statistics)
    if near is None:
        return None
    tiling: BackwardTiling = near.choice
    layouts = ((tiling.dq_layout, geometry), (tiling.dkv_layout, transposed))
    if any(layout is not None and layout[1] not in (None, *of.row_orders) for layout, of in layouts):
        return None
    filled = is_fillable_backward(tiling)
    return ServingTiling(tiling, _filled_gradients(geometry_of, tiling, device=geometry.device) if filled else None)


@on_device
def _filled_gradients(
    geometry_of: Callable[[bool], MaskGeometry], tiling: BackwardTiling, *, device: torch.device
) -> PreparedBackward | None:
    """The lists of a fillable tiling; None for masks that cannot be filled."""
    assert tiling.dq_layout is not None
    assert tiling.dkv_layout is not None
    assert tiling.dq is not None
    assert tiling.dkv is not None
    geometry, transposed = geometry_of(False), geometry_of(True)
    dq, dkv = _count_tiles(device, (geometry, tiling.dq_layout[0]), (transposed, tiling.dkv_layout[0]))
    if dq is None or dkv is None:
        return None
    return PreparedBackward(
        filled_backward_tiles(dq.write(True), geometry.q_len), tiling.dq,
        filled_backward_tiles(dkv.write(True), transposed.q_len), tiling.dkv,
    )  # fmt: skip


def keep_tiling(
    kept: KeptChoices, call: CallSpec, geometry_of: Callable[[bool], MaskGeometry], best: BackwardTiling, mask_text: str
) -> None:
    """As `keep_choice`, for gradients."""
    whole, slower = whole_tile_tiling(call, geometry_of)
    kept.keep(geometry_of(False).statistics, whole if slower <= _MOST_SLOWER else best, mask_text)


class CountedTiles(NamedTuple):
    """Tiles of a mask that were counted but not written."""

    fill: TileFill
    tiles: int
    partial: int

    def write(self, every_column: bool) -> FilledTiles:
        """Write the lists; see `TileFill.write`."""
        return self.fill.write(self.tiles, self.partial, every_column)


def _count_tiles(device: torch.device, *counted: tuple[MaskGeometry, LayoutConfig]) -> list[CountedTiles | None]:
    """Count the tiles of masks, all before the host waits for any; None for masks that cannot be filled."""
    fills = [
        start_fill(of.mask, of.q_len, of.kv_len, of.dims, of.which, config.block_m, config.block_n, device)
        for of, config in counted
    ]
    counts = [None if fill is None else fill.counts() for fill in fills]
    return [
        None if fill is None or count is None else CountedTiles(fill, *count)
        for fill, count in zip(fills, counts, strict=True)
    ]
