"""Launching the kernels that build layouts: straight from the compiled kernel once there is one.

They take numbers as they come, without specialising on their values, so one compiled kernel serves all lengths, and
Triton's own call path, which binds and hashes every argument, is needed only once for every set of constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from stof.errors import KernelError
from stof.runtime.cache_keys import settled

# Compiled for aligned tensors, by kernel, constants and device.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], constants: tuple[Any, ...],
    *, device: torch.device, num_warps: int = 4,
) -> None:  # fmt: skip
    """Run a kernel whose parameters are, in this order, tensors, numbers below 2**31, and constants.

    Raises:
        KernelError: it does not compile for this device.
    """
    if device.type != "cuda":  # Triton's interpreter
        kernel[(grid,)](*tensors, *numbers, *constants)
        return
    pointers = [t.data_ptr() for t in tensors]
    low = 0
    for pointer in pointers:
        low |= pointer
    # A kernel's constants say which types its tensors have, and how many warps it runs with.
    key = (kernel.__name__, constants, device.index)
    found = _compiled.get(key)
    # Profilers' hooks want Triton's own path, and so do pointers to other than multiples of 16 bytes.
    hooked = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
    if found is None or low & 15 or hooked:
        try:
            made = settled(kernel)[(grid,)](*tensors, *numbers, *constants, num_warps=num_warps)
        except (CompilationError, OutOfResources, PTXASError) as error:
            first = (str(error) or type(error).__name__).strip().splitlines()[-1]
            raise KernelError(
                f"{kernel.__name__} does not run on this device: {type(error).__name__}: {first}"
            ) from error
        if not low & 15:
            _compiled[key] = made
        return
    found.run(
        grid, 1, 1, torch._C._cuda_getCurrentRawStream(device.index), found.function, found.packed_metadata,
        None, None, None, *pointers, *numbers, *constants,
    )  # fmt: skip
