"""What launches need to know of the device, and of what is installed."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


@functools.cache
def device_limits(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors of a CUDA device."""
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def programs(tensor: Tensor) -> int:
    """Persistent programs: one a multiprocessor. Triton's interpreter takes them one by one: three."""
    return device_limits(tensor.device.index or 0)[1] if tensor.device.type == "cuda" else 3


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Options of kernels that take turns, where there is such a thing."""
    from stof.kernels.triton.pdl import supports_pdl

    return {"CHAINED": True, "launch_pdl": True} if supports_pdl(tensor.device) else {"CHAINED": False}


@functools.cache
def tilelang_installed() -> bool:
    """Whether there is a TileLang to import."""
    return importlib.util.find_spec("tilelang") is not None
