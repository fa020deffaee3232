"""What is timed: a problem (one cell of the grid) and a peer (one implementation of it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stof.testing.mask_grid import GridMask, Shape

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Problem:
    """One cell of the grid: a mask, a shape, and the inputs everyone gets.

    Attributes:
        q: `[B, H, Sq, D]`, contiguous like k and v `[B, Hkv, Skv, D]`; peers may keep a copy in another layout.
    """

    grid_mask: GridMask
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.shape.heads != self.shape.kv_heads

    @property
    def aligned(self) -> bool:
        """Whether the mask's FlashAttention window, which counts from the last key, means the same here."""
        return self.grid_mask.at_end or self.shape.q_len == self.shape.kv_len

    @property
    def half(self) -> bool:
        return self.q.dtype in (torch.float16, torch.bfloat16)

    @cached_property
    def keep(self) -> Tensor:
        """The dense mask, bool `[1, 1, Sq, Skv]`; evaluated once for all peers that want it."""
        return self.grid_mask.dense(self.shape, self.device)

    @staticmethod
    def draw(grid_mask: GridMask, shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
        """Normally distributed inputs, the same for every run on one kind of device."""
        generator = torch.Generator(device=device).manual_seed(0)

        def tensor(heads: int, length: int) -> Tensor:
            size = (shape.batch, heads, length, shape.head_dim)
            return torch.randn(size, generator=generator, device=device).to(dtype)

        q = tensor(shape.heads, shape.q_len)
        return Problem(grid_mask, shape, q, tensor(shape.kv_heads, shape.kv_len), tensor(shape.kv_heads, shape.kv_len))


@dataclass(frozen=True)
class Peer:
    """One implementation under test.

    Attributes:
        name: the `impl` of its JSON rows.
        summary: one line for `stof bench --help` and tables.
        missing: why it cannot run this problem here, or None.
        prepare: everything done once per mask and shape (timed as `build_us`); returns the call to time, whose
            result is `[B, H, Sq, D]` (any strides).
    """

    name: str
    summary: str
    missing: Callable[[Problem], str | None]
    prepare: Callable[[Problem], Call]


def first_line(error: BaseException, limit: int = 160) -> str:
    """`Type: first line of the message`, for tables and progress lines."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:limit]}" if text else type(error).__name__


def device_problem(device: torch.device) -> str:
    """Why a device no longer answers, "" where it does: after an illegal access all further calls of a process fail."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError as error:
        return first_line(error)
    return ""
