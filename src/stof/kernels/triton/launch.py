"""Launching Triton kernels: once through the JIT, then straight from the compiled kernel.

Triton's own call path binds, specialises and hashes every argument, some 20 us for a kernel of 60; the direct path
costs a dictionary look-up and the launch itself.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from stof.errors import KernelError

# Compiled kernels kept for direct launches; more means that shapes never repeat, and then the JIT's path is no worse.
_MAX_READY = 4096

_ready: dict[Hashable, Any] = {}
_lock = threading.Lock()


def launch(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int,
    num_stages: int,
    max_registers: int = 0,
    device: torch.device,
) -> None:
    """Run `kernel` on a one-dimensional grid; its parameters are tensors, then numbers, then constants.

    Raises:
        KernelError: the kernel does not compile for this device, or needs more shared memory than it has.
    """
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter
        kernel[(grid,)](*tensors, *numbers, *constants)
        return
    pointers = tuple([t.data_ptr() for t in tensors])
    aligned = 0
    for pointer in pointers:
        aligned = 2 * aligned + (pointer % 16 == 0)
    # Numbers by value: equal values specialise alike. Floats are not specialised.
    whole = tuple([n for n in numbers if type(n) is int])
    dtypes = tuple([t.dtype for t in tensors])
    key = (kernel, whole, aligned, dtypes, constants, num_warps, num_stages, max_registers, device.index)
    compiled = _ready.get(key)
    if compiled is None or knobs.runtime.launch_enter_hook is not None or knobs.runtime.launch_exit_hook is not None:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers:
            options["maxnreg"] = max_registers
        with torch.cuda.device(device):
            _first_launch(key, kernel, grid, tensors, numbers, constants, options)
        return
    current = torch.cuda.current_device()
    if device.index is not None and device.index != current:
        with torch.cuda.device(device):
            _direct(compiled, grid, device.index, pointers, numbers, constants)
    else:
        _direct(compiled, grid, current, pointers, numbers, constants)


def _direct(
    compiled: Any,
    grid: int,
    index: int,
    pointers: tuple[int, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
) -> None:
    stream = torch._C._cuda_getCurrentRawStream(index)
    compiled.run(
        grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *pointers, *numbers, *constants,
    )  # fmt: skip


def _first_launch(
    key: Hashable,
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    options: dict[str, int],
) -> None:
    try:
        compiled = kernel[(grid,)](*tensors, *numbers, *constants, **options)
    except (CompilationError, OutOfResources, PTXASError) as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[-1]
        raise KernelError(f"{kernel.__name__} does not run on this device: {type(error).__name__}: {first}") from error
    with _lock:
        if len(_ready) >= _MAX_READY:
            _ready.clear()
        _ready[key] = compiled
