"""Row orders found by looking at the mask alone, for masks that name none (or whose own does not help enough).

First cheap questions: does the natural order waste much, and are there like rows at all? Then orders with a name are
tried, a stride and patches of a grid, which show in how much a row overlaps its neighbours at each distance; then rows
are clustered (`stof.layout.orders.cluster`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.layout.orders.cluster import cluster_rows
from stof.layout.orders.named import named_order
from stof.masks import Mask
from stof.masks.index import Index

# The name of an order that is found by clustering, without a formula.
CLUSTERED = "clustered"
# Computed over needed scores up to which the rows' own order is left alone.
GOOD_ENOUGH = 1.5
# An order counts as found when it leaves at most this share of the work, and one with a name is preferred when it is
# this close to the best: the Hopper kernel copies evenly spaced rows by TMA.
WORTH, _CLOSE = 0.8, 1.1
# Rows past which searching would take seconds; columns looked at, picked at random where there are more.
_MOST_ROWS, _MOST_COLUMNS = 2**15, 2**12
# Masks of a batch or of heads looked at, and the fewest columns of each.
_MOST_MASKS, _FEWEST_COLUMNS = 8, 2**10
# Scores evaluated at once.
_STRIP = 2**22
# Rows whose neighbours are looked at to see whether a search can help, and to find distances.
_PROBED = 32
# Patches tried where rows form a grid: 64 rows, flat to tall.
_PATCHES = ((8, 8), (4, 16), (16, 4), (2, 32), (32, 2))


def find_order(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
    block_m: int = 64,
) -> tuple[str, Tensor] | None:
    """The row order that makes the mask's row blocks densest, as far as cheap methods tell.

    Needs memory for the mask in float32, at most 4096 columns of it, on `device` (benchmarks/notes/row-orders.md).

    Args:
        mask, q_len, kv_len, batch, heads, device: as for `build_layout`. Masks of several heads or batch entries get
            one order for all.
        block_m: rows of a row block.

    Returns:
        Name and order, int64 `[q_len]` on `device`: a name that `named_order` knows, or `CLUSTERED`. None where the
        rows' own order computes at most `GOOD_ENOUGH` times what is needed, where no order that was found leaves less
        than 0.8 of that, and for more than 32768 rows.
    """
    if not block_m < q_len <= _MOST_ROWS:
        return None
    keep = _evaluated(mask, (q_len, kv_len), (batch, heads), device)
    unpermuted, needed = computed(keep, block_m), int(keep.count_nonzero())
    if unpermuted <= GOOD_ENOUGH * needed:
        return None
    near = _Nearness.of(keep)
    named = {name: named_order(name, q_len) for name in near.regular_names()}
    orders = {name: order.to(keep.device) for name, order in named.items() if order is not None}
    costs = {name: float(computed(keep[order], block_m)) for name, order in orders.items()}
    possible = near.possible(keep, block_m)
    if possible <= WORTH * unpermuted and min(costs.values(), default=unpermuted) > _CLOSE * possible:
        orders[CLUSTERED] = cluster_rows(near.described, block_m)
        costs[CLUSTERED] = _CLOSE * computed(keep[orders[CLUSTERED]], block_m)
    best = min(costs, key=lambda name: costs[name], default=None)
    return (best, orders[best]) if best is not None and costs[best] <= WORTH * unpermuted else None


def column_order(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
    block_n: int = 64,
) -> Tensor:
    """Keys seen by like queries side by side, int64 `[kv_len]` on `device`: their tiles need no gathering.

    Whether that is worth a pass over K and V is the caller's question; see `stof.masks.reordered`. Gathering columns
    singly computes as little without it.

    Args:
        mask, q_len, kv_len, batch, heads, device: as for `build_layout`.
        block_n: columns of a tile.
    """
    keep = _evaluated(mask, (q_len, kv_len), (batch, heads), device, columns=True)
    return cluster_rows(keep, block_n)


def fitting_orders(mask: Mask, q_len: int, kv_len: int) -> tuple[str, ...]:
    """Names of the orders that a mask names, as far as they fit the number of rows.

    `grid W` stands for patches of a grid of rows of W tokens, however many rows there are.
    """
    names = []
    for name in mask.row_orders(q_len, kv_len):
        if name.startswith("grid "):
            width = int(name.removeprefix("grid "))
            name = f"patch {q_len // width} {width} 8 8"
        if named_order(name, q_len) is not None:
            names.append(name)
    return tuple(names)


class RowOrders:
    """Row orders of one mask at one pair of lengths: those it names, and one found by looking at it, when asked.

    Args:
        mask, q_len, kv_len, batch, heads, device: as for `build_layout`.

    Attributes:
        names: `fitting_orders` of the mask.
    """

    def __init__(
        self, mask: Mask, q_len: int, kv_len: int, *, batch: int, heads: int, device: torch.device | str
    ) -> None:
        self.names = fitting_orders(mask, q_len, kv_len)
        self._q_len = q_len
        self._search = functools.partial(find_order, mask, q_len, kv_len, batch=batch, heads=heads, device=device)
        self._evaluated = functools.partial(_evaluated, mask, (q_len, kv_len), (batch, heads), device)
        self._searched = self._in_order = mask.has_monotonic_ranges
        self._search_result: tuple[str, Tensor] | None = None

    def regular(self) -> tuple[str, ...]:
        """The names, or else those by stride or by patches of a grid that like rows suggest, examined no further."""
        if self.names or self._in_order or not 64 < self._q_len <= _MOST_ROWS:
            return self.names
        suggested = _Nearness.of(self._evaluated()).regular_names()
        return tuple(name for name in suggested if named_order(name, self._q_len) is not None)

    def searched_name(self) -> str | None:
        """The name of what `find_order` finds, None where that is nothing new; searched once.

        Ragged documents waste much at the ends of row blocks, whatever the order, and each batch of them is another
        mask: none is searched for where rows stand in order.
        """
        if not self._searched:
            self._search_result = self._search()
            self._searched = True
        return None if self._search_result is None or self._search_result[0] in self.names else self._search_result[0]

    def rows(self, name: str | None) -> Tensor | None:
        """The order of that name, int64 `[q_len]`; None stands for the rows' own."""
        if self._search_result is not None and self._search_result[0] == name:
            return self._search_result[1]
        return None if name is None else named_order(name, self._q_len)


def computed(keep: Tensor, block_m: int) -> int:
    """Scores that row blocks of bool `[rows, columns]` compute when columns are gathered singly."""
    rows, columns = keep.shape
    whole = rows - rows % block_m
    # Bytes: `amax` is vectorised on the CPU, `any` is not (0.4 against 15 ms at 4096 x 4096, 2 cores).
    bytes_ = keep.view(torch.uint8)
    count = block_m * int(bytes_[:whole].view(-1, block_m, columns).amax(1).count_nonzero())
    return count + (rows - whole) * int(keep[whole:].any(0).sum())


def _some(length: int, most: int) -> Tensor:
    """Positions in order, picked at random where there are more than `most`; int64 on the CPU."""
    if length <= most:
        return torch.arange(length, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0x570F)
    return torch.randperm(length, generator=generator, device="cpu")[:most].sort().values


def _evaluated(
    mask: Mask, lengths: tuple[int, int], sizes: tuple[int, int], device: torch.device | str, columns: bool = False
) -> Tensor:
    """Bool `[q_len, k]`: all distinct masks side by side, of some keys where there are many.

    With `columns` the other way round: `[kv_len, q]`, of some queries.
    """
    mask_batch, mask_heads = mask.dims(*sizes, device)
    numbers = mask.pattern_ids(mask_batch, mask_heads).expand(mask_batch, mask_heads).flatten().tolist()
    pairs = [divmod(numbers.index(number), mask_heads) for number in dict.fromkeys(numbers)][:_MOST_MASKS]
    most = max(_FEWEST_COLUMNS, _MOST_COLUMNS // len(pairs))
    queries, keys = (lengths[0], most) if not columns else (most, lengths[1])
    rows, kv = _some(lengths[0], queries).to(device), _some(lengths[1], keys).to(device)
    distinct: list[Tensor] = []
    for b, h in pairs:
        at = {"b": torch.tensor([b], device=device), "h": torch.tensor([h], device=device)}
        strips = []
        for strip in rows.split(max(1, _STRIP // len(kv))):
            kept = mask.evaluate(Index.make(strip, kv, q_len=lengths[0], kv_len=lengths[1], **at))
            strips.append(kept.expand(1, 1, len(strip), len(kv))[0, 0])
        keep = torch.cat(strips)
        if not any(torch.equal(keep, other) for other in distinct):
            distinct.append(keep)
    return torch.cat([keep.T for keep in distinct] if columns else distinct, 1).contiguous()


@dataclass(frozen=True)
class _Nearness:
    """How much some rows overlap all others.

    Attributes:
        described: float32 `[rows, columns]`, 1 where a score is kept.
        some: int64 `[n]`, the rows looked at.
        shared: float32 `[n, rows]`, columns that each of them shares with every row.
    """

    described: Tensor
    some: Tensor
    shared: Tensor

    @staticmethod
    def of(keep: Tensor) -> _Nearness:
        some = _some(len(keep), _PROBED).to(keep.device)
        described = keep.float()
        with torch.autocast(keep.device.type, enabled=False):  # lower precision would lose counts
            return _Nearness(described, some, described[some] @ described.T)

    def possible(self, keep: Tensor, block_m: int) -> float:
        """Scores computed if all row blocks were like those of these rows, each with the rows most like it."""
        sizes = self.described.sum(1)
        unlike = sizes[self.some, None] + sizes - 2 * self.shared  # columns that one keeps and the other does not
        nearest = unlike.topk(block_m, dim=1, largest=False).indices
        together = keep[nearest]
        union = block_m * int(together.any(1).count_nonzero())
        return union / max(1, int(together.count_nonzero())) * int(keep.count_nonzero())

    def regular_names(self) -> list[str]:
        """Orders by stride, or by patches of a grid, that the distances suggest at which rows are alike."""
        rows = len(self.described)
        distance = torch.arange(rows // 2 + 1, device=self.some.device)
        other = self.some[:, None] + distance
        inside = other < rows
        overlap = (self.shared.gather(1, other.clamp(max=rows - 1)) * inside).sum(0)
        whole = (self.shared.gather(1, self.some[:, None]) * inside).sum(0)
        # For each distance, the share of a row's columns that the row at this distance keeps too.
        alike = (overlap / whole.clamp(min=1)).cpu()
        names = []
        # Take the least distance that is nearly the best, since its multiples score as high.
        stride = 2 + int((alike[2:] >= 0.95 * alike[2:].max()).int().argmax())
        if alike[stride] > 1.2 * alike[1]:
            names.append(f"remainder {stride}")
        # Rows of a grid: alike next to each other, then not, and again one line further.
        apart = (alike < 0.5 * alike[1]).nonzero()
        if len(apart):
            width = int(apart[0]) + int(alike[int(apart[0]) :].argmax())
            if alike[width] > 0.5 * alike[1] and rows % width == 0:
                names += [f"patch {rows // width} {width} {tall} {wide}" for tall, wide in _PATCHES]
        return names
