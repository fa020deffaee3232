"""Choices kept by the structure of a mask: a later mask with other numbers need not be surveyed.

The structure of a mask is its program without bounds, shifts, table sizes and table contents, or the text of a function
or composition without its numbers; all bool tensors have one. Of each structure, and of each kind of call, several
choices are kept: how fast one is depends on how many keys rows see, and on much else. A kept choice says how a call is
computed, never which scores count: lists and layouts are made for each mask.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from stof.runtime.locks import ForkSafeLock
from stof.selection import CallSpec, MaskGeometry

# Structures, with the calls under them, of which choices are kept, and choices of each.
_MOST, _MOST_CHOICES = 256, 32
# How much each statistic of a mask, a logarithm to base 2, may differ from that of the mask that a choice was made for.
_REACH = 0.5
# Strided row orders need a length that stride times `block_m` divides; larger divisors than this make no difference.
_EVEN = 2**12

Statistics = tuple[float, ...]


class Kept(NamedTuple):
    """A choice, and the mask that it was made for.

    Attributes:
        choice: a `KernelChoice`, or a `BackwardTiling`; None where an implementation does not serve the structure.
        mask_text: repr of the mask.
    """

    choice: Any
    mask_text: str


class KeptChoices:
    """Choices of one structure for one kind of call, by the statistics of the masks that they were made for.

    Attributes:
        may_count: whether masks unlike all of those are served by whole tiles, chosen from counts of their tiles.
        compiled: whole tiles whose kernels are compiled: their layouts, or for gradients `compiled_by` their tilings.
    """

    def __init__(self) -> None:
        self._by_statistics: dict[Statistics, Kept] = {}
        self.may_count = False
        self.compiled: set[Hashable] = set()

    def near(self, statistics: Statistics) -> Kept | None:
        """Return the choice made for the mask that is most alike, None if none was alike enough."""
        kept = self._by_statistics
        nearest = min(kept, key=lambda other: _distance(statistics, other), default=None)
        return None if nearest is None or _distance(statistics, nearest) > _REACH else kept[nearest]

    def first(self) -> Kept | None:
        """Return the choice that was made first, None if there is none."""
        return next(iter(self._by_statistics.values()), None)

    def keep(self, statistics: Statistics, choice: Any, mask_text: str) -> None:
        """Keep a choice for masks like the one it was made for; of too many, the one made first is dropped."""
        items = [*self._by_statistics.items()][1 - _MOST_CHOICES :]
        self._by_statistics = {**dict(items), statistics: Kept(choice, mask_text)}

    def drop(self, choice: Any) -> None:
        """Forget a choice that failed."""
        left = {at: kept for at, kept in self._by_statistics.items() if kept.choice != choice}
        self.may_count = self.may_count and len(left) == len(self._by_statistics)
        self._by_statistics = left


def _distance(one: Statistics, other: Statistics) -> float:
    if len(one) != len(other):
        return math.inf
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


class KeptByStructure:
    """Kept choices by structure and call, least recently used ones dropped; safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, KeptChoices] = OrderedDict()
        self._lock = ForkSafeLock()

    def of(self, key: Hashable) -> KeptChoices:
        """Return the choices under a key of `structure_key`, at first none."""
        with self._lock:
            kept = self._kept.setdefault(key, KeptChoices())
            self._kept.move_to_end(key)
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
            return kept

    def drop(self, choice: Any) -> None:
        """Forget a choice that failed, of all structures."""
        with self._lock:
            for kept in self._kept.values():
                kept.drop(choice)

    def clear(self) -> None:
        """Forget all choices."""
        with self._lock:
            self._kept.clear()


kept_by_structure = KeptByStructure()


def structure_key(geometry: MaskGeometry, call: CallSpec, *rest: Hashable) -> Hashable | None:
    """The key of choices for calls like this one under masks of one structure; None for masks that have none.

    Lengths and batch entries count by powers of two, so that packed rows and growing caches share choices.

    Args:
        rest: what else decides.
    """
    outline, sizes, orders = geometry.outline, geometry.dims, geometry.row_orders
    if outline is None:
        return None
    even = math.gcd(geometry.q_len, _EVEN) if orders else 1
    return outline.structure, orders, even, _kind_of(call), sizes[0] > 1, sizes[1] > 1, geometry.device, *rest


@functools.lru_cache(maxsize=256)
def _kind_of(call: CallSpec) -> CallSpec:
    """What calls that share choices have in common."""
    return replace(
        call,
        batch=call.batch.bit_length(),
        q_len=(call.q_len - 1).bit_length(),
        kv_len=(call.kv_len - 1).bit_length(),
        bias_to_copy=int(call.bias_to_copy > 0),
    )
