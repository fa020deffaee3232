"""The custom operators behind `stof.attention`: schemas, fakes, autograd and refusals; nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stof.dispatch import empty_results, is_empty, plan_of, run_backward, run_call, run_empty
from stof.errors import PlanMismatchError, UnsupportedError
from stof.handles import PLAN, TENSOR, named
from stof.kernels.common import empty_gradient
from stof.kernels.implementation import NeedsGrad, Options
from stof.masks.traced import DOCUMENTS, NUMBERED
from stof.plans.plan import Plan
from stof.runtime.private import has_values, is_plain, recomputes_random_numbers
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
        keep: the mask if `mask` is `TENSOR`, bool `[Sq, Skv]` up to `[B, H, Sq, Skv]`; the ids of an `Intersection`,
            integers `[S]` or `[B, S]` on the CPU.

    Returns:
        `(out [B, H, Sq, Dv], lse [B, H, Sq])`; lse is float64 for float64 inputs, else float32.

    Raises:
        ArgumentError, MaskError: the plan or mask with this number or key is gone, or is another process's.
        UnsupportedError: `keep` is given while a CUDA graph is captured; replays would use the present values.
    """
    scales = tuple(s for s in (q_scale, k_scale, v_scale) if s is not None)
    return _attend(q, k, v, named(mask, number, keep), Options(scale, softcap, bias, sinks, scales), implementation)


def _dropout_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    implementation: str,
    dropout_p: float,
    seed: Tensor,
    number: int = 0,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`_masked_attention` with dropout; an operator of its own, as each argument of one costs every call host time.

    Args:
        dropout_p: the probability of dropout, above 0.
        seed: int64 `[2]`, see `stof.kernels.dropout`; a tensor, so that compiled code draws one in each call.
    """
    options = Options(scale, softcap, bias, sinks, dropout_p=dropout_p, seed=seed)
    return _attend(q, k, v, named(mask, number, keep), options, implementation)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask_or_plan: Any, options: Options, implementation: str
) -> tuple[Tensor, Tensor]:
    """Run a call of an operator."""
    bias, sinks = options.bias, options.sinks
    refuse_tangents(q, k, v, bias, sinks)
    if is_empty(q, k):
        return run_empty(q, k, v, mask_or_plan, implementation)
    arguments = (q, k, v, bias, sinks, options.scale, options.softcap, implementation, *options.key_values)
    return run_call(q, k, v, plan_of(mask_or_plan, q, k), options, implementation, arguments)


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: str, *options: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialised results, for compilers and exporters."""
    del k, options
    # Raised here and not in `attention`, which chooses the key: Dynamo traces that function and would lose the message.
    if mask not in (PLAN, TENSOR) and not mask.startswith(NUMBERED) and "<" in mask.removeprefix(DOCUMENTS):
        raise UnsupportedError(
            f"torch.export cannot keep the mask {mask}: it exists in this process alone; for torch.compile, make masks "
            "of functions outside of compiled code, as by masks.from_function(f). Give stof.attention a mask "
            "made of named masks, or a bool tensor (an input or a buffer of the module), e.g. "
            "mask.to_dense(q_len, kv_len) or plan.to_dense()",
            {},
        )
    return empty_results(q, v)


def _attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: str,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    number: int,
    keep: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `masked_attention`.

    Args:
        d_out, d_lse: gradients of its results, `d_lse` None for zero.
        out, lse: its results.
        needs: which gradients are wanted: of q, of k and v, of the bias, of the sinks.
        q, k, v, mask, bias, sinks, scale, softcap, number, keep: its arguments.

    Returns:
        Gradients of q, k, v, bias and sinks, in their shapes and dtypes; empty tensors for those that are not wanted.
    """
    options = Options(scale, softcap, bias, sinks)
    return _differentiate_call(d_out, d_lse, q, k, v, out, lse, named(mask, number, keep), options, needs)


def _dropout_attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: str,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    number: int,
    keep: Tensor | None,
    needs: list[bool],
    dropout_p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `dropout_attention`: as for the other operator, with `dropout_p` and `seed` of the call."""
    options = Options(scale, softcap, bias, sinks, dropout_p=dropout_p, seed=seed)
    return _differentiate_call(d_out, d_lse, q, k, v, out, lse, named(mask, number, keep), options, needs)


def _differentiate_call(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask_or_plan: Any,
    options: Options, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a call of a backward operator."""
    wanted, bias, sinks = NeedsGrad(*needs), options.bias, options.sinks
    if is_empty(q, k):
        return _gradients(q, k, v, bias, sinks, wanted, lambda x: empty_gradient(x).zero_())
    gradients = run_backward(q, k, v, out, lse, d_out, d_lse, plan_of(mask_or_plan, q, k), options, wanted)
    inputs = (q, k, v, bias, sinks)
    dq, dk, dv, d_bias, d_sinks = [
        q.new_empty(0) if gradient is None or x is None else _in_memory_order(gradient, x)
        for gradient, x in zip(gradients, inputs, strict=True)
    ]
    return dq, dk, dv, d_bias, d_sinks


def _in_memory_order(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient with the strides that the fake promises."""
    if gradient.stride() == x.stride():  # x has no gaps then, so the fake has these strides; allocates nothing
        return gradient
    wanted = empty_gradient(x)
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    needs: NeedsGrad,
    like: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors for the gradients that are wanted, made by `like`, and empty ones."""

    def of(x: Tensor | None, wanted: bool) -> Tensor:
        return like(x) if wanted and x is not None else q.new_empty(0)

    return of(q, needs.q), of(k, needs.kv), of(v, needs.kv), of(bias, needs.bias), of(sinks, needs.sinks)


def _fake_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: str,
    bias: Tensor | None, sinks: Tensor | None, scale: float, softcap: float, number: int, keep: Tensor | None,
    needs: list[bool], *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return uninitialised gradients, for compilers."""
    del d_out, d_lse, out, lse, mask, scale, softcap, number, keep, dropout
    return _gradients(q, k, v, bias, sinks, NeedsGrad(*needs), empty_gradient)


def _copy(keep: Tensor) -> Tensor:
    return keep.clone()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass reads: inputs, results, and what names the plan."""
    q, k, v, mask, bias, sinks, scale, softcap, _, *_scales, number, keep = inputs
    ctx.save_for_backward(q, k, v, *output, bias, sinks, keep)
    _save_rest(ctx, q, mask, number, scale, softcap)


def _save_with_dropout(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """`_save` of a call with dropout: its seed too."""
    if not has_values(inputs[0]) and recomputes_random_numbers():
        warnings.warn(
            "with torch._functorch.config.activation_memory_budget = 0, compiled backward passes draw random numbers "
            "again: gradients of dropout are wrong, PyTorch's own included; set it above 0",
            stacklevel=2,
        )
    q, k, v, mask, bias, sinks, scale, softcap, _, ctx.dropout_p, seed, number, keep = inputs
    ctx.save_for_backward(q, k, v, *output, bias, sinks, keep, seed)
    ctx.seed = seed if has_values(q) else None
    _save_rest(ctx, q, mask, number, scale, softcap)


def _save_rest(ctx: Any, q: Tensor, mask: str, number: int, scale: float, softcap: float) -> None:
    """Save what is no tensor."""
    ctx.mask, ctx.number, ctx.scale, ctx.softcap = mask, number, scale, softcap
    # Eager calls give the number of their plan, which stays alive until the backward pass.
    ctx.plan = Plan.by_number(number) if mask == PLAN and has_values(q) else None
    ctx.updates = 0 if ctx.plan is None else ctx.plan.updates
    ctx.set_materialize_grads(False)


def _refuse_updated(ctx: Any) -> None:
    if ctx.plan is not None and ctx.plan.updates != ctx.updates:
        raise PlanMismatchError(
            "a dynamic plan was updated between a call and its backward pass, which would be under another mask; "
            "update it after the backward pass, or give each layer a plan of its own"
        )


def _of_drawn_seed(ctx: Any, seed: Tensor, lse: Tensor) -> Tensor:
    """Return `lse` if `seed`, a saved tensor, has the values that the call drew.

    Activation checkpointing makes saved tensors again, not attributes of `ctx`. On a GPU the result is NaN for another
    seed, and so are the gradients: an error would wait for the GPU.
    """
    if ctx.seed is None or seed.data_ptr() == ctx.seed.data_ptr():
        return lse
    if lse.device.type != "cpu":
        return torch.where((seed == ctx.seed).all(), lse, torch.nan)
    if not torch.equal(seed, ctx.seed):
        raise UnsupportedError(
            "activation checkpointing recomputed a call with another dropout seed than it had: let the policy of "
            "selective checkpointing save all random operators of a region or none (`torch.randint` draws the seed), "
            "and keep preserve_rng_state=True",
            {},
        )
    return lse


def _differentiate(backward: Any, ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The autograd formula of the operators."""
    _refuse_updated(ctx)
    q, k, v, out, lse, bias, sinks, keep, *seed = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    dropout = (ctx.dropout_p, *seed) if seed else ()
    if seed:
        lse = _of_drawn_seed(ctx, seed[0], lse)
    gradients = backward(
        d_out, d_lse, q, k, v, out, lse, ctx.mask, bias, sinks, ctx.scale, ctx.softcap, ctx.number, keep, _needs(ctx),
        *dropout,
    )  # fmt: skip
    return _of_inputs(ctx, gradients)


def _needs(ctx: Any) -> list[bool]:
    """Which gradients are wanted: of q, of k and v, of the bias, of the sinks."""
    of_q, of_k, of_v, _, of_bias, of_sinks, *_ = ctx.needs_input_grad
    return [of_q, of_k or of_v, of_bias, of_sinks]


def _of_inputs(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias and sinks as those of all arguments of an operator."""
    dq, dk, dv, d_bias, d_sinks = gradients
    rest = [None] * (len(ctx.needs_input_grad) - 6)
    every = (dq, dk, dv, None, d_bias, d_sinks, *rest)
    return tuple([x if wanted else None for x, wanted in zip(every, ctx.needs_input_grad, strict=True)])


class EagerAttention(torch.autograd.Function):
    """The operators' autograd formula for eager calls that nothing intercepts; it does not use PyTorch's dispatcher.

    `apply(q, k, v, plan, bias, sinks, scale, softcap, implementation, dropout_p, seed)` returns `(out, lse)`; arguments
    as for the operators, with the plan in place of what names it.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, plan, bias, sinks, scale, softcap, implementation, dropout_p, seed = inputs
        ctx.options = Options(scale, softcap, dropout_p=dropout_p)
        out, lse = _attend(q, k, v, plan, ctx.options._replace(bias=bias, sinks=sinks, seed=seed), implementation)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, seed)
        ctx.plan, ctx.updates, ctx.seed = plan, plan.updates, seed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _refuse_updated(ctx)
        d_out, d_lse = gradients
        q, k, v, out, lse, bias, sinks, seed = ctx.saved_tensors
        options, needs = ctx.options._replace(bias=bias, sinks=sinks, seed=seed), _needs(ctx)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        if seed is not None:
            lse = _of_drawn_seed(ctx, seed, lse)
        tensors = (d_out, d_lse, q, k, v, out, lse)
        # The operator raises an error when it is differentiated (create_graph=True), and takes tensors and modes that
        # are not plain.
        if torch.is_grad_enabled() or not is_plain(*tensors, bias, sinks, seed, differentiated=True):
            arguments = (*tensors, PLAN, bias, sinks, options.scale, options.softcap, ctx.plan.number, None, needs)
            if seed is None:
                return _of_inputs(ctx, masked_attention_backward_op(*arguments))
            return _of_inputs(ctx, dropout_attention_backward_op(*arguments, options.dropout_p, seed))
        return _of_inputs(ctx, _differentiate_call(*tensors, ctx.plan, options, needs))


def _no_double_backward(ctx: Any, *grads: Tensor) -> Any:
    """The autograd formula of the backward operators: a clear error."""
    refuse_derivatives("a second derivative was asked for (create_graph=True)")


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    """The batching rule of the operators: a clear error."""
    raise UnsupportedError(
        "stof.attention is not for torch.vmap; its tensors have a batch dimension, into which the mapped one can go",
        {name: ["no vmap"] for name in IMPLEMENTATIONS},
    )


def _operator(name: str, function: Any, fake: Any, tags: tuple[torch.Tag, ...]) -> Any:
    operator = torch.library.custom_op(f"stof::{name}", function, mutates_args=(), tags=tags)
    operator.register_fake(fake)
    operator.register_vmap(_no_vmap)
    return operator


def _operators(name: str, *tags: torch.Tag, dropout: bool = False) -> tuple[Any, Any]:
    """An operator, and `{name}_backward` for its gradients."""
    attend, differentiate, save = (
        (_dropout_attention, _dropout_attention_backward, _save_with_dropout)
        if dropout
        else (_masked_attention, _attention_backward, _save)
    )
    forward = _operator(name, attend, _fake, tags)
    backward = _operator(f"{name}_backward", differentiate, _fake_backward, tags)
    forward.register_autograd(partial(_differentiate, backward), setup_context=save)
    backward.register_autograd(_no_double_backward)
    return forward, backward


copy_of_mask_op = torch.library.custom_op("stof::copy_of_mask", _copy, mutates_args=())
copy_of_mask_op.register_fake(_copy)
masked_attention_op, masked_attention_backward_op = _operators("masked_attention")
dropout_attention_op, dropout_attention_backward_op = _operators("dropout_attention", dropout=True)
# The same for a mask or plan that changes from call to call. Its tag keeps it out of Inductor's CUDA graphs: Inductor
# would capture and keep one graph for each value of `number`.
varying_attention_op, varying_attention_backward_op = _operators("varying_attention", torch.Tag.cudagraph_unsafe)
varying_dropout_attention_op, varying_dropout_attention_backward_op = _operators(
    "varying_dropout_attention", torch.Tag.cudagraph_unsafe, dropout=True
)
