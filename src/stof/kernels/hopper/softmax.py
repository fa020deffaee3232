"""Softmax of a tile in registers: mask bits, row maxima, exponentials, row sums, conversion to 16 bits."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stof.kernels.hopper.intrinsics import bit_layout

LOG2E = gl.constexpr(1.4426950408889634)
# With lazy rescaling, a row's maximum follows its scores when they exceed it by more than this many powers of two; fp16
# has a range of 15.
RESCALE_THRESHOLD = gl.constexpr(8.0)
# A thread's row sum up to which each of its probabilities fits fp16, whose largest value is 65504.
MAX_THREAD_SUM = gl.constexpr(32768.0)
# Smaller than all scores.
LOWEST = gl.constexpr(-1e38)


@gluon.jit
@no_type_check
def _reduced(x, axis: gl.constexpr, MAXIMUM: gl.constexpr):
    return gl.max(x, axis) if MAXIMUM else gl.sum(x, axis)


@gluon.jit
@no_type_check
def _per_thread(x, MAXIMUM: gl.constexpr):
    """Reduce what each thread holds of a row by maximum or sum, `[64, N / 8, 4, 2]` -> `[64, 4]`.

    As a tree: a chain of 32 dependent instructions would expose their latency.
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
def masked(s, words, BLOCK_N: gl.constexpr):
    """Set scores to -inf where the bitmap is 0."""
    return _selected(s, words, "0fFF800000", BLOCK_N)


@gluon.jit
@no_type_check
def kept(p, words, BLOCK_N: gl.constexpr):
    """Set probabilities to 0 where the bitmap is 0."""
    return _selected(p, words, "0f00000000", BLOCK_N)


@gluon.constexpr_function
def _select(otherwise):  # type: ignore[no-untyped-def]
    select = f"and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, {otherwise}, p;"
    return f"{{ .reg .pred p; .reg .b32 t; {select} }}"


@gluon.jit
@no_type_check
def _selected(s, words, OTHERWISE: gl.constexpr, BLOCK_N: gl.constexpr):
    bits: gl.constexpr = bit_layout(BLOCK_N)
    split = gl.convert_layout(s.reshape([64, BLOCK_N // 8, 4, 2]), bits, assert_trivial=True)
    j = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, bits))))
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, bits))))
    bit = 1 << (2 * j.expand_dims(0).expand_dims(2).expand_dims(3)
                + pair.expand_dims(0).expand_dims(1).expand_dims(2))  # fmt: skip
    # One select at a time: ptxas then moves seven bits at once to predicates (R2P) and does not run out of them.
    split = gl.inline_asm_elementwise(
        _select(OTHERWISE),
        "=f,f,r,r",
        [split, words.expand_dims(1).expand_dims(3), bit],
        dtype=gl.float32,
        is_pure=False,  # pure code would be hoisted above the branch and run for full tiles too
        pack=1,
    )
    return gl.convert_layout(split.reshape([64, BLOCK_N]), s.type.layout, assert_trivial=True)


@gluon.jit
@no_type_check
def tanh_by_exp2(x):
    """`tanh(x / (2 * LOG2E))`, by exp2, which saturates to 0 or inf and so to +-1."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x))


@gluon.jit
@no_type_check
def _softcap(s, scale, softcap):
    """`softcap * tanh(scale * s / softcap)`."""
    return softcap * tanh_by_exp2(s * (scale * 2.0 * LOG2E / softcap))


@gluon.jit
@no_type_check
def biased(s, bias, scale, softcap, HAS_SOFTCAP: gl.constexpr):
    """Scale scores, apply the softcap and add the bias; `probabilities` then takes a scale of `LOG2E` and no options.

    A bias then costs a conversion and turns a multiplication into an FMA, and is masked like any score.
    """
    bias = bias.to(gl.float32)
    return _softcap(s, scale, softcap) + bias if HAS_SOFTCAP else s * scale + bias


@gluon.jit
@no_type_check
def exponents(
    s, m_old, scale, softcap, PARTIAL: gl.constexpr, HAS_SCORE_MOD: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    LAZY: gl.constexpr, BLOCK_N: gl.constexpr, SHIFT: gl.constexpr = 0,
):  # fmt: skip
    """Return exponents of probabilities, `SHIFT` at most: `(x, new maximum, new maximum or 0 where it is -inf)`.

    If LAZY, a row keeps its maximum until scores exceed it by `RESCALE_THRESHOLD`, and `x` may exceed `SHIFT` by that.
    """
    rows_layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    bits: gl.constexpr = bit_layout(BLOCK_N)
    if HAS_SOFTCAP:
        # -inf stays -inf.
        s = gl.where(s == float("-inf"), s, _softcap(s, scale, softcap) * LOG2E)
    elif HAS_SCORE_MOD:
        s = gl.where(s == float("-inf"), s, s * (scale * LOG2E))
    split = gl.convert_layout(s.reshape([64, BLOCK_N // 8, 4, 2]), bits, assert_trivial=True)
    highest = gl.convert_layout(gl.max(_per_thread(split, True), 1), rows_layout)
    if not HAS_SCORE_MOD:
        highest *= scale
    m_new = gl.maximum(m_old, highest)
    if LAZY:
        m_new = gl.where(highest - m_old <= RESCALE_THRESHOLD, m_old, m_new)
    # A row may have no key so far: -inf - -inf is NaN.
    m_use = gl.where(m_new == float("-inf"), 0.0, m_new) if PARTIAL else m_new
    lowered = m_use - SHIFT if SHIFT > 0 else m_use
    if HAS_SCORE_MOD:
        x = s - lowered[:, None]
    else:
        x = s * scale - lowered[:, None]
    return x, m_new, m_use


@gluon.jit
@no_type_check
def thread_sums(p, BLOCK_N: gl.constexpr):
    """Sum the probabilities of each row by thread, of all columns or some: `[64, 4]` in the layout of all columns."""
    COLUMNS: gl.constexpr = p.shape[1]
    sums_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bit_layout(BLOCK_N)))
    split = gl.convert_layout(p.reshape([64, COLUMNS // 8, 4, 2]), bit_layout(COLUMNS), assert_trivial=True)
    return gl.convert_layout(_per_thread(split, False), sums_layout, assert_trivial=True)


@gluon.jit
@no_type_check
def probabilities(
    s, m_old, scale, softcap, PARTIAL: gl.constexpr, HAS_SCORE_MOD: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    LAZY: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Online softmax of a tile: `(p, new maximum, factor of earlier sums, sums of p by thread)`."""
    x, m_new, m_use = exponents(s, m_old, scale, softcap, PARTIAL, HAS_SCORE_MOD, HAS_SOFTCAP, LAZY, BLOCK_N)
    p = gl.exp2(x)
    alpha = gl.exp2(m_old - m_use)
    # Each thread keeps its own sums (four a row) until the epilogue.
    return p, m_new, alpha, thread_sums(p, BLOCK_N)


@gluon.jit
@no_type_check
def probabilities_over_old_maximum(s, m, scale, BLOCK_N: gl.constexpr, PARTIAL: gl.constexpr):
    """Exponentials of plain scores over the maximum of earlier tiles: `(p, sums of p by thread)`.

    Sums above `MAX_THREAD_SUM`, or NaN, say that this maximum does not serve, as for the first key of a row.
    """
    if PARTIAL:
        # A row without a key so far, and without one here: -inf - -inf is NaN.
        m = gl.maximum(m, LOWEST)
    p = gl.exp2(s * scale - m[:, None])
    return p, thread_sums(p, BLOCK_N)


@gluon.jit
@no_type_check
def pack_probabilities(p, dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Pack probabilities to 16 bits, two a word: int32 `[64, N / 8, 4, 2]`, zero in the second place of each pair.

    Carried through the loop like this: fp16 values would be unpacked and packed again, fp32 takes twice the registers.
    """
    bits: gl.constexpr = bit_layout(BLOCK_N)
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
def probabilities_operand(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpack probabilities to the left operand of the PV matmul."""
    if dtype == gl.float16:
        half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [packed], dtype=gl.float16, is_pure=True, pack=2)
    else:
        half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=2)
    return gl.convert_layout(half.reshape([64, packed.shape[1] * 8]), layout, assert_trivial=True)
