"""Row-wise attention in Triton: each query row reads exactly the keys it keeps, without tensor cores.

A row's columns are divided over `SLOTS` independent online softmaxes that are merged once at the end: inside the loop
nothing is exchanged between them, so neither warps nor lanes wait for each other.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.running_maximum import LOWEST, bounded
from stof.kernels.triton.softcap import softcapped
from stof.runtime.pdl import launch_next_and_wait

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
def row_wise_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, sinks_ptr,
    pattern_ptr, rows_ptr, row_ptr, columns_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_od,
    stride_bb, stride_bh, stride_bm, stride_bn,
    stride_pb, stride_ph,
    heads, q_len, heads_at_once, row_programs, scale, softcap,
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
    # K and V of `heads_at_once` heads stay in the L2 cache together. Heads are fastest: programs that run at the same
    # time read the same column lists.
    program = tl.program_id(0)
    group_programs = heads_at_once * row_programs
    i_bh = program // group_programs * heads_at_once + program % heads_at_once
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    position = program % group_programs // heads_at_once * ROWS
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
    m_i = tl.full([STATES], LOWEST, dtype=tl.float32)
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
                score = softcapped(score, softcap)
            if HAS_BIAS:
                score += biases[u]
            score = tl.where(first + u * SLOTS < left, score, float("-inf"))
            m_new = tl.maximum(m_new, score)
            scores += (score,)
        m_new = bounded(m_new)
        alpha = tl.exp2(m_i - m_new)
        m_i = m_new
        l_i *= alpha
        acc_new = ()
        for n in tl.static_range(len(acc)):
            acc_new += (acc[n] * alpha[:, None],)
        for u in tl.static_range(UNROLL):
            p = tl.exp2(scores[u] - m_new)
            l_i += p
            acc = acc_new
            acc_new = ()
            for n in tl.static_range(len(acc)):
                acc_new += (acc[n] + p[:, None] * v_parts[u][n].to(tl.float32),)
        acc = acc_new

    # The states of a row meet only here.
    m_i = tl.reshape(m_i, [ROWS, SLOTS])
    m_row = tl.max(m_i, 1)  # [ROWS]
    weights = tl.exp2(m_i - m_row[:, None])
    l_row = tl.sum(tl.reshape(l_i, [ROWS, SLOTS]) * weights, 1)
    empty = l_row == 0.0
    total = l_row
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + i_h).to(tl.float32) * 1.4426950408889634 - tl.where(empty, 0.0, m_row))
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
    lse = (m_row + tl.log2(tl.where(empty, 1.0, l_row))) * 0.6931471805599453
    lse_ptrs = lse_ptr + (i_b * heads + i_h) * q_len + rows
    tl.store(lse_ptrs, tl.where(empty, float("-inf"), lse), mask=exists)
