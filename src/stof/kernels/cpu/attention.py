"""Row-block attention: only the columns a row block needs, through PyTorch's fused CPU attention.

Where that operator cannot serve (softcap, another value width) the same walk runs on plain
matrix products of one row block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from stof.kernels.common import empty_output, pattern_ranges, softmax_and_lse
from stof.kernels.cpu.schedule import (
    COLUMN_OFFSET,
    COLUMNS,
    EMPTY_ROWS,
    FIRST_COLUMN,
    MASK_OFFSET,
    MERGE,
    ROW_START,
    ROW_STOP,
    Schedule,
    Step,
)
from stof.runtime.private import flash_attention_cpu

# Additive masks kept expanded during one call; equal row blocks (windows, documents) hit it.
_EXPANDED_MASKS = 4


@dataclass(frozen=True, eq=False)
class _Call:
    """One (batch, head) range that shares a pattern; heads of one key head are folded into rows.

    Attributes:
        checked: whether to compute rows again that PyTorch's fused attention may have taken for rows without keys.
    """

    q: Tensor  # [b, h, Sq, D]
    k: Tensor  # [b, hkv, Skv, D]
    v: Tensor  # [b, hkv, Skv, Dv]
    out: Tensor  # [b, h, Sq, Dv]
    lse: Tensor  # [b, h, Sq]
    bias: Tensor | None  # [b | 1, h | 1, Sq | 1, Skv | 1]
    scale: float
    softcap: float
    checked: bool = False

    def part(self, batches: slice, heads: slice) -> _Call:
        """The call of some sequences and some of its heads, which are whole groups or within one group."""
        group = self.q.shape[1] // self.k.shape[1]
        kv_heads = slice(heads.start // group, -(-heads.stop // group))
        return replace(
            self,
            q=self.q[batches, heads],
            k=self.k[batches, kv_heads],
            v=self.v[batches, kv_heads],
            out=self.out[batches, heads],
            lse=self.lse[batches, heads],
            bias=None if self.bias is None else _narrow(self.bias, batches, heads),
        )

    def sequence(self, b: int) -> _Call:
        """The call of one sequence of the batch."""
        return self.part(slice(b, b + 1), slice(0, self.q.shape[1]))


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
    whole = _Call(q=q, k=k, v=v, out=out, lse=lse, bias=bias, scale=scale, softcap=softcap)
    if not _run(whole, schedule) and not _scores_are_finite(whole):
        _run(replace(whole, checked=True), schedule)
    if sinks is not None:
        # softmax over keys and sink = softmax over keys * sigmoid(lse - sink)
        share = torch.sigmoid(lse - sinks.to(lse_dtype).view(1, heads, 1))
        # Rows that keep nothing stay 0, also under a sink of -inf (-inf - -inf is NaN).
        out *= share.masked_fill_(lse == -torch.inf, 0.0)[..., None].to(out.dtype)
    return out, lse


def _run(whole: _Call, schedule: Schedule) -> bool:
    """Write all rows of a call's `out` and `lse`; return whether no score is lost."""
    batch, heads, *_ = whole.q.shape
    group = heads // whole.k.shape[1]
    pattern_of = schedule.pattern_of.expand(batch, heads).tolist()
    masks = _MaskReader(schedule, whole.q.dtype)
    ranges = pattern_ranges(pattern_of, group)
    for batches, head_range, pattern in ranges:
        call = whole if len(ranges) == 1 else whole.part(batches, head_range)
        order = schedule.rows[pattern] if schedule.rows.numel() else None
        for steps in schedule.batches_of[pattern]:
            if not _run_batch(call, steps, schedule, masks, order):
                return False
    return _none_lost(whole.lse)


def _none_lost(lse: Tensor) -> bool:
    """Whether all rows of a fused call have finite scores, or see no key.

    PyTorch's fused attention gives an output and a log-sum-exp of exactly 0 to rows whose scores are all NaN or minus
    infinity, as if they saw no key, and a log-sum-exp of infinity or NaN to others with NaN or infinite scores.
    """
    return bool(lse.all()) and lse.amax().item() < torch.inf


def _scores_are_finite(call: _Call) -> bool:
    """Whether no score of a call can overflow, from the largest values of its inputs."""
    largest = [float(x.abs().amax()) for x in (call.q, call.k)]
    highest = 0.0 if call.bias is None else float(call.bias.amax())
    bound = largest[0] * largest[1] * call.q.shape[-1] * max(1.0, abs(call.scale)) + highest
    return bound < torch.finfo(call.lse.dtype).max / 2  # false for NaN


def _narrow(bias: Tensor, batches: slice, heads: slice) -> Tensor:
    bias = bias if bias.shape[0] == 1 else bias[batches]
    return bias if bias.shape[1] == 1 else bias[:, heads]


def _run_batch(call: _Call, steps: list[Step], schedule: Schedule, masks: _MaskReader, order: Tensor | None) -> bool:
    """Compute steps of equal size and write their rows of `call.out` and `call.lse`; return whether no score is lost.

    A fused call has one batch dimension: it holds the sequences, or the steps of one sequence, whichever are more.
    """
    sequences = call.q.shape[0]
    if len(steps) == 1 or sequences >= len(steps):
        return all(_compute(call, _Rows([step], order), [step], schedule, masks) for step in steps)
    rows = _Rows(steps, order)
    return all(_compute(call.sequence(b), rows, steps, schedule, masks) for b in range(sequences))


def _compute(call: _Call, rows: _Rows, steps: list[Step], schedule: Schedule, masks: _MaskReader) -> bool:
    """Compute one batch of steps; return False where a merge would hide from `call.lse` that scores are lost."""
    first = steps[0]
    none_lost = True
    if not first[COLUMNS]:
        rows.put(call.out, torch.zeros((), dtype=call.out.dtype, device="cpu"))
        rows.put(call.lse, torch.full((), -torch.inf, dtype=call.lse.dtype, device="cpu"))
        return True
    out, lse = _attend(call, rows, steps, schedule, masks)
    if first[MERGE]:
        before, lse_before = rows.take(call.out), rows.take(call.lse)
        none_lost = call.checked or (_none_lost(lse) and _none_lost(lse_before))
        # A bias can empty both parts: -inf - -inf is NaN.
        weight = torch.sigmoid(lse - lse_before).masked_fill_(lse == -torch.inf, 0.0)
        out = torch.lerp(before, out, weight[..., None].to(out.dtype))
        lse = torch.logaddexp(lse, lse_before)
    rows.put(call.out, out)
    rows.put(call.lse, lse)
    return none_lost


class _Rows:
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

    def put(self, x: Tensor, value: Tensor) -> None:
        if self.places is None:
            self.take(x).copy_(value)
        elif value.ndim == 0:
            x[:, :, self.places] = value
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


def _keys(x: Tensor, steps: list[Step], schedule: Schedule) -> Tensor:
    """The columns of a batch of steps, `[n, hkv, columns, ...]` from `[b, hkv, Skv, ...]`."""
    first, count = steps[0][FIRST_COLUMN], steps[0][COLUMNS]
    if first < 0:
        offset = steps[0][COLUMN_OFFSET]
        return _unfold(x.index_select(2, schedule.columns[offset : offset + len(steps) * count]), len(steps))
    if len(steps) == 1:
        return x[:, :, first : first + count]
    return _windows(x, first, count, steps[1][FIRST_COLUMN] - first, len(steps))


def _attend(
    call: _Call, rows: _Rows, steps: list[Step], schedule: Schedule, masks: _MaskReader
) -> tuple[Tensor, Tensor]:
    """One attention call: `[n, h, height, Dv]` and `[n, h, height]`."""
    count, masked = steps[0][COLUMNS], steps[0][MASK_OFFSET] >= 0
    k, v = _keys(call.k, steps, schedule), _keys(call.v, steps, schedule)
    q = rows.take(call.q)
    batch, heads, height, width = q.shape
    group = heads // k.shape[1]
    added = None
    if masked:
        offsets = {step[MASK_OFFSET]: None for step in steps}
        each = [masks.additive(step[MASK_OFFSET], height, count) for step in (steps if len(offsets) > 1 else steps[:1])]
        added = (each[0][None] if len(each) == 1 else torch.stack(each))[:, None]  # [n | 1, 1, height, columns]
    if call.bias is not None:
        bias = _bias_part(call.bias, rows, steps, schedule).to(_bias_dtype(call.bias, q))
        added = bias if added is None else bias.masked_fill(added == -torch.inf, -torch.inf)
    if group > 1:
        q = q.reshape(batch, heads // group, group * height, width)
        added = None if added is None else _fold_heads(added, heads, group, height, count)
    if not call.softcap and v.shape[-1] == width:
        # Several steps: heads outermost, so that the overlapping windows of one head follow each other in the caches.
        swap = len(steps) > 1
        if swap:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        mask = added.transpose(0, 1) if swap and added is not None else added
        out, lse = flash_attention_cpu(q, k, v, mask, call.scale)
        out, lse = (out.transpose(0, 1), lse.transpose(0, 1)) if swap else (out, lse)
        if added is not None and (steps[0][EMPTY_ROWS] or (call.bias is not None and bool((lse == 0).any()))):
            # The fused operator reports 0 for rows whose scores are all -inf, and NaN where their query is NaN.
            empty = (added == -torch.inf).all(-1)
            out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
        if call.checked and not _none_lost(lse):
            q, k, v = (x.transpose(0, 1) for x in (q, k, v)) if swap else (q, k, v)
            lost = (lse == 0) | ~(lse < torch.inf)
            plain_out, plain_lse = _plain(q, k, v, added, call.scale, 0.0)
            out, lse = torch.where(lost[..., None], plain_out, out), torch.where(lost, plain_lse, lse)
    else:
        out, lse = _plain(q, k, v, added, call.scale, call.softcap)
    return out.reshape(batch, heads, height, -1), lse.reshape(batch, heads, height)


def _bias_part(bias: Tensor, rows: _Rows, steps: list[Step], schedule: Schedule) -> Tensor:
    """What a batch of steps needs of a bias, `[n | 1, h | 1, height | 1, columns | 1]`; broadcast dimensions stay 1."""
    by_row = bias.shape[2] > 1
    if by_row:
        bias = rows.take(bias)
    if bias.shape[3] == 1:
        return bias
    across = bias.transpose(2, 3)  # columns where keys have them
    if len(steps) == 1 or not by_row:
        return _keys(across, steps, schedule).transpose(2, 3)
    each = [_keys(across[n : n + 1], [step], schedule) for n, step in enumerate(steps)]
    return torch.cat(each).transpose(2, 3)


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
    """One row block by matmuls: float64 for float64, else float32."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)).mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if added is not None:
        scores = torch.where(added == -torch.inf, -torch.inf, scores + added)  # also scores that are NaN
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
