"""The custom operators behind `stof.attention`: schemas, fakes and refusals; nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.dispatch import empty_results, is_empty, plan_of, run_call, run_empty
from stof.errors import UnsupportedError
from stof.handles import NUMBERED, PLAN, TENSOR, named
from stof.kernels.implementation import Options
from stof.selection import IMPLEMENTATIONS
from stof.validation import refuse_derivatives, refuse_tangents


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    implementation: str,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    number: int = 0,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`stof.attention` as compilers, exporters and autograd see it; its arguments were checked by `attention`.

    The plan is looked up (or built once) when the operator runs.

    Args:
        q, k, v: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]`, `[B, Hkv, Skv, Dv]`.
        mask: the key of a mask; or `PLAN`, `NUMBERED`, `TENSOR`, or the handle of an `Intersection`.
        bias: None, or 4-D and broadcastable to `[B, H, Sq, Skv]`.
        sinks: None or `[H]`.
        scale, softcap: floats, softcap 0 for none.
        implementation: a name of `stof.selection.IMPLEMENTATIONS`, "" for the default.
        q_scale, k_scale, v_scale: float32 `[B or 1, H]` and `[B or 1, Hkv]` of 8-bit tensors, else None.
        number: names a living plan or mask if `mask` is neither a key nor `TENSOR`.
        keep: the mask if `mask` is `TENSOR`, bool `[Sq, Skv]` up to `[B, H, Sq, Skv]`.

    Returns:
        `(out [B, H, Sq, Dv], lse [B, H, Sq])`; lse is float64 for float64 inputs, else float32.

    Raises:
        ArgumentError, MaskError: the plan or mask with this number or key is gone, or is another process's.
        UnsupportedError: `mask` is `TENSOR` while a CUDA graph is captured; replays would use the present values.
    """
    refuse_tangents(q, k, v, bias, sinks)
    mask_or_plan = named(mask, number, keep)
    if is_empty(q, k):
        return run_empty(q, k, v, mask_or_plan, implementation)
    scales = tuple(s for s in (q_scale, k_scale, v_scale) if s is not None)
    given = (q, k, v, bias, sinks, scale, softcap, implementation, *scales)
    options = Options(scale, softcap, bias, sinks, scales)
    return run_call(q, k, v, plan_of(mask_or_plan, q, k), options, implementation, given)


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: str, *others: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialised results, for compilers and exporters."""
    del k, others
    # Raised here and not in `attention`, which chooses the key: Dynamo traces that function and would lose the message.
    if "<" in mask and mask not in (PLAN, TENSOR) and not mask.startswith(NUMBERED):
        raise UnsupportedError(
            f"torch.export cannot keep the mask {mask}: it exists in this process alone; for torch.compile, make masks "
            "of functions outside of compiled code, as by masks.from_function(f). Give stof.attention a mask "
            "made of named patterns, or a bool tensor (an input or a buffer of the module), e.g. "
            "mask.to_dense(q_len, kv_len) or plan.to_dense()",
            {},
        )
    return empty_results(q, v)


def _no_backward(ctx: Any, *grads: Tensor) -> Any:
    """The autograd formula of the operators: a clear error."""
    refuse_derivatives("a backward pass reached it")


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    """The batching rule of the operators: a clear error."""
    raise UnsupportedError(
        "stof.attention is not for torch.vmap; its tensors have a batch dimension, into which the mapped one can go",
        {name: ["no vmap"] for name in IMPLEMENTATIONS},
    )


masked_attention_op = torch.library.custom_op("stof::masked_attention", _masked_attention, mutates_args=())
# The same for a mask or plan that changes from call to call. Its tag keeps it out of Inductor's CUDA graphs: Inductor
# would capture and keep one graph for each value of `number`.
varying_attention_op = torch.library.custom_op(
    "stof::varying_attention", _masked_attention, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
for _operator in (masked_attention_op, varying_attention_op):
    _operator.register_fake(_fake)
    _operator.register_autograd(_no_backward)
    _operator.register_vmap(_no_vmap)
