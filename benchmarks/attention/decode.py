"""`python -m benchmarks decode`: one query against a long cache, as bytes a second beside what a plain copy reaches."""

from __future__ import annotations

import torch

from benchmarks.attention.report import time_of
from benchmarks.attention.run import Row
from stof.tuning.timing import time_calls

# Read and written: far past any cache, so that the rate is the memory's.
_COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 128 * 2**20}


def needed_bytes(row: Row) -> float:
    """Bytes that any kernel must move: the keys and values that the mask keeps, once, the queries and the output."""
    size = getattr(torch, row.dtype).itemsize
    keys = row.kv_heads * row.density * row.kv_len
    return 2.0 * row.batch * row.head_dim * size * (keys + row.heads * row.q_len)


def rate(row: Row) -> float | None:
    """Needed bytes a second, None where nothing was timed."""
    us = time_of(row)
    return needed_bytes(row) / us * 1e6 if us else None


def copy_rate(device: torch.device, rounds: int = 7) -> float:
    """Bytes a second, read and written both counted, of a large element-wise kernel within the device's memory.

    A copy captured in a CUDA graph becomes a copy node, which moves a third less on an H200 than a kernel does.
    """
    source = torch.zeros(_COPY_BYTES.get(device.type, _COPY_BYTES["cpu"]) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = time_calls({"copy": lambda: torch.neg(source, out=target)}, device, rounds=rounds)["copy"]
    us = timing.gpu_us if timing.gpu_us is not None else timing.call_us
    return 2 * source.numel() * source.element_size() / us * 1e6
