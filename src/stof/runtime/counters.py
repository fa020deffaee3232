"""Counters that are zero when a kernel gets them and zero again when it ends."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.runtime.locks import ForkSafeLock
from stof.runtime.memory import outside_graph_pool
from stof.runtime.private import raw_stream

# 4 MB of counters per device for captured graphs, enough for thousands of captured calls.
_ARENA = 2**20
# Kernels are compiled for pointers to multiples of 16 bytes, and two kernels' counters must not share a cache line.
_LINE = 32

_lock = ForkSafeLock()
_by_stream: dict[tuple[int, int], Tensor] = {}
_arena: dict[int, tuple[Tensor, int]] = {}
# Smaller counters that larger ones replaced are kept, since running kernels may use them; their total is smaller.
_outgrown: list[Tensor] = []


def zeroed_counters(count: int, device: torch.device) -> Tensor:
    """int32 `[>= count]`, all zero, for one launch whose kernel sets every counter back to zero.

    Calls on one stream follow each other, so they share counters; streams do not. A captured call may be replayed
    next to anything else: it gets counters of its own, taken from an arena that was cleared before any capture,
    so that the graph holds no clearing.
    """
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return _from_arena(count, device, index)
    key = (index, raw_stream(index))
    counters = _by_stream.get(key)
    if counters is None or counters.numel() < count:
        with _lock:
            if index not in _arena:
                _arena[index] = (_cleared(_ARENA, device), 0)
            counters = _by_stream.get(key)  # another thread may have been here first
            if counters is None or counters.numel() < count:
                if counters is not None:
                    _outgrown.append(counters)
                counters = _by_stream[key] = _cleared(max(1024, 2 * count), device)
    return counters


def _cleared(count: int, device: torch.device) -> Tensor:
    return outside_graph_pool(device, lambda: torch.zeros(count, dtype=torch.int32, device=device))


def _from_arena(count: int, device: torch.device, index: int) -> Tensor:
    count = -(-count // _LINE) * _LINE
    with _lock:
        arena, used = _arena.get(index, (None, 0))
        if arena is not None and used + count <= arena.numel():
            _arena[index] = (arena, used + count)
            return arena[used : used + count]
    return torch.zeros(count, dtype=torch.int32, device=device)
