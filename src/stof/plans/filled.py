"""Lists of new masks, filled on the device under a choice that was made for another mask of their structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from stof.kernels.hopper.backward_filled import filled_backward_lists
from stof.kernels.hopper.backward_lists import BackwardLists
from stof.kernels.hopper.filled_lists import prepare_filled
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.kernels.triton.filled_tiles import filled_backward_tiles
from stof.layout import LayoutConfig
from stof.layout.fill.mask_input import on_device
from stof.layout.fill.tiles import FilledTiles, TileFill, start_fill
from stof.layout.survey import MASKS_COUNTED, Survey, TileCounts
from stof.plans.kept_choices import KeptChoices
from stof.selection import CallSpec, Candidate, Geometry, KernelChoice, MaskGeometry, failures, gpu_choices, weighed
from stof.selection.backward_tilings import BackwardTiling, best_tiling, compiled_by, whole_tile_layouts
from stof.selection.compiled import compiled_or_best
from stof.selection.gpu_choices import for_call
from stof.selection.select import LayoutErrors, takes

# Maximum ratio of a fillable choice's estimate to the best estimate.
_ALLOWED_SLOWDOWN = 1.2


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
    """Whether the lists of a tiling of a GPU's kernels for gradients can be filled: whole tiles, rows in order."""
    layouts, kernels = (tiling.dq_layout, tiling.dkv_layout), (tiling.dq, tiling.dkv)
    whole_tiles = all(layout is None or _has_whole_tiles(layout) for layout in layouts)
    return tiling.dkv_layout is not None and whole_tiles and not any(one and one.split_tiles for one in kernels)


def _has_whole_tiles(layout: tuple[LayoutConfig, str | None]) -> bool:
    config, row_order = layout
    return row_order is None and config.slab is None and config.block_n % 32 == 0


class ServingChoice(NamedTuple):
    """A kept choice for another mask, or one of whole tiles, chosen from counts of this mask's tiles.

    Attributes:
        choice: the choice.
        prepared: the lists that were filled; None where layouts are built.
        mask_text: repr of the mask that it was made for.
    """

    choice: KernelChoice
    prepared: PreparedTiles | None
    mask_text: str


class ServingTiling(NamedTuple):
    """A kept tiling for the gradients under another mask, and the lists that were filled, if any.

    `tiling` is None where the implementation does not serve the structure.
    """

    tiling: BackwardTiling | None
    prepared: PreparedBackward | BackwardLists | None


def kept_choice(
    kept: KeptChoices,
    geometry: MaskGeometry,
    call: CallSpec,
    device: torch.device,
    prepared: Mapping[KernelChoice, Any],
    layout_errors: LayoutErrors,
    mask_text: str,
) -> ServingChoice | None:
    """The choice that serves a mask without a survey; None if the mask must be surveyed.

    Args:
        device: the plan's.
        prepared: choices with lists of this mask.
        layout_errors: choices whose layouts do not fit. Filled lists of them may fit: no tile of theirs holds a key
            that no query sees.
        mask_text: repr of this mask.
    """
    near = kept.near(geometry.statistics)
    if near is None:
        may_count = kept.may_count and not call.has_bias
        return counted_choice(kept, geometry, call, device, mask_text, device=geometry.device) if may_count else None
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
            kept.compiled.add(choice.layout)
            return ServingChoice(filled, lists, near.mask_text)
    return None if choice.layout_key in layout_errors else ServingChoice(choice, None, near.mask_text)


@on_device
def _filled_tiles(geometry: MaskGeometry, choice: KernelChoice, *, device: torch.device) -> PreparedTiles | None:
    """The lists of a fillable choice; None for masks that cannot be filled."""
    assert choice.layout is not None
    counted = _CountedTiles.of(geometry, [choice.layout], device)
    return None if counted is None else _prepared_tiles(counted, choice)


@on_device
def counted_choice(
    kept: KeptChoices, geometry: MaskGeometry, call: CallSpec, gpu: torch.device, mask_text: str, *,
    device: torch.device,
) -> ServingChoice | None:  # fmt: skip
    """The fillable choice with the least estimate by counts of this mask's tiles, which is kept; None if there is none.

    One whose kernel is compiled is taken unless another is much faster.

    Args:
        gpu: whose constants the estimates use.
        mask_text: repr of the mask.
    """
    wide = None if takes("hopper", call) else call.widened()
    choices = [one for one in gpu_choices(wide or call, geometry, "hopper") if is_fillable(one)]
    counted = _CountedTiles.of(geometry, [one.layout for one in choices if one.layout is not None], device)
    if counted is None:
        return None
    ranked = weighed(choices, wide or call, gpu, counted, {})
    times = {one.choice: one.estimate_us or 0.0 for one in ranked if one.choice is not None and not one.refusals}
    if not times:
        return None
    best = compiled_or_best(times, lambda choice: choice.layout in kept.compiled)
    kept.compiled.add(best.layout)
    choice = replace(best, widened=wide is not None)
    kept.keep(geometry.statistics, choice, mask_text)
    return ServingChoice(replace(choice, filled=True), _prepared_tiles(counted, choice), mask_text)


def _prepared_tiles(counted: _CountedTiles, choice: KernelChoice) -> PreparedTiles:
    assert choice.layout is not None
    assert choice.kernel is not None
    return prepare_filled(counted.write(choice.layout, False), counted.lengths, choice.layout.block_n, choice.kernel)


def keep_choice(
    kept: KeptChoices, geometry: MaskGeometry, ranked: list[Candidate], best: KernelChoice, mask_text: str
) -> None:
    """Keep the choice for later masks: the best whose lists can be filled, unless it is much slower than the best."""
    times = {one.choice: one.estimate_us for one in ranked if one.choice is not None and not one.refusals}
    best_us = times.get(best)
    if best_us is None:
        return
    choice = next((one for one in times if is_fillable(one)), best)
    if (times[choice] or 0.0) > _ALLOWED_SLOWDOWN * best_us:
        choice = best
    kept.keep(geometry.statistics, choice, mask_text)
    kept.may_count = is_fillable(choice) and geometry.outline is not None and geometry.outline.is_regular


def kept_tiling(
    kept: KeptChoices, call: CallSpec, geometry_of: Callable[[bool], MaskGeometry], mask_text: str
) -> ServingTiling | None:
    """The tiling that serves the gradients under a mask without a survey; None if the mask must be surveyed.

    Args:
        geometry_of: returns the geometry of the mask, or with True that of the transposed mask.
        mask_text: repr of the mask.
    """
    geometry, transposed = geometry_of(False), geometry_of(True)
    near = kept.near(geometry.statistics)
    if near is None:
        may_count = kept.may_count
        return _counted_tiling(kept, call, geometry_of, mask_text, device=geometry.device) if may_count else None
    tiling: BackwardTiling = near.choice
    layouts = ((tiling.dq_layout, geometry), (tiling.dkv_layout, transposed))
    if any(layout is not None and layout[1] not in (None, *of.row_orders) for layout, of in layouts):
        return None
    if not is_fillable_backward(tiling):
        return ServingTiling(tiling, None)
    kept.compiled |= compiled_by(tiling)
    return ServingTiling(tiling, filled_gradients(geometry_of, tiling, device=geometry.device))


def kept_decision(kept: KeptChoices, geometry_of: Callable[[bool], MaskGeometry]) -> ServingTiling | None:
    """As `kept_tiling`, where the first mask of a structure decides for all; None for the first one."""
    first = kept.first()
    if first is None or first.choice is None:
        return None if first is None else ServingTiling(None, None)
    filled = filled_gradients(geometry_of, first.choice, device=geometry_of(False).device)
    return ServingTiling(first.choice, filled)


@on_device
def filled_gradients(
    geometry_of: Callable[[bool], MaskGeometry], tiling: BackwardTiling, *, both_kinds: bool = False,
    device: torch.device,
) -> Any | None:  # fmt: skip
    """The lists of a fillable tiling, as its kernels read them; None for masks that cannot be filled.

    Args:
        both_kinds: return None, too, for masks without partial or without full tiles, which have faster kernels.
    """
    layouts = {swap: one[0] for swap, one in ((False, tiling.dq_layout), (True, tiling.dkv_layout)) if one is not None}
    counted = _wait_for_all(
        geometry_of, {swap: _start_counts(geometry_of(swap), [layout], device) for swap, layout in layouts.items()}
    )
    if counted is None or (both_kinds and not all(one.has_both_kinds() for one in counted.values())):
        return None
    return _prepared_gradients(counted, tiling)


@on_device
def _counted_tiling(
    kept: KeptChoices, call: CallSpec, geometry_of: Callable[[bool], MaskGeometry], mask_text: str, *,
    device: torch.device,
) -> ServingTiling | None:  # fmt: skip
    """As `counted_choice`, for gradients."""
    wanted = whole_tile_layouts(call)
    started = {swap: _start_counts(geometry_of(swap), layouts, device) for swap, layouts in wanted.items()}
    counted = _wait_for_all(geometry_of, started)
    if counted is None:
        return None
    best, _ = best_tiling(call, counted.__getitem__, whole_tiles=True, compiled=kept.compiled)
    kept.compiled |= compiled_by(best)
    kept.keep(geometry_of(False).statistics, best, mask_text)
    return ServingTiling(best, _prepared_gradients(counted, best))


def _wait_for_all(
    geometry_of: Callable[[bool], MaskGeometry], started: dict[bool, _Fills]
) -> dict[bool, _CountedTiles] | None:
    """The counts of a mask, of its transpose or of both, which `_start_counts` began."""
    counted = {swap: _CountedTiles.wait_for(geometry_of(swap), fills) for swap, fills in started.items()}
    known = {swap: one for swap, one in counted.items() if one is not None}
    return known if len(known) == len(counted) else None


def _prepared_gradients(counted: dict[bool, _CountedTiles], tiling: BackwardTiling) -> PreparedBackward | BackwardLists:
    if tiling.dq_layout is None:  # one kernel for all gradients
        assert tiling.dkv_layout is not None
        kv_len, q_len = counted[True].lengths
        filled = counted[True].write(tiling.dkv_layout[0], True)
        return filled_backward_lists(filled, q_len, kv_len)
    dq, dkv, dq_layout, dkv_layout = tiling.dq, tiling.dkv, tiling.dq_layout, tiling.dkv_layout
    assert dq is not None
    assert dkv is not None
    assert dkv_layout is not None
    of_mask, of_transpose = counted[False], counted[True]
    return PreparedBackward(
        filled_backward_tiles(of_mask.write(dq_layout[0], True), of_mask.lengths[0]), dq,
        filled_backward_tiles(of_transpose.write(dkv_layout[0], True), of_transpose.lengths[0]), dkv,
    )  # fmt: skip


def keep_tiling(
    kept: KeptChoices, call: CallSpec, geometry_of: Callable[[bool], MaskGeometry], best: BackwardTiling, mask_text: str
) -> None:
    """As `keep_choice`, for gradients."""
    geometry = geometry_of(False)
    (whole, whole_us), (_, best_us) = (best_tiling(call, geometry_of, whole_tiles) for whole_tiles in (True, False))
    is_whole = whole_us <= _ALLOWED_SLOWDOWN * best_us
    kept.keep(geometry.statistics, whole if is_whole else best, mask_text)
    kept.may_count = is_whole and geometry.outline is not None and geometry.outline.is_regular


# Counts that the device makes, by tile size; None for a size that its kernels do not serve.
_Fills = dict[LayoutConfig, "TileFill | None"]


def _start_counts(of: MaskGeometry, layouts: list[LayoutConfig], device: torch.device) -> _Fills:
    """Begin to count the tiles of a mask in several sizes."""
    return {
        one: start_fill(of.evaluated, of.q_len, of.kv_len, of.dims, of.which, one.block_m, one.block_n, device)
        for one in layouts
    }


class _CountedTiles(Geometry):
    """Tiles of one mask in several sizes, counted on the device but not written."""

    def __init__(self, geometry: MaskGeometry, fills: dict[LayoutConfig, tuple[TileFill, int, int]]) -> None:
        self.device, self.lengths = geometry.device, (geometry.q_len, geometry.kv_len)
        self._dims, self._which, self._fills = geometry.dims, geometry.which, fills
        self._counts: dict[LayoutConfig, TileCounts] = {}

    @staticmethod
    def of(geometry: MaskGeometry, layouts: list[LayoutConfig], device: torch.device) -> _CountedTiles | None:
        """Count and wait; None for masks that cannot be filled."""
        return _CountedTiles.wait_for(geometry, _start_counts(geometry, layouts, device))

    @staticmethod
    def wait_for(geometry: MaskGeometry, fills: _Fills) -> _CountedTiles | None:
        """The counts that `_start_counts` began."""
        counts = {layout: (fill, fill.counts()) for layout, fill in fills.items() if fill is not None}
        known = {layout: (fill, *count) for layout, (fill, count) in counts.items() if count is not None}
        return _CountedTiles(geometry, known) if len(known) == len(fills) else None

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        """Tiles of the first masks, as `layout.survey` counts them; the keys of rows are not known."""
        assert row_order is None
        for layout in set(geometries) - self._counts.keys():
            partial, full = self._fills[layout][0].of_row_blocks()[:, self._which[:MASKS_COUNTED]].long()
            self._counts[layout] = TileCounts(partial, full)
        return Survey(self._counts, torch.empty((0, self.lengths[0]), device="cpu"), *self._dims)

    def has_both_kinds(self) -> bool:
        """Whether there are partial and full tiles in each size."""
        return all(0 < partial < tiles for _, tiles, partial in self._fills.values())

    def write(self, layout: LayoutConfig, every_column: bool) -> FilledTiles:
        """Write the lists of one size; see `TileFill.write`."""
        fill, tiles, partial = self._fills[layout]
        return fill.write(tiles, partial, every_column)
