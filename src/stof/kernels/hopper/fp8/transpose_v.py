"""Triton kernel that transposes 8-bit values to `[D, keys]`: FP8 wgmma wants the summed dimension contiguous."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.runtime.pdl import launch_next_and_wait

# Every second byte, and the upper half, of a word.
ODD_BYTES = tl.constexpr(0xFF00FF00 - 2**32)
UPPER = tl.constexpr(0xFFFF0000 - 2**32)


@triton.jit
@no_type_check
def _interleaved(a, b):
    """Bytes 0 and 2 of two words as `a0 b0 a2 b2`, and bytes 1 and 3 as `a1 b1 a3 b3`."""
    even = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)
    odd = ((a >> 8) & 0x00FF00FF) | (b & ODD_BYTES)
    return even, odd


@triton.jit
@no_type_check
def _halves(a, b):
    """The lower halves of two words, and the upper ones."""
    return (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & UPPER)


@triton.jit
@no_type_check
def _keys_of(number, place, keys_ptr, keys_len, LISTED: tl.constexpr):
    """The key of each place, and whether there is one."""
    if LISTED:
        key = tl.load(keys_ptr + number * keys_len + place, mask=place < keys_len, other=-1)
    else:
        key = tl.where(place < keys_len, place, -1)
    return key.to(tl.int64), key >= 0


@triton.jit
@no_type_check
def transpose_v(
    k_ptr,  # [B, Hkv, Skv, D / 4] int32, four elements to a word; read only where LISTED
    v_ptr,
    k_out_ptr,  # [B, heads, keys_len, D / 4] int32, keys in their order
    v_out_ptr,  # [B, heads, D, words] int32, four keys to a word
    q_scale_ptr,  # [B or 1, query heads] float32; all scales are read only where not LISTED
    k_scale_ptr,  # [B or 1, heads]
    v_scale_ptr,
    factors_ptr,  # [B, query heads, 2]: of scores, and of the output
    keys_ptr,  # [mask_batch, mask_heads, keys_len] int32, -1 for none; read only where LISTED
    heads,  # that are written
    heads_per_group,  # of those, that share keys and values; where not LISTED, query heads that do
    keys_stride_b,  # in lists of keys
    keys_stride_h,
    keys_len,
    words,
    stride_kb,  # in words
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_qsb,
    stride_qsh,
    stride_ksb,
    stride_ksh,
    stride_vsb,
    stride_vsh,
    LISTED: tl.constexpr,  # listed keys (compacted columns), not all of them
    GROUP: tl.constexpr,  # heads_per_group, up to a power of two
    WORDS: tl.constexpr,  # written at once, of each row
    D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write transposed values, zeros for places without a key, and the factors of scores and output.

    In each 16 keys, place `4 q + 2 h + b` has key `8 h + 2 q + b`: a thread of the attention kernel holds the
    probabilities of keys 2q, 2q + 1, 8 + 2q and 9 + 2q, and the tensor cores take 4 neighbouring places from it.
    """
    launch_next_and_wait(USE_PDL)
    chunks = tl.cdiv(words, WORDS)
    program = tl.program_id(0)
    chunk = program % chunks
    owner = program // chunks
    b, h = (owner // heads).to(tl.int64), (owner % heads).to(tl.int64)
    kv_head = h // heads_per_group if LISTED else h
    number = b * keys_stride_b + h * keys_stride_h
    word = chunk * WORDS + tl.arange(0, WORDS)
    quad = tl.arange(0, D // 4)
    first = word // 4 * 16 + word % 4 * 2
    v_ptr += b * stride_vb + kv_head * stride_vh
    k_ptr += b * stride_kb + kv_head * stride_kh
    key0, some0 = _keys_of(number, first, keys_ptr, keys_len, LISTED)
    key1, some1 = _keys_of(number, first + 1, keys_ptr, keys_len, LISTED)
    key2, some2 = _keys_of(number, first + 8, keys_ptr, keys_len, LISTED)
    key3, some3 = _keys_of(number, first + 9, keys_ptr, keys_len, LISTED)
    r0 = tl.load(v_ptr + key0[:, None] * stride_vs + quad[None, :], mask=some0[:, None], other=0)
    r1 = tl.load(v_ptr + key1[:, None] * stride_vs + quad[None, :], mask=some1[:, None], other=0)
    r2 = tl.load(v_ptr + key2[:, None] * stride_vs + quad[None, :], mask=some2[:, None], other=0)
    r3 = tl.load(v_ptr + key3[:, None] * stride_vs + quad[None, :], mask=some3[:, None], other=0)
    even01, odd01 = _interleaved(r0, r1)
    even23, odd23 = _interleaved(r2, r3)
    d0, d2 = _halves(even01, even23)
    d1, d3 = _halves(odd01, odd23)
    at = v_out_ptr + (owner.to(tl.int64) * D + 4 * quad)[None, :] * words + word[:, None]
    ok = (word < words)[:, None] & (quad >= 0)[None, :]
    tl.store(at, d0, mask=ok)
    tl.store(at + words, d1, mask=ok)
    tl.store(at + 2 * words, d2, mask=ok)
    tl.store(at + 3 * words, d3, mask=ok)
    if LISTED:
        _copy(k_ptr, stride_ks, k_out_ptr, owner, first, key0, some0, keys_len, quad, D)
        _copy(k_ptr, stride_ks, k_out_ptr, owner, first + 1, key1, some1, keys_len, quad, D)
        _copy(k_ptr, stride_ks, k_out_ptr, owner, first + 8, key2, some2, keys_len, quad, D)
        _copy(k_ptr, stride_ks, k_out_ptr, owner, first + 9, key3, some3, keys_len, quad, D)
    elif chunk == 0:
        member = tl.arange(0, GROUP)
        query_head = h * heads_per_group + member
        mine = member < heads_per_group
        q_scale = tl.load(q_scale_ptr + b * stride_qsb + query_head * stride_qsh, mask=mine, other=0.0)
        k_scale = tl.load(k_scale_ptr + b * stride_ksb + h * stride_ksh)
        v_scale = tl.load(v_scale_ptr + b * stride_vsb + h * stride_vsh)
        pair_ptr = factors_ptr + (b * heads * heads_per_group + query_head) * 2
        tl.store(pair_ptr, q_scale * k_scale, mask=mine)
        tl.store(pair_ptr + 1, v_scale + tl.zeros([GROUP], tl.float32), mask=mine)


@triton.jit
@no_type_check
def _copy(k_ptr, stride_ks, k_out_ptr, owner, place, key, some, keys_len, quad, D: tl.constexpr):
    """Some keys to their places, zeros where there are none."""
    k = tl.load(k_ptr + key[:, None] * stride_ks + quad[None, :], mask=some[:, None], other=0)
    at = k_out_ptr + (owner.to(tl.int64) * keys_len + place)[:, None] * (D // 4) + quad[None, :]
    tl.store(at, k, mask=(place < keys_len)[:, None])
