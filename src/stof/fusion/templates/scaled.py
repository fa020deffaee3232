"""The operator for weights of 8-bit values with a factor for each column of the result: weight-only quantising.

A GEMM of few rows takes as long as its weight is copied. The kernel reads the 8-bit values and widens them in
registers; plain graphs write the widened weight to memory first and read it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import launch, reference
from stof.fusion.templates.gemm_config import ACTIVATIONS, STORED


@torch.library.custom_op("stof::scaled_linear", mutates_args=())
def scaled_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: str,
) -> Tensor:
    """`act(scale * (x @ weight.T) + bias) + residual`.

    Args:
        x, bias, residual, activation, config: as for `stof::linear`.
        weight: `[N, K]`, int8 or float8_e4m3fn (on a GPU of compute capability 8.9 and up).
        scale: `[N]` or `[N, 1]`, any floating dtype; applied to float32 sums.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation, another dtype of weight, a scale of another size, or text that is no
            configuration.
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if weight.dtype not in STORED:
        raise ArgumentError(f"a scaled weight is {' or '.join(map(str, STORED))}, got {weight.dtype}")
    if tuple(scale.shape) not in ((weight.shape[0],), (weight.shape[0], 1)):
        raise ArgumentError(f"a weight {tuple(weight.shape)} has {weight.shape[0]} factors, got {tuple(scale.shape)}")
    call = launch.gemm_call("scaled_linear", x, weight, bias, residual, activation, scale=scale)
    chosen = launch.resolve_config(call, config)
    if chosen is None:
        return reference.scaled_linear(x, weight, scale, bias, residual, activation)
    return launch.compute(call, chosen)


@scaled_linear.register_fake
def _scaled_linear_fake(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
