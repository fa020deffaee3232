"""Launching Triton kernels: once through the JIT, then straight from the compiled kernel.

Triton's own call path binds, specialises and hashes every argument. An eager attention call took 52 us of host time
through it and took 15 without (`python -m benchmarks launch`, an H200 machine; others are up to twice as slow).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from stof.errors import KernelError
from stof.runtime.cache_keys import settled
from stof.runtime.memory import record
from stof.runtime.private import Launcher, encode_tensor_map, hooks_are_set, launcher_of, raw_stream, without_encoding

# Addresses whose encoded tensor maps a launch keeps, for each of its maps.
_MOST_ENCODED = 64


class TensorMap(NamedTuple):
    """Where TMA finds boxes of a tensor. Triton's launcher reads these names."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class TensorWindow(Protocol):
    """A tensor map but for the tensor, which every call brings anew, with the same shape, strides and dtype."""

    def at(self, tensor: Tensor) -> TensorMap: ...


class Launch:
    """A kernel on a one-dimensional grid with everything decided but some of its tensors.

    The kernel's parameters are, in this order: tensor maps of a call's bases, its tensors, `tensors`, `numbers`,
    `constants`.

    Args:
        kernel: a `triton.jit` function.
        grid: programs.
        tensors: tensors that are the same in every call.
        numbers: integers and floats.
        constants: values of the compile-time parameters.
        num_warps, num_stages, max_registers: compile options, 0 registers for no bound.
        windows: what the kernel copies of each base by TMA; None where it reads none.
        use_pdl: launch with programmatic dependent launch (`pdl.py`).
        device: where the tensors are; default that of the first of `tensors`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
        max_registers: int = 0,
        windows: tuple[TensorWindow | None, ...] = (),
        use_pdl: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.kernel, self.grid, self.device = kernel, grid, device or tensors[0].device
        self.windows = windows
        self.tensors = tensors
        self.rest = (*numbers, *constants)
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers:
            self.options["maxnreg"] = max_registers
        if use_pdl:
            self.options["launch_pdl"] = True
        self._pointers = tuple([t.data_ptr() for t in tensors])
        self._static_aligned = not any(pointer % 16 for pointer in self._pointers)
        self._launcher: Launcher | None = None
        self._encoded: _EncodedMaps | None = None
        self._streams: set[int] = set()

    def __call__(self, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> None:
        """Run the kernel; shapes, strides and dtypes are those of every other call.

        Args:
            tensors: what the kernel gets pointers to.
            bases: what TMA copies from and to; any tensor where there is no window.

        Raises:
            KernelError: the kernel does not compile for this device, or needs more shared memory than it has.
        """
        launcher = self._launcher
        if launcher is None:
            self._launch_jit(tensors, bases)
            return
        pointers = [t.data_ptr() for t in tensors]
        low = 0
        for pointer in pointers:
            low |= pointer
        current = torch.cuda.current_device()
        # Compiled for pointers to multiples of 16 bytes; hooks are for profilers, which want Triton's own path.
        if low & 15 or self.device.index not in (None, current) or hooks_are_set():
            self._launch_jit(tensors, bases)
            return
        encoded = self.maps(bases) if self._encoded is None else self._encoded(bases)
        stream = raw_stream(current)
        if stream not in self._streams:
            self._used_on(stream)
        launcher.run(
            self.grid, 1, 1, stream, launcher.function, launcher.metadata,
            None, None, None, *encoded, *pointers, *self._pointers, *self.rest,
        )  # fmt: skip

    def _used_on(self, stream: int) -> None:
        """Have PyTorch wait for this stream before it gives the tensors' memory to others.

        They may be dropped, with the plan that holds them, while a kernel reads them on a stream that they were not
        allocated for. Captured launches are left out: whoever replays them keeps the plan alive.
        """
        if stream not in self._streams and not torch.cuda.is_current_stream_capturing():
            record(self.tensors, self.device)
            self._streams.add(stream)

    def maps(self, bases: tuple[Tensor, ...]) -> tuple[TensorMap | None, ...]:
        """The tensor maps of a call."""
        return tuple([None if w is None else w.at(base) for w, base in zip(self.windows, bases, strict=True)])

    def _launch_jit(self, tensors: tuple[Tensor, ...], bases: tuple[Tensor, ...]) -> None:
        """Through Triton's own path, which compiles what is new."""
        arguments = (*_descriptors(self.maps(bases)), *tensors, *self.tensors, *self.rest)
        if not isinstance(self.kernel, triton.JITFunction):  # Triton's interpreter
            self.kernel[(self.grid,)](*arguments)
            return
        with torch.cuda.device(self.device):
            self._used_on(raw_stream(torch.cuda.current_device()))
            compiled = _launch_jit(self.kernel, self.grid, arguments, self.options)
        if self._static_aligned and not any(t.data_ptr() % 16 for t in tensors):
            launcher = launcher_of(compiled)
            if self.windows:
                run, metadata = without_encoding(launcher.run)
                if metadata is not None:
                    launcher = launcher._replace(run=run)
                    self._encoded = _EncodedMaps(self.windows, metadata)
            self._launcher = launcher


# Kernels that do not specialise on numbers, compiled for aligned tensors, by name, constants and device.
_compiled: dict[tuple[Any, ...], Launcher] = {}


def launch(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    *,
    device: torch.device,
    num_warps: int = 4,
) -> None:
    """Run a kernel that takes numbers as they come, without specialising on their values: compiled once for all.

    Args:
        kernel: its parameters are, in this order, tensors, numbers below 2**31, and constants, which tell the types of
            the tensors and decide `num_warps`.
        grid: programs.
        tensors, numbers, constants: its arguments.
        device: where the tensors are.
        num_warps: warps of a program.

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
    key = (kernel.__name__, constants, device.index)
    launcher = _compiled.get(key)
    if launcher is None or low & 15 or hooks_are_set():
        compiled = _launch_jit(kernel, grid, (*tensors, *numbers, *constants), {"num_warps": num_warps})
        if not low & 15:
            _compiled[key] = launcher_of(compiled)
        return
    launcher.run(
        grid, 1, 1, raw_stream(device.index), launcher.function, launcher.metadata,
        None, None, None, *pointers, *numbers, *constants,
    )  # fmt: skip


def _launch_jit(kernel: Any, grid: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launch through Triton's own path, and return the compiled kernel.

    Raises:
        KernelError: it does not compile for this device, or needs more shared memory than it has.
    """
    try:
        return settled(kernel)[(grid,)](*arguments, **options)
    except triton.TritonError as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[-1]
        raise KernelError(f"{kernel.__name__} does not run on this device: {type(error).__name__}: {first}") from error


class _EncodedMaps:
    """Tensor maps as a compiled kernel takes them, kept by address.

    Encoding one takes about 2 us of an eager call's 25 us (`python -m benchmarks launch` on an H200 machine). A call
    has four or more.
    """

    def __init__(self, windows: tuple[TensorWindow | None, ...], metadata: list[Any]) -> None:
        of_map = iter(metadata)
        self._slots: list[tuple[TensorWindow, Any, dict[int, list[Any]]] | None] = [
            None if window is None else (window, next(of_map), {}) for window in windows
        ]

    def __call__(self, bases: tuple[Tensor, ...]) -> list[Any]:
        arguments: list[Any] = []
        for slot, base in zip(self._slots, bases, strict=True):
            if slot is None:
                arguments.append(None)
                continue
            window, metadata, kept = slot
            address = base.data_ptr()
            found = kept.get(address)
            if found is None:
                if len(kept) >= _MOST_ENCODED:
                    kept.clear()
                found = kept[address] = encode_tensor_map(window.at(base), metadata)
            arguments += found
        return arguments


def _descriptors(maps: tuple[TensorMap | None, ...]) -> list[Any]:
    """Tensor maps as Triton's own path wants them."""
    if not maps:
        return []
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return [tensor_map and TensorDescriptor(*tensor_map[:5]) for tensor_map in maps]
