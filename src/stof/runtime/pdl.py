"""Programmatic dependent launch (PDL): a kernel starts while the previous one in its stream still runs.

Its prologue overlaps the end of the previous kernel; it waits before it reads anything that a kernel writes.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
@no_type_check
def launch_next_and_wait(USE_PDL: tl.constexpr):
    """Allow the next kernel to start, then wait until the previous one has ended and its writes are visible.

    The next kernel's thread blocks occupy multiprocessors as these become idle and wait here themselves. This order is
    sound because every kernel waits: when the previous kernel has ended, all kernels before it have. Kernels launched
    without PDL start when this one has ended, and this one starts when they have.
    """
    launch_next(USE_PDL)
    wait_previous(USE_PDL)


@triton.jit
@no_type_check
def launch_next(USE_PDL: tl.constexpr):
    """Allow the next kernel in the stream to start."""
    if USE_PDL:
        gdc_launch_dependents()


@triton.jit
@no_type_check
def wait_previous(USE_PDL: tl.constexpr):
    """Wait for the previous kernel.

    Code before this call may only read memory that no kernel writes, or what the previous kernel wrote before it
    released a counter that this code has acquired.
    """
    if USE_PDL:
        gdc_wait()


def supports_pdl(device: torch.device) -> bool:
    """Whether a device supports programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
