"""Masked attention in plain PyTorch on any device: row blocks of like width gathered and computed as one batch.

The portable implementation where no kernel of its own exists (Apple, Intel and AMD GPUs, and NVIDIA until Triton
serves the call). All tensors stay on the device and all sizes are known beforehand, so it never synchronises and can be
captured in a CUDA graph. It reads only the columns a row block needs; the price is one gathered copy of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.kernels.common import pattern_ranges, softmax_and_lse
from stof.kernels.merge import share_of_keys
from stof.layout import bitmaps as bits
from stof.layout.layout import Layout
from stof.runtime.private import efficient_attention_cuda

# Scores held at once, in elements: bounds extra memory at about 0.5 GB of float32 temporaries.
MAX_SCORES = 2**26


@dataclass(frozen=True, eq=False)
class Bucket:
    """Row blocks of one pattern, padded to the same number of tiles.

    Attributes:
        pattern: the pattern they belong to.
        rows: int64 `[n, rows]`, original rows: block_m of them, fewer in the bucket of a ragged last block.
        columns: int64 `[n, width]`, key columns; unused slots repeat the first.
        tile_bitmap: int64 `[n, tiles]`, row of `bitmaps`.
    """

    pattern: int
    rows: Tensor
    columns: Tensor
    tile_bitmap: Tensor


@dataclass(frozen=True, eq=False)
class BatchedLayout:
    """A layout as buckets. `bitmaps` int32 `[U + 1, block_m, words]` ends with an empty one for unused tiles."""

    buckets: list[Bucket]
    bitmaps: Tensor
    pattern_of: list[list[int]]
    block_n: int


def make_batched(layout: Layout) -> BatchedLayout:
    """Sort row blocks into buckets whose widths differ by a quarter at most; synchronises, once per plan."""
    config, device = layout.config, layout.device
    widths = layout.row_block_ptr.diff().tolist()
    first = layout.row_block_ptr.tolist()
    rows = layout.rows().view(-1, config.block_m)
    # Full and unused tiles get bitmaps as well: one rule for all.
    full, unused = len(layout.bitmaps), len(layout.bitmaps) + 1
    words = bits.words(config.block_n)
    extra = torch.zeros(2, config.block_m, words, dtype=torch.int32, device=device)
    extra[0] = -1
    tile_live = layout.tile_live()
    buckets = []
    for pattern in range(layout.patterns):
        members: dict[int, list[int]] = {}
        for number in range(pattern * layout.row_blocks, (pattern + 1) * layout.row_blocks):
            if widths[number]:
                members.setdefault(_rounded(widths[number]), []).append(number)
        for tiles, numbers in sorted(members.items()):
            chosen = torch.tensor(numbers, device=device)
            slots = torch.arange(tiles, device=device)
            starts = torch.tensor([first[n] for n in numbers], device=device)
            exists = slots < torch.tensor([widths[n] for n in numbers], device=device)[:, None]
            tile = torch.where(exists, starts[:, None] + slots, 0)
            columns = layout.tile_columns(tile.flatten()).view(len(numbers), tiles, -1)
            live = tile_live[tile] & exists[:, :, None]
            columns, live = columns.flatten(1), live.flatten(1)
            # Others repeat a column the row block needs, so that NaN elsewhere in K and V stays there.
            columns = torch.where(live, columns, columns.gather(1, live.int().argmax(1, keepdim=True)))
            bitmap = layout.tile_bitmap[tile].long()
            bitmap = torch.where(exists, torch.where(bitmap < 0, full, bitmap), unused)
            block_rows = rows[chosen]
            # Only the last row block can be ragged; it is alone in a bucket, so that others write all their rows.
            ragged = block_rows[:, -1] < 0
            for group in (~ragged, ragged):
                if bool(group.any()):
                    height = int((block_rows[group][0] >= 0).sum())
                    kept_rows = block_rows[group][:, :height].contiguous()
                    buckets.append(Bucket(pattern, kept_rows, columns[group].clamp(min=0), bitmap[group]))
    return BatchedLayout(buckets, torch.cat([layout.bitmaps, extra]), layout.pattern_of.tolist(), config.block_n)


def _rounded(tiles: int) -> int:
    """The bucket of a width: up to 4 exact, then 4 buckets for each doubling."""
    step = max(1, 2 ** (max(tiles - 1, 1).bit_length() - 3))
    return -(-tiles // step) * step


def batched_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchedLayout,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked attention; arguments and results as `reference_attention`, the mask as a `BatchedLayout`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, q_len, _ = q.shape
    out = torch.zeros_like(q) if v.shape[-1] == q.shape[-1] else q.new_zeros(*q.shape[:-1], v.shape[-1])
    # The same memory with the strides of a contiguous tensor. Under deterministic algorithms, CUDA's index_put (PyTorch
    # 2.11) writes to wrong rows if the dimension of a single head has another stride.
    target = out.squeeze(1).unsqueeze(1) if heads == 1 else out
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=dtype, device=q.device)
    group = heads // k.shape[1]
    rows_of = layout.pattern_of if len(layout.pattern_of) > 1 else layout.pattern_of * batch
    pattern_of = [row if len(row) > 1 else row * heads for row in rows_of]
    # PyTorch's memory-efficient CUDA attention wants 16-byte rows and has no softcap.
    aligned = q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0
    fused = q.device.type == "cuda" and q.dtype != torch.float64 and aligned and not softcap
    for batches, head_range, pattern in pattern_ranges(pattern_of, group):
        kv_range = slice(head_range.start // group, -(-head_range.stop // group))
        part = (q[batches, head_range], k[batches, kv_range], v[batches, kv_range])
        added = None
        if bias is not None:
            added = bias if bias.shape[0] == 1 else bias[batches]
            added = added if added.shape[1] == 1 else added[:, head_range]
        for bucket in layout.buckets:
            if bucket.pattern != pattern:
                continue
            count, height = bucket.rows.shape
            scores = part[0].shape[0] * part[0].shape[1] * height * bucket.columns.shape[1]
            step = max(1, MAX_SCORES // scores)
            for start in range(0, count, step):
                piece = slice(start, start + step)
                keep = bits.unpack(layout.bitmaps[bucket.tile_bitmap[piece]], layout.block_n)
                keep = keep.transpose(1, 2).flatten(2)[:, :height]  # [n, rows, width]
                rows, columns = bucket.rows[piece], bucket.columns[piece]
                if fused:
                    result, row_lse = _attend_fused(*part, rows, columns, keep, added, scale)
                else:
                    result, row_lse = _attend(*part, rows, columns, keep, added, scale, softcap, dtype)
                target[batches, head_range, rows.flatten()] = result.to(q.dtype)
                lse[batches, head_range, rows.flatten()] = row_lse
    if sinks is not None:
        out = out * share_of_keys(lse, sinks)[..., None].to(out.dtype)
    return out, lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    keep: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Row blocks as a batch: `[b, h, n * block_m, Dv]` and `[b, h, n * block_m]`."""
    batch, heads, _, width = q.shape
    kv_heads = k.shape[1]
    count, block_m = rows.shape
    group = heads // kv_heads
    q = (q[:, :, rows].to(dtype) * scale).view(batch, kv_heads, group, count, block_m, width)
    k = k[:, :, columns].to(dtype).unsqueeze(2)  # [b, hkv, 1, n, columns, D]
    v = v[:, :, columns].to(dtype).unsqueeze(2)
    scores = (q @ k.transpose(-1, -2)).reshape(batch, heads, count, block_m, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _gathered_bias(bias, rows, columns).to(dtype)
    scores = scores.masked_fill(~keep, -torch.inf)
    weights, lse = softmax_and_lse(scores)
    out = weights.view(batch, kv_heads, group, count, block_m, -1) @ v
    return out.reshape(batch, heads, count * block_m, -1), lse.reshape(batch, heads, count * block_m)


def _attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    keep: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same through PyTorch's memory-efficient CUDA attention, each row block a batch entry of its own."""
    batch, heads, _, width = q.shape
    kv_heads = k.shape[1]
    count, height = rows.shape
    group, columns_each = heads // kv_heads, columns.shape[1]
    added = torch.zeros(keep.shape, dtype=q.dtype, device=q.device).masked_fill_(~keep, -torch.inf)[:, None]
    if bias is not None:
        spread = _gathered_bias(bias, rows, columns).to(q.dtype)
        spread = spread.masked_fill(~keep, -torch.inf).expand(batch, -1, count, height, columns_each)
        added = spread.transpose(1, 2).flatten(0, 1)  # [b * n, h | 1, rows, columns]
    elif batch > 1:
        added = added.repeat(batch, 1, 1, 1)
    if group > 1:  # the query heads of a key head follow each other as rows
        added = added.expand(-1, heads, -1, -1).reshape(-1, kv_heads, group * height, columns_each)
    else:
        added = added.expand(-1, heads, -1, -1)

    def gathered(x: Tensor, places: Tensor) -> Tensor:
        """`[b * n, heads, places, width]`, stored `[b * n, places, heads, width]` as the operator likes it."""
        taken = x.transpose(1, 2).index_select(1, places.flatten())
        return taken.view(batch * count, -1, *taken.shape[2:]).transpose(1, 2)

    taken = gathered(q, rows).reshape(batch * count, kv_heads, group * height, width)
    out, lse = efficient_attention_cuda(taken, gathered(k, columns), gathered(v, columns), added, scale)
    # Rows that keep nothing come back as NaN or garbage, and lse is padded to a multiple of 32 rows.
    empty = (added == -torch.inf).all(-1)
    out = out.masked_fill(empty[..., None], 0.0)
    lse = lse[:, :, : group * height].masked_fill(empty, -torch.inf)

    def restored(x: Tensor) -> Tensor:
        """`[b, heads, n * rows, ...]` from `[b * n, kv_heads, group * rows, ...]`."""
        x = x.reshape(batch, count, heads, height, *x.shape[3:])
        return x.transpose(1, 2).flatten(2, 3)

    return restored(out), restored(lse)


def _gathered_bias(bias: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`[b | 1, h | 1, n | 1, block_m | 1, columns | 1]` from a 4-D bias; broadcast dimensions stay 1."""
    per_row, per_column = bias.shape[2] > 1, bias.shape[3] > 1
    if per_row and per_column:
        return bias[:, :, rows[:, :, None], columns[:, None, :]]
    if per_row:
        return bias[:, :, rows]
    return bias[:, :, 0][:, :, columns][:, :, :, None] if per_column else bias[..., None]
