"""Bundles of row blocks on Hopper, in Gluon: one K/V pipeline that never drains between row blocks.

A program walks the tiles of a bundle (see `stof.kernels.triton.work`), of 64 query rows each. Copies of K and V run two
tiles ahead (`cp.async`, so columns may lie anywhere), the next row block's Q is fetched while the last tile of this one
is computed, and the output is written straight from the accumulator's registers. Two programs or more share a
multiprocessor, so one's softmax overlaps the other's tensor-core work. The Triton kernel cannot do this: it copies Q
to shared memory for every tile once Q changes inside a loop, and waits for every product.

Source: STOF (arXiv 2506.06095), section 4.1; online softmax as FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from stof.kernels.cpu.attention import empty_output
from stof.kernels.triton.launch import BoundCall, Launch
from stof.kernels.triton.scratch import zeroed_counters
from stof.kernels.triton.work import ITEM_FIELDS, BlockWiseConfig, Work

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
FIELDS = gl.constexpr(ITEM_FIELDS)
# Rows of a row block: one warpgroup.
ROWS = 64
# Triton 3.7 has another name for it.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.constexpr_function
def _bit_layout(block_n):
    """The accumulator of 64 x block_n scores, seen as [row, group of 8 columns, thread of the group, column pair]."""
    groups = [[0, 1 << i, 0, 0] for i in range((block_n // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *groups],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block_n // 8, 4, 2],
    )


@gluon.jit
@no_type_check
def _copy(buffer, base, columns, live, stride, D: gl.constexpr, layout: gl.constexpr):
    """Start copying one row of D elements per column; rows that are not live become zero."""
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    pointers = base + columns[:, None] * stride + d[None, :]
    mask = gl.convert_layout(live[:, None].broadcast_to([buffer.shape[0], D]), layout)
    async_copy.async_copy_global_to_shared(buffer, pointers, mask=mask)


@gluon.jit
@no_type_check
def _query_rows(row_block, pattern, row_order_ptr, q_len, PERMUTED: gl.constexpr, layout: gl.constexpr):
    """Query row of each row of a row block, and whether it exists."""
    position = row_block * 64 + gl.arange(0, 64, layout=layout)
    exists = position < q_len
    row = position
    if PERMUTED:
        row = gl.load(row_order_ptr + pattern * q_len + position, mask=exists, other=0)
    return row, exists


@gluon.jit
@no_type_check
def _store(acc, m_i, l_i, row, exists, out_base, lse_base, sink, stride_os, D: gl.constexpr, HAS_SINKS: gl.constexpr):
    """Normalise and write 64 rows of output and log-sum-exp, from registers."""
    some = l_i > 0.0
    total = gl.where(some, l_i, 1.0)
    lse = gl.where(some, (m_i + gl.log2(total)) * LN2, float("-inf"))
    if HAS_SINKS:
        total = gl.where(some, total * (1.0 + gl.exp2((sink - lse) * LOG2E)), 1.0)
    factor = gl.convert_layout(gl.where(some, 1.0 / total, 0.0), gl.SliceLayout(1, acc.type.layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    at = gl.convert_layout(row, gl.SliceLayout(1, acc.type.layout))
    ok = gl.convert_layout(exists, gl.SliceLayout(1, acc.type.layout))
    values = (acc * factor[:, None]).to(out_base.dtype.element_ty)
    gl.store(out_base + at[:, None] * stride_os + d[None, :], values, mask=ok[:, None])
    gl.store(lse_base + row, lse, mask=exists)


@gluon.jit
@no_type_check
def bundled_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, Hkv, Skv, D]
    v_ptr,  # [B, Hkv, Skv, D]
    out_ptr,  # [B, H, Sq, D]
    lse_ptr,  # [B, H, Sq] float32, contiguous
    sinks_ptr,  # [H]
    chunk_out_ptr,  # [groups, chunks, 64, D] float32
    chunk_ml_ptr,  # [groups, chunks, 2, 64] float32
    counters_ptr,  # [groups, split row blocks] int32, zero before and after
    pattern_ptr,  # [mask_batch, mask_heads] int32
    items_ptr,  # [P, items, ITEM_FIELDS] int32
    first_columns_ptr,  # [P, items, BLOCK_N] int32
    columns_ptr,  # [tiles, BLOCK_N] int32
    bitmap_ptr,  # [tiles] int32, row of bitmaps
    tile_code_ptr,  # [tiles] int32: 2 * row block, + 1 on its last tile
    bitmaps_ptr,  # [U, 64, 4] int32
    row_order_ptr,  # [P, Sq] int32, when PERMUTED
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_os,
    mask_stride_b,
    mask_stride_h,
    groups,  # batch entries times heads
    heads,
    heads_per_group,  # query heads per key head
    q_len,
    items,
    side,
    chunks,
    splits,
    scale,  # times log2(e) unless MODIFIED
    softcap,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    PATTERNS: gl.constexpr,
    PERMUTED: gl.constexpr,
    SPLIT: gl.constexpr,
    MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    column_layout: gl.constexpr = gl.SliceLayout(1, copy_layout)
    bits: gl.constexpr = _bit_layout(BLOCK_N)

    program = gl.program_id(0)
    per_side = items * side
    item = (program % per_side) // side
    group = (program // per_side) * side + program % side
    if group >= groups:
        return
    b = group // heads
    head = group % heads
    pattern = 0
    if PATTERNS:
        pattern = gl.load(pattern_ptr + b * mask_stride_b + head * mask_stride_h)
        item += pattern * items
    n = gl.arange(0, BLOCK_N, layout=column_layout)
    columns = gl.load(first_columns_ptr + item * BLOCK_N + n)
    item_ptr = items_ptr + item * FIELDS
    if gl.load(item_ptr) < 0:  # patterns have different numbers of items
        return
    begin = gl.load(item_ptr + 1)
    end = gl.load(item_ptr + 2)
    bitmap = gl.load(item_ptr + 9)
    code0 = gl.load(item_ptr + 10)

    b64 = b.to(gl.int64)
    q_base = q_ptr + b64 * stride_qb + head.to(gl.int64) * stride_qh
    k_base = k_ptr + b64 * stride_kb + (head // heads_per_group).to(gl.int64) * stride_kh
    v_base = v_ptr + b64 * stride_vb + (head // heads_per_group).to(gl.int64) * stride_vh
    out_base = out_ptr + b64 * stride_ob + head.to(gl.int64) * stride_oh
    lse_base = lse_ptr + group.to(gl.int64) * q_len
    sink = 0.0
    if HAS_SINKS:
        sink = gl.load(sinks_ptr + head).to(gl.float32)

    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], tile_layout)

    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bits))
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = bitmaps_ptr + word_row[:, None] * 4 + word[None, :]
    j = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, bits))))
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, bits))))
    shift = 2 * j.expand_dims(0).expand_dims(2).expand_dims(3) + pair.expand_dims(0).expand_dims(1).expand_dims(2)

    # The pipeline, at tile t: the product of tile t + 1's scores runs while the softmax of tile t is computed, and the
    # product with V of tile t runs into the next step. K is copied three tiles ahead, V one, Q with its first tile's K.
    # Q, K and V have two buffers each: Q by row block, K and V by tile.
    row, exists = _query_rows(code0 // 2, pattern, row_order_ptr, q_len, PERMUTED, column_layout)
    _copy(q_smem.index(0), q_base, row, exists, stride_qs, D, copy_layout)
    columns1 = columns
    _copy(k_smem.index(0), k_base, columns1, columns1 >= 0, stride_ks, D, copy_layout)
    columns2 = gl.load(columns_ptr + (begin + 1) * BLOCK_N + n, mask=begin + 1 < end, other=-1)
    columns3 = gl.load(columns_ptr + (begin + 2) * BLOCK_N + n, mask=begin + 2 < end, other=-1)
    next_words = gl.load(words_ptr + bitmap * 256)
    bitmap = gl.load(bitmap_ptr + begin + 1)
    # Past the end, 0 says "row block 0, not its last tile": nothing is fetched for it.
    code1 = gl.load(tile_code_ptr + begin + 1, mask=begin + 1 < end, other=0)
    code2 = gl.load(tile_code_ptr + begin + 2, mask=begin + 2 < end, other=0)
    code3 = gl.load(tile_code_ptr + begin + 3, mask=begin + 3 < end, other=0)
    if code0 % 2 == 1:
        row, exists = _query_rows(code1 // 2, pattern, row_order_ptr, q_len, PERMUTED, column_layout)
        _copy(q_smem.index(1), q_base, row, exists & (begin + 1 < end), stride_qs, D, copy_layout)
    _copy(k_smem.index(1), k_base, columns2, columns2 >= 0, stride_ks, D, copy_layout)
    _copy(v_smem.index(0), v_base, columns1, columns1 >= 0, stride_vs, D, copy_layout)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)
    token = warpgroup_mma(q_smem.index(0), k_smem.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(token,))
    _barrier()
    # Buffer of the Q that the next product of scores reads.
    q_buffer = code0 % 2
    if code1 % 2 == 1:
        row, exists = _query_rows(code2 // 2, pattern, row_order_ptr, q_len, PERMUTED, column_layout)
        _copy(q_smem.index(1 - q_buffer), q_base, row, exists & (begin + 2 < end), stride_qs, D, copy_layout)
    _copy(k_smem.index(0), k_base, columns3, columns3 >= 0, stride_ks, D, copy_layout)
    async_copy.commit_group()
    # Now columns1, 2 and 3 become those of the tile after the current one, and of the two that follow.
    columns1 = columns2
    columns2 = columns3
    columns3 = gl.load(columns_ptr + (begin + 3) * BLOCK_N + n, mask=begin + 3 < end, other=-1)

    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    l_i = gl.full([64], 0.0, gl.float32, layout=rows_layout)
    acc = warpgroup_mma_init(gl.full([64, D], 0.0, gl.float32, layout=out_layout))
    ended = 0  # whether the tile before was the last of its row block
    ended_block = 0
    odd = 0  # tiles since the first, modulo 2: K and V of this tile are in that buffer
    for tile in range(begin, end):
        words = next_words
        next_words = gl.load(words_ptr + bitmap * 256)
        bitmap = gl.load(bitmap_ptr + tile + 2)
        next_columns = gl.load(columns_ptr + (tile + 4) * BLOCK_N + n, mask=tile + 4 < end, other=-1)
        code4 = gl.load(tile_code_ptr + tile + 4, mask=tile + 4 < end, other=0)
        token = warpgroup_mma(
            q_smem.index(q_buffer), k_smem.index(1 - odd).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        if HAS_SOFTCAP:
            # tanh by exp2, which saturates to 0 or inf and so to +-1
            s = softcap * (1.0 - 2.0 / (1.0 + gl.exp2(s * (scale * 2.0 * LOG2E / softcap)))) * LOG2E
        elif MODIFIED:
            s = s * (scale * LOG2E)
        keep = (words.expand_dims(1).expand_dims(3) >> shift) & 1
        keep = gl.convert_layout(keep.reshape([64, BLOCK_N]), score_layout, assert_trivial=True)
        s = gl.where(keep != 0, s, float("-inf"))
        m_old = gl.where(ended == 1, float("-inf"), m_i)
        if MODIFIED:
            m_new = gl.maximum(m_old, gl.max(s, 1))
            # A row may have kept nothing so far: -inf - -inf is NaN.
            m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(s - m_use[:, None])
        else:
            m_new = gl.maximum(m_old, gl.max(s, 1) * scale)
            m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(s * scale - m_use[:, None])
        alpha = gl.exp2(m_old - m_use)
        p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, out_layout))
        # The copies of the step before are here: each thread's own are made visible to the tensor cores, and the barrier
        # gathers everybody's. Behind it nobody reads the buffers of the products that are done.
        s, done = warpgroup_mma_wait(0, deps=(token, acc))
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        if ended == 1:
            own, there = _query_rows(ended_block, pattern, row_order_ptr, q_len, PERMUTED, rows_layout)
            _store(done, m_i, l_i, own, there, out_base, lse_base, sink, stride_os, D, HAS_SINKS)
            # alpha = 0 would clear it, but for infinities, which are this row block's own affair.
            done = gl.full([64, D], 0.0, gl.float32, layout=out_layout)
        l_i = gl.where(ended == 1, 0.0, l_i) * alpha + gl.sum(p, 1)
        m_i = m_new
        acc = warpgroup_mma(p16, v_smem.index(odd), done * factor[:, None], is_async=True)
        q_buffer = (q_buffer + code1) % 2
        if code2 % 2 == 1:
            row, exists = _query_rows(code3 // 2, pattern, row_order_ptr, q_len, PERMUTED, column_layout)
            _copy(q_smem.index(1 - q_buffer), q_base, row, exists & (tile + 3 < end), stride_qs, D, copy_layout)
        _copy(k_smem.index(1 - odd), k_base, columns3, columns3 >= 0, stride_ks, D, copy_layout)
        _copy(v_smem.index(1 - odd), v_base, columns1, columns1 >= 0, stride_vs, D, copy_layout)
        async_copy.commit_group()
        ended = code0 % 2
        ended_block = code0 // 2
        code0 = code1
        code1 = code2
        code2 = code3
        code3 = code4
        columns1 = columns2
        columns2 = columns3
        columns3 = next_columns
        odd = 1 - odd
    done = warpgroup_mma_wait(0, deps=(acc,))
    async_copy.wait_group(0)
    if ended == 1:
        own, there = _query_rows(ended_block, pattern, row_order_ptr, q_len, PERMUTED, rows_layout)
        _store(done, m_i, l_i, own, there, out_base, lse_base, sink, stride_os, D, HAS_SINKS)

    if SPLIT:
        n_chunks = gl.load(item_ptr + 5)
        if n_chunks > 1:
            slot = group.to(gl.int64) * chunks + gl.load(item_ptr + 6)
            chunk = gl.load(item_ptr + 7)
            r = gl.arange(0, 64, layout=rows_layout)
            out_row = gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, out_layout))
            at = out_row[:, None] * D + d[None, :]
            gl.store(chunk_out_ptr + (slot + chunk) * (64 * D) + at, done)
            gl.store(chunk_ml_ptr + (slot + chunk) * 128 + r, m_i)
            gl.store(chunk_ml_ptr + (slot + chunk) * 128 + 64 + r, l_i)
            # All threads' stores come before the one thread's release.
            _barrier()
            counter_ptr = counters_ptr + group * splits + gl.load(item_ptr + 8)
            before = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
            if before == n_chunks - 1:
                _barrier()
                m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
                l_i = gl.full([64], 0.0, gl.float32, layout=rows_layout)
                total = gl.full([64, D], 0.0, gl.float32, layout=out_layout)
                for c in range(n_chunks):
                    # .cg: written by other multiprocessors
                    m_c = gl.load(chunk_ml_ptr + (slot + c) * 128 + r, cache_modifier=".cg")
                    l_c = gl.load(chunk_ml_ptr + (slot + c) * 128 + 64 + r, cache_modifier=".cg")
                    acc_c = gl.load(chunk_out_ptr + (slot + c) * (64 * D) + at, cache_modifier=".cg")
                    m_new = gl.maximum(m_i, m_c)
                    m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
                    old = gl.exp2(m_i - m_use)
                    new = gl.exp2(m_c - m_use)
                    l_i = l_i * old + l_c * new
                    old = gl.convert_layout(old, gl.SliceLayout(1, out_layout))
                    new = gl.convert_layout(new, gl.SliceLayout(1, out_layout))
                    total = total * old[:, None] + acc_c * new[:, None]
                    m_i = m_new
                gl.store(counter_ptr, 0)
                own, there = _query_rows(gl.load(item_ptr), pattern, row_order_ptr, q_len, PERMUTED, rows_layout)
                _store(total, m_i, l_i, own, there, out_base, lse_base, sink, stride_os, D, HAS_SINKS)


def bind_bundled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    config: BlockWiseConfig,
    *,
    scale: float,
    softcap: float,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> BoundCall:
    """The kernel bound to tensors like these: `call(q, k, v, bias, sinks) -> (out, lse)`.

    Args:
        q, k, v: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]`, `[B, Hkv, Skv, D]`; float16 or bfloat16, D 64 or 128; any strides
            that are multiples of 8 with a contiguous last dimension, else the call copies.
        work: bundles of row blocks of 64 (`make_work` with `bundle_tiles`).
        config: registers and side; warps are 4.
        scale, softcap: floats, softcap 0 for none.
        bias: must be None.
        sinks: None or `[H]`.

    Returns (the call):
        `out [B, H, Sq, D]` in q's memory order, `lse [B, H, Sq]` float32.

    Raises (the call):
        KernelError: the kernel does not compile here.
    """
    del bias
    if not all(_copyable(x) for x in (q, k, v)):
        return _with_copies(work, config, scale, softcap)
    batch, heads, q_len, head_dim = q.shape
    out = empty_output(q, v)
    copy_out = out.stride(3) != 1
    out_strides = out.stride()[:3] if not copy_out else (heads * q_len * head_dim, q_len * head_dim, head_dim)
    groups = batch * heads
    items = work.items.shape[1]
    side = min(config.side or groups, groups)
    mask_batch, mask_heads = work.pattern_of.shape
    permuted = work.row_order.numel() > 0
    modified = softcap > 0 or scale <= 0
    ready = Launch(
        bundled_kernel,
        items * -(-groups // side) * side,
        (
            work.pattern_of, work.items, work.first_columns, work.partial_columns, work.partial_bitmap,
            work.tile_code, work.bitmaps, work.row_order if permuted else work.pattern_of,
        ),
        (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out_strides,
            0 if mask_batch == 1 else mask_heads, 0 if mask_heads == 1 else 1,
            groups, heads, heads // k.shape[1], q_len, items, side, work.chunks, work.splits,
            scale if modified else scale * math.log2(math.e), softcap,
        ),
        (
            work.block_n, head_dim, work.pattern_of.numel() > 1, permuted, work.splits > 0,
            modified, softcap > 0, sinks is not None,
        ),
        num_warps=4,
        num_stages=1,
        max_registers=config.max_registers,
        device=q.device,
    )  # fmt: skip
    device, lse_shape = q.device, (batch, heads, q_len)
    chunk_size = groups * work.chunks * ROWS
    counters_size = groups * work.splits

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        del bias
        result = out = empty_output(q, v)
        if copy_out:
            out = torch.empty_like(result, memory_format=torch.contiguous_format)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        # Pointers the kernel is compiled not to read take any tensor.
        chunk_out, chunk_ml, counters = lse, lse, work.pattern_of
        if counters_size:
            scratch = torch.empty(chunk_size * (head_dim + 2), dtype=torch.float32, device=device)
            chunk_out, chunk_ml = scratch, scratch[chunk_size * head_dim :]
            counters = zeroed_counters(counters_size, device)
        ready(q, k, v, out, lse, q if sinks is None else sinks, chunk_out, chunk_ml, counters)
        return (result.copy_(out) if copy_out else result), lse

    return call


def _copyable(x: Tensor) -> bool:
    """Whether rows can be copied 16 bytes at a time, at 32-bit offsets within one (batch, head)."""
    aligned = x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return aligned and x.stride(2) * x.shape[2] < 2**31


def _with_copies(work: Work, config: BlockWiseConfig, scale: float, softcap: float) -> BoundCall:
    """A call for tensors the kernel cannot read as they lie."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        result = empty_output(q, v)
        q, k, v = (x if _copyable(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        bound = bind_bundled(q, k, v, work, config, scale=scale, softcap=softcap, bias=bias, sinks=sinks)
        out, lse = bound(q, k, v, bias, sinks)
        return (out if out.stride() == result.stride() else result.copy_(out)), lse

    return call
