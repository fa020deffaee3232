"""Two GEMMs with a narrow value between them, as adapters and small MLPs have. Experimental."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import launch, reference
from stof.fusion.templates.device_properties import pdl_options
from stof.fusion.templates.gemm_config import ACTIVATIONS, CHAIN, GemmConfig, padded_columns
from stof.runtime.cache_keys import settled


class Chain(NamedTuple):
    """The tensors of one call as the kernel reads them.

    first: x `[M, K]`, the first weight `[R, K]` and bias, and the shape of the whole; up: the second weight `[N, R]`;
    up_bias: `[N]`; residual: `[M, N]`.
    """

    first: launch.GemmCall
    up: Tensor
    up_bias: Tensor | None
    residual: Tensor | None


@torch.library.custom_op("stof::chain_linear", mutates_args=())
def chain_linear(
    x: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: str,
) -> Tensor:
    """`act(x @ down.T + down_bias) @ up.T + up_bias + residual`; what lies between is rounded to x's dtype.

    Args:
        x: `[..., K]`; a kernel serves float16 and bfloat16 on a GPU.
        down: `[R, K]` of x's dtype; a kernel serves up to 256 rows.
        up: `[N, R]`.
        down_bias, up_bias: None or `[R]`, `[N]`.
        residual: None or `[..., N]`.
        activation, config: as for `stof::linear`.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation, weights that do not fit each other, or text that is no configuration.
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if down.shape[0] != up.shape[1]:
        raise ArgumentError(f"the second weight reads {up.shape[1]} columns, the first one makes {down.shape[0]}")
    call = chain(x, down, down_bias, up, up_bias, residual, activation)
    others = [t for t in (up, up_bias, residual) if t is not None]
    agree = all((t.device, t.dtype) == (x.device, x.dtype) for t in others)
    chosen = launch.resolve_config(call.first, config) if agree else None
    if chosen is None:
        return reference.chain_linear(x, down, down_bias, up, up_bias, residual, activation)
    return compute(call, chosen)


@chain_linear.register_fake
def _chain_linear_fake(x: Tensor, down: Tensor, down_bias: Tensor | None, up: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], up.shape[0])


def chain(
    x: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> Chain:
    """View (or, where strides are too odd, copy) the tensors of a call for the kernel."""
    first = launch.gemm_call(CHAIN, x, down.contiguous(), down_bias, None, activation)
    inner, columns = down.shape[0], up.shape[0]
    shape = replace(first.shape, n=columns, inner=inner, residual=residual is not None)
    added = None if residual is None else residual.reshape(-1, columns)
    if added is not None and added.stride(1) != 1:
        added = added.contiguous()
    up_bias = None if up_bias is None else up_bias.contiguous()
    return Chain(first._replace(shape=shape), up.contiguous(), up_bias, added)


def compute(call: Chain, config: GemmConfig) -> Tensor:
    """Run a chain; result `[..., N]`, contiguous."""
    from stof.fusion.templates.triton.chained_gemm import chain_kernel

    x, down, shape = call.first.x, call.first.weight, call.first.shape
    out = x.new_empty(shape.m, shape.n)
    settled(chain_kernel)[(-(-shape.m // config.block_m) * config.split,)](
        x, down, call.first.bias, call.up, call.up_bias, call.residual, out,
        shape.m, shape.n, shape.k, shape.inner, x.stride(0), down.stride(0), call.up.stride(0),
        0 if call.residual is None else call.residual.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, INNER=padded_columns(shape.inner),
        PARTS=config.split, ACTIVATION=call.first.activation, FAST=x.device.type == "cuda",
        HAS_DOWN_BIAS=call.first.bias is not None, HAS_UP_BIAS=call.up_bias is not None,
        HAS_RESIDUAL=call.residual is not None, num_warps=config.warps, num_stages=config.stages, **pdl_options(x),
    )  # fmt: skip
    return out.view(*call.first.lead, shape.n)
