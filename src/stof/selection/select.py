"""Choosing: the first implementation that refuses nothing, or an error with every reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stof.errors import UnsupportedError
from stof.layout import LayoutConfig
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
    """Block sizes for a device.

    On the CPU 64 rows and single gathered columns are fastest on Longformer, BigBird, strided and window masks at
    S = 4096, and level with taller row blocks on causal ones (`stof bench attention`; 32 rows lose to per-call
    cost, 128 to columns computed in vain). Other devices take the same until kernels of
    their own arrive.
    """
    del device
    return LayoutConfig(block_m=64, block_n=64, slab=1)
