"""A documents mask that changes between the replays of a CUDA graph, and plans whose lists the graph fills.

The mask may be intersected with masks by distance, which stay. The graph reads the mask's program from pinned memory,
and the lists of a plan have room for the tiles of any mask: no memory is allocated by the number of tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from stof.errors import UnsupportedError, shown
from stof.kernels.hopper.filled_lists import FilledTileLists, prepare_filled
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.implementation import tensors_of
from stof.layout.fill.tiles import FilledTiles, TileFill, start_fill
from stof.masks import Mask
from stof.masks.aligned import not_by_distance
from stof.masks.compose import And
from stof.plans.calls import call_sizes_of
from stof.plans.filled import counted_choice
from stof.plans.kept_choices import KeptChoices
from stof.plans.plan import Plan
from stof.runtime.memory import current_device, made_for_calls, record_streams, refuse_capture
from stof.selection import CallSpec, KernelChoice, MaskGeometry

# Most bytes of the bitmaps of one plan, which has room for a bitmap of every tile.
_MOST_BYTES = 2**26
_BITMAP_WORDS = 4  # of a row of a tile
# Numbers of a program that there is room for: those of 2000 documents.
_ROOM = 2**12
_LOCAL = threading.local()


class ReplacedMask:
    """The plans of the calls within `replacing`, under a mask that contains `mask`."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._plans: dict[Hashable, _FilledPlan] = {}

    def plan_of(self, mask: Any, q: Tensor, k: Tensor) -> Plan:
        """The plan of a call, made by the first such call.

        Raises:
            UnsupportedError: the call uses a plan, or a mask that is not the replaced one, alone or intersected with
                masks by distance. A replay would keep what the recording knew of the replaced one.
        """
        parts = mask.masks if isinstance(mask, And) else (mask,)
        further_masks = [part for part in parts if part != self._mask]
        if len(further_masks) != len(parts) - 1 or any(not_by_distance(part) is not None for part in further_masks):
            raise UnsupportedError(
                f"a call under {shown(mask)} is recorded in a CUDA graph whose replays have other documents, and only "
                "the documents can be replaced, alone or intersected by & with masks by distance",
                {},
            )
        key = (mask.key, q.shape[:3], k.shape[2], q.device)
        plan = self._plans.get(key)
        if plan is None:
            refuse_capture(q.device)
            plan = self._plans[key] = _FilledPlan(parts, parts.index(self._mask), q, k)
        return plan

    def take(self, mask: Mask) -> None:
        """Take another mask for the next replay.

        To be called after `holds_mask` of the previous replay, which waits until the device has read the old program.
        """
        for plan in self._plans.values():
            plan.take(mask)

    def fill(self) -> None:
        """Fill the lists of all plans for the mask that was taken. Recorded, this is repeated in each replay."""
        for plan in self._plans.values():
            plan.fill()

    def holds_mask(self) -> bool:
        """Whether the lists hold the mask of the last replay, or recording; waits for the device to count its tiles."""
        # Of all plans: where counts were not read, the next `take` waits for the device. Without plans, nothing is
        # known to depend on the mask.
        return bool(self._plans) and False not in [plan.holds_mask() for plan in self._plans.values()]


class _FilledPlan(Plan):
    """A plan whose lists are filled again, in place, for the Hopper kernel."""

    def __init__(self, parts: tuple[Mask, ...], place: int, q: Tensor, k: Tensor) -> None:
        """
        Args:
            parts: masks that are intersected.
            place: which of them is replaced.
            q, k: of a call.
        """
        self._parts, self._place = parts, place
        self._lists: list[tuple[TileFill, FilledTiles, FilledTileLists]] = []
        self._has_room = True  # and sizes that fit, for the mask that was taken last
        self._filled = 0  # how many of the lists the recording fills
        self._streams: set[int] = set()
        sizes: dict[str, Any] = {"batch": q.shape[0], "heads": q.shape[1], "device": q.device}
        self._sizes = {"q_len": q.shape[2], "kv_len": k.shape[2], **sizes}
        geometry = MaskGeometry(self._with(parts[place]), **self._sizes)
        mask, dims, lengths = geometry.mask, geometry.dims, (geometry.q_len, geometry.kv_len)
        mask.check(*lengths)
        super().__init__(repr(mask), lengths, dims, q.device, call_sizes=call_sizes_of(mask, dims), geometry=geometry)

    def _with(self, replacement: Mask) -> Mask:
        if len(self._parts) == 1:
            return replacement
        return And.of(*self._parts[: self._place], replacement, *self._parts[self._place + 1 :])

    def _decided(self, call: CallSpec, implementation: str | None) -> KernelChoice:
        geometry = self.mask_geometry
        assert geometry is not None
        arguments = KeptChoices(), geometry, call, self.device, self.mask_text
        # Only choices whose lists the device can fill, even if others are faster. The tile sizes that suit the first
        # mask stay.
        count = partial(counted_choice, *arguments, device=self.device)
        is_hopper_call = self.device.type == "cuda" and implementation in (None, "hopper")
        serves = made_for_calls(self.device, count) if is_hopper_call else None
        if serves is not None:
            key = replace(serves.choice, widened=False)
            if key not in self._prepared:
                self._prepared[key] = made_for_calls(self.device, partial(self._make_lists, key))
            return serves.choice
        raise _not_recorded("other kernels run its attention")

    def _make_lists(self, choice: KernelChoice) -> PreparedTiles:
        """The lists of a choice, for any mask."""
        layout, kernel, geometry = choice.layout, choice.kernel, self.mask_geometry
        assert layout is not None
        assert kernel is not None
        assert geometry is not None
        sizes = (self.q_len, self.kv_len, geometry.dims, geometry.which, layout.block_m, layout.block_n)
        with current_device(self.device):
            fill = None if any(geometry.which) else start_fill(geometry.evaluated, *sizes, self.device, _ROOM)
            most = None if fill is None else fill.max_counts()
            if fill is None or most is None or most[1] * layout.block_m * _BITMAP_WORDS * 4 > _MOST_BYTES:
                raise _not_recorded("too large for that")
            tiles = fill.write(*most, every_column=False)
        prepared = prepare_filled(tiles, (self.q_len, self.kv_len), layout.block_n, kernel, changing=True)
        assert isinstance(prepared.lists, FilledTileLists)
        self._lists.append((fill, tiles, prepared.lists))
        return prepared

    def take(self, replacement: Mask) -> None:
        """Take the mask with another documents mask in it."""
        geometry = MaskGeometry(self._with(replacement), **self._sizes)
        geometry.mask.check(self.q_len, self.kv_len)
        written = [tiles for _, tiles, _ in self._lists]
        record_streams(tensors_of([written, *self._prepared.values()]), self.device, self._streams)
        same_sizes = geometry.dims == (self.mask_batch, self.mask_heads) and not any(geometry.which)
        refilled = [fill.refill(geometry.evaluated) for fill, _, _ in self._lists]
        self._has_room = same_sizes and all(refilled)

    def fill(self) -> None:
        """Fill all lists for the mask that was taken."""
        with current_device(self.device):
            for fill, tiles, lists in self._lists:
                fill.run_again(tiles)
                lists.write_work_lists()
        self._filled = len(self._lists)

    def holds_mask(self) -> bool:
        """Whether the lists hold the mask of the last replay, or of the recording.

        False if there is no room for its program or its tiles, if its size differs or heads have different masks, if a
        key after the first unseen one is seen, or if lists were made after the recording had filled the others.
        """
        counts = [fill.counts() for fill, _, _ in self._lists]
        return self._has_room and self._filled == len(self._lists) and None not in counts


def _not_recorded(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"masks that differ from replay to replay need lists for the Hopper kernel, of at most {_MOST_BYTES >> 20} MB: "
        f"{reason}",
        {},
    )


@contextmanager
def replacing(mask: Mask) -> Iterator[ReplacedMask]:
    """Within it, attention of this thread runs under plans whose lists `ReplacedMask.fill` fills."""
    before, _LOCAL.replaced = getattr(_LOCAL, "replaced", None), ReplacedMask(mask)
    try:
        yield _LOCAL.replaced
    finally:
        _LOCAL.replaced = before


def replaced_mask() -> ReplacedMask | None:
    """That of the innermost `replacing` of this thread."""
    replaced: ReplacedMask | None = getattr(_LOCAL, "replaced", None)
    return replaced
