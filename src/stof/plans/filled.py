"""Lists of new masks, filled on the device under a choice that was made for another mask of their structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stof.kernels.hopper.filled_lists import prepare_filled
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.kernels.triton.filled_tiles import filled_backward_tiles
from stof.layout import LayoutConfig
from stof.layout.fill.tiles import FilledTiles, TileFill, start_fill
from stof.plans.kept_choices import KeptChoices
from stof.selection import CallSpec, Candidate, KernelChoice, MaskGeometry, failures
from stof.selection.backward_tilings import BackwardTiling, whole_tile_tiling
from stof.selection.gpu_choices import for_call
from stof.selection.select import LayoutErrors

# Choices whose lists can be filled may be estimated to take so many times as long as the best.
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
    prepared: Mapping[KernelChoice, Any],
    layout_errors: LayoutErrors,
) -> ServingChoice | None:
    """The kept choice that serves a mask, with filled lists if it can have them; None if the mask must be surveyed.

    Args:
        prepared: choices with lists of this mask.
        layout_errors: choices whose layouts do not fit. Filled lists may: their tiles hold no key that no query sees.
    """
    near = kept.near(geometry.statistics)
    if near is None:
        return None
    wide = call.widened() if near.choice.widened else None
    choice = for_call(near.choice, wide or call)
    if failures.reason(choice, wide or call, geometry.device) is not None:
        return None
    if choice.row_order not in (None, *geometry.row_orders):  # an order that a search gave
        return None
    filled = None
    if is_fillable(choice) and not call.has_bias and choice not in prepared:
        assert choice.layout is not None
        assert choice.kernel is not None
        [counted] = count_tiles((geometry, choice.layout))
        if counted is not None:
            lengths = geometry.q_len, geometry.kv_len
            filled = prepare_filled(counted.write(False), lengths, choice.layout.block_n, choice.kernel)
    if filled is None and layout_errors.get(choice.layout_key) is not None:
        return None
    return ServingChoice(choice, filled, near.mask_text)


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
    prepared = None
    if is_fillable_backward(tiling):
        counted = count_tiles(*[(of, layout[0]) for layout, of in layouts if layout is not None])
        tiles = [
            filled_backward_tiles(one.write(True), of.q_len)
            for one, (_, of) in zip(counted, layouts, strict=True)
            if one is not None
        ]
        if len(tiles) == len(layouts):
            assert tiling.dq is not None
            assert tiling.dkv is not None
            prepared = PreparedBackward(tiles[0], tiling.dq, tiles[1], tiling.dkv)
    return ServingTiling(tiling, prepared)


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


def count_tiles(*counted: tuple[MaskGeometry, LayoutConfig]) -> list[CountedTiles | None]:
    """Count the tiles of masks, all before the host waits for any; None for masks that cannot be filled."""
    fills = [
        start_fill(
            geometry.mask, geometry.q_len, geometry.kv_len, geometry.dims, geometry.which, config.block_m,
            config.block_n, device=geometry.device,
        )
        for geometry, config in counted
    ]  # fmt: skip
    counts = [None if fill is None else fill.counts() for fill in fills]
    return [
        None if fill is None or count is None else CountedTiles(fill, *count)
        for fill, count in zip(fills, counts, strict=True)
    ]
