"""Masked attention on Hopper, in Gluon: one warp copies by TMA, one to three warpgroups compute.

A thread block stays on its multiprocessor and works through a list of jobs (see `stof.kernels.hopper.jobs`): some tiles
of one row block, for one batch entry and one head. One warp, the producer, copies Q, K and V to shared memory; each
warpgroup of consumers owns 64 rows of the block. While a tile's softmax is computed, the tensor cores multiply the tile
before with V, across the ends of jobs as well, so short jobs do not drain the pipeline.

Source: STOF (arXiv 2506.06095), section 4.1; warp specialisation and the overlap of softmax and products as
FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2; split and merge as Flash-Decoding.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stof.kernels.hopper.jobs import JOB_FIELDS

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
FIELDS = gl.constexpr(JOB_FIELDS)

# Triton 3.7 has another name for it.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.constexpr_function
def _bit_layout(block_n):  # type: ignore[no-untyped-def]
    """The accumulator of 64 x block_n scores, seen as [row, group of 8 columns, thread of the group, column pair]."""
    groups = [[0, 1 << i, 0, 0] for i in range((block_n // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *groups],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block_n // 8, 4, 2],
    )


@gluon.constexpr_function
def _tile_layout(dtype, rows, width, rank):  # type: ignore[no-untyped-def]
    """Shared memory of a tile as TMA writes it and the tensor cores read it."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, width * dtype.primitive_bitwidth // 8),
        element_bitwidth=dtype.primitive_bitwidth,
        rank=rank,
    )


@gluon.constexpr_function
def _turn(operation, group):  # type: ignore[no-untyped-def]
    """Two warpgroups meet at a barrier of the hardware; Triton takes the first few of the sixteen for itself."""
    return f"bar.{operation} {8 + group}, 256; mov.u32 $0, 0;"


@gluon.jit
@no_type_check
def _await_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Wait until the warpgroup before this one has handed its products to the tensor cores.

    So one computes exponentials while another multiplies; left alone they fall into step and want one unit at once.
    """
    if GROUPS > 1:
        gl.inline_asm_elementwise(_turn("sync", GROUP), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _pass_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    if GROUPS > 1:
        following: gl.constexpr = (GROUP + 1) % GROUPS
        gl.inline_asm_elementwise(_turn("arrive", following), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _lane():
    """This thread's number within its warp, as a scalar that differs from thread to thread."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
@no_type_check
def _opaque(value):
    """The value, in a way that the compiler cannot see through.

    Triton 3.6 and 3.7 take a loop-carried scalar whose only use is to bound an inner loop for the one before the loop.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _cleared(x):
    """Zeros like x, set where this stands: plain zeros would become one select per element for every tile."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _of_lane(value, lane):
    """The value that thread `lane` of the warp holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [value, lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@no_type_check
def _copy_tile(
    record, b, h, desc, slab_desc, buffer, slab_buffer, stage, bar, kv_step, residue_stride,
    BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr,
):  # fmt: skip
    """Start copying a tile of K or V: all of it at once, or runs of 64 columns and slabs, as `record` says by lane."""
    dtype: gl.constexpr = buffer.dtype
    mbarrier.expect(bar, BLOCK_N * D * (dtype.primitive_bitwidth // 8))
    if SLAB == 0:
        column = _of_lane(record, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, BLOCK_N, D], _tile_layout(dtype, BLOCK_N, D, 4))
        tma.async_copy_global_to_shared(desc, [b, h, column // kv_step, (column % kv_step) * residue_stride], bar, tile)
    else:
        slabs: gl.constexpr = BLOCK_N // SLAB
        per_run: gl.constexpr = 64 // SLAB
        for start in gl.static_range(0, slabs, per_run):
            place = stage * (D // 64) * slabs + start
            first = _of_lane(record, start)
            if first < 0:
                for chunk in gl.static_range(D // 64):
                    run = slab_buffer.index(place + chunk * slabs)
                    run = run._reinterpret(dtype, [1, 1, 64, 64], _tile_layout(dtype, 64, 64, 4))
                    tma.async_copy_global_to_shared(desc, [b, h, -1 - first, chunk * 64], bar, run)
            else:
                # No loop: each turn of it would wait for its own shuffle.
                for i in gl.static_range(per_run):
                    column = _of_lane(record, start + i)
                    for chunk in gl.static_range(D // 64):
                        slab = slab_buffer.index(place + chunk * slabs + i)
                        slab = slab._reinterpret(dtype, [1, 1, SLAB, 64], _tile_layout(dtype, SLAB, 64, 4))
                        tma.async_copy_global_to_shared(slab_desc, [b, h, column, chunk * 64], bar, slab)


@gluon.jit
@no_type_check
def _slabs_of(buffer, BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of K or V in shared memory, slab by slab and 64 elements of each row at a time."""
    rows: gl.constexpr = SLAB if SLAB > 0 else 8
    layout: gl.constexpr = _tile_layout(buffer.dtype, rows, 64, 2)
    return buffer._reinterpret(buffer.dtype, [STAGES * (D // 64) * (BLOCK_N // rows), rows, 64], layout)


@gluon.jit
@no_type_check
def _copy_rows(
    job, q_desc, q_smem, stage, bar, rows_per_residue, residue_stride, GROUPS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Start copying Q of a job, whose fields `job` says by lane."""
    dtype: gl.constexpr = q_smem.dtype
    row_block = _of_lane(job, 0)
    b = _of_lane(job, 1)
    h = _of_lane(job, 2)
    mbarrier.expect(bar, GROUPS * 64 * D * (dtype.primitive_bitwidth // 8))
    for group in gl.static_range(GROUPS):
        position = (row_block * GROUPS + group) * 64
        residue = position // rows_per_residue
        row = position - residue * rows_per_residue
        rows = q_smem.index(stage * GROUPS + group)._reinterpret(dtype, [1, 1, 64, D], _tile_layout(dtype, 64, D, 4))
        tma.async_copy_global_to_shared(q_desc, [b, h, row, residue * residue_stride], bar, rows)


@gluon.jit
@no_type_check
def _producer(
    shared, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    k_residue_stride, v_residue_stride,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, SLAB: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies. Jobs and tiles are read one ahead, a word to a lane; the first tile is on its way."""
    (
        q_desc, jobs_ptr, job_begin, job_end, tiles_ptr, q_smem, q_full, q_empty, heads_per_group, rows_per_residue,
        q_residue_stride, kv_step,
    ) = shared  # fmt: skip
    slabs: gl.constexpr = BLOCK_N // SLAB if SLAB > 0 else 1
    k_slabs = _slabs_of(k_smem, BLOCK_N, D, SLAB, STAGES)
    v_slabs = _slabs_of(v_smem, BLOCK_N, D, SLAB, STAGES)
    lane = _lane()
    # Lists end with a job and a tile that nobody computes, for reading ahead.
    jobs_ptr += gl.minimum(lane, FIELDS - 1)
    tiles_ptr += gl.minimum(lane, slabs - 1)
    next_job = gl.load(jobs_ptr + job_begin * FIELDS)
    next_tile = gl.load(tiles_ptr + _of_lane(next_job, 3) * slabs)
    count = 0
    for number in range(job_begin, job_end):
        job = next_job
        next_job = gl.load(jobs_ptr + (number + 1) * FIELDS)
        b = _of_lane(job, 1)
        kv_head = _of_lane(job, 2) // heads_per_group
        begin = _of_lane(job, 3)
        end = _of_lane(job, 5)
        turn = number - job_begin
        if turn > 0:
            q_stage = turn % Q_STAGES
            mbarrier.wait(q_empty.index(q_stage), (turn // Q_STAGES + 1) & 1)
            _copy_rows(
                job, q_desc, q_smem, q_stage, q_full.index(q_stage), rows_per_residue, q_residue_stride, GROUPS, D
            )
        for tile in range(begin, end):
            record = next_tile
            following = tile + 1
            if following == end:
                following = _of_lane(next_job, 3)
            next_tile = gl.load(tiles_ptr + following * slabs)
            if count > 0:
                stage = count % STAGES
                mbarrier.wait(k_empty.index(stage), (count // STAGES + 1) & 1)
                _copy_tile(record, b, kv_head, k_desc, k_slab_desc, k_smem, k_slabs, stage, k_full.index(stage),
                           kv_step, k_residue_stride, BLOCK_N, D, SLAB)  # fmt: skip
                # V's ring is one ahead: its first place holds zeros, for the tile before the first.
                stage = (count + 1) % STAGES
                mbarrier.wait(v_empty.index(stage), ((count + 1) // STAGES + 1) & 1)
                _copy_tile(record, b, kv_head, v_desc, v_slab_desc, v_smem, v_slabs, stage, v_full.index(stage),
                           kv_step, v_residue_stride, BLOCK_N, D, SLAB)  # fmt: skip
            count += 1


@gluon.jit
@no_type_check
def _reduced(x, axis: gl.constexpr, MAXIMUM: gl.constexpr):
    return gl.max(x, axis) if MAXIMUM else gl.sum(x, axis)


@gluon.jit
@no_type_check
def _per_thread(x, MAXIMUM: gl.constexpr):
    """Maximum or sum of what one thread holds of each row, `[64, N / 8, 4, 2]` -> `[64, 4]`.

    In pairs: a chain of 32 dependent instructions would wait for each of them.
    """
    GROUPS_OF_8: gl.constexpr = x.shape[1]
    x = _reduced(x, 3, MAXIMUM)
    if GROUPS_OF_8 >= 16:
        x = _reduced(x.reshape([64, 8, 2, 4]), 2, MAXIMUM)
    if GROUPS_OF_8 >= 8:
        x = _reduced(x.reshape([64, 4, 2, 4]), 2, MAXIMUM)
    if GROUPS_OF_8 >= 4:
        x = _reduced(x.reshape([64, 2, 2, 4]), 2, MAXIMUM)
    return _reduced(x, 1, MAXIMUM)


@gluon.jit
@no_type_check
def _masked(s, words, BLOCK_N: gl.constexpr):
    """Scores with -inf where the bitmap says so."""
    bits: gl.constexpr = _bit_layout(BLOCK_N)
    split = gl.convert_layout(s.reshape([64, BLOCK_N // 8, 4, 2]), bits, assert_trivial=True)
    j = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, bits))))
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, bits))))
    bit = 1 << (2 * j.expand_dims(0).expand_dims(2).expand_dims(3)
                + pair.expand_dims(0).expand_dims(1).expand_dims(2))  # fmt: skip
    # One select at a time, so that the assembler moves seven bits at once to predicates and runs out of none.
    split = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r",
        [split, words.expand_dims(1).expand_dims(3), bit],
        dtype=gl.float32,
        is_pure=False,  # else full tiles would compute it too, to be on the safe side of a branch
        pack=1,
    )
    return gl.convert_layout(split.reshape([64, BLOCK_N]), s.type.layout, assert_trivial=True)


@gluon.jit
@no_type_check
def _weights(
    s, m_old, scale, softcap, PARTIAL: gl.constexpr, MODIFIED: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Exponentials: `(p, new maximum, factor of what was summed so far, sums of p per thread)`."""
    rows_layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    bits: gl.constexpr = _bit_layout(BLOCK_N)
    sums_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bits))
    if HAS_SOFTCAP:
        # tanh by exp2, which saturates to 0 or inf and so to +-1; what is masked stays so
        capped = softcap * (1.0 - 2.0 / (1.0 + gl.exp2(s * (scale * 2.0 * LOG2E / softcap)))) * LOG2E
        s = gl.where(s == float("-inf"), s, capped)
    elif MODIFIED:
        s = gl.where(s == float("-inf"), s, s * (scale * LOG2E))
    split = gl.convert_layout(s.reshape([64, BLOCK_N // 8, 4, 2]), bits, assert_trivial=True)
    highest = gl.convert_layout(gl.max(_per_thread(split, True), 1), rows_layout)
    if MODIFIED:
        m_new = gl.maximum(m_old, highest)
    else:
        m_new = gl.maximum(m_old, highest * scale)
    # A row may have kept nothing so far: -inf - -inf is NaN.
    m_use = gl.where(m_new == float("-inf"), 0.0, m_new) if PARTIAL else m_new
    if MODIFIED:
        p = gl.exp2(s - m_use[:, None])
    else:
        p = gl.exp2(s * scale - m_use[:, None])
    alpha = gl.exp2(m_old - m_use)
    # Sums stay with each thread (four to a row) until the row block is done.
    split = gl.convert_layout(p.reshape([64, BLOCK_N // 8, 4, 2]), bits, assert_trivial=True)
    sums = gl.convert_layout(_per_thread(split, False), sums_layout, assert_trivial=True)
    return p, m_new, alpha, sums


@gluon.jit
@no_type_check
def _packed(p, dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Weights in half precision, two to a word: int32 `[64, N / 8, 4, 2]`, zero where the second of a pair would be.

    Carried through the loop like this: fp16 values would be unpacked and packed again, fp32 takes twice the registers.
    """
    bits: gl.constexpr = _bit_layout(BLOCK_N)
    split = gl.convert_layout(p.reshape([64, BLOCK_N // 8, 4, 2]), bits, assert_trivial=True)
    if dtype == gl.float16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $3, $2; mov.b32 $1, 0;", "=r,=r,f,f", [split], dtype=gl.int32, is_pure=True, pack=2
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $3, $2; mov.b32 $1, 0;", "=r,=r,f,f", [split], dtype=gl.int32, is_pure=True, pack=2
        )
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, bits))))
    return gl.where(pair.expand_dims(0).expand_dims(1).expand_dims(2) == 0, words, 0)


@gluon.jit
@no_type_check
def _operand(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Packed weights as the left operand of the product with V."""
    if dtype == gl.float16:
        half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [packed], dtype=gl.float16, is_pure=True, pack=2)
    else:
        half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=2)
    return gl.convert_layout(half.reshape([64, packed.shape[1] * 8]), layout, assert_trivial=True)


@gluon.jit
@no_type_check
def _finish(
    acc, m_i, l_i, job_ptr, q_rows, out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr,
    row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, PERMUTED: gl.constexpr, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of a job's output; a chunk of a split row block leaves partial results, and the last merges."""
    acc_layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    dtype: gl.constexpr = q_rows.dtype
    row_block = gl.load(job_ptr)
    b = gl.load(job_ptr + 1)
    h = gl.load(job_ptr + 2)
    m = gl.convert_layout(m_i, rows_layout)
    total = gl.convert_layout(gl.sum(l_i, 1), rows_layout)
    r = gl.arange(0, 64, layout=rows_layout)
    write = True
    if SPLIT:
        parts = gl.load(job_ptr + 6)
        if parts > 1:
            slot = gl.load(job_ptr + 7).to(gl.int64)
            chunk = gl.load(job_ptr + 8)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, acc_layout))
            at = (r * D)[:, None] + d[None, :]
            mine = (slot + chunk) * GROUPS + GROUP
            gl.store(chunk_out_ptr + mine * (64 * D) + at, acc)
            gl.store(chunk_ml_ptr + mine * 128 + r, m)
            gl.store(chunk_ml_ptr + mine * 128 + 64 + r, total)
            # All threads' stores come before the one thread's release.
            _barrier()
            counter_ptr = counters_ptr + gl.load(job_ptr + 9) * GROUPS + GROUP
            before = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
            write = before == parts - 1
            if write:
                _barrier()
                m = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
                total = gl.full([64], 0.0, gl.float32, layout=rows_layout)
                acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
                for c in range(parts):
                    # .cg: written by other multiprocessors
                    other = (slot + c) * GROUPS + GROUP
                    m_c = gl.load(chunk_ml_ptr + other * 128 + r, cache_modifier=".cg")
                    l_c = gl.load(chunk_ml_ptr + other * 128 + 64 + r, cache_modifier=".cg")
                    acc_c = gl.load(chunk_out_ptr + other * (64 * D) + at, cache_modifier=".cg")
                    m_new = gl.maximum(m, m_c)
                    m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
                    old = gl.exp2(m - m_use)
                    new = gl.exp2(m_c - m_use)
                    total = total * old + l_c * new
                    acc = acc * old[:, None] + acc_c * new[:, None]
                    m = m_new
                gl.store(counter_ptr, 0)
    if write:
        position = row_block * (64 * GROUPS) + GROUP * 64
        exists = position + r < q_len
        row = position + r
        if PERMUTED:
            pattern = gl.load(job_ptr + 10)
            row = gl.load(row_order_ptr + pattern * q_len + position + r, mask=exists, other=0)
        some = total > 0.0
        safe = gl.where(some, total, 1.0)
        lse = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
        if HAS_SINKS:
            # softmax over keys and sink = softmax over keys / (1 + exp(sink - lse))
            sink = gl.load(sinks_ptr + h).to(gl.float32)
            safe = gl.where(some, safe * (1.0 + gl.exp2((sink - lse) * LOG2E)), 1.0)
        gl.store(lse_ptr + (b * heads + h).to(gl.int64) * q_len + row, lse, mask=exists)
        factor = gl.where(some, 1.0 / safe, 0.0)
        values = (acc * factor[:, None]).to(dtype)
        # The rows of Q are used up: their place takes the output, and TMA takes it from there.
        q_rows.store(values)
        fence_async_shared()
        _barrier()
        residue = position // rows_per_residue
        staged = q_rows._reinterpret(dtype, [1, 1, 64, D], _tile_layout(dtype, 64, D, 4))
        tma.async_copy_shared_to_global(
            out_desc, [b, h, position - residue * rows_per_residue, residue * out_residue_stride], staged
        )


@gluon.jit
@no_type_check
def _words(words_ptr, number, GROUPS: gl.constexpr):
    return gl.load(words_ptr + number * (GROUPS * 256))


@gluon.jit
@no_type_check
def _consumer(
    shared,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PERMUTED: gl.constexpr, SPLIT: gl.constexpr, MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_FULL: gl.constexpr,
):  # fmt: skip
    """One warpgroup of those that compute: 64 rows of every job."""
    (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, jobs_ptr,
        job_begin, job_end, tile_bitmap_ptr, bitmaps_ptr, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
        v_full, v_empty, q_len, heads, rows_per_residue, out_residue_stride, scale,
        softcap,
    ) = shared  # fmt: skip
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    bits: gl.constexpr = _bit_layout(BLOCK_N)
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bits))
    sums_layout: gl.constexpr = word_layout
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = bitmaps_ptr + GROUP * 256 + word_row[:, None] * 4 + word[None, :]
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)

    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    l_i = gl.full([64, 4], 0.0, gl.float32, layout=sums_layout)
    packed = gl.full([64, BLOCK_N // 8, 4, 2], 0, gl.int32, layout=bits)
    count = 0
    # Each job, and the bits of its first tile, are read during the job before.
    next_ptr = jobs_ptr + job_begin * FIELDS
    next_begin = gl.load(next_ptr + 3)
    next_partial_end = gl.load(next_ptr + 4)
    next_end = gl.load(next_ptr + 5)
    next_words = _words(words_ptr, gl.load(next_ptr + 11), GROUPS)
    bitmap = gl.load(tile_bitmap_ptr + next_begin + 1)
    # What the product with V reads before there is a tile before: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    v_smem.index(0).store(gl.full([BLOCK_N, D], 0.0, dtype, layout=zeros_layout))
    fence_async_shared()
    _barrier()
    if GROUP == GROUPS - 1:
        _pass_turn(GROUP, GROUPS)
    for number in range(job_begin, job_end):
        job_ptr = jobs_ptr + number * FIELDS
        begin = next_begin
        partial_end = _opaque(next_partial_end)
        end = _opaque(next_end)
        next_ptr = job_ptr + FIELDS
        next_begin = gl.load(next_ptr + 3)
        next_partial_end = gl.load(next_ptr + 4)
        next_end = gl.load(next_ptr + 5)
        first_bitmap = gl.load(next_ptr + 11)
        turn = number - job_begin
        q_rows = q_smem.index((turn % Q_STAGES) * GROUPS + GROUP)
        mbarrier.wait(q_full.index(turn % Q_STAGES), (turn // Q_STAGES) & 1)
        rest = gl.maximum(begin + 1, partial_end) if HAS_FULL else end
        for tile in range(begin, rest):
            # The weights of the tile before are multiplied with V under this tile's softmax: also when that one ended
            # the job before. Before the first tile of all, zeros are.
            words = next_words
            last = tile + 1 == rest
            next_words = _words(words_ptr, gl.where(last, first_bitmap, bitmap), GROUPS)
            bitmap = gl.load(tile_bitmap_ptr + gl.where(last, next_begin + 1, tile + 2))
            p16 = _operand(packed, dtype, p_layout)
            v_stage = count % STAGES
            v_phase = (count // STAGES) & 1
            k_stage = count % STAGES
            mbarrier.wait(k_full.index(k_stage), (count // STAGES) & 1)
            _await_turn(GROUP, GROUPS)
            s = warpgroup_mma(q_rows, k_smem.index(k_stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            pv = warpgroup_mma(p16, v_smem.index(v_stage), acc, is_async=True)
            _pass_turn(GROUP, GROUPS)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            if tile < partial_end:
                s = _masked(s, words, BLOCK_N)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            p, m_new, alpha, sums = _weights(s, m_old, scale, softcap, True, MODIFIED, HAS_SOFTCAP, BLOCK_N)
            # Never blocks; it ends the basic block, across which the assembler does not move the wait for PV up.
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma_wait(0, deps=(pv,))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            packed = _packed(p, dtype, BLOCK_N)
            if tile == begin:
                if turn > 0:
                    q_before = (turn + Q_STAGES - 1) % Q_STAGES
                    _finish(
                        acc, m_i, l_i, job_ptr - FIELDS, q_smem.index(q_before * GROUPS + GROUP), out_desc,
                        lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, q_len, heads,
                        rows_per_residue, out_residue_stride, GROUP, GROUPS, D,
                        PERMUTED, SPLIT, HAS_SINKS,
                    )  # fmt: skip
                    # The output of the job before that one has left its buffer long ago.
                    tma.store_wait(1)
                    mbarrier.arrive(q_empty.index((turn + Q_STAGES - 2) % Q_STAGES), count=1, pred=turn > 1)
                    acc = _cleared(acc)
                    l_i = _cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
            # Rescaled here: between the two products it would make the assembler serialise them.
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout))[:, None]
            count += 1

        if HAS_FULL:
            # The same without bits and ends of jobs.
            for _tile in range(rest, end):
                p16 = _operand(packed, dtype, p_layout)
                v_stage = count % STAGES
                v_phase = (count // STAGES) & 1
                k_stage = count % STAGES
                mbarrier.wait(k_full.index(k_stage), (count // STAGES) & 1)
                _await_turn(GROUP, GROUPS)
                s = warpgroup_mma(
                    q_rows, k_smem.index(k_stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                mbarrier.wait(v_full.index(v_stage), v_phase)
                pv = warpgroup_mma(p16, v_smem.index(v_stage), acc, is_async=True)
                _pass_turn(GROUP, GROUPS)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(k_empty.index(k_stage), count=1)
                p, m_i, alpha, sums = _weights(s, m_i, scale, softcap, False, MODIFIED, HAS_SOFTCAP, BLOCK_N)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc = warpgroup_mma_wait(0, deps=(pv,))
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                packed = _packed(p, dtype, BLOCK_N)
                l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout))[:, None]
                count += 1

    if job_end > job_begin:
        v_stage = count % STAGES
        mbarrier.wait(v_full.index(v_stage), (count // STAGES) & 1)
        pv = warpgroup_mma(_operand(packed, dtype, p_layout), v_smem.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        turn = job_end - 1 - job_begin
        _finish(
            acc, m_i, l_i, jobs_ptr + (job_end - 1) * FIELDS, q_smem.index((turn % Q_STAGES) * GROUPS + GROUP),
            out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, q_len, heads,
            rows_per_residue, out_residue_stride, GROUP, GROUPS, D, PERMUTED, SPLIT,
            HAS_SINKS,
        )  # fmt: skip
        tma.store_wait(0)


@gluon.jit
@no_type_check
def warp_specialized_kernel(
    q_desc,
    k_desc,
    v_desc,
    k_slab_desc,
    v_slab_desc,
    out_desc,
    lse_ptr,
    sinks_ptr,
    chunk_out_ptr,
    chunk_ml_ptr,
    counters_ptr,
    jobs_ptr,
    starts_ptr,
    tiles_ptr,
    tile_bitmap_ptr,
    bitmaps_ptr,
    row_order_ptr,
    heads,
    heads_per_group,
    q_len,
    rows_per_residue,
    q_residue_stride,
    out_residue_stride,
    kv_step,
    k_residue_stride,
    v_residue_stride,
    scale,
    softcap,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    SLAB: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    PERMUTED: gl.constexpr,
    SPLIT: gl.constexpr,
    MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile_layout: gl.constexpr = _tile_layout(dtype, BLOCK_N, D, 2)
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS, 64, D], tile_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A thread block's first job and the columns of that job's first tile lie in one line. Their copies start before
    # anything else: memory takes longer to answer than all other barriers to be set up.
    lane = _lane()
    start = gl.load(starts_ptr + gl.program_id(0) * (2 * FIELDS) + lane)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(1), count=1)
    fence_async_shared()
    job_begin = _of_lane(start, 12)
    job_end = _of_lane(start, 13)
    if job_begin < job_end:
        record = _of_lane(start, lane + FIELDS)
        b = _of_lane(start, 1)
        kv_head = _of_lane(start, 2) // heads_per_group
        _copy_tile(record, b, kv_head, k_desc, k_slab_desc, k_smem, _slabs_of(k_smem, BLOCK_N, D, SLAB, STAGES), 0,
                   k_full.index(0), kv_step, k_residue_stride, BLOCK_N, D, SLAB)  # fmt: skip
        _copy_rows(start, q_desc, q_smem, 0, q_full.index(0), rows_per_residue, q_residue_stride, GROUPS, D)
        _copy_tile(record, b, kv_head, v_desc, v_slab_desc, v_smem, _slabs_of(v_smem, BLOCK_N, D, SLAB, STAGES), 1,
                   v_full.index(1), kv_step, v_residue_stride, BLOCK_N, D, SLAB)  # fmt: skip
    for i in gl.static_range(max(STAGES, Q_STAGES)):
        if i < Q_STAGES:
            if i > 0:
                mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=GROUPS)
        if i < STAGES:
            if i > 0:
                mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=GROUPS)
            if i != 1:
                mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=GROUPS)
    # The zeros that stand for the tile before the first are there.
    mbarrier.arrive(v_full.index(0), count=1)
    fence_async_shared()

    shared = (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, jobs_ptr,
        job_begin, job_end, tile_bitmap_ptr, bitmaps_ptr, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
        v_full, v_empty, q_len, heads, rows_per_residue, out_residue_stride, scale,
        softcap,
    )  # fmt: skip
    lists = (
        q_desc, jobs_ptr, job_begin, job_end, tiles_ptr, q_smem, q_full, q_empty, heads_per_group, rows_per_residue,
        q_residue_stride, kv_step,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_SINKS, HAS_FULL)),
                (_producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, k_empty, v_full,
                             v_empty, k_residue_stride, v_residue_stride, GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_SINKS, HAS_FULL)),
                (_consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_SINKS, HAS_FULL)),
                (_producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, k_empty, v_full,
                             v_empty, k_residue_stride, v_residue_stride, GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_SINKS, HAS_FULL)),
                (_consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_SINKS, HAS_FULL)),
                (_consumer, (shared, 2, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_SINKS, HAS_FULL)),
                (_producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, k_empty, v_full,
                             v_empty, k_residue_stride, v_residue_stride, GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
