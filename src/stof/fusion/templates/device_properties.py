"""Properties of devices and installed packages that launches depend on."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


@functools.cache
def device_limits(index: int) -> tuple[tuple[int, int], int]:
    """Return compute capability and number of multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def programs(tensor: Tensor) -> int:
    """Return the number of persistent programs: one per multiprocessor, three in Triton's interpreter."""
    return device_limits(tensor.device.index or 0)[1] if tensor.device.type == "cuda" else 3


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Return launch options for programmatic dependent launch, on GPUs that have it."""
    from stof.runtime.pdl import supports_pdl

    return {"CHAINED": True, "launch_pdl": True} if supports_pdl(tensor.device) else {"CHAINED": False}


@functools.cache
def tilelang_installed() -> bool:
    """Whether TileLang is installed."""
    return importlib.util.find_spec("tilelang") is not None
