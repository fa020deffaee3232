"""What the kernels that build and count read: a mask's programs, or a dense mask's memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from stof.errors import KernelError
from stof.masks.base import Mask
from stof.masks.program import Programs, programs_of
from stof.masks.tensors import DenseMask

# Scores that a kernel's program handles at once, and its warps. Running a mask's program, a thread has registers for 8
# scores; reading a dense mask 16 bytes at a time, for more, and then one warp holds enough rows and needs no barriers.
_SCORES_RUN, _WARPS_RUN = 2**10, 4
_SCORES_READ, _WARPS_READ = 2**11, 1
# Rows of blocks that one program draws.
_DRAWN = 2**7

# Devices whose Triton does not compile the kernels, or has none.
_without: set[torch.device] = set()

T = TypeVar("T")


def on_device(device: torch.device, make: Callable[[torch.device], T | None]) -> T | None:
    """What `make` returns with this device, its number known, as the current one; None where there is no Triton."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device in _without:
        return None
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return make(device)
    except (KernelError, ImportError) as error:
        _without.add(device)
        reason = f"stof: layouts are built by torch from now on, which is slower: {error}"
        warnings.warn(reason, RuntimeWarning, stacklevel=4)
        return None


@dataclass(frozen=True, eq=False)
class Source:
    """What the kernels read.

    Attributes:
        tensor: programs, int32; or bytes of a dense mask `[.., Sq, Skv]`, as they are or four as one int32.
        entries: int32 `[P]`, which (batch, head) entry of a dense mask each of several patterns is; else None.
        strides: of batch, heads, queries and keys of a dense mask; of four int32 where it is read so.
        heads: entries of a dense mask in one batch entry.
        patterns: masks there are.
    """

    tensor: Tensor
    entries: Tensor | None
    strides: tuple[int, ...]
    heads: int
    patterns: int

    @property
    def kind(self) -> int:
        """One of the constants of `reading.py`."""
        from stof.layout.device import reading

        if self.tensor.ndim == 1:
            return int(reading.PROGRAM)
        return int(reading.QUADS if self.reads_quads else reading.BYTES)

    @property
    def reads_quads(self) -> bool:
        """Whether a dense mask is read as int32."""
        return self.tensor.ndim > 1 and self.tensor.dtype == torch.int32

    @property
    def num_warps(self) -> int:
        """Of a program that evaluates scores."""
        return _WARPS_READ if self.reads_quads else _WARPS_RUN

    def rows_at_once(self, block_m: int, columns: int) -> int:
        """Rows of a row block that a program handles together: a power of two that divides them."""
        scores = _SCORES_READ if self.reads_quads else _SCORES_RUN
        return min(block_m & -block_m, max(1, scores // columns))


def put(device: torch.device, numbers: list[int]) -> Tensor:
    """int32, without waiting for what the device does."""
    return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def source_of(
    mask: Mask, q_len: int, kv_len: int, mask_heads: int, entries: list[int], device: torch.device
) -> Source | None:
    """What the kernels read of some entries, `batch entry * mask_heads + head`; None for masks they do not serve."""
    if not isinstance(mask, DenseMask):
        programs = programs_of(mask, q_len, kv_len, [divmod(entry, mask_heads) for entry in entries])
        if programs is None:
            return None
        numbers = _with_draws(programs, device)
        return Source(numbers, None, (0, 0, 0, 0), 1, len(entries))
    keep = mask.keep
    if keep.device != device:
        return None
    if keep.ndim < 4:
        keep = keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape))
    strides = keep.stride()
    if max(map(abs, strides)) >= 2**31:
        return None
    aligned = not (kv_len % 16 or keep.data_ptr() % 16 or any(n % 16 for n in strides[:3]))
    if aligned and strides[3] == 1:
        keep, strides = keep.view(torch.int32), (*(n // 16 for n in strides[:3]), 1)
    else:
        keep = keep.view(torch.uint8)
    places = put(device, entries) if len(entries) > 1 else None
    return Source(keep, places, strides, keep.shape[1], len(entries))


def _with_draws(programs: Programs, device: torch.device) -> Tensor:
    """Programs on the device, followed by the tables that it fills."""
    if not programs.draws:
        return put(device, programs.numbers)

    from stof.layout.device.launch import launch
    from stof.layout.device.programs import draw_blocks

    numbers = torch.empty(programs.length, dtype=torch.int32, device=device)
    numbers[: len(programs.numbers)].copy_(put(device, programs.numbers))
    for draw in programs.draws:
        launch(draw_blocks, -(-draw.rows // _DRAWN), (numbers,), tuple(draw), (_DRAWN,), num_warps=4, device=device)
    return numbers
