"""Choosing: the first implementation that refuses nothing, or an error with every reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stof.errors import UnsupportedError
from stof.layout import Layout, LayoutConfig, statistics
from stof.selection.capabilities import CallSpec
from stof.selection.implementations import IMPLEMENTATIONS


@dataclass(frozen=True)
class Candidate:
    """One implementation weighed for a call: `refusals` is empty when it can run."""

    name: str
    refusals: tuple[str, ...]


def candidates(call: CallSpec) -> list[Candidate]:
    """All implementations in order of preference, each with all its reasons to refuse."""
    return [Candidate(name, tuple(impl.capabilities.refusals(call))) for name, impl in IMPLEMENTATIONS.items()]


def choose(call: CallSpec) -> str:
    """Name of the implementation to run.

    Raises:
        UnsupportedError: none can; lists every reason of every implementation.
    """
    weighed = candidates(call)
    for candidate in weighed:
        if not candidate.refusals:
            return candidate.name
    raise UnsupportedError(f"no implementation can run this call ({call})", {c.name: c.refusals for c in weighed})


def default_implementation(device: torch.device) -> str:
    """The implementation most calls on this device get, which plans prepare for ahead of time."""
    return choose(CallSpec(device.type, torch.float32, head_dim=64, value_dim=64, heads=1, kv_heads=1))


def default_config(device: torch.device) -> LayoutConfig:
    """Block sizes to start from on a device; `refined_config` may improve on them once a layout is there.

    On the CPU 64 rows are fastest on Longformer and BigBird masks at S = 4096, and within 3 % of the best height on
    strided and causal ones (2 cores, fp32; benchmarks/cpu_choices.py). Other devices take the same until kernels of
    their own arrive.
    """
    del device
    return LayoutConfig(block_m=64, block_n=64, slab=1)


def refined_config(layout: Layout) -> LayoutConfig:
    """Block sizes for a mask, given its layout under the default ones.

    Where every row block keeps a contiguous range of columns, half the rows cost nothing to gather and waste less at
    the ends: a causal window of 512 takes 42.7 ms with 32 rows, 44.9 with 64 (S = 4096, H = 12, D = 64, fp32, 2 cores;
    benchmarks/cpu_choices.py). Below 5 % waste there is nothing to gain.
    """
    config = layout.config
    if layout.device.type != "cpu" or layout.tiles == 0 or statistics(layout).computed_over_needed < 1.05:
        return config
    columns, owner = layout.tile_columns(), layout.tile_row_block()
    exists = columns >= 0
    blocks = layout.row_block_ptr.numel() - 1
    count = torch.zeros(blocks, dtype=torch.int64).index_add_(0, owner, exists.sum(1))
    first = torch.full((blocks,), layout.kv_len).scatter_reduce_(
        0, owner, torch.where(exists, columns, layout.kv_len).amin(1), "amin"
    )
    last = torch.full((blocks,), -1).scatter_reduce_(0, owner, columns.amax(1), "amax")
    contiguous = bool(((last - first + 1 == count) | (count == 0)).all())
    return replace(config, block_m=32) if contiguous else config
