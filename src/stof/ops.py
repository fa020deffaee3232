"""`torch.library` operators: schemas, fakes, and the jump to an implementation.

`stof::attention` takes whatever tensors the chosen implementation prepared from the layout, so every kernel, present
and future, shares this one schema. Compilers see an opaque, functional operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.errors import UnsupportedError
from stof.kernels.cpu.attention import empty_output
from stof.selection.implementations import IMPLEMENTATIONS, Options


@torch.library.custom_op("stof::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    implementation: str,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked attention on a prepared layout; arguments are checked by `stof.attention`, not here.

    Args:
        q, k, v: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]`, `[B, Hkv, Skv, Dv]`.
        layout, sizes: what `implementation` prepared from the layout (`PreparedLayout`).
        bias: None, or 4-D and broadcastable to `[B, H, Sq, Skv]`.
        sinks: None or `[H]`.
        scale, softcap: floats, softcap 0 for none.
        implementation: a name of `stof.selection.IMPLEMENTATIONS`.
        q_scale, k_scale, v_scale: float32 `[B or 1, H]` and `[B or 1, Hkv]` of 8-bit tensors, else None.

    Returns:
        `(out [B, H, Sq, Dv], lse [B, H, Sq])`; lse is float64 for float64 inputs, else float32.
    """
    impl = IMPLEMENTATIONS[implementation]
    return impl.run(q, k, v, layout, sizes, Options(scale, softcap, bias, sinks, scales_of(q_scale, k_scale, v_scale)))


@attention_op.register_fake
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    implementation: str,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


def scales_of(*scales: Tensor | None) -> tuple[Tensor, ...]:
    """The scales of a call that an operator was given one by one: three, or none."""
    return tuple(scale for scale in scales if scale is not None)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` as every implementation returns them, uninitialised."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_output(q, v), q.new_empty(q.shape[:-1], dtype=lse_dtype)


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


forward_only(attention_op)


def refuse_derivatives() -> None:
    """Raise where torch.func's `grad` or `jvp` runs: PyTorch's own words there are about its autograd functions.

    Raises:
        UnsupportedError: one of them does.
    """
    level = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    if level is not None and level.key() in (kinds.Grad, kinds.Jvp):
        no_backward(None)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether an implementation may be called straight, past the operator and its host time.

    The operator must be seen by autograd when an input requires a gradient, and by whoever wraps tensors or intercepts
    operators (fake tensors, functorch transforms, tracing).
    """
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (grad and tensor.requires_grad)):
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


_PLAIN = (Tensor, torch.nn.Parameter)
