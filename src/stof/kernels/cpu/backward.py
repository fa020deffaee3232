"""Gradients of row-block attention: the forward's walk over a schedule, from the saved output and log-sum-exp.

Each step adds what its rows and columns contribute, by PyTorch's fused backward: weights are `exp(scores - lse)` and
`delta = rowsum(d_out * out)` of whole rows, so that steps need not know of each other. Where that operator cannot serve
(softcap, dropout, another value width, gradients of a bias or through the log-sum-exp) steps are computed by matmuls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.cpu.schedule import COLUMN_OFFSET, COLUMNS, FIRST_COLUMN, MASK_OFFSET, MERGE, Schedule, Step
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
from stof.kernels.implementation import Gradients, NeedsGrad
from stof.runtime.private import flash_attention_cpu_backward


class _Call(NamedTuple):
    """A call, or its part for some sequences and the heads that share a pattern.

    Attributes:
        lse: +inf where a row keeps nothing: its weights are 0 then. With sinks, of keys and sink if `fused`.
        delta: `share * rowsum(d_out * out) - d_lse`, unless `fused`.
        share: the keys' part of the softmax's denominator, 1 without sinks, unless `fused`.
        dq, dk, dv, d_bias: what is added to; `d_bias` is None if nobody asks for it.
        fused: whether PyTorch's fused operator serves the call.
    """

    q: Tensor  # [b, h, Sq, D]
    k: Tensor  # [b, hkv, Skv, D]
    v: Tensor  # [b, hkv, Skv, Dv]
    out: Tensor  # [b, h, Sq, Dv]
    d_out: Tensor  # [b, h, Sq, Dv]
    lse: Tensor  # [b, h, Sq]
    delta: Tensor  # [b, h, Sq]
    share: Tensor  # [b, h, Sq]
    dq: Tensor  # as q
    dk: Tensor  # as k
    dv: Tensor  # as v
    bias: Tensor | None  # [b | 1, h | 1, Sq | 1, Skv | 1]
    d_bias: Tensor | None
    scale: float
    softcap: float
    fused: bool
    dropout: DropoutOfHeads | None

    def part(self, batches: slice, heads: slice) -> _Call:
        """The call of some sequences and heads."""
        group = self.q.shape[1] // self.k.shape[1]
        kv_heads = slice(heads.start // group, -(-heads.stop // group))
        of_q = {name: getattr(self, name)[batches, heads] for name in _OF_QUERIES}
        of_kv = {name: getattr(self, name)[batches, kv_heads] for name in ("k", "v", "dk", "dv")}
        biases = {name: getattr(self, name) for name in ("bias", "d_bias")}
        biases = {name: x if x is None else narrow_bias(x, batches, heads) for name, x in biases.items()}
        dropout = None if self.dropout is None else self.dropout.part(batches, heads)
        return self._replace(**of_q, **of_kv, **biases, dropout=dropout)


_OF_QUERIES = ("q", "out", "d_out", "lse", "delta", "share", "dq")


def row_block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    schedule: Schedule,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    d_lse: Tensor | None = None,
    needs: NeedsGrad | None = None,
    dropout: Dropout | None = None,
) -> Gradients:
    """Gradients of `row_block_attention`; arguments and results as `reference_backward`, the mask as a `Schedule`.

    Args:
        out, lse: what the forward returned.
        needs: which gradients are returned; default all.

    Extra memory is that of the gradients in float32, and `O(rows * columns * heads)` of one step.
    """
    needs = needs or NeedsGrad(bias=bias is not None, sinks=sinks is not None)
    d_bias = None
    if needs.bias and bias is not None:
        d_bias = torch.zeros(bias.shape, dtype=lse.dtype, device=q.device)
    fused = not softcap and dropout is None and q.shape[-1] == v.shape[-1] and d_lse is None and d_bias is None
    empty = lse == -torch.inf
    if bool(empty.any()):
        # Queries without keys may hold NaN.
        q, d_out = (x.masked_fill(empty[..., None], 0.0) for x in (q, d_out))
        d_lse = None if d_lse is None else d_lse.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty, torch.inf)
    lse, delta, share, of_sinks = _row_terms(lse, out, d_out, d_lse, sinks, fused)

    # The fused operator takes any strides but the last: it would read past the tensors.
    q, k, v, out, d_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, out, d_out))
    # Rows are written by one step, and added to by those that merge.
    dq = torch.empty_like(q, dtype=lse.dtype if schedule.merges else q.dtype, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    dropped = None if dropout is None else DropoutOfHeads.of(dropout, q, k)
    call = _Call(q, k, v, out, d_out, lse, delta, share, dq, dk, dv, bias, d_bias, scale, softcap, fused, dropped)
    if needs.q or needs.kv or needs.bias:
        _run(call, schedule)
    return Gradients(
        q=dq.to(q.dtype) if needs.q else None,
        k=dk.to(k.dtype) if needs.kv else None,
        v=dv.to(v.dtype) if needs.kv else None,
        bias=d_bias if d_bias is None or bias is None else d_bias.to(bias.dtype),
        sinks=-of_sinks.sum((0, 2)).to(sinks.dtype) if needs.sinks and sinks is not None else None,
    )


def _row_terms(
    lse: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor | None, sinks: Tensor | None, fused: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`lse`, `delta` and `share` of a `_Call`, and minus the gradient of the sink by row; `[b, h, Sq]` each."""
    if fused and sinks is None:
        return lse, lse, lse, lse  # the operator reads lse alone
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share, of_sinks = torch.ones_like(lse), delta
    if sinks is not None:
        logits = sinks.to(lse.dtype).view(1, -1, 1)
        share, of_sinks = torch.sigmoid(lse - logits), delta * torch.sigmoid(logits - lse)
        lse = torch.logaddexp(lse, logits) if fused else lse
    delta = delta * share if d_lse is None else delta * share - d_lse.to(lse.dtype)
    return lse, delta, share, of_sinks


def _run(call: _Call, schedule: Schedule) -> None:
    """Add up `call.dq`, `call.dk`, `call.dv` and `call.d_bias`."""
    batch, heads, _ = call.lse.shape
    masks = MaskReader(schedule, call.q.dtype)
    for batches, head_range, pattern in schedule.ranges(batch, heads, heads // call.k.shape[1]):
        part = call.part(batches, head_range)
        every = slice(0, part.q.shape[1])
        order = schedule.rows[pattern] if schedule.rows.numel() else None
        for steps in schedule.batches_of[pattern]:
            # As in the forward, one batch dimension: sequences, or the steps of one sequence.
            if len(steps) == 1 or part.q.shape[0] >= len(steps) or call.d_bias is not None:
                for step in steps:
                    _compute(part, Rows([step], order), [step], schedule, masks)
                continue
            rows = Rows(steps, order)
            for b in range(part.q.shape[0]):
                _compute(part.part(slice(b, b + 1), every), rows, steps, schedule, masks)


def _compute(call: _Call, rows: Rows, steps: list[Step], schedule: Schedule, masks: MaskReader) -> None:
    """Add what steps of equal size contribute."""
    count = steps[0][COLUMNS]
    if not count:
        rows.fill(call.dq, 0.0)
        return
    q, out, d_out, lse, delta, share = (
        rows.take(x) for x in (call.q, call.out, call.d_out, call.lse, call.delta, call.share)
    )
    k, v = keys_of(call.k, steps, schedule), keys_of(call.v, steps, schedule)
    batch, heads, height, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    mask = None
    if steps[0][MASK_OFFSET] >= 0:
        offsets = {step[MASK_OFFSET] for step in steps}
        each = [masks.additive(step[MASK_OFFSET], height, count) for step in (steps if len(offsets) > 1 else steps[:1])]
        mask = torch.stack(each)[:, None]  # [n | 1, 1, height, columns]
    added = mask
    if call.bias is not None:
        added = bias_part(call.bias, rows, steps, schedule).to(bias_dtype(call.bias, q))
        added = added if mask is None else added.masked_fill(mask == -torch.inf, -torch.inf)
    if group > 1:
        q, out, d_out, lse, delta, share = (
            x.reshape(batch, kv_heads, group * height, *x.shape[3:]) for x in (q, out, d_out, lse, delta, share)
        )
        added = None if added is None else fold_heads(added, heads, group, height, count)
    if call.fused:
        dq, dk, dv = _fused(d_out, q, k, v, out, lse, added, call.scale, swap=len(steps) > 1)
    else:
        hidden = None
        if mask is not None:
            hidden = mask == -torch.inf
            hidden = hidden if group == 1 else fold_heads(hidden, heads, group, height, count)
        kept = None if call.dropout is None else call.dropout.kept(rows, steps, schedule, group)
        dq, dk, dv, d_scores = _plain(d_out, q, k, v, lse, delta, share, added, hidden, kept, call)
        if call.d_bias is not None:
            _add_bias(call.d_bias, d_scores.view(batch, heads, height, count), rows, steps[0], schedule)
    dq = dq.reshape(batch, heads, height, -1).to(call.dq.dtype)
    rows.put(call.dq, rows.take(call.dq) + dq if steps[0][MERGE] else dq)
    _add_keys(call.dk, dk, steps, schedule)
    _add_keys(call.dv, dv, steps, schedule)


def _fused(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, added: Tensor | None, scale: float,
    *, swap: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """PyTorch's fused backward; `swap` as for the forward."""
    if not swap:
        return flash_attention_cpu_backward(d_out, q, k, v, out, lse, added, scale)
    d_out, q, k, v, out, lse = [x.transpose(0, 1) for x in (d_out, q, k, v, out, lse)]
    mask = None if added is None else added.transpose(0, 1)
    dq, dk, dv = flash_attention_cpu_backward(d_out, q, k, v, out, lse, mask, scale)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _plain(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    share: Tensor,
    added: Tensor | None,
    hidden: Tensor | None,
    kept: Tensor | None,
    call: _Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(dq, dk, dv, d_scores)` of one batch of steps by matmuls: float64 for float64, else float32."""
    d_out, q, k, v = (x.to(lse.dtype) for x in (d_out, q, k, v))
    scores = q @ k.mT * call.scale
    slope = None
    if call.softcap:
        capped = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * capped, 1 - capped * capped
    if added is not None:
        scores = scores + added
    weights = torch.exp(scores - lse[..., None])
    shared = weights * share[..., None]
    d_weights = d_out @ v.mT
    seen = shared
    if kept is not None and call.dropout is not None:
        seen, d_weights = (x.masked_fill(~kept, 0.0) * call.dropout.scale for x in (shared, d_weights))
    d_scores = shared * d_weights - weights * delta[..., None]
    d_capped = d_scores if slope is None else d_scores * slope
    if hidden is not None:  # also what is NaN
        seen, d_scores, d_capped = (x.masked_fill(hidden, 0.0) for x in (seen, d_scores, d_capped))
    return d_capped @ k * call.scale, d_capped.mT @ q * call.scale, seen.mT @ d_out, d_scores


def _add_keys(total: Tensor, part: Tensor, steps: list[Step], schedule: Schedule) -> None:
    """Add `[n, hkv, columns, D]` to the steps' columns of `[b, hkv, Skv, D]`, one step after the other."""
    first, count = steps[0][FIRST_COLUMN], steps[0][COLUMNS]
    if first < 0:
        offset = steps[0][COLUMN_OFFSET]
        columns = schedule.columns[offset : offset + len(steps) * count]
        part = part if len(steps) == 1 else part.transpose(0, 1).flatten(1, 2)[None]
        total.index_add_(2, columns, part.to(total.dtype))
    elif len(steps) == 1:
        total[:, :, first : first + count] += part
    else:
        for step, one in zip(steps, part, strict=True):
            total[0, :, step[FIRST_COLUMN] : step[FIRST_COLUMN] + count] += one


def _add_bias(d_bias: Tensor, d_scores: Tensor, rows: Rows, step: Step, schedule: Schedule) -> None:
    """Add one step's `[b, h, height, columns]` to the gradient of a bias, summed over what the bias broadcasts."""
    by_row, by_column = d_bias.shape[2] > 1, d_bias.shape[3] > 1
    height, count = d_scores.shape[2:]
    summed = d_scores.sum_to_size(*d_bias.shape[:2], height if by_row else 1, count if by_column else 1)
    row = column = torch.zeros(1, dtype=torch.int64, device="cpu")
    if by_row:
        places = torch.arange(rows.start, rows.start + height, device="cpu")
        row = places if rows.places is None else rows.places
    if by_column:
        first, offset = step[FIRST_COLUMN], step[COLUMN_OFFSET]
        following = torch.arange(first, first + count, device="cpu")
        column = following if first >= 0 else schedule.columns[offset : offset + count]
    # Columns of padding repeat another one: added up, not written.
    d_bias.permute(2, 3, 0, 1).index_put_((row[:, None], column), summed.permute(2, 3, 0, 1), accumulate=True)
