"""Triton kernel that copies scattered keys and values to consecutive rows, which TMA can read as tiles."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.runtime.pdl import launch_next_and_wait


@triton.jit
@no_type_check
def gather_columns(
    k_ptr,  # [B, Hkv, Skv, D]
    v_ptr,
    k_out_ptr,  # [B, H, n, D]
    v_out_ptr,
    keys_ptr,  # [mask_batch, mask_heads, n] int32, -1 for none
    heads,
    heads_per_group,
    keys_stride_b,  # in lists of n keys
    keys_stride_h,
    n,
    head_dim,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Copy listed keys and their values to consecutive rows; rows without a key are zero."""
    launch_next_and_wait(USE_PDL)
    chunks = n // ROWS
    program = tl.program_id(0)
    place = program % chunks * ROWS + tl.arange(0, ROWS)
    group = program // chunks
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    key = tl.load(keys_ptr + (b * keys_stride_b + h * keys_stride_h) * n + place).to(tl.int64)
    d = tl.arange(0, WIDTH)
    exists = (d < head_dim)[None, :] & (place >= 0)[:, None]
    some = exists & (key >= 0)[:, None]
    kv_head = h // heads_per_group
    k = tl.load(
        k_ptr + b * stride_kb + kv_head * stride_kh + key[:, None] * stride_ks + d[None, :], mask=some, other=0.0
    )
    v = tl.load(
        v_ptr + b * stride_vb + kv_head * stride_vh + key[:, None] * stride_vs + d[None, :], mask=some, other=0.0
    )
    at = (group.to(tl.int64) * n + place)[:, None] * head_dim + d[None, :]
    tl.store(k_out_ptr + at, k, mask=exists)
    tl.store(v_out_ptr + at, v, mask=exists)
