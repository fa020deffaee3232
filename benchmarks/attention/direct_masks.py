"""`python -m benchmarks direct`: attention under a bool tensor that is read in every call, beside plans and SDPA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import stof
from benchmarks.timing import host_us
from stof import masks
from stof.testing import assert_attention

_PATTERNS = {
    "window of 512": masks.sliding_window(512),
    "Longformer": masks.sliding_window(128, 128) | masks.global_tokens(64),
    "causal": masks.causal(),
}


@dataclass(frozen=True)
class DirectRow:
    """One way to attend under one mask.

    Attributes:
        mask, length: of the problem.
        how: what the mask is given as.
        us: wall time of an eager call among many, in microseconds.
        host_us: the host's part of it on a GPU.
    """

    mask: str
    length: int
    how: str
    us: float
    host_us: float | None


def direct_rows(
    device: torch.device, dtype: torch.dtype, lengths: list[int], heads: int, head_dim: int
) -> Iterator[DirectRow]:
    """Check every way against float64, then time it."""
    for length in lengths:
        q, k, v = (torch.randn(1, heads, length, head_dim, dtype=dtype, device=device) for _ in range(3))
        for name, pattern in _PATTERNS.items():
            keep = pattern.to_dense(length, device=device)[0, 0].contiguous()
            table = keep.clone()
            masks_by_name = {
                "plan": stof.plan(keep, length, device=device),
                "masks.from_dense(tensor)": masks.from_dense(keep),
                "bool tensor": keep,
                "mask function that reads a tensor": _lookup(table),
            }
            ways: dict[str, Callable[[], object]] = {
                how: partial(stof.attention, q, k, v, mask) for how, mask in masks_by_name.items()
            }
            ways["SDPA, bool tensor"] = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=keep)
            with torch.no_grad():
                for call in ways.values():
                    assert_attention(call(), None, q, k, v, keep[None, None])  # type: ignore[arg-type]
                host = host_us(ways, device, calls=100, batch=10) if device.type == "cuda" else {}
                for how, call in ways.items():
                    yield DirectRow(name, length, how, _wall_us(call, device), host.get(how))


def _lookup(table: torch.Tensor) -> masks.Mask:
    return masks.from_function(lambda b, h, i, j: table[i, j])


def _wall_us(call: Callable[[], object], device: torch.device, seconds: float = 0.2) -> float:
    """Wall time of one call among many that follow each other."""
    call()
    count, taken = 1, 0.0
    while taken < seconds:
        count *= 2
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - start
    return taken / count * 1e6
