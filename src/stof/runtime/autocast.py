"""Autocast without what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Autocast casts weights anew in this block, and keeps none of the casts.

    What it keeps would serve the user's calls after the block: casts made without gradients, or in a CUDA graph's pool.
    Where no autocast is on there is nothing to keep, and compiled code would be compiled again for the other setting.
    """
    if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        yield
        return
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
