"""Programmatic dependent launch: kernels that are set up while the one before still runs, and then wait their turn."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
@no_type_check
def take_turn(CHAINED: tl.constexpr):
    """Let the next kernel be set up, and wait for the one before. Nothing that others write is read before.

    The next kernel's programs fill multiprocessors as they fall idle and wait here in their turn. Letting them in
    before waiting is sound because each of them waits: when the kernel before has ended, it has waited for all before
    it. Kernels of others do not take part: they start when this one has ended, and it when they have.
    """
    let_next(CHAINED)
    wait_turn(CHAINED)


@triton.jit
@no_type_check
def let_next(CHAINED: tl.constexpr):
    """The first half of `take_turn`: let the next kernel be set up."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
@no_type_check
def wait_turn(CHAINED: tl.constexpr):
    """The second half of `take_turn`. What comes before it may read what no kernel writes."""
    if CHAINED:
        gdc_wait()


def takes_turns(device: torch.device) -> bool:
    """Whether kernels on a device can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
