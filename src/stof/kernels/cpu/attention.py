"""Row-block attention: only the columns a row block needs, through PyTorch's fused CPU attention.

Where that operator cannot serve (softcap, dropout, another value width) the same walk runs on plain
matrix products of one row block at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.common import empty_output, softmax_and_lse
from stof.kernels.cpu.schedule import COLUMNS, EMPTY_ROWS, MASK_OFFSET, MERGE, Schedule, Step
from stof.kernels.cpu.steps import (
    DropoutOfHeads,
    MaskReader,
    Rows,
    bias_dtype,
    bias_part,
    fold_heads,
    keys_of,
    narrow_bias,
)
from stof.kernels.dropout import Dropout
from stof.kernels.merge import merge_results, share_of_keys
from stof.runtime.private import flash_attention_cpu

_LOWEST = torch.finfo(torch.float32).min


class _Call(NamedTuple):
    """A call, or its part for one (batch, head) range that shares a pattern.

    Attributes:
        checked: each result of the fused operator is checked at once, else all of them together at the end.
    """

    q: Tensor  # [b, h, Sq, D]
    k: Tensor  # [b, hkv, Skv, D]
    v: Tensor  # [b, hkv, Skv, Dv]
    out: Tensor  # [b, h, Sq, Dv]
    lse: Tensor  # [b, h, Sq]
    bias: Tensor | None  # [b | 1, h | 1, Sq | 1, Skv | 1]
    scale: float
    softcap: float
    checked: bool
    dropout: DropoutOfHeads | None

    @property
    def is_fused(self) -> bool:
        """Whether PyTorch's fused operator serves it."""
        return not self.softcap and self.q.shape[-1] == self.v.shape[-1] and self.dropout is None

    def part(self, batches: slice, heads: slice) -> _Call:
        """The call of some sequences and heads."""
        if batches == slice(0, self.lse.shape[0]) and heads == slice(0, self.lse.shape[1]):
            return self
        group = self.q.shape[1] // self.k.shape[1]
        kv_heads = slice(heads.start // group, -(-heads.stop // group))
        return self._replace(
            q=self.q[batches, heads],
            k=self.k[batches, kv_heads],
            v=self.v[batches, kv_heads],
            out=self.out[batches, heads],
            lse=self.lse[batches, heads],
            bias=None if self.bias is None else narrow_bias(self.bias, batches, heads),
            dropout=None if self.dropout is None else self.dropout.part(batches, heads),
        )

    def sequence(self, b: int) -> _Call:
        """The call of one sequence of the batch."""
        one = slice(b, b + 1)
        bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[one]
        return self._replace(
            q=self.q[one], k=self.k[one], v=self.v[one], out=self.out[one], lse=self.lse[one], bias=bias,
            dropout=None if self.dropout is None else self.dropout.part(one, slice(None)),
        )  # fmt: skip


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
    dropout: Dropout | None = None,
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
    dropped = None if dropout is None else DropoutOfHeads.of(dropout, q, k)
    checked = schedule.merges or bias is not None
    call = _Call(q, k, v, out, lse, bias, scale, softcap, checked, dropped)
    _run(call, schedule)
    # Rows that see no key have -inf, which is no suspect.
    unchecked = call.is_fused and not call.checked
    if unchecked and _has_suspects(lse.clamp(min=_LOWEST) if schedule.has_empty_rows else lse):
        _run(call._replace(checked=True), schedule)
    if sinks is not None:
        out *= share_of_keys(lse, sinks)[..., None].to(out.dtype)
    return out, lse


def _run(call: _Call, schedule: Schedule) -> None:
    """Write `call.out` and `call.lse`."""
    batch, heads, _ = call.lse.shape
    masks = MaskReader(schedule, call.q.dtype)
    for batches, head_range, pattern in schedule.ranges(batch, heads, heads // call.k.shape[1]):
        part = call.part(batches, head_range)
        order = schedule.rows[pattern] if schedule.rows.numel() else None
        for steps in schedule.batches_of[pattern]:
            _run_batch(part, steps, schedule, masks, order)


def _run_batch(call: _Call, steps: list[Step], schedule: Schedule, masks: MaskReader, order: Tensor | None) -> None:
    """Compute steps of equal size and write their rows of `call.out` and `call.lse`.

    A fused call has one batch dimension: it holds the sequences, or the steps of one sequence, whichever are more.
    """
    sequences = call.q.shape[0]
    if len(steps) == 1 or sequences >= len(steps):
        for step in steps:
            _compute(call, Rows([step], order), [step], schedule, masks)
        return
    rows = Rows(steps, order)
    for b in range(sequences):
        _compute(call.sequence(b), rows, steps, schedule, masks)


def _compute(call: _Call, rows: Rows, steps: list[Step], schedule: Schedule, masks: MaskReader) -> None:
    first = steps[0]
    if not first[COLUMNS]:
        rows.fill(call.out, 0.0)
        rows.fill(call.lse, -torch.inf)
        return
    out, lse = _attend(call, rows, steps, schedule, masks)
    if first[MERGE]:
        out, lse = merge_results(rows.take(call.out), rows.take(call.lse), out, lse)
    rows.put(call.out, out)
    rows.put(call.lse, lse)


def _attend(call: _Call, rows: Rows, steps: list[Step], schedule: Schedule, masks: MaskReader) -> tuple[Tensor, Tensor]:
    """One attention call: `[n, h, height, Dv]` and `[n, h, height]`."""
    count, masked = steps[0][COLUMNS], steps[0][MASK_OFFSET] >= 0
    k, v = keys_of(call.k, steps, schedule), keys_of(call.v, steps, schedule)
    q = rows.take(call.q)
    batch, heads, height, width = q.shape
    group = heads // k.shape[1]
    mask = added = None
    if masked:
        offsets = {step[MASK_OFFSET]: None for step in steps}
        each = [masks.additive(step[MASK_OFFSET], height, count) for step in (steps if len(offsets) > 1 else steps[:1])]
        mask = (each[0][None] if len(each) == 1 else torch.stack(each))[:, None]  # [n | 1, 1, height, columns]
        added = mask
    if call.bias is not None:
        added = bias_part(call.bias, rows, steps, schedule).to(bias_dtype(call.bias, q))
        added = added if mask is None else added.masked_fill(mask == -torch.inf, -torch.inf)
    if group > 1:
        q = q.reshape(batch, heads // group, group * height, width)
        added = None if added is None else fold_heads(added, heads, group, height, count)

    def hidden() -> Tensor | None:
        """Where the mask hides a key, `[n | 1, 1, rows, columns]`."""
        if mask is None:
            return None
        where = mask == -torch.inf
        return where if group == 1 else fold_heads(where, heads, group, height, count)

    if not call.is_fused:
        kept = None if call.dropout is None else call.dropout.kept(rows, steps, schedule, group)
        out, lse = _plain(q, k, v, added, hidden(), call, kept)
    else:
        out, lse = _fused(q, k, v, added, call.scale, swap=len(steps) > 1)
        if steps[0][EMPTY_ROWS] or (call.checked and _has_suspects(lse)):
            out, lse = _corrected(out, lse, q, k, v, added, hidden(), call)
    return out.reshape(batch, heads, height, -1), lse.reshape(batch, heads, height)


def _fused(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float, *, swap: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's fused attention, of whose results `_has_suspects` tells whether they may be wrong.

    Args:
        swap: heads outermost, so that the overlapping windows of one head follow each other in the caches.
    """
    if not swap:
        return flash_attention_cpu(q, k, v, added, scale)
    mask = None if added is None else added.transpose(0, 1)
    out, lse = flash_attention_cpu(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _has_suspects(lse: Tensor) -> bool:
    """Whether a row of the fused operator may be wrong: its log-sum-exp is 0, infinite or NaN.

    Rows whose scores are all -inf get 0, as do some with NaN or infinite scores; others get an output of 0 and a
    log-sum-exp of infinity. The other rows have a quotient of 1: every call asks, and this takes two operators.
    """
    quotients = (lse / lse).min().item()
    return quotients != quotients


def _corrected(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    hidden: Tensor | None,
    call: _Call,
) -> tuple[Tensor, Tensor]:
    """Empty the rows of the fused operator that see no key; if `call.checked`, compute suspect ones by `_plain`."""
    empty = None
    if hidden is not None:
        empty = hidden.all(-1)
        # 1 is no suspect.
        out, lse = out.masked_fill_(empty[..., None], 0.0), lse.masked_fill_(empty, 1.0 if call.checked else -torch.inf)
    if not call.checked:
        return out, lse
    if _has_suspects(lse):
        suspects = (lse == 0) | ~lse.isfinite()
        rows = suspects.flatten(0, 1).any(0).nonzero()[:, 0]
        added, hidden_part = (x if x is None or x.shape[2] == 1 else x[:, :, rows] for x in (added, hidden))
        part, part_lse = _plain(q[:, :, rows], k, v, added, hidden_part, call)
        # Only these: not one bit of a result depends on what its row, head or sequence does not see.
        chosen = suspects[:, :, rows]
        out = out.index_copy(2, rows, torch.where(chosen[..., None], part, out[:, :, rows]))
        lse = lse.index_copy(2, rows, torch.where(chosen, part_lse, lse[:, :, rows]))
    return out, lse if empty is None else lse.masked_fill_(empty, -torch.inf)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, hidden: Tensor | None, call: _Call,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One row block by matmuls: float64 for float64, else float32; `kept`: the weights that dropout leaves."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)).mul_(call.scale)
    if call.softcap:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if added is not None:
        scores = scores + added
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)  # also scores that are NaN
    weights, lse = softmax_and_lse(scores)
    if kept is not None and call.dropout is not None:
        weights = weights.masked_fill_(~kept, 0.0).mul_(call.dropout.scale)
    return (weights @ v.to(dtype)).to(q.dtype), lse
