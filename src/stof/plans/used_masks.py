"""Which masks a stretch of code uses: a captured CUDA graph replays under the values that they had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stof.masks import Mask
from stof.runtime.memory import refuse_values

# A mask that may change, and the frozen mask that it was.
UsedMask = tuple[Mask, Mask]
_USED = threading.local()


@contextmanager
def noting_masks() -> Iterator[list[UsedMask]]:
    """Note the masks that may change under which this thread calls attention."""
    before, _USED.masks = getattr(_USED, "masks", None), []
    try:
        yield _USED.masks
    finally:
        _USED.masks = before


def present(mask: Mask, device: torch.device) -> Mask:
    """The frozen mask of one that may change; both are recorded inside of `noting_masks`.

    Raises:
        UnsupportedError: a CUDA graph is being captured on this device, whose owner does not check masks.
    """
    if not mask.may_change:
        return mask
    refuse_values(device)
    frozen = mask.frozen()
    if (used := getattr(_USED, "masks", None)) is not None:
        used.append((mask, frozen))
    return frozen
