"""The public operator: `attention` and `plan`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from stof.dispatch import (
    call_spec,
    is_empty,
    plan_for_backward,
    plan_of,
    run_call,
    run_empty,
    under_autocast,
)
from stof.dtensors import global_result, is_dtensor, local_call
from stof.errors import KernelError, UnsupportedError
from stof.flop_formula import register_flops
from stof.handles import FULL, TENSOR, handle_of, is_constant
from stof.kernels.dropout import draw_seed
from stof.kernels.implementation import Options
from stof.kernels.quantization import Scales
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.tensors import as_mask, is_function_or_block_mask
from stof.masks.traced import Intersection
from stof.operators import (
    EagerAttention,
    copy_of_mask_op,
    dropout_attention_op,
    masked_attention_op,
    varying_attention_op,
    varying_dropout_attention_op,
)
from stof.plans.make import cached_plan, make_plan
from stof.plans.plan import Plan
from stof.plans.replaced_masks import replaced_mask
from stof.runtime.private import break_graph, has_values, is_exporting, is_plain, is_traced
from stof.runtime.recomputation import saved_in_forward
from stof.selection import Explanation
from stof.validation import (
    check_bias,
    check_dropout,
    check_scale,
    check_scales,
    check_sinks,
    check_softcap,
    check_tensors,
    refuse_contexts,
    refuse_dropout,
    refuse_gradients,
    refuse_jit_trace,
    usable_device,
)

# `out` and `lse`.
Results = tuple[Tensor, Tensor]

_WHY_UPDATES = "compiled code would not notice updates of a dynamic plan between a call and its backward pass"
_WHY_CHANGES = (
    "compiled code cannot differentiate attention under a mask function that reads what may change, because the "
    "backward pass would read it again; in each call give mask.frozen() or a plan, made outside of compiled code"
)


def plan(
    mask: Mask | Tensor | str | Any,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    config: LayoutConfig | None = None,
    row_order: Tensor | None = None,
) -> Plan:
    """Compile a mask once, to run it many times.

    A plan keeps the values that the mask's tensors have now. Plans of equal masks, lengths and device are cached (128
    plans, 256 MiB with the tensors of their masks, least recently used dropped).

    Args:
        mask: a mask from `stof.masks`, a bool tensor, a FlexAttention `BlockMask`, a function or text.
        q_len, kv_len: lengths in tokens; `kv_len` defaults to `q_len`.
        batch, heads: sizes of the calls to come, checked against the mask. Default: what the mask says (the sequences
            of `padding`, the heads of `per_head`). A plan of a mask function that looks at the batch entry or the head
            takes calls of any sizes, and builds a layout at the first call of each.
        device: where the calls will run; default where the mask's tensors are, else torch's default device.
        config: block sizes and gathering; default by device.
        row_order: int64 `[q_len]`, see `stof.layout.orders.named`.

    Raises:
        ShapeError: the mask does not fit the lengths, batch or heads.
        MaskFunctionError: the mask function raised or returned a non-bool.
    """
    if not torch.compiler.is_compiling():
        refuse_jit_trace()
    mask = as_mask(mask)
    if device is not None:
        where = usable_device(device)
    else:  # `torch.get_default_device` takes as long as all the rest of finding a plan in the cache
        where = mask.tensors_device() or torch.empty(0).device
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return make_plan(
        mask,
        q_len,
        q_len if kv_len is None else kv_len,
        batch=batch,
        heads=heads,
        device=where,
        config=config,
        row_order=row_order,
    )


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_or_plan: Mask | Plan | Tensor | str | Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_or_plan: Mask | Plan | Tensor | str | Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_or_plan: Mask | Plan | Tensor | str | Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention under any mask, differentiable in q, k, v, the bias and the sinks.

    `dropout(softmax(softcap(scale * q @ k^T) + bias))` over the keys the mask keeps, times `v`. Source: STOF
    (arXiv 2506.06095), section 4.1; sinks as in StreamingLLM-style models (one extra logit in the denominator); 8-bit
    tensors as in FlashAttention-3 (arXiv 2407.08608), section 3.3.

    Args:
        q: queries `[B, H, Sq, D]`; float16, bfloat16, float32, float64, or float8_e4m3fn with scales; any strides. If
            q, k and v are DTensors, replicated or sharded alike by batch or heads, the results are too; the mask or
            plan is that of all batch entries and heads, the same on every rank, and follows them as bias and sinks do.
        k: keys `[B, Hkv, Skv, D]`, same dtype and device; `H` is a multiple of `Hkv`.
        v: values `[B, Hkv, Skv, Dv]`.
        mask_or_plan: what each query sees: a mask (compiled and cached by value), a plan from `stof.plan`, a bool
            tensor (read in every call), a FlexAttention `BlockMask`, a mask function, text, or None for everything.
        scale: factor on the scores, default `1 / sqrt(D)`.
        bias: added to the scores, broadcastable to `[B, H, Sq, Skv]` (T5 position bias, ALiBi).
        softcap: scores become `softcap * tanh(score / softcap)` before the bias is added.
        sinks: `[H]`, logits of attention sinks.
        scales: of float8_e4m3fn q, k and v: `(q_scale, k_scale, v_scale)`, float32 above 0, `[B or 1, H]` and twice
            `[B or 1, Hkv]`, what the values of a head are multiplied with; see `stof.quantise_heads`. Heads of 128 run
            in 8 bits on Hopper; where that cannot run, or would be slower, tensors are widened first.
        dropout_p: the probability that a weight becomes 0, from 0 to below 1; the others are divided by
            `1 - dropout_p`. There is no training mode: give 0 for inference. Which weights stay follows from two int64
            that PyTorch's generator of the device draws in each call, so `torch.manual_seed` repeats them. For the same
            draw they are the same on every device and in every implementation.
        return_lse: also return the log-sum-exp of the kept scores; it is that without dropout.
        implementation: force one of `stof.selection.IMPLEMENTATIONS`; default the first that can run the call.

    Returns:
        `out [B, H, Sq, Dv]` in q's dtype (bfloat16 for 8-bit inputs), or `(out, lse)` with lse `[B, H, Sq]` in float32
        (float64 for float64 inputs). Rows that keep no key give 0 and -inf, never NaN, as do all rows where `Skv` is
        0; where `B`, `H` or `Sq` is 0, the result is empty.

    Raises:
        ShapeError, HeadCountError, DtypeError, DeviceError: tensors that disagree.
        PlanMismatchError: a plan made for other lengths, batch or heads.
        UnsupportedError: under `torch.export`, a mask function, or a plan or mask that holds a function or tensor: an
            exported program outlives them. It takes masks made of named masks, and bool tensors.
        UnsupportedError: while a CUDA graph is captured, a first call under a mask or plan, or with such tensors, or a
            mask with tensors in it, which replays would read as it was.
        ArgumentError: a scale, softcap, scales, dropout_p or implementation outside what is accepted.
        UnsupportedError: no implementation can run the call; lists every reason. Dropout of 8-bit tensors.
        UnsupportedError: DTensors that are sharded otherwise; dropout or 8-bit ones.
        UnsupportedError: where a gradient is asked for: of 8-bit tensors, under a dynamic plan of `vertical_slash`, and
            in a `fullgraph` under any dynamic plan or a mask that reads what may change.
        UnsupportedError, PlanMismatchError: in the backward pass: for second derivatives; if a dynamic plan was updated
            after the call.
    """
    if torch.compiler.is_dynamo_compiling():
        if reason := _cannot_compile(mask_or_plan, (q, k, v, bias, sinks)):
            break_graph(reason)
            return torch.compiler.disable(attention)(
                q, k, v, mask_or_plan, scale=scale, bias=bias, softcap=softcap, sinks=sinks, scales=scales,
                dropout_p=dropout_p, return_lse=return_lse, implementation=implementation,
            )  # fmt: skip
        call = _checked(q, k, v, scale, bias, softcap, sinks, scales, dropout_p)
        results = _operator_call(call, mask_or_plan, implementation, traced=True)
    else:
        arguments = (q, k, v, mask_or_plan, scale, bias, softcap, sinks, scales, dropout_p, implementation)
        results = _bound_call(*arguments) or _eager_call(*arguments)
    return results if return_lse else results[0]


def _bound_call(
    q: Tensor, k: Tensor, v: Tensor, mask_or_plan: Any, scale: float | None, bias: Tensor | None,
    softcap: float | None, sinks: Tensor | None, scales: Any, dropout_p: float, implementation: str | None,
) -> Results | None:  # fmt: skip
    """Run a call like one before it, whose plan and bound call are found by look-ups; None if there is none.

    Each call with dropout draws a seed, so it is not found here.
    """
    scale_tuple: tuple[Tensor, ...] = tuple(scales) if isinstance(scales, (tuple, list)) else ()
    # Scales that are not a tuple or list are never stored: the checks refuse them.
    if dropout_p != 0.0 or (scales is not None and not scale_tuple) or not is_plain(q, k, v, bias, sinks, *scale_tuple):
        return None
    if replaced_mask() is not None:
        return None
    if isinstance(mask_or_plan, Plan):
        plan: Plan | None = mask_or_plan
    else:
        plan = cached_plan(FULL if mask_or_plan is None else mask_or_plan, q, k)
    # Autocast would cast these arguments.
    if plan is None or torch.is_autocast_enabled(plan.device.type):
        return None
    bound = plan.find_call(q, k, v, bias, sinks, scale, softcap, implementation, *scale_tuple)
    if bound is None:
        return None
    try:
        return bound(q, k, v, bias, sinks, *scale_tuple)
    except KernelError:  # another alignment needs another compilation, which failed; the next candidate serves
        return None


def _eager_call(
    q: Tensor, k: Tensor, v: Tensor, mask_or_plan: Any, scale: float | None, bias: Tensor | None,
    softcap: float | None, sinks: Tensor | None, scales: Any, dropout_p: float, implementation: str | None,
) -> Results:  # fmt: skip
    """Check a call and run it: directly if nothing intercepts operators, else through the custom operator."""
    scale_tuple = tuple(scales) if isinstance(scales, (tuple, list)) else ()
    tensors = (q, k, v, bias, sinks, *scale_tuple)
    plain, traced = is_plain(*tensors), torch.compiler.is_compiling() and is_traced(q)
    if is_dtensor(mask_or_plan) or (not plain and any(map(is_dtensor, tensors))):
        return _of_dtensors(
            q, k, v, mask_or_plan, bias, sinks, scales, dropout_p,
            scale=scale, softcap=softcap, implementation=implementation,
        )  # fmt: skip
    if not plain and not traced:
        refuse_contexts(*tensors)
        register_flops()
    call = _checked(q, k, v, scale, bias, softcap, sinks, scales, dropout_p)
    if not plain or call.q.is_meta:
        return _operator_call(call, mask_or_plan, implementation, traced)
    if is_empty(call.q, call.k):
        return run_empty(call.q, call.k, call.v, mask_or_plan, implementation)
    arguments = (call.q, call.k, call.v, bias, sinks, scale, softcap, implementation, *call.options.key_values)
    return run_call(*call[:3], plan_of(mask_or_plan, call.q, call.k), call.options, implementation, arguments)


class _Call(NamedTuple):
    """Checked arguments of a call: q, k and v in the dtype of autocast, the others as the operators take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options


def _checked(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None, softcap: float | None,
    sinks: Tensor | None, scales: Any, dropout_p: float,
) -> _Call:  # fmt: skip
    """Check the arguments of a call but for its mask, and draw the seed of dropout."""
    q, k, v = under_autocast(q, k, v)
    check_tensors(q, k, v)
    factor, cap = check_scale(scale, q.shape[-1]), check_softcap(softcap)
    scale_tuple = check_scales(scales, q, k)
    dropout_p = check_dropout(dropout_p)
    seed: Tensor | None = None
    if dropout_p:
        refuse_dropout(scale_tuple)
        seed = saved_in_forward(draw_seed, q.device)
    bias, sinks = check_bias(bias, q, k.shape[2]), check_sinks(sinks, q)
    return _Call(q, k, v, Options(factor, cap, bias, sinks, scale_tuple, dropout_p, seed))


def _operator_call(call: _Call, mask_or_plan: Any, implementation: str | None, traced: bool) -> Results:
    """Call the custom operator, which makes the plan and selects the kernel when it runs, outside of graphs.

    Args:
        traced: whether a compiler or exporter traces the call.
    """
    q, k, v, options = call
    scale, softcap, bias, sinks, scales, dropout_p, seed = options
    differentiated = _is_differentiated((q, k, v, bias, sinks, *scales))
    if differentiated:
        without_values = traced or not has_values(q)
        refuse_gradients(mask_or_plan, scales, traced=without_values)
        if not without_values and not is_empty(q, k):
            mask_or_plan = plan_for_backward(mask_or_plan, q, k, v, options)
            if not q.is_meta and is_plain(q, k, v, bias, sinks, differentiated=True):
                return EagerAttention.apply(
                    q, k, v, mask_or_plan, bias, sinks, scale, softcap, implementation or "", dropout_p, seed
                )
    handle = handle_of(mask_or_plan, q, k, traced)
    keep = handle.keep
    if differentiated and keep is not None and handle.key == TENSOR:
        # The version counter misses some writes to the user's tensor; the backward pass reads this copy.
        keep = saved_in_forward(copy_of_mask_op, keep)
    if differentiated and traced and handle.may_change:
        raise UnsupportedError(_WHY_CHANGES, {})
    named = (q, k, v, handle.key, bias, sinks, scale, softcap, implementation or "")
    constant = is_constant(handle, traced)
    if seed is None:
        operator = masked_attention_op if constant else varying_attention_op
        return operator(*named, *(scales or (None, None, None)), handle.number, keep)
    operator = dropout_attention_op if constant else varying_dropout_attention_op
    return operator(*named, dropout_p, seed, handle.number, keep)


def _of_dtensors(
    q: Any, k: Any, v: Any, mask_or_plan: Any, bias: Any, sinks: Any, scales: Any, dropout_p: float, **options: Any
) -> Results:
    """The results of a call of DTensors: DTensors with the placements of q."""
    local = local_call(q, k, v, mask_or_plan, bias, sinks, dropout_p=dropout_p, scales=scales)
    out, lse = attention(*local[:4], bias=local.bias, sinks=local.sinks, return_lse=True, **options)
    return global_result(out, q), global_result(lse, q)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_or_plan: Mask | Plan | Tensor | str | Any = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Explanation:
    """Every way to run this call, best first; nothing runs. `print(explain(...))` prints a table.

    Returns:
        A list of candidates: those with an estimated GPU time, fastest first (the first one runs), then those without
        one in order of preference, then those that refuse, with all their reasons. Its `token_order` is
        the order of queries and keys that would compute at least a tenth less, None if none is known. Its `serving`
        says which choice runs the call where that was made for an earlier mask of the same structure.
    """
    check_tensors(q, k, v)
    bias = check_bias(bias, q, k.shape[2])
    plan = plan_of(mask_or_plan, q, k)
    options = Options(1.0, check_softcap(softcap), bias, sinks, dropout_p=check_dropout(dropout_p))
    call = call_spec(plan, q, k, v, options)
    return Explanation(plan.candidates(call), plan.better_token_order(call), plan.serving(call))


def _cannot_compile(mask_or_plan: Any, tensors: tuple[Tensor | None, ...]) -> str:
    """Why compiled code has to leave a call to Python, else ""."""
    if any(map(is_dtensor, (mask_or_plan, *tensors))):
        return "stof.attention computes on the local tensors of DTensors outside of compiled graphs"
    if is_exporting():
        return ""
    if is_function_or_block_mask(mask_or_plan):
        return "give stof.attention a mask that was made outside of compiled code by from_function"
    reason = ""
    if isinstance(mask_or_plan, Plan):
        reason = _WHY_UPDATES if mask_or_plan.is_dynamic else ""
    elif isinstance(mask_or_plan, Mask | Intersection):
        reason = _WHY_CHANGES if mask_or_plan.may_change else ""
    return reason if reason and _is_differentiated(tensors) else ""


def _is_differentiated(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
