"""Row-block attention: only the columns a row block needs, through PyTorch's fused CPU attention.

Where that operator cannot serve (softcap, another value width) the same walk runs on plain
matrix products of one row block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from stof.kernels.cpu.schedule import (
    COLUMN_OFFSET,
    COLUMNS,
    EMPTY_ROWS,
    FIRST_COLUMN,
    MASK_OFFSET,
    MERGE,
    PATTERN,
    ROW_START,
    ROW_STOP,
    Schedule,
)
from stof.kernels.ranges import pattern_ranges
from stof.kernels.softmax import softmax_and_lse

# Additive masks kept expanded during one call; equal row blocks (windows, documents) hit it.
_EXPANDED_MASKS = 4


@dataclass(frozen=True, eq=False)
class _Call:
    """One (batch, head) range that shares a pattern; heads of one key head are folded into rows."""

    q: Tensor  # [b, h, Sq, D]
    k: Tensor  # [b, hkv, Skv, D]
    v: Tensor  # [b, hkv, Skv, Dv]
    out: Tensor  # [b, h, Sq, Dv]
    lse: Tensor  # [b, h, Sq]
    bias: Tensor | None  # [b | 1, h | 1, Sq | 1, Skv | 1]
    scale: float
    softcap: float


def row_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked attention; arguments and results as `reference_attention`, the mask as a `Schedule`.

    Extra memory is a few row blocks: `O(rows * columns * heads)` of one step. `bias` has 4 dimensions.
    """
    batch, heads, q_len, _ = q.shape
    out = empty_output(q, v)
    # The fused operator takes any strides but the last: it would read past the tensors.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(batch, heads, q_len, dtype=lse_dtype, device=q.device)
    steps: dict[int, list[list[int]]] = {}
    for step in schedule.steps.tolist():
        steps.setdefault(step[PATTERN], []).append(step)
    group = heads // k.shape[1]
    pattern_of = schedule.pattern_of.expand(batch, heads).tolist()
    masks = _MaskReader(schedule, q.dtype)
    for batches, head_range, pattern in pattern_ranges(pattern_of, group):
        kv_range = slice(head_range.start // group, -(-head_range.stop // group))
        call = _Call(
            q=q[batches, head_range],
            k=k[batches, kv_range],
            v=v[batches, kv_range],
            out=out[batches, head_range],
            lse=lse[batches, head_range],
            bias=None if bias is None else _narrow(bias, batches, head_range),
            scale=scale,
            softcap=softcap,
        )
        order = schedule.rows[pattern] if schedule.rows.numel() else None
        for step in steps[pattern]:
            _run_step(call, step, schedule, masks, order)
    if sinks is not None:
        # softmax over keys and sink = softmax over keys * sigmoid(lse - sink)
        share = torch.sigmoid(lse - sinks.to(lse_dtype).view(1, heads, 1))
        # Rows that keep nothing stay 0, also under a sink of -inf (-inf - -inf is NaN).
        out *= share.masked_fill_(lse == -torch.inf, 0.0)[..., None].to(out.dtype)
    return out, lse


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised `[B, H, Sq, Dv]` in q's memory order, so that `[B, S, H, D]` callers need no copy."""
    return torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty(*q.shape[:-1], v.shape[-1])


def _narrow(bias: Tensor, batches: slice, heads: slice) -> Tensor:
    bias = bias if bias.shape[0] == 1 else bias[batches]
    return bias if bias.shape[1] == 1 else bias[:, heads]


def _run_step(call: _Call, step: list[int], schedule: Schedule, masks: _MaskReader, order: Tensor | None) -> None:
    """Compute one step and write its rows of `call.out` and `call.lse`."""
    span = slice(step[ROW_START], step[ROW_STOP])
    rows = span if order is None else order[span]
    if not step[COLUMNS]:
        call.out[:, :, rows] = 0
        call.lse[:, :, rows] = -torch.inf
        return
    out, lse = _attend(call, rows, step, schedule, masks)
    if step[MERGE]:
        before, lse_before = call.out[:, :, rows], call.lse[:, :, rows]
        # A bias can empty both parts: -inf - -inf is NaN.
        weight = torch.sigmoid(lse - lse_before).masked_fill_(lse == -torch.inf, 0.0)
        out = torch.lerp(before, out, weight[..., None].to(out.dtype))
        lse = torch.logaddexp(lse, lse_before)
    call.out[:, :, rows] = out
    call.lse[:, :, rows] = lse


def _attend(
    call: _Call, rows: slice | Tensor, step: list[int], schedule: Schedule, masks: _MaskReader
) -> tuple[Tensor, Tensor]:
    """One attention call: `[b, h, rows, Dv]` and `[b, h, rows]`."""
    first, count, offset = step[FIRST_COLUMN], step[COLUMNS], step[COLUMN_OFFSET]
    columns: slice | Tensor
    if first >= 0:
        columns = slice(first, first + count)
        k, v = call.k[:, :, columns], call.v[:, :, columns]
    else:
        columns = schedule.columns[offset : offset + count]
        k, v = call.k.index_select(2, columns), call.v.index_select(2, columns)
    q = call.q[:, :, rows]
    batch, heads, height, width = q.shape
    group = heads // k.shape[1]
    added = None
    if step[MASK_OFFSET] >= 0:
        added = masks.additive(step[MASK_OFFSET], height, count).view(1, 1, height, count)
    if call.bias is not None:
        bias = _rows_and_columns(call.bias, rows, columns).to(_bias_dtype(call.bias, q))
        added = bias if added is None else bias.masked_fill(added == -torch.inf, -torch.inf)
    if group > 1:
        q = q.reshape(batch, heads // group, group * height, width)
        added = None if added is None else _fold_heads(added, heads, group, height, count)
    fused = not call.softcap and v.shape[-1] == width
    if fused:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=added, scale=call.scale
        )
        if added is not None and (step[EMPTY_ROWS] or (call.bias is not None and bool((lse == 0).any()))):
            # The fused operator reports 0 for rows whose scores are all -inf.
            lse = lse.masked_fill((added == -torch.inf).all(-1), -torch.inf)
    else:
        out, lse = _plain(q, k, v, added, call.scale, call.softcap)
    return out.reshape(batch, heads, height, -1), lse.reshape(batch, heads, height)


def _rows_and_columns(bias: Tensor, rows: slice | Tensor, columns: slice | Tensor) -> Tensor:
    """The part of a bias one step needs; broadcast dimensions stay 1."""
    if bias.shape[2] > 1:
        bias = bias[:, :, rows]
    return bias if bias.shape[3] == 1 else bias[..., columns]


def _bias_dtype(bias: Tensor, q: Tensor) -> torch.dtype:
    """16-bit queries take a bias of another dtype in float32, the others in their own: all that PyTorch accepts."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and bias.dtype != q.dtype else q.dtype


def _fold_heads(added: Tensor, heads: int, group: int, height: int, count: int) -> Tensor:
    """`[b | 1, h | 1, rows | 1, n | 1]` to `[b | 1, hkv | 1, group * rows, n]` for heads folded into rows."""
    if added.shape[1] == 1:
        return added.expand(-1, group, height, count).reshape(added.shape[0], 1, group * height, count)
    full = added.expand(-1, heads, height, count)
    return full.reshape(added.shape[0], heads // group, group * height, count)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """One row block in matrix products: float64 for float64, else float32."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)).mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if added is not None:
        scores = scores + added
    weights, lse = softmax_and_lse(scores)
    return (weights @ v.to(dtype)).to(q.dtype), lse


class _MaskReader:
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
