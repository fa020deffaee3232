"""Lists of new masks, filled on the device under a choice that was made for another mask of their structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from stof.kernels.hopper.filled_lists import prepare_filled
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.triton.backward_tiles import BackwardTiles, PreparedBackward
from stof.kernels.triton.filled_tiles import filled_backward_tiles
from stof.layout import LayoutConfig
from stof.layout.fill.tiles import TileFill, start_fill
from stof.plans.kept_choices import KeptChoices
from stof.selection import CallSpec, Candidate, KernelChoice, MaskGeometry, failures
from stof.selection.backward_tilings import BackwardTiling, whole_tile_tiling
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


@dataclass(frozen=True)
class CountedTiles:
    """Tiles of a mask that were counted but not written.

    Attributes:
        keys: how many keys a row sees on average, if half of a partial tile is kept.
    """

    fill: TileFill
    tiles: int
    partial: int
    keys: float

    def forward(self, geometry: MaskGeometry, choice: KernelChoice) -> PreparedTiles:
        """Write the lists of the choice under whose tiles was counted."""
        assert choice.layout is not None
        assert choice.kernel is not None
        filled = self.fill.write(self.tiles, self.partial, every_column=False)
        return prepare_filled(filled, (geometry.q_len, geometry.kv_len), choice.layout.block_n, choice.kernel)

    def backward(self, rows: int) -> BackwardTiles:
        """Write the lists of the kernels for gradients, of so many rows."""
        return filled_backward_tiles(self.fill.write(self.tiles, self.partial, every_column=True), rows)


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
    kept: KeptChoices, geometry: MaskGeometry, call: CallSpec, layout_errors: LayoutErrors
) -> ServingChoice | None:
    """The kept choice that serves a mask, with filled lists if it can have them; None if the mask must be surveyed."""
    if kept.latest is None:
        return None
    choice: KernelChoice = kept.latest.choice
    if layout_errors or failures.reason(choice, call, geometry.device) is not None:
        return None
    if call.has_bias or not is_fillable(choice):
        return ServingChoice(choice, None, kept.latest.mask_text)
    assert choice.layout is not None
    counted = count_tiles((geometry, choice.layout))[0]
    near = None if counted is None else kept.near(counted.keys)
    if near is None:
        return None
    if near.choice.layout != choice.layout and is_fillable(near.choice):
        counted = count_tiles((geometry, near.choice.layout))[0]
    if counted is None or not is_fillable(near.choice):
        return ServingChoice(near.choice, None, near.mask_text)
    return ServingChoice(near.choice, counted.forward(geometry, near.choice), near.mask_text)


def keep_choice(
    kept: KeptChoices, geometry: MaskGeometry, ranked: list[Candidate], best: KernelChoice, mask_text: str
) -> None:
    """Keep the choice for later masks: the best whose lists can be filled, unless it is much slower than the best."""
    times = {one.choice: one.estimate_us for one in ranked if one.choice is not None and not one.refusals}
    best_us = times.get(best)
    if best_us is None or best.layout is None or best.widened:
        return
    choice = next((one for one in times if is_fillable(one)), best)
    if (times[choice] or 0.0) > _MOST_SLOWER * best_us:
        choice = best
    assert choice.layout is not None
    keys = 1.0 if choice.row_order is not None else surveyed_keys(geometry, choice.layout)
    kept.keep(keys, choice, mask_text)


def kept_tiling(kept: KeptChoices, geometry_of: Callable[[bool], MaskGeometry]) -> ServingTiling | None:
    """As `kept_choice`, for gradients."""
    if kept.latest is None:
        return None
    tiling: BackwardTiling = kept.latest.choice
    if not is_fillable_backward(tiling):
        return ServingTiling(tiling, None)
    counted = _count_both(tiling, geometry_of)
    near = None if counted is None else kept.near(counted[0].keys)
    if near is None:
        return None
    if near.choice is not tiling and is_fillable_backward(near.choice):
        tiling, counted = near.choice, _count_both(near.choice, geometry_of)
    if counted is None or near.choice is not tiling:
        return ServingTiling(near.choice, None)
    assert tiling.dq is not None
    assert tiling.dkv is not None
    rows = geometry_of(False).q_len, geometry_of(True).q_len
    dq, dkv = (one.backward(length) for one, length in zip(counted, rows, strict=True))
    return ServingTiling(tiling, PreparedBackward(dq, tiling.dq, dkv, tiling.dkv))


def keep_tiling(
    kept: KeptChoices, call: CallSpec, geometry_of: Callable[[bool], MaskGeometry], best: BackwardTiling, mask_text: str
) -> None:
    """As `keep_choice`, for gradients."""
    whole, slower = whole_tile_tiling(call, geometry_of)
    tiling = whole if slower <= _MOST_SLOWER else best
    keys = 1.0
    if is_fillable_backward(tiling) and tiling.dq_layout is not None:
        keys = surveyed_keys(geometry_of(False), tiling.dq_layout[0])
    kept.keep(keys, tiling, mask_text)


def _count_both(
    tiling: BackwardTiling, geometry_of: Callable[[bool], MaskGeometry]
) -> tuple[CountedTiles, CountedTiles] | None:
    """Count the tiles of the mask and of the transposed mask; None if either cannot be filled."""
    assert tiling.dq_layout is not None
    assert tiling.dkv_layout is not None
    dq, dkv = count_tiles((geometry_of(False), tiling.dq_layout[0]), (geometry_of(True), tiling.dkv_layout[0]))
    return None if dq is None or dkv is None else (dq, dkv)


def surveyed_keys(geometry: MaskGeometry, config: LayoutConfig) -> float:
    """As `CountedTiles.keys`, by a survey."""
    counts = geometry.own_order_survey(config).counts[config]
    return keys_of_row(int(counts.partial.sum()), int(counts.full.sum()), config, len(counts.partial) * geometry.q_len)


def count_tiles(*counted: tuple[MaskGeometry, LayoutConfig]) -> list[CountedTiles | None]:
    """Count the tiles of masks, all before the host waits for any; None for masks that cannot be filled."""
    fills = [_start(geometry, config) for geometry, config in counted]
    results: list[CountedTiles | None] = []
    for fill, (_, config) in zip(fills, counted, strict=True):
        counts = None if fill is None else fill.counts()
        if fill is None or counts is None:
            results.append(None)
            continue
        keys = keys_of_row(counts[1], counts[0] - counts[1], config, fill.rows)
        results.append(CountedTiles(fill, *counts, keys))
    return results


def keys_of_row(partial: int, full: int, config: LayoutConfig, rows: int) -> float:
    """How many keys a row sees on average, if half of each partial tile is kept.

    Args:
        partial, full: tiles of all row blocks.
        config: their sizes.
        rows: of all masks.
    """
    return (full + partial / 2) * config.block_m * config.block_n / rows


def _start(geometry: MaskGeometry, config: LayoutConfig) -> TileFill | None:
    return start_fill(
        geometry.mask, geometry.q_len, geometry.kv_len, geometry.dims, geometry.which, config.block_m, config.block_n,
        device=geometry.device,
    )  # fmt: skip
