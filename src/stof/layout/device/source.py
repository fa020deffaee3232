"""What the kernels that build and count read: a mask's programs, or a dense mask's memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from stof.errors import KernelError
from stof.masks.base import Mask
from stof.masks.program import Draw, programs_of
from stof.masks.tensors import DenseMask

# Scores that a kernel's program handles at once, so that each of its threads has registers for them: running a mask's
# program a bit takes none, reading a dense mask 16 bytes at a time a byte takes a quarter.
_SCORES_RUN, _SCORES_BYTES, _SCORES_QUADS = 2**14, 2**10, 2**13
# Numbers that one program of `prepare` clears.
_CLEARED = 2**10

# Devices whose Triton does not compile the kernels, or has none.
_without: set[torch.device] = set()

# What a kernel reads: programs, bytes of dense masks, or four of their bytes, four columns, as one int32.
PROGRAM, BYTES, QUADS = range(3)

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


class Source(NamedTuple):
    """What the kernels read.

    Attributes:
        dense: bytes of a dense mask `[.., Sq, Skv]`, as they are or four as one int32; None where there are programs.
        kind: one of the constants of `reading.py`.
        numbers: programs, as `stof.masks.program` numbers them; or which (batch, head) entry of a dense mask each
            pattern is.
        draws: tables that the device adds to the numbers.
        length: numbers there are with these tables.
        strides: of batch, heads, queries and keys of a dense mask; of four int32 where it is read so.
        heads: entries of a dense mask in one batch entry.
        patterns: masks there are.
    """

    dense: Tensor | None
    kind: int
    numbers: list[int]
    draws: list[Draw]
    length: int
    strides: tuple[int, ...]
    heads: int
    patterns: int

    def rows_at_once(self, block_m: int, columns: int) -> int:
        """Rows of a row block that a program handles together: a power of two that divides them."""
        scores = (_SCORES_RUN, _SCORES_BYTES, _SCORES_QUADS)[self.kind]
        return min(block_m & -block_m, max(1, scores // columns))

    def prepared(self, zeros: int, rest: int, found: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """What kernels start from, made without waiting for what the device does.

        Args:
            zeros, rest: numbers that are 0 at first, and numbers that may be anything.
            found: numbers that the device has to tell.
            device: the current one.

        Returns:
            int32 on the device, zeros first and this source's numbers last; int32 on the host, where kernels may write
            the first `found` numbers, and which must live until they have ended; and where the source's numbers begin.
        """
        from stof.layout.device.launch import launch
        from stof.layout.device.reading import prepare

        first = zeros + rest
        state = torch.empty(first + self.length, dtype=torch.int32, device=device)
        # A kernel reads pinned memory where it lies, which takes less of the host's time than to have it copied.
        given = [0] * found + self.numbers
        for draw in self.draws:
            given += draw
        on_host = torch.tensor(given, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        sizes = (found, zeros, first, len(self.numbers), len(self.draws))
        launch(prepare, -(-max(zeros, self.length) // _CLEARED), (on_host, state), sizes, (), device=device)
        return state, on_host, first


def source_of(
    mask: Mask, q_len: int, kv_len: int, mask_heads: int, entries: list[int], device: torch.device
) -> Source | None:
    """What the kernels read of some entries, `batch entry * mask_heads + head`; None for masks they do not serve."""
    if not isinstance(mask, DenseMask):
        programs = programs_of(mask, q_len, kv_len, [divmod(entry, mask_heads) for entry in entries])
        if programs is None:
            return None
        return Source(None, PROGRAM, *programs, (0, 0, 0, 0), 1, len(entries))
    keep = mask.keep
    if keep.device != device:
        return None
    if keep.ndim < 4:
        keep = keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape))
    strides = keep.stride()
    if max(map(abs, strides)) >= 2**31:
        return None
    heads = keep.shape[1]
    aligned = not (kv_len % 16 or keep.data_ptr() % 16 or any(n % 16 for n in strides[:3]))
    if aligned and strides[3] == 1:
        strides = (*(n // 16 for n in strides[:3]), 1)
        return Source(keep.view(torch.int32), QUADS, entries, [], len(entries), strides, heads, len(entries))
    return Source(keep.view(torch.uint8), BYTES, entries, [], len(entries), strides, heads, len(entries))
