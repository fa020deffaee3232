"""Device functions that the Triton and the Gluon kernels share."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def tile_coordinates(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return row and column of a tile; GROUP_M rows of tiles are rasterized together, to keep operands in L2."""
    width = GROUP_M * tiles_n
    group = tile // width
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = tile - group * width
    return first + within % height, within // height


@triton.jit
@no_type_check
def prefetch_l2(pointers):
    """Prefetch the cache lines of these addresses into the L2. No value is read, so concurrent writes are safe."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
@no_type_check
def _damped(x, z, FAST: tl.constexpr):
    """`x / (1 + 2^z)`; 2^z saturates to 0 or infinity, and so the result to x or 0."""
    if FAST:
        # 4 instructions. The plain form takes 9, for denormals and quotients beyond 2^126, which do not matter here.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $2; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; "
            "mul.ftz.f32 $0, $1, t; }",
            "=f,f,f",
            [x, z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return x / (1.0 + tl.exp2(z))


@triton.jit
@no_type_check
def activate(x, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """An activation of float32 values, by name; "gelu" is exact enough for 16-bit results, "gelu_exact" for float32.

    FAST: with instructions of NVIDIA's assembler, which Triton's interpreter does not know.
    """
    if ACTIVATION == "gelu":
        # x * Phi(x), the normal distribution as sigmoid(x * p(x^2)): within 3.4e-6 of the exact value everywhere (our
        # fit; a degree more gains a factor 3), at half the instructions of erf. float16 is coarser above 0.007.
        t = tl.minimum(x * x, 31.36)
        p = -3.2104279728106843e-06
        p = p * t + 8.791060262851068e-05
        p = p * t + 0.00036204379563411414
        p = p * t - 0.10522997120770855
        p = p * t - 2.3020437770725484
        x = _damped(x, x * p, FAST)
    elif ACTIVATION == "gelu_exact":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = _damped(x, x * (-2.302208198 - 0.1029432397 * (x * x)), FAST)
    elif ACTIVATION == "silu":
        # log2(e), not a global constant: a kernel's key in Triton's cache holds its helpers' constants only where those
        # helpers had keys before, so a process that compiles in another order would not find it.
        x = _damped(x, x * -1.4426950408889634, FAST)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # a maximum would drop NaN
    return x
