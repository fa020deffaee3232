"""Kernel launches: 2-D views of the tensors of a call, its configuration, and the launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stof.fusion.templates import reference
from stof.fusion.templates.device_properties import device_limits, pdl_options, programs
from stof.fusion.templates.gemm_config import GATED, GLUON, GemmConfig, GemmShape, default, fitting
from stof.fusion.templates.norms import Norm, can_normalise, merge_and_normalise, normalise, row_statistics
from stof.fusion.templates.row_buckets import bucket_of, in_bucket, nearest_first
from stof.runtime.cache_keys import on_grid


class Rotary(NamedTuple):
    """Heads rotated in the first `turned` columns of a result, each `head_dim` wide.

    cos, sin: `[P, head_dim]`, contiguous; row r of the result has position `r % P`.
    """

    cos: Tensor
    sin: Tensor
    turned: int
    head_dim: int


class GemmCall(NamedTuple):
    """The tensors of one call as kernels read them.

    Attributes:
        x: `[M, K]`, rows contiguous.
        weight: `[N, K]` (gated: `[2 N, K]`), contiguous in either direction.
        bias: `[N]` (gated: `[2 N]`) or None.
        residual: `[M, N]`, rows contiguous, or None.
        lead: the result's shape without its last dimension.
        row_scale: the factor of every row by an RMSNorm, float32 `[M]`, if the caller has computed it.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm: Norm | None
    activation: str
    shape: GemmShape
    lead: torch.Size
    row_scale: Tensor | None = None
    rotary: Rotary | None = None


def gemm_call(
    template: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    norm: Norm | None = None,
    row_scale: Tensor | None = None,
    rotary: Rotary | None = None,
) -> GemmCall:
    """Return the tensors of a call as 2-D views, or copies where kernels cannot read their strides."""
    k = x.shape[-1]
    n = weight.shape[0] // (2 if template in GATED else 1)
    rows = x.shape[:-1].numel()  # of tensors without elements, reshape cannot tell
    flat = _rows_contiguous(x.reshape(rows, k))
    if weight.stride(1) != 1 and weight.stride(0) != 1:
        weight = weight.contiguous()
    flat_residual = None if residual is None else _rows_contiguous(residual.reshape(rows, n))
    bias = None if bias is None else bias.contiguous()
    transposed = weight.stride(1) != 1
    stored = weight.t() if transposed else weight
    read = [flat, stored] + ([] if flat_residual is None else [flat_residual])
    shape = GemmShape(
        template=template,
        m=flat.shape[0],
        n=n,
        k=k,
        activation=activation,
        norm="" if norm is None else norm.kind,
        scaled=norm is not None and (norm.weight is not None or norm.bias is not None),
        bias=bias is not None,
        residual=residual is not None,
        transposed=transposed,
        head_dim=0 if rotary is None else rotary.head_dim,
        turned=0 if rotary is None else rotary.turned,
        aligned=all(width * x.element_size() % 16 == 0 for width in (n, k)) and all(map(_aligned, read)),
    )
    if row_scale is not None:
        row_scale = row_scale.reshape(rows).contiguous()
    return GemmCall(flat, weight, bias, flat_residual, norm, activation, shape, x.shape[:-1], row_scale, rotary)


def resolve_config(call: GemmCall, text: str) -> GemmConfig | None:
    """Return the given configuration if it fits these tensors, else the default for the shape, else None.

    Both depend on the bucket of the number of rows: the text may have a configuration for each bucket, and the default
    is that of the bucket's largest GEMM. Without a default, as in float32, the configuration of the nearest bucket that
    fits is used.

    Raises:
        ArgumentError: the text is no configuration.
    """
    config = in_bucket(text, call.shape.m)
    if config:
        GemmConfig.parse(config)
    if call.x.device.type != "cuda" or not call.x.numel() or not call.shape.n or not _agree(call):
        return None
    capability, processors = device_limits(call.x.device.index or 0)
    given = fitting(config, call.shape, call.x.dtype, capability) if config else None
    if given is not None:
        return given
    usual = default(replace(call.shape, m=bucket_of(call.shape.m)), call.x.dtype, capability, processors)
    if usual is not None:
        return usual
    others = (fitting(one, call.shape, call.x.dtype, capability) for one in nearest_first(text, call.shape.m) if one)
    return next((one for one in others if one is not None), None)


def compute_normed(call: GemmCall, config: GemmConfig, norm: Norm) -> tuple[Tensor, Tensor]:
    """Run a GEMM, and a norm over its result's last dimension: `(h, norm(h))`, both `[..., N]` and contiguous.

    With split-K the norm's kernel, which reads every row anyway, reduces the partial sums.
    """
    if config.split == 1:
        h = compute(call, config)
        return h, normalise(h, norm)
    partial = torch.empty(config.split, call.shape.m, call.shape.n, dtype=torch.float32, device=call.x.device)
    _tile(call, config, None, partial, None, None)
    h, normed = merge_and_normalise(partial, call.bias, call.residual, norm, call.x.dtype)
    return h.view(*call.lead, call.shape.n), normed.view(*call.lead, call.shape.n)


def compute(call: GemmCall, config: GemmConfig) -> Tensor:
    """Run a GEMM; result `[..., N]`, contiguous."""
    mean, rstd = None, call.row_scale
    if call.norm is not None and rstd is None:
        if config.kind == "tile" or (config.kind in GLUON and call.shape.commutes):
            mean, rstd = row_statistics(call.x, call.norm)
        else:
            call = call._replace(x=normalise(call.x, call.norm), norm=None)
    out = call.x.new_empty(call.shape.m, call.shape.n)
    if config.kind == "tile":
        _tile(call, config, out, None, mean, rstd)
    elif config.kind == "tilelang":
        _tilelang(call, config, out)
    else:
        _hopper(call, config, out, rstd)
    return out.view(*call.lead, call.shape.n)


def row_factors(x: Tensor, eps: float) -> Tensor:
    """Return the factors by which an RMSNorm multiplies the rows of x `[..., K]`: `[...]`, float32 at least."""
    if can_normalise(x.shape[-1], x) and x.is_contiguous():
        return row_statistics(x.view(-1, x.shape[-1]), Norm("rms", None, None, eps))[1].view(x.shape[:-1])
    return reference.row_factors(x, eps)


def _tile(
    call: GemmCall,
    config: GemmConfig,
    out: Tensor | None,
    partial: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> None:
    """Launch into `out`, or write partial sums to `partial` `[splits, M, N]` for another kernel to reduce."""
    from stof.fusion.templates.triton.gemm import tile_gemm_kernel
    from stof.runtime.counters import zeroed_counters

    x, weight, shape, norm = call.x, call.weight, call.shape, call.norm
    width = config.block_n // 2 if shape.gated else config.block_n
    tiles = -(-shape.m // config.block_m) * -(-shape.n // width)
    counters = None
    merge = config.split > 1 and partial is None
    if merge:
        size = tiles * config.split * config.block_m * config.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = zeroed_counters(tiles, x.device)
    on_grid(tile_gemm_kernel, (tiles * config.split,))(
        x, weight, out, call.bias, call.residual, mean, rstd,
        None if norm is None else norm.weight, None if norm is None else norm.bias, partial, counters,
        shape.m, shape.n, shape.k, x.stride(0), weight.stride(0), weight.stride(1), shape.n * weight.stride(0),
        0 if call.residual is None else call.residual.stride(0), *_positions(call),
        BLOCK_M=config.block_m, BLOCK_N=width, BLOCK_K=config.block_k,
        GROUP_M=config.tile_group_rows(shape, x.element_size()), SPLITS=config.split,
        EVEN_N=shape.n % width == 0, EVEN_K=shape.k % config.block_k == 0, MERGE=merge,
        GATED=shape.gated, TRANSPOSED=shape.transposed,
        ACTIVATION="gelu_exact" if call.activation == "gelu" and x.dtype == torch.float32 else call.activation,
        FAST=x.device.type == "cuda", HAS_BIAS=call.bias is not None, HAS_RESIDUAL=call.residual is not None,
        NORM="none" if norm is None else norm.kind,
        HAS_NORM_WEIGHT=norm is not None and norm.weight is not None,
        HAS_NORM_BIAS=norm is not None and norm.bias is not None, HEAD_DIM=shape.head_dim,
        num_warps=config.warps, num_stages=config.stages, **pdl_options(x),
    )  # fmt: skip


def _hopper(call: GemmCall, config: GemmConfig, out: Tensor, rstd: Tensor | None) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape, size = call.shape, out.element_size()
    pingpong = config.kind == "pingpong"
    rows = config.block_m if pingpong else config.block_m // config.consumers
    width = config.block_n // 2 if shape.gated else config.block_n
    piece = config.piece(shape, size)
    stored = call.weight.t() if shape.transposed else call.weight

    def weights(columns: int) -> Any:
        return boxes(stored, [config.block_k, columns] if shape.transposed else [columns, config.block_k])

    def boxes(tensor: Tensor, box: list[int]) -> Any:
        # All boxes are 64 elements wide or more: 128-byte swizzle.
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return TensorDescriptor(tensor, *_extent(tensor), box, layout)

    x = boxes(call.x, [rows, config.block_k])
    given = (
        boxes(out, [rows, piece]), None if call.residual is None else boxes(call.residual, [rows, piece]),
        call.bias, rstd, shape.m, shape.n, shape.k,
    )  # fmt: skip
    common = {
        "ROWS": rows, "BLOCK_N": config.block_n - config.extra_columns, "BLOCK_K": config.block_k,
        "GROUP_M": config.tile_group_rows(shape, size), "PIECE": piece,
        "GATED": shape.gated, "TRANSPOSED": shape.transposed, "ACTIVATION": call.activation,
        "HAS_BIAS": call.bias is not None, "HAS_RESIDUAL": call.residual is not None, "HAS_SCALE": rstd is not None,
    }  # fmt: skip
    grid = (min(-(-shape.m // config.block_m) * -(-shape.n // width), programs(out)),)
    if pingpong:
        from stof.fusion.templates.hopper.pingpong import pingpong_gemm_kernel

        on_grid(pingpong_gemm_kernel, grid)(
            x, weights(width), *given, *_positions(call), STAGES=config.stages, HEAD_DIM=shape.head_dim, **common,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
    else:
        from stof.fusion.templates.hopper.cooperative import cooperative_gemm_kernel

        extra = config.extra_columns
        on_grid(cooperative_gemm_kernel, grid)(
            x, weights(width - extra), weights(extra) if extra else None, *given, SIDE=extra,
            A_STAGES=config.row_stages, B_STAGES=config.stages, CONSUMERS=config.consumers, LAG=config.lag, **common,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip


def _tilelang(call: GemmCall, config: GemmConfig, out: Tensor) -> None:
    from stof.fusion.templates.tilelang_gemm import launch

    residual = None if call.residual is None else call.residual.contiguous()
    launch(config, call.x.contiguous(), call.weight.contiguous(), call.bias, residual, call.activation, out)


def _positions(call: GemmCall) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return cos, sin, their number of positions, and the number of rotated columns; (None, None, 0, 0) for none."""
    if call.rotary is None:
        return None, None, 0, 0
    return call.rotary.cos, call.rotary.sin, call.rotary.cos.shape[0], call.rotary.turned


def _agree(call: GemmCall) -> bool:
    """Whether all tensors have one device and dtype; PyTorch computes or refuses others."""
    norm = () if call.norm is None else (call.norm.weight, call.norm.bias)
    tables = () if call.rotary is None else call.rotary[:2]
    others = [call.weight, call.bias, call.residual, call.row_scale, *norm, *tables]
    return call.weight.dtype == call.x.dtype and all(t.device == call.x.device for t in others if t is not None)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and _row_stride(x) * x.element_size() % 16 == 0


def _row_stride(x: Tensor) -> int:
    """Return the row stride, rounded to the 16 bytes that TMA needs where a single row makes it arbitrary."""
    return x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // 8) * 8


def _extent(x: Tensor) -> tuple[list[int], list[int]]:
    """Return shape and strides of a TMA descriptor."""
    return list(x.shape), [_row_stride(x), 1]
