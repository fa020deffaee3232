"""What the operator of `stof.attention` has in common for autograd, vmap and fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.errors import UnsupportedError
from stof.kernels.common import empty_output
from stof.selection.implementations import IMPLEMENTATIONS

# Names of the two operators; see `stof.attention`.
MASKED, VARYING = "stof::masked_attention", "stof::varying_attention"


def scales_of(*scales: Tensor | None) -> tuple[Tensor, ...]:
    """The scales of a call that an operator was given one by one: three, or none."""
    return tuple(scale for scale in scales if scale is not None)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` as every implementation returns them, uninitialised."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_output(q, v), q.new_empty(q.shape[:-1], dtype=lse_dtype)


def results_of_nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` where there is no query, or no key to see."""
    out, lse = empty_results(q, v)
    return out.zero_(), lse.fill_(-torch.inf)


def no_backward(ctx: Any, *grads: Tensor) -> Any:
    """The autograd formula of the operators: a clear error."""
    raise UnsupportedError(
        "stof.attention computes forward passes only, and a backward pass reached it; run inference under "
        "torch.inference_mode(), and train with another attention implementation for now",
        {name: ["no backward"] for name in IMPLEMENTATIONS},
    )


def no_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    """The batching rule of the operators: a clear error."""
    raise UnsupportedError(
        "stof.attention is not for torch.vmap; its tensors have a batch dimension, into which the mapped one can go",
        {name: ["no vmap"] for name in IMPLEMENTATIONS},
    )


def forward_only(operator: Any) -> None:
    """Have an operator say what it is not for, wherever PyTorch's transforms ask it."""
    operator.register_autograd(no_backward)
    operator.register_vmap(no_vmap)


def refuse_derivatives() -> None:
    """Raise where torch.func's `grad` or `jvp` runs: PyTorch's own words there are about its autograd functions.

    Raises:
        UnsupportedError: one of them does.
    """
    level = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    if level is not None and level.key() in (kinds.Grad, kinds.Jvp):
        no_backward(None)
