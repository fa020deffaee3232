"""Like rows brought together, whatever the mask: a tree of cuts, each at the place that leaves least to compute.

A row block computes the columns that any of its rows keeps, so rows belong together whose columns overlap. Rows are
described by how much they overlap every other row, projected to a few random directions; these descriptions of a
window's rows lie along a curve, of a neighbourhood's on a sheet, of separate documents apart from each other. Each part
of the rows is sorted along a few of its main axes, cut where the expected union of columns falls most, and the cut is
improved by giving rows to the side that adds fewer columns. The order of the columns plays no role.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Random directions that rows are described by: half as many lose up to a quarter of the result, more gain nothing.
_DIRECTIONS = 128
# Main axes tried, and how they are found: iterations with this power (of two) of the moments.
_AXES, _SQUARINGS, _ITERATIONS = 3, 3, 8
# Angles tried in the plane of the two main axes: a square grid has no preferred one of its own.
_ANGLES = 8
# Places to cut tried along each axis, evenly spaced.
_CUTS = 7
# Large parts are judged by this many columns, picked at random.
_JUDGED, _LARGE = 2048, 512
# A cut is improved at most this often.
_ROUNDS = 8
# A column counts as needed by a part with the probability that some of so many random rows of it keep the column. With
# 64, as in a row block, early cuts would mix rows that later cuts cannot separate.
_SHARPNESS = 16


def cluster_rows(keep: Tensor, block_m: int = 64) -> Tensor:
    """An order of rows in which each `block_m` that follow each other keep like columns, int64 `[rows]`.

    The same for equal masks on one device, under autocast as well. Needs memory for the mask in float32.

    Args:
        keep: bool `[rows, columns]`; columns may be a sample of all, in any order.
        block_m: rows of a row block.
    """
    # Lower precision would lose counts.
    with torch.autocast(keep.device.type, enabled=False):
        return _clustered(keep.float(), block_m)


def _clustered(described: Tensor, block_m: int) -> Tensor:
    rows, columns = described.shape
    device = described.device
    generator = torch.Generator("cpu").manual_seed(0x570F)
    directions = torch.randn(rows, _DIRECTIONS, generator=generator, device="cpu").to(device)
    features = described @ (described.T @ directions) / rows
    judged = described
    if columns > _JUDGED:
        picked = torch.randperm(columns, generator=generator, device="cpu")[:_JUDGED]
        judged = described[:, picked.to(device)]
    done: list[Tensor] = []
    parts = [torch.arange(rows, device=device)]
    while parts:
        part = parts.pop()
        if len(part) <= block_m:
            done.append(part)
            continue
        exact = judged if len(part) > _LARGE else described
        cut, ordered = _cut(exact[part], features[part], block_m)
        parts += [part[ordered[cut:]], part[ordered[:cut]]]
    # Every cut leaves a multiple of `block_m` before it, so at most one part is smaller.
    done.sort(key=lambda part: len(part) < block_m)
    return torch.cat(done)


def _cut(keep: Tensor, features: Tensor, block_m: int) -> tuple[int, Tensor]:
    """Where to cut rows in two, and the rows' order for it: `(rows of the first part, int64 [rows])`.

    Args:
        keep: float `[rows, columns]`, 0 or 1.
        features: float `[rows, directions]`.
    """
    rows, columns = keep.shape
    # Pairs of row blocks stay together while parts are large: so orders serve blocks twice as tall too.
    unit = 2 * block_m if rows > 4 * block_m else block_m
    units = -(-rows // unit)
    places = sorted({round(units * step / (_CUTS + 1)) * unit for step in range(1, _CUTS + 1)} - {0, units * unit})
    scores = _scores(features)
    orders = scores.argsort(dim=1, stable=True)
    ranks = torch.empty_like(orders).scatter_(1, orders, torch.arange(rows, device=keep.device).expand_as(orders))
    sizes = torch.tensor(places, dtype=keep.dtype, device=keep.device)
    before = (ranks[:, None, :] < sizes[:, None]).to(keep.dtype)  # [axes, places, rows]
    total = keep.sum(0)
    first = (before.flatten(0, 1) @ keep).view(len(scores), len(places), columns)
    expected = _expected(rows, block_m)
    cost = expected(first, sizes[:, None]) + expected(total - first, rows - sizes[:, None])
    axis, place = divmod(int(cost.argmin()), len(places))
    return places[place], _improved(keep, orders[axis], places[place], float(cost[axis, place]), expected)


def _scores(features: Tensor) -> Tensor:
    """float `[axes, rows]`: rows along their main axes, and along several between the first two."""
    centred = features - features.mean(0)
    along = centred @ _main_axes(centred.T @ centred)
    angles = torch.arange(_ANGLES, device=features.device) * (math.pi / _ANGLES)
    turned = angles.cos()[:, None] * along[:, 0] + angles.sin()[:, None] * along[:, 1]
    return torch.cat([turned, along[:, 2:].T])


def _main_axes(moments: Tensor) -> Tensor:
    """float `[directions, 3]`: the axes along which rows differ most, from `moments [directions, directions]`.

    By subspace iteration: LAPACK's eigenvalues fail to converge on the moments of rows that are nearly equal.
    """
    # On the CPU: a matrix of 128 x 128 is no work for a GPU.
    power = moments.cpu().double()
    for _ in range(_SQUARINGS):
        power = power / power.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        power = power @ power
    axes = torch.eye(len(power), _AXES, dtype=power.dtype, device="cpu") + 1e-3
    for _ in range(_ITERATIONS):
        axes = torch.linalg.qr(power @ axes).Q
    return axes.to(moments)


Expected = Callable[[Tensor, Tensor], Tensor]


def _expected(rows: int, block_m: int) -> Expected:
    """What to judge a cut of so many rows by: what `count [..., columns]` kept scores of `size [..., 1]` rows cost."""

    def exact(count: Tensor, size: Tensor) -> Tensor:
        """Scores computed when each side is one row block."""
        return (count > 0).sum(-1) * size[..., 0]

    def drawn(count: Tensor, size: Tensor) -> Tensor:
        """Scores computed when row blocks are drawn at random: a column is needed unless all of them drop it."""
        return (1 - (1 - count / size).clamp(0, 1) ** block_m).sum(-1) * size[..., 0]

    return exact if rows <= 2 * block_m else drawn


def _improved(keep: Tensor, order: Tensor, cut: int, cost: float, expected: Expected) -> Tensor:
    """Move rows to the part where they add fewer columns, at equal sizes, while the cost falls; return the order."""
    rows = len(keep)
    total = keep.sum(0)
    first = keep[order[:cut]].sum(0)
    sizes = torch.tensor([float(cut)], device=keep.device), torch.tensor([float(rows - cut)], device=keep.device)
    for _ in range(_ROUNDS):
        alone = (1 - first / cut) ** _SHARPNESS - (1 - (total - first) / (rows - cut)) ** _SHARPNESS
        proposed = (keep @ alone).argsort(stable=True)
        first = keep[proposed[:cut]].sum(0)
        new = float(expected(first, sizes[0]) + expected(total - first, sizes[1]))
        if new >= cost:
            break
        cost, order = new, proposed
    return order
