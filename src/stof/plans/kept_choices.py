"""Choices kept by the structure of a mask: a later mask with other numbers is neither surveyed nor estimated.

The structure of a mask is its program without bounds, shifts, sizes and contents of tables. Of each structure, and of
each kind of call, several choices are kept, by how many keys a row sees on average. A kept choice says how a call is
computed, never which scores count: lists and layouts are made for each mask.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stof.runtime.locks import ForkSafeLock
from stof.selection import CallSpec, MaskGeometry

# Structures, with the calls under them, of which choices are kept.
_MOST = 256
# Brackets of the keys that a row sees: two for each factor of two. A choice of a neighbouring bracket serves, too.
_BRACKETS, _NEAR = 2, 1


class Kept(NamedTuple):
    """A choice, and the mask that it was made for.

    Attributes:
        choice: a `KernelChoice`, or a name and a `BackwardTiling`.
        mask_text: repr of the mask.
    """

    choice: Any
    mask_text: str


@dataclass
class KeptChoices:
    """Choices of one structure for one kind of call.

    Attributes:
        by_bracket: of the brackets that masks were chosen for.
        latest: the one that served last.
    """

    by_bracket: dict[int, Kept] = field(default_factory=dict)
    latest: Kept | None = None

    def near(self, keys: float) -> Kept | None:
        """Return the choice for masks whose rows see about so many keys, None if no mask was like that."""
        bracket = _bracket(keys)
        nearest = min(self.by_bracket, key=lambda other: abs(other - bracket), default=None)
        if nearest is None or abs(nearest - bracket) > _NEAR:
            return None
        self.latest = self.by_bracket[nearest]
        return self.latest

    def keep(self, keys: float, choice: Any, mask_text: str) -> None:
        self.latest = self.by_bracket[_bracket(keys)] = Kept(choice, mask_text)


def _bracket(keys: float) -> int:
    return round(_BRACKETS * math.log2(max(keys, 1.0)))


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

    def clear(self) -> None:
        """Forget all choices."""
        with self._lock:
            self._kept.clear()


kept_by_structure = KeptByStructure()


def structure_key(geometry: MaskGeometry, call: CallSpec, *rest: Hashable) -> Hashable | None:
    """The key of choices for calls like this one under masks of one structure; None for masks without a program.

    Lengths and batch entries count by powers of two, so that packed rows and growing caches share choices.

    Args:
        rest: what else decides.
    """
    structure, sizes = geometry.structure, geometry.dims
    if structure is None:
        return None
    kind = replace(
        call,
        batch=call.batch.bit_length(),
        q_len=(call.q_len - 1).bit_length(),
        kv_len=(call.kv_len - 1).bit_length(),
        bias_to_copy=int(call.bias_to_copy > 0),
    )
    return structure, kind, sizes[0] > 1, sizes[1] > 1, geometry.device, *rest
