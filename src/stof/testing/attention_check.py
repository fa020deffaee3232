"""The inputs of one attention call, and the float64 check that comes before every time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stof.testing.mask_grid import GridMask, Shape
from stof.testing.oracle import oracle_attention

# Largest |out - float64| / max |float64| accepted before a time is given: some 10 units in the last place of what
# a row of attention averages over. A wrong mask is off by 0.1 or more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class AttentionProblem:
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
        """The dense mask, bool, `[1, 1, Sq, Skv]` for masks of the grid; evaluated once for all peers that want it."""
        return self.grid_mask.dense(self.shape, self.device)

    @staticmethod
    def draw(grid_mask: GridMask, shape: Shape, device: torch.device, dtype: torch.dtype) -> AttentionProblem:
        """Normally distributed inputs, the same for every run on one kind of device."""
        generator = torch.Generator(device=device).manual_seed(0)

        def tensor(heads: int, length: int) -> Tensor:
            size = (shape.batch, heads, length, shape.head_dim)
            return torch.randn(size, generator=generator, device=device).to(dtype)

        q = tensor(shape.heads, shape.q_len)
        return AttentionProblem(
            grid_mask, shape, q, tensor(shape.kv_heads, shape.kv_len), tensor(shape.kv_heads, shape.kv_len)
        )


@dataclass(frozen=True)
class Expected:
    """Exact results of some rows of a problem.

    Attributes:
        rows: int64 `[R]`, the query positions checked, in all batch entries and heads.
        out: float64 `[B, H, R, D]`.
    """

    rows: Tensor
    out: Tensor

    @staticmethod
    def of(problem: AttentionProblem, most_rows: int, bias: Tensor | None = None) -> Expected:
        """Exact attention in float64 on at most `most_rows` rows: both ends and a random sample (seed 0).

        `bias`: added to the scores, None or `[1, H, Sq, Skv]`.
        """
        q_len, device = problem.shape.q_len, problem.device
        rows = torch.arange(q_len, device=device)
        if q_len > most_rows:
            # Errors show first at both ends: global rows, and tiles that reach past the last row.
            ends = min(64, most_rows // 4)
            drawn = torch.randperm(q_len - 2 * ends, generator=torch.Generator().manual_seed(0)) + ends
            some = drawn[: most_rows - 2 * ends].sort().values.to(device)
            rows = torch.cat((rows[:ends], some, rows[q_len - ends :]))
        keep = problem.grid_mask.dense(problem.shape, device, rows)
        bias = None if bias is None else bias[:, :, rows]
        out, _ = oracle_attention(problem.q[:, :, rows], problem.k, problem.v, keep, bias=bias)
        return Expected(rows, out)

    def error(self, out: Tensor) -> float:
        """`relative_error` on the checked rows; infinity when anything in the whole output is not finite."""
        if not bool(torch.isfinite(out).all()):
            return float("inf")
        return relative_error(out[:, :, self.rows], self.out)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """`max |out - expected| / max |expected|`; infinity when anything is not finite."""
    difference = (out.double() - expected).abs().max()
    error = float(difference / expected.abs().max().clamp_min(1e-300))
    return error if error == error else float("inf")
