"""Row-wise attention in Triton: each query row reads exactly the keys it keeps, without tensor cores.

For masks with few columns per row or with columns that no two rows share, where tiles would be mostly empty, and for
short sequences. A row's columns are dealt to `slots`, independent online softmaxes that are merged once at the end:
inside the loop nothing is exchanged between slots, so neither warps nor lanes wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from stof.errors import ArgumentError, LayoutError
from stof.kernels.cpu.attention import empty_output
from stof.kernels.triton.work import BoundCall
from stof.layout.layout import Layout
from stof.runtime.launch import Launch
from stof.runtime.pdl import launch_next_and_wait, supports_pdl

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Scores of tiles unpacked at once while preparing; at 70 bytes each, temporaries stay below 0.3 GB.
STRIP_SCORES = 2**22
# Rows whose counts round up to the same multiple of this keep the layout's order, which has like rows side by side.
COUNT_STEP = 16


@dataclass(frozen=True)
class RowWiseConfig:
    """How the kernel cuts its work; every size is a power of two.

    Attributes:
        rows: query rows of a program.
        cols: columns of a row read in one step.
        slots: softmax states of a row; `cols // slots` columns go to a slot in one step.
        width: neighbouring elements of a key read by one load of the program; 16 bytes go to a thread.
        num_warps: warps of a program.
    """

    rows: int = 1
    cols: int = 16
    slots: int = 8
    width: int = 32
    num_warps: int = 1

    def __post_init__(self) -> None:
        limits = {"rows": (1, 16), "cols": (1, 256), "slots": (1, 256), "width": (8, 128), "num_warps": (1, 16)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ArgumentError(f"{name} is a power of two between {least} and {most}, got {value!r}")
        if self.cols < self.slots:
            raise ArgumentError(f"cols is a multiple of slots, got {self.cols} and {self.slots}")


def default_config(head_dim: int, max_count: int, itemsize: int = 2) -> RowWiseConfig:
    """A config for the wider of head_dim and value width, the longest row in columns, and bytes of an input element.

    A thread holds 8 to 32 elements of a key and of the result. The lanes of a warp that are left take other rows, which
    leaves nothing to merge, or, the more columns a row has, columns of the same row; very long rows get several warps.
    """
    lanes = 2  # 16 bytes each: a whole sector
    while lanes * 24 < head_dim and lanes < 8:
        lanes *= 2
    groups = 32 // lanes
    slots = 1
    while slots * 64 < max_count and slots < 4 * groups:
        slots *= 2
    # Columns a state has in flight, kept to what 128 registers hold.
    unroll = 4 if head_dim <= lanes * 16 else 2
    if itemsize > 2:
        unroll //= 2
    while unroll > 1 and unroll * slots >= 2 * max_count:
        unroll //= 2
    rows, warps = max(1, groups // slots), max(1, slots // groups)
    return RowWiseConfig(rows, slots * unroll, slots, lanes * 16 // itemsize, warps)


def prepare_row_wise(layout: Layout) -> tuple[list[Tensor], list[int]]:
    """The kept columns of every row, rows with like counts side by side and the longest first.

    Memory beyond the result is one strip of row blocks, never `q_len x kv_len`. Synchronises; done once per plan.

    Returns:
        `([pattern_of, rows, row_ptr, columns], [most])`: `rows` int32 `[P * q_len]` holds the query row at each
        position of a pattern, `row_ptr` int32 `[P * q_len + 1]` where the columns of each position start in
        `columns` (int32, ascending within a row), `most` the largest count of a row.

    Raises:
        LayoutError: the mask keeps 2**31 scores or more, which int32 pointers cannot count.
    """
    device, patterns, q_len = layout.device, layout.patterns, layout.q_len
    padded = layout.row_blocks * layout.config.block_m
    strips = [_strip(layout, blocks) for blocks in _strips(layout)]
    counts = torch.cat([counts for counts, _ in strips]).view(patterns, padded)
    # Stable: rows of one class stay neighbours, as the layout's order has rows with like columns side by side.
    classes = (counts[:, :q_len] + COUNT_STEP - 1) // COUNT_STEP
    order = classes.argsort(dim=1, descending=True, stable=True)
    sorted_counts = counts.gather(1, order).flatten()
    row_ptr = torch.nn.functional.pad(sorted_counts.cumsum(0), (1, 0))
    total, most = int(row_ptr[-1]), int(counts.max())
    if total >= 2**31:
        raise LayoutError([f"row-wise attention takes fewer than 2**31 kept scores, this mask keeps {total}"])
    starts = torch.zeros(patterns, padded, dtype=torch.int64, device=device)
    starts.scatter_(1, order, row_ptr[:-1].view(patterns, q_len))
    columns = torch.empty(total, dtype=torch.int32, device=device)
    first = 0
    for strip_counts, strip_columns in strips:
        last = first + len(strip_counts)
        before = strip_counts.cumsum(0) - strip_counts
        shift = starts.view(-1)[first:last] - before
        kept = len(strip_columns)
        places = torch.repeat_interleave(shift, strip_counts, output_size=kept) + torch.arange(kept, device=device)
        columns[places] = strip_columns
        first = last
    rows = layout.rows().gather(1, order)
    return [layout.pattern_of, rows.flatten().int(), row_ptr.int(), columns], [most]


def _strips(layout: Layout) -> list[range]:
    """Row blocks of all patterns in runs of at most `STRIP_SCORES` scores (always one row block at least)."""
    pointers = layout.row_block_ptr.tolist()
    tiles = STRIP_SCORES // (layout.config.block_m * layout.config.block_n)
    out, start = [], 0
    for stop in range(1, len(pointers)):
        if stop + 1 == len(pointers) or pointers[stop + 1] - pointers[start] > tiles:
            out.append(range(start, stop))
            start = stop
    return out


def _strip(layout: Layout, blocks: range) -> tuple[Tensor, Tensor]:
    """Counts int64 `[len(blocks) * block_m]` and sorted columns int32 of the rows of these row blocks."""
    block_m, device = layout.config.block_m, layout.device
    pointers = layout.row_block_ptr[blocks.start : blocks.stop + 1].long()
    first, last = pointers[[0, -1]].tolist()
    tiles = torch.arange(first, last, device=device)
    block = torch.repeat_interleave(torch.arange(len(blocks), device=device), pointers.diff(), output_size=len(tiles))
    columns = layout.tile_columns(tiles)
    exists = layout.rows().view(-1, block_m)[blocks.start : blocks.stop] >= 0
    keep = layout.tile_keep(tiles) & (columns >= 0)[:, None, :] & exists[block][:, :, None]
    tile, row, within = keep.nonzero(as_tuple=True)
    positions = block[tile] * block_m + row
    keys = (positions * layout.kv_len + columns[tile, within]).sort().values
    counts = torch.bincount(positions, minlength=len(blocks) * block_m)
    return counts, (keys % layout.kv_len).int()


def row_wise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    sizes: list[int],
    *,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    config: RowWiseConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked attention; arguments and results as `reference_attention`, the mask as `prepare_row_wise` made it.

    Inputs are float16, bfloat16 or float32, arithmetic is float32. `bias` has 4 dimensions, each 1 or the full size.
    Only kept columns of `k` and `v` are read. Equal calls give equal bits.

    Returns:
        `(out, lse)`: `[B, H, Sq, Dv]` as `empty_output` lays it out, and float32 `[B, H, Sq]`.
    """
    result = empty_output(q, v)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    options = {"scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks, "config": config}
    out, lse = bind_row_wise(q, k, v, tensors, sizes, **options)(q, k, v, bias, sinks)  # type: ignore[arg-type]
    return (out if out.stride() == result.stride() else result.copy_(out)), lse


def bind_row_wise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    sizes: list[int],
    *,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    config: RowWiseConfig | None = None,
) -> BoundCall:
    """`row_wise_attention` with everything but the data decided, for tensors like these.

    The call takes tensors with the shapes, strides, dtypes and device of those given here.
    """
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return lambda q, k, v, bias, sinks: row_wise_attention(
            q, k, v, tensors, sizes, scale=scale, softcap=softcap, bias=bias, sinks=sinks, config=config
        )
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    out = empty_output(q, v)
    pattern_of, rows, row_ptr, columns = tensors
    mask_batch, mask_heads = pattern_of.shape
    config = config or default_config(max(head_dim, value_dim), sizes[0], q.element_size())
    bias_strides = [0, 0, 0, 0]
    if bias is not None:
        bias_strides = [0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)]
    ready = Launch(
        row_wise_kernel,
        -(-q_len // config.rows) * batch * heads,
        (pattern_of, rows, row_ptr, columns),
        (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride(), *bias_strides,
            0 if mask_batch == 1 else mask_heads, 0 if mask_heads == 1 else 1,
            batch * heads, heads, q_len,
            # Scores are in base 2; under a softcap the scale is inside the tanh and the base outside.
            scale / softcap if softcap else scale * LOG2E, softcap * LOG2E,
        ),
        (
            heads // kv_heads, mask_batch * mask_heads == 1, head_dim, value_dim,
            bias is not None, softcap != 0.0, sinks is not None,
            (kv_len - 1) * max(k.stride(2), v.stride(2), bias_strides[3]) >= 2**31,
            config.rows, config.slots, config.cols // config.slots, config.width, supports_pdl(q.device),
        ),
        num_warps=config.num_warps,
        num_stages=1,
        use_pdl=supports_pdl(q.device),
        device=q.device,
    )  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out = empty_output(q, v)
        lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
        # What the kernel does not read may be anything.
        ready(q, k, v, out, lse, q if bias is None else bias, q if sinks is None else sinks)
        return out, lse

    return call


# Tuples grow while the compiler unrolls loops, which a type checker cannot follow: hence no_type_check.


@triton.jit
@no_type_check
def _load_slices(pointers, mask, SIZE: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr):
    """The last dimension as a tuple of `[..., WIDTH]` tensors: sizes such as 80 or 192 need no padding to 128 or 256.

    Masked elements are 0, but undefined under `mask` without FILL, which saves writing a register for each of them.
    """
    parts = ()
    offsets = tl.arange(0, WIDTH)
    for n in tl.static_range((SIZE + WIDTH - 1) // WIDTH):
        if (n + 1) * WIDTH > SIZE:
            part = tl.load(pointers + (n * WIDTH + offsets), mask=mask & (n * WIDTH + offsets < SIZE), other=0.0)
        elif FILL:
            part = tl.load(pointers + (n * WIDTH + offsets), mask=mask, other=0.0)
        else:
            part = tl.load(pointers + (n * WIDTH + offsets), mask=mask)
        parts += (part,)
    return parts


@triton.jit
@no_type_check
def _softcapped(x, bound):
    """`bound * tanh(x)` without overflow; near 0 a series, where `1 - exp` would lose the leading digits."""
    size = tl.abs(x)
    decay = tl.exp2(size * -2.8853900817779268)  # exp(-2 |x|)
    far = (1.0 - decay) / (1.0 + decay)
    near = tl.where(size < 0.25, x, 0.0)
    square = near * near
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return bound * tl.where(size < 0.25, near * series, tl.where(x < 0, -far, far))


@triton.jit
@no_type_check
def _finite(m):
    """The reference point of exponentials: any finite one where nothing was seen, since -inf - -inf is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
@no_type_check
def row_wise_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, sinks_ptr,
    pattern_ptr, rows_ptr, row_ptr, columns_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_od,
    stride_bb, stride_bh, stride_bm, stride_bn,
    stride_pb, stride_ph,
    batch_heads, heads, q_len, scale, softcap,
    GROUP: tl.constexpr,
    ONE_PATTERN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDTH: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    launch_next_and_wait(USE_PDL)
    # Heads are fastest: programs that run at the same time read the same column lists.
    program = tl.program_id(0)
    i_bh = program % batch_heads
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    position = program // batch_heads * ROWS
    pattern = tl.zeros([], dtype=tl.int64)
    if not ONE_PATTERN:
        pattern = tl.load(pattern_ptr + i_b * stride_pb + i_h * stride_ph).to(tl.int64)
    rows_ptr += pattern * q_len
    row_ptr += pattern * q_len
    q_ptr += i_b * stride_qb + i_h * stride_qh
    k_ptr += i_b * stride_kb + i_h // GROUP * stride_kh
    v_ptr += i_b * stride_vb + i_h // GROUP * stride_vh

    # Everything in the loop is [STATES, WIDTH]. A few lanes share a key, the others and the warps take states; slices
    # of the head dimension and the UNROLL columns of a state lie in a thread's registers, where sums cost no exchange.
    # Two dimensions, not five: Triton 3.6 and 3.7 order threads differently along dimensions without contiguity.
    STATES: tl.constexpr = ROWS * SLOTS
    states = tl.arange(0, STATES)
    slot = states % SLOTS
    listed = position + states // SLOTS
    exists = listed < q_len
    rows = tl.load(rows_ptr + listed, mask=exists, other=0).to(tl.int64)
    starts = tl.load(row_ptr + listed, mask=exists, other=0)
    counts = tl.load(row_ptr + listed + 1, mask=exists, other=0) - starts
    # The largest count once more from scalars: a loop whose bound comes from lanes is compiled as divergent.
    most = 0
    start = tl.load(row_ptr + position)
    for n in tl.static_range(1, ROWS + 1):
        stop = tl.load(row_ptr + tl.minimum(position + n, q_len))
        most = tl.maximum(most, stop - start)
        start = stop

    q_loaded = _load_slices(q_ptr + (rows * stride_qs)[:, None], exists[:, None], HEAD_DIM, WIDTH, True)
    q_parts = ()
    for n in tl.static_range(len(q_loaded)):
        q_parts += (q_loaded[n].to(tl.float32) * scale,)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + (i_b * stride_bb + i_h * stride_bh + rows * stride_bm)
    acc = ()
    for _ in tl.static_range((VALUE_DIM + WIDTH - 1) // WIDTH):
        acc += (tl.zeros([STATES, WIDTH], dtype=tl.float32),)
    m_i = tl.full([STATES], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([STATES], dtype=tl.float32)
    column_ptrs = columns_ptr + (starts.to(tl.int64) + slot)
    left = counts - slot
    columns = ()
    for u in tl.static_range(UNROLL):
        columns += (tl.load(column_ptrs + u * SLOTS, mask=u * SLOTS < left, other=0),)
    for first in range(0, most, UNROLL * SLOTS):
        # All loads of a step before its arithmetic, and the next step's columns as well: keys cannot be asked for
        # before their numbers are here.
        k_parts, v_parts, biases, columns_next = (), (), (), ()
        for u in tl.static_range(UNROLL):
            valid = first + u * SLOTS < left
            column = columns[u].to(tl.int64) if WIDE else columns[u]
            # Scores of unused places are replaced, whatever their keys; values there must be 0, as the weights are.
            k_ptrs, v_ptrs = k_ptr + column * stride_ks, v_ptr + column * stride_vs
            k_parts += (_load_slices(k_ptrs[:, None], valid[:, None], HEAD_DIM, WIDTH, False),)
            v_parts += (_load_slices(v_ptrs[:, None], valid[:, None], VALUE_DIM, WIDTH, True),)
            if HAS_BIAS:
                bias = tl.load(bias_ptrs + column * stride_bn, mask=valid, other=0.0)
                biases += (bias.to(tl.float32) * 1.4426950408889634,)
            ahead = first + (UNROLL + u) * SLOTS
            columns_next += (tl.load(column_ptrs + ahead, mask=ahead < left, other=0),)
        columns = columns_next

        m_new = m_i
        scores = ()
        for u in tl.static_range(UNROLL):
            products = q_parts[0] * k_parts[u][0].to(tl.float32)
            for n in tl.static_range(1, len(q_parts)):
                products += q_parts[n] * k_parts[u][n].to(tl.float32)
            score = tl.sum(products, 1)  # [STATES]
            if HAS_SOFTCAP:
                score = _softcapped(score, softcap)
            if HAS_BIAS:
                score += biases[u]
            score = tl.where(first + u * SLOTS < left, score, float("-inf"))
            m_new = tl.maximum(m_new, score)
            scores += (score,)
        reference = _finite(m_new)
        alpha = tl.exp2(m_i - reference)
        m_i = m_new
        l_i *= alpha
        acc_new = ()
        for n in tl.static_range(len(acc)):
            acc_new += (acc[n] * alpha[:, None],)
        for u in tl.static_range(UNROLL):
            p = tl.exp2(scores[u] - reference)
            l_i += p
            acc = acc_new
            acc_new = ()
            for n in tl.static_range(len(acc)):
                acc_new += (acc[n] + p[:, None] * v_parts[u][n].to(tl.float32),)
        acc = acc_new

    # The states of a row meet only here.
    m_i = tl.reshape(m_i, [ROWS, SLOTS])
    reference = _finite(tl.max(m_i, 1))  # [ROWS]
    weights = tl.exp2(m_i - reference[:, None])
    l_row = tl.sum(tl.reshape(l_i, [ROWS, SLOTS]) * weights, 1)
    empty = l_row == 0.0
    total = l_row
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + i_h).to(tl.float32) * 1.4426950408889634 - reference)
    weights = tl.reshape(weights / tl.where(empty, 1.0, total)[:, None], [STATES])
    listed = position + tl.arange(0, ROWS)
    exists = listed < q_len
    rows = tl.load(rows_ptr + listed, mask=exists, other=0).to(tl.int64)
    out_ptrs = out_ptr + i_b * stride_ob + i_h * stride_oh + (rows * stride_os)[:, None]
    for n in tl.static_range(len(acc)):
        offsets = n * WIDTH + tl.arange(0, WIDTH)[None, :]
        out = tl.sum(tl.reshape(acc[n] * weights[:, None], [ROWS, SLOTS, WIDTH]), 1)
        mask = exists[:, None] & (offsets < VALUE_DIM)
        tl.store(out_ptrs + offsets * stride_od, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = (reference + tl.log2(tl.where(empty, 1.0, l_row))) * 0.6931471805599453
    lse_ptrs = lse_ptr + (i_b * heads + i_h) * q_len + rows
    tl.store(lse_ptrs, tl.where(empty, float("-inf"), lse), mask=exists)
