"""Which masks a stretch of code uses: a captured CUDA graph replays under the values that their tensors had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stof.masks import Mask

# A mask, and the versions of its tensors.
UsedMask = tuple[Mask, tuple[int, ...]]
_USED = threading.local()


@contextmanager
def noting_masks() -> Iterator[list[UsedMask]]:
    """Note the masks with tensors in them under which this thread calls attention."""
    before, _USED.masks = getattr(_USED, "masks", None), []
    try:
        yield _USED.masks
    finally:
        _USED.masks = before


def note_mask(mask: Mask) -> None:
    """Note that a mask is used, where anyone wants to know."""
    if (used := getattr(_USED, "masks", None)) is not None and (versions := mask.versions):
        used.append((mask, versions))
