"""`stof::linear` in TileLang, for the search to choose where it is faster; needs the extra `tilelang`.

TileLang is imported when a kernel is first wanted. It compiles with CUDA's compiler, and keeps what it compiled in a
cache of its own.
"""

# No postponed annotations here: TileLang reads those of `linear` as what they are.
import functools
from typing import Any, no_type_check

from torch import Tensor

from stof.fusion.templates.gemm_config import GemmConfig


def launch(
    config: GemmConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out: Tensor,
) -> None:
    """Into `out` `[M, N]`: `act(x @ weight.T + bias) + residual`; all are contiguous, x `[M, K]`, weight `[N, K]`."""
    dtype = str(x.dtype).removeprefix("torch.")
    kernel = _compiled(config, *weight.shape, dtype, activation, bias is not None, residual is not None)
    # Programs have all operands; what stands in for one that is missing is not read.
    kernel(x, weight, out[0] if bias is None else bias, out if residual is None else residual, out)


@functools.lru_cache(maxsize=1024)
def _compiled(
    config: GemmConfig, columns: int, depth: int, dtype: str, activation: str, has_bias: bool, has_residual: bool
) -> Any:
    import tilelang

    function = program(config, columns, depth, dtype, activation, has_bias, has_residual)
    return tilelang.compile(function, target="cuda")


@no_type_check
def program(
    config: GemmConfig, columns: int, depth: int, dtype: str, activation: str, has_bias: bool, has_residual: bool
) -> Any:
    """TileLang's function of `(x, weight, bias, residual, out)` for any number of rows."""
    import tilelang.language as T

    rows = T.dynamic("rows")
    BLOCK_M, BLOCK_N, BLOCK_K = config.block_m, config.block_n, config.block_k

    def damped(x, z):
        return x / (1.0 + T.exp2(z))

    # As in `device_functions.activate`, but for the exact GELU, which has an instruction sequence of CUDA's here.
    act = {
        "none": lambda x: x,
        "gelu": lambda x: 0.5 * x * (1.0 + T.erf(x * 0.7071067811865476)),
        "gelu_tanh": lambda x: damped(x, x * (-2.302208198 - 0.1029432397 * (x * x))),
        "silu": lambda x: damped(x, x * -1.4426950408889634),
        "relu": lambda x: T.if_then_else(x < 0.0, 0.0, x),
    }[activation]

    @T.prim_func
    def linear(
        x: T.Tensor((rows, depth), dtype),
        weight: T.Tensor((columns, depth), dtype),
        bias: T.Tensor((columns,), dtype),
        residual: T.Tensor((rows, columns), dtype),
        out: T.Tensor((rows, columns), dtype),
    ):
        with T.Kernel(T.ceildiv(columns, BLOCK_N), T.ceildiv(rows, BLOCK_M), threads=32 * config.warps) as (n, m):
            x_tile = T.alloc_shared((BLOCK_M, BLOCK_K), dtype)
            weight_tile = T.alloc_shared((BLOCK_N, BLOCK_K), dtype)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            T.use_swizzle(panel_size=config.group or 8)
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(depth, BLOCK_K), num_stages=config.stages):
                T.copy(x[m * BLOCK_M, k * BLOCK_K], x_tile)
                T.copy(weight[n * BLOCK_N, k * BLOCK_K], weight_tile)
                T.gemm(x_tile, weight_tile, acc, transpose_B=True)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                if has_bias:
                    acc[i, j] = acc[i, j] + bias[n * BLOCK_N + j]
                acc[i, j] = act(acc[i, j])
                if has_residual:
                    acc[i, j] = acc[i, j] + residual[m * BLOCK_M + i, n * BLOCK_N + j]
            T.copy(acc, out[m * BLOCK_M, n * BLOCK_N])

    return linear
