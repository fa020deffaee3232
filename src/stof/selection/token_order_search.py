"""Orders of the tokens, queries and keys alike, that need fewer tiles than the order they are given in.

A row order permutes query rows inside a layout, and their columns are gathered. Tokens that come in a better order keep
contiguous tiles, but only the model can give them so. `stof.explain` and `stof inspect` ask; calls never do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stof.layout import Layout, statistics
from stof.layout.orders import by_remainder, by_z_order
from stof.layout.survey import MASKS_COUNTED
from stof.masks import reordered
from stof.selection.capabilities import CallSpec
from stof.selection.device_model import DeviceModel
from stof.selection.mask_geometry import MaskGeometry
from stof.selection.select import candidates
from stof.selection.token_order import TokenOrder

# Scores evaluated at most, so that this takes about 2 seconds or less.
_MOST_SCORES = {"cpu": 2**24, "cuda": 2**28}


def better_token_order(
    geometry: MaskGeometry,
    call: CallSpec,
    device: torch.device,
    *,
    model: DeviceModel | None = None,
    layout: Layout | None = None,
) -> TokenOrder | None:
    """The best order that a grid of tokens (Z order) or a stride in the mask suggests; None if none helps.

    Masks that would take more than about 2 seconds are not examined.

    Args:
        geometry: the mask, tokens as they are.
        call, device, model: as for `candidates`; a GPU need not be here if a model is given.
        layout: on a CPU, the one that the call uses.
    """
    length, sizes = geometry.q_len, (geometry.batch, geometry.heads)
    distinct = min(MASKS_COUNTED, math.prod(geometry.mask.dims(*sizes, geometry.device)))
    most = _MOST_SCORES["cuda" if geometry.device.type == "cuda" else "cpu"]
    if length != geometry.kv_len or length**2 * distinct > most:
        return None
    options: dict[str, Any] = {"batch": sizes[0], "heads": sizes[1], "device": geometry.device}
    orders = []
    for text, order in dict(_token_order(name, length) for name in geometry.orders.regular()).items():
        order = order.to(geometry.device)
        moved = _InOrder(reordered(geometry.mask, order, order), length, length, **options)
        if layout is not None:
            scores, scores_now = (_scores_of(each) for each in (moved.build(layout.config, None), layout))
            orders.append(TokenOrder(text, layout.config, scores, scores_now))
            continue
        best, best_now = (candidates(call, device, each, model)[0] for each in (moved, geometry))
        tiles = None if best.choice is None else best.choice.layout
        if tiles is not None and best.estimate_us is not None and best_now.estimate_us is not None:
            counted = [each.survey((tiles,), None) for each in (moved, geometry)]
            scores, scores_now = (each.scores_of(tiles) // len(each.kept) for each in counted)
            orders.append(TokenOrder(text, tiles, scores, scores_now, best.estimate_us, best_now.estimate_us))
    helpful = [one for one in orders if one.helps]
    return min(helpful, key=lambda one: (one.estimate_us or 0.0, one.scores), default=None)


class _InOrder(MaskGeometry):
    """A mask whose tokens are in order: no row order is searched for."""

    def found_order(self) -> None:
        return None


def _token_order(name: str, length: int) -> tuple[str, Tensor]:
    """Description and order, int64 `[length]`, for a row order's name: squares of a grid in place of its patches."""
    order, *numbers = name.split()
    sizes = [int(number) for number in numbers]
    if order == "patch":
        return f"Z order of a {sizes[0]} x {sizes[1]} grid", by_z_order(*sizes[:2])
    return f"order of i % {sizes[0]}", by_remainder(length, *sizes)


def _scores_of(layout: Layout) -> int:
    return statistics(layout).computed // layout.pattern_of.numel()
