"""Launching Triton kernels: once through the JIT, then straight from the compiled kernel.

Triton's own call path binds, specialises and hashes every argument. An eager attention call took 52 us of host time
through it and 15 us without (`python -m benchmarks launch`, the host of an H200; other hosts are up to twice as slow).
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from stof.errors import KernelError
from stof.runtime.cache_keys import on_grid
from stof.runtime.memory import record_streams
from stof.runtime.private import (
    Launcher,
    encode_tensor_map,
    hooks_are_set,
    launcher_of,
    passed,
    raw_stream,
    without_encoding,
)

# Compiled kernels by everything they may be compiled for, with the encoded tensor maps of their windows: a launch under
# another mask, whose tensors alone differ, neither binds nor encodes anew.
_shared: dict[tuple[Any, ...], tuple[Launcher, _EncodedMaps | None]] = {}
_MOST_SHARED = 1024
# Encoded tensor maps that a launch keeps for each of its windows, one for each address of a tensor.
_MOST_ENCODED = 64


class TensorMap(NamedTuple):
    """A tensor map (TMA descriptor): a tensor and the box of one TMA copy. Triton's launcher reads these names."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class TensorWindow(Protocol):
    """Makes the tensor map of a call's tensor; shape, strides and dtype are the same in every call."""

    def at(self, tensor: Tensor) -> TensorMap: ...

    def key(self) -> tuple[Any, ...]:
        """Equal for windows with equal maps of equal tensors."""
        ...


class Launch:
    """A kernel on a one-dimensional grid, with all arguments fixed except the tensors that a call brings.

    The kernel's parameters are, in this order: tensor maps of the call's `bases`, the call's tensors, then `tensors`,
    `numbers` and `constants` as given here. A named tuple is one parameter, whose fields the kernel reads by name.

    Args:
        kernel: a `triton.jit` function.
        grid: number of thread blocks.
        tensors: tensors that are the same in every call, or named tuples of them.
        numbers: integers and floats, or named tuples of them.
        constants: values of the compile-time parameters.
        num_warps, num_stages, max_registers: compile options; `max_registers` 0 sets no limit.
        windows: one for each of a call's `bases`; None for a base that the kernel does not copy by TMA.
        use_pdl: launch with programmatic dependent launch (`pdl.py`).
        device: where the tensors are; default that of the first of `tensors`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        tensors: tuple[Tensor | tuple[Tensor, ...], ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
        max_registers: int = 0,
        windows: tuple[TensorWindow | None, ...] = (),
        use_pdl: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._hold(tensors)
        self.kernel, self.grid, self.device = kernel, grid, device or self._held[0].device
        self.windows = windows
        self.rest = (*numbers, *constants)
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers:
            self.options["maxnreg"] = max_registers
        if use_pdl:
            self.options["launch_pdl"] = True
        self._keys: list[tuple[Any, ...]] = []  # that of `_compiled_for`, once a call has shown it

    def _hold(self, tensors: tuple[Tensor | tuple[Tensor, ...], ...]) -> None:
        """Take the tensors that are the same in every call."""
        self.tensors = tensors
        self._held = [t for group in tensors for t in (group if isinstance(group, tuple) else (group,))]
        self._pointers = tuple(
            [tuple([t.data_ptr() for t in x]) if isinstance(x, tuple) else x.data_ptr() for x in tensors]
        )
        self._passed: tuple[Any, ...] = ()  # of what is fixed, what the machine code takes
        self._static_aligned = not any(t.data_ptr() % 16 for t in self._held)
        self._launcher: Launcher | None = None
        self._encoded: _EncodedMaps | None = None
        self._streams: set[int] = set()

    def with_tensors(self, tensors: tuple[Tensor | tuple[Tensor, ...], ...]) -> Launch:
        """The same launch with other fixed tensors, of equal dtypes, on the same device."""
        other = copy.copy(self)
        other._hold(tensors)
        return other

    def __call__(self, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> None:
        """Run the kernel. Shapes, strides and dtypes must be the same in every call.

        Args:
            tensors: tensors whose pointers the kernel gets.
            bases: tensors that TMA copies from and to; any tensor where the window is None.

        Raises:
            KernelError: the kernel does not compile for this device, or needs more shared memory than it has.
        """
        launcher = self._launcher
        if launcher is None and self.device.type != "cuda":  # Triton's interpreter
            self._launch_jit(tensors, bases)
            return
        if launcher is None:
            if not self._keys:
                self._keys.append(self._compiled_for(tensors, bases))
            key = self._keys[0]
            shared = _shared.get(key)
            if shared is None or not self._static_aligned:
                self._launch_jit(tensors, bases)
                self._share(key)
                return
            launcher, self._encoded = shared
            self._keep(launcher)
        pointers = [t.data_ptr() for t in tensors]
        low = 0
        for pointer in pointers:
            low |= pointer
        current = torch.cuda.current_device()
        # The compiled kernel assumes pointers aligned to 16 bytes. Only Triton's own path calls profilers' hooks.
        if low & 15 or self.device.index not in (None, current) or hooks_are_set():
            self._launch_jit(tensors, bases)
            return
        encoded = filter(None, self.maps(bases)) if self._encoded is None else self._encoded(bases)
        stream = raw_stream(current)
        if stream not in self._streams:
            # The plan that holds the fixed tensors may be dropped while a kernel reads them.
            record_streams(self._held, self.device, self._streams)
        launcher.run(
            self.grid, 1, 1, stream, launcher.function, launcher.metadata,
            None, None, None, *encoded, *pointers, *self._passed,
        )  # fmt: skip

    def _compiled_for(self, tensors: tuple[Tensor, ...], bases: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Everything but addresses: two launches with equal keys run the same machine code."""
        kinds = [t.dtype for t in (*tensors, *self._held, *bases)]
        windows = [None if w is None else w.key() for w in self.windows]
        groups = [len(x) if isinstance(x, tuple) else 0 for x in self.tensors]
        numbers = [(type(x), x) for x in self.rest]  # 1, 1.0 and True are equal, and compiled differently
        options = tuple(self.options.items())
        return self.kernel, self.device, options, len(tensors), *kinds, *windows, *groups, *numbers

    def _share(self, key: tuple[Any, ...]) -> None:
        """Keep the compiled kernel for launches with this key; not one that was compiled for unaligned tensors."""
        if self._launcher is not None:
            if len(_shared) >= _MOST_SHARED:
                _shared.clear()
            _shared[key] = self._launcher, self._encoded

    def _keep(self, launcher: Launcher) -> None:
        """Launch this compiled kernel from now on."""
        fixed = (*self._pointers, *self.rest)
        self._passed = tuple(passed(launcher.kinds[len(launcher.kinds) - len(fixed) :], fixed))
        self._launcher = launcher

    def maps(self, bases: tuple[Tensor, ...]) -> tuple[TensorMap | None, ...]:
        """Return the tensor maps of a call, None where there is no window."""
        return tuple([None if w is None else w.at(base) for w, base in zip(self.windows, bases, strict=True)])

    def _launch_jit(self, tensors: tuple[Tensor, ...], bases: tuple[Tensor, ...]) -> None:
        """Launch through Triton's own path, which compiles if needed, and keep the compiled kernel for later calls."""
        arguments = (*_descriptors(self.maps(bases)), *tensors, *self.tensors, *self.rest)
        if not isinstance(self.kernel, triton.JITFunction):  # Triton's interpreter
            self.kernel[(self.grid,)](*arguments)
            return
        with torch.cuda.device(self.device):
            record_streams(self._held, self.device, self._streams)
            compiled = _launch_jit(self.kernel, self.grid, arguments, self.options)
        if self._static_aligned and not any(t.data_ptr() % 16 for t in tensors):
            launcher = launcher_of(compiled)
            if self.windows:
                run, metadata = without_encoding(launcher.run)
                if metadata is not None:
                    launcher = launcher._replace(run=run)
                    self._encoded = _EncodedMaps(self.windows, metadata)
            self._keep(launcher)


# Kernels of `launch`, compiled for aligned tensors, by name, constants and device.
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
    """Run a kernel that is compiled once for all numbers, because it does not specialise on their values.

    Args:
        kernel: its parameters are, in this order, tensors, numbers below 2**31, and constants. Equal constants must
            mean equal tensor dtypes and an equal `num_warps`.
        grid: number of thread blocks.
        tensors, numbers, constants: its arguments.
        device: where the tensors are.
        num_warps: warps of a thread block.

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
        None, None, None, *pointers, *numbers,
    )  # fmt: skip


def _launch_jit(kernel: Any, grid: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launch through Triton's own path, and return the compiled kernel.

    Raises:
        KernelError: it does not compile for this device, or needs more shared memory than it has.
    """
    try:
        return on_grid(kernel, (grid,))(*arguments, **options)
    except triton.TritonError as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[-1]
        raise KernelError(f"{kernel.__name__} does not run on this device: {type(error).__name__}: {first}") from error


class _EncodedMaps:
    """Encodes tensor maps for a compiled kernel, and caches them by the tensor's address.

    Encoding one takes about 2 us of an eager call's 25 us (`python -m benchmarks launch`, the host of an H200). A call
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
                continue
            window, metadata, kept = slot
            address = base.data_ptr()
            encoded = kept.get(address)
            if encoded is None:
                if len(kept) >= _MOST_ENCODED:
                    kept.clear()
                encoded = kept[address] = encode_tensor_map(window.at(base), metadata)
            arguments += encoded
        return arguments


def _descriptors(maps: tuple[TensorMap | None, ...]) -> list[Any]:
    """Return tensor maps as Triton's own launch path takes them."""
    if not maps:
        return []
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return [tensor_map and TensorDescriptor(*tensor_map[:5]) for tensor_map in maps]
