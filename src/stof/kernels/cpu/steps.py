"""Rows, columns, masks and biases of a schedule's steps, as batches that PyTorch's operators take."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.cpu.schedule import COLUMN_OFFSET, COLUMNS, FIRST_COLUMN, ROW_START, ROW_STOP, Schedule, Step
from stof.kernels.dropout import Dropout, head_numbers, kept_weights

# Additive masks kept expanded during one call; equal row blocks (windows, documents) hit it.
_EXPANDED_MASKS = 4


class Rows:
    """The rows of a batch of steps, read and written as `[n, h, height, ...]`.

    One step: `n` is the number of sequences, and rows are a slice. Several steps: `n` steps of one sequence, as a
    strided view. Permuted rows are gathered and scattered.
    """

    def __init__(self, steps: list[Step], order: Tensor | None) -> None:
        self.steps = len(steps)
        self.start, self.height = steps[0][ROW_START], steps[0][ROW_STOP] - steps[0][ROW_START]
        self.distance = steps[1][ROW_START] - self.start if self.steps > 1 else 0
        self.places: Tensor | None = None
        if order is not None:
            self.places = torch.cat([order[step[ROW_START] : step[ROW_STOP]] for step in steps])

    def take(self, x: Tensor) -> Tensor:
        """From `[b, h, S, ...]`; a view where rows are not permuted."""
        if self.places is not None:
            return _unfold(x.index_select(2, self.places), self.steps)
        if self.steps == 1:
            return x[:, :, self.start : self.start + self.height]
        return _windows(x, self.start, self.height, self.distance, self.steps)

    def fill(self, x: Tensor, value: float) -> None:
        if self.places is None:
            self.take(x).fill_(value)
        else:
            x.index_fill_(2, self.places, value)

    def put(self, x: Tensor, value: Tensor) -> None:
        if self.places is None:
            self.take(x).copy_(value)
        else:
            folded = value if self.steps == 1 else value.transpose(0, 1).flatten(1, 2)[None]
            x.index_copy_(2, self.places, folded)


def _windows(x: Tensor, start: int, length: int, distance: int, count: int) -> Tensor:
    """`[count, h, length, ...]`, possibly overlapping views of `[1, h, S, ...]`, `distance` apart along S."""
    _, head_stride, stride, *rest = x.stride()
    size = (count, x.shape[1], length, *x.shape[3:])
    return x.as_strided(size, (distance * stride, head_stride, stride, *rest), x.storage_offset() + start * stride)


def _unfold(x: Tensor, steps: int) -> Tensor:
    """`[1, h, steps * n, ...]` to `[steps, h, n, ...]`; unchanged for one step."""
    return x if steps == 1 else x[0].unflatten(1, (steps, -1)).transpose(0, 1)


def keys_of(x: Tensor, steps: list[Step], schedule: Schedule) -> Tensor:
    """The columns of a batch of steps, `[n, hkv, columns, ...]` from `[b, hkv, Skv, ...]`."""
    first, count = steps[0][FIRST_COLUMN], steps[0][COLUMNS]
    if first < 0:
        offset = steps[0][COLUMN_OFFSET]
        return _unfold(x.index_select(2, schedule.columns[offset : offset + len(steps) * count]), len(steps))
    if len(steps) == 1:
        return x[:, :, first : first + count]
    return _windows(x, first, count, steps[1][FIRST_COLUMN] - first, len(steps))


def bias_part(bias: Tensor, rows: Rows, steps: list[Step], schedule: Schedule) -> Tensor:
    """What a batch of steps needs of a bias, `[n | 1, h | 1, height | 1, columns | 1]`; broadcast dimensions stay 1."""
    by_row = bias.shape[2] > 1
    if by_row:
        bias = rows.take(bias)
    if bias.shape[3] == 1:
        return bias
    across = bias.transpose(2, 3)  # columns where keys have them
    if len(steps) == 1 or not by_row:
        return keys_of(across, steps, schedule).transpose(2, 3)
    each = [keys_of(across[n : n + 1], [step], schedule) for n, step in enumerate(steps)]
    return torch.cat(each).transpose(2, 3)


def bias_dtype(bias: Tensor, q: Tensor) -> torch.dtype:
    """16-bit queries take a bias of another dtype in float32, the others in their own: all that PyTorch accepts."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and bias.dtype != q.dtype else q.dtype


def fold_heads(added: Tensor, heads: int, group: int, height: int, count: int) -> Tensor:
    """`[b | 1, h | 1, rows | 1, n | 1]` to `[b | 1, hkv | 1, group * rows, n]` for heads folded into rows."""
    if added.shape[1] == 1:
        return added.expand(-1, group, height, count).reshape(added.shape[0], 1, group * height, count)
    full = added.expand(-1, heads, height, count)
    return full.reshape(added.shape[0], heads // group, group * height, count)


def narrow_bias(bias: Tensor, batches: slice, heads: slice) -> Tensor:
    bias = bias if bias.shape[0] == 1 else bias[batches]
    return bias if bias.shape[1] == 1 else bias[:, heads]


class DropoutOfHeads(NamedTuple):
    """Dropout of some sequences and heads of a call.

    Attributes:
        dropout: of the call.
        heads: int64 `[b, h]`, their `b * H + h`.
        rows, columns: int64 `[1, 1, Sq]` and `[1, 1, Skv]`, the numbers of queries and keys.
    """

    dropout: Dropout
    heads: Tensor
    rows: Tensor
    columns: Tensor

    @staticmethod
    def of(dropout: Dropout, q: Tensor, k: Tensor) -> DropoutOfHeads:
        """That of all sequences and heads of a call."""
        rows, columns = (torch.arange(x.shape[2], device=x.device)[None, None] for x in (q, k))
        return DropoutOfHeads(dropout, head_numbers(q.shape[0], q.shape[1], q.device), rows, columns)

    @property
    def scale(self) -> float:
        """The factor of weights that stay."""
        return self.dropout.scale

    def part(self, batches: slice, heads: slice) -> DropoutOfHeads:
        """That of some of the sequences and heads."""
        return self._replace(heads=self.heads[batches, heads])

    def kept(self, rows: Rows, steps: list[Step], schedule: Schedule, group: int) -> Tensor:
        """Which weights of a batch of steps stay, `[n, hkv, group * height, columns]`: heads are folded into rows."""
        queries = rows.take(self.rows)[..., None]  # [n | 1, 1, height, 1]
        keys = keys_of(self.columns, steps, schedule)[:, :, None]  # [n | 1, 1, 1, columns]
        kept = kept_weights(self.dropout, self.heads[..., None, None], queries, keys)
        batch, heads, height, count = kept.shape
        return kept if group == 1 else kept.reshape(batch, heads // group, group * height, count)


class MaskReader:
    """Expands packed masks to additive ones, 8 columns per table look-up."""

    def __init__(self, schedule: Schedule, dtype: torch.dtype) -> None:
        self._bytes = schedule.mask_bytes
        self._table = _additive_table(dtype)
        self._expanded: dict[tuple[int, int, int], Tensor] = {}

    def additive(self, offset: int, rows: int, columns: int) -> Tensor:
        """`[rows, columns]`: 0 where kept, -inf elsewhere."""
        key = (offset, rows, columns)
        if key not in self._expanded:
            if len(self._expanded) >= _EXPANDED_MASKS:
                self._expanded.pop(next(iter(self._expanded)))
            width = -(-columns // 8)
            packed = self._bytes[offset : offset + rows * width].int()
            spread = self._table.index_select(0, packed).view(rows, width * 8)
            self._expanded[key] = spread[:, :columns]
        return self._expanded[key]


@lru_cache(maxsize=8)
def _additive_table(dtype: torch.dtype) -> Tensor:
    """`[256, 8]`: the eight additive values each byte stands for."""
    bits = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1
    return torch.zeros(256, 8, dtype=dtype, device="cpu").masked_fill_(bits == 0, -torch.inf)
