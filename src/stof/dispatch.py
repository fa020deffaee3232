"""How a checked call becomes a bound call: its plan, its implementation, and what empty calls return."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError, KernelError
from stof.handles import mask_of
from stof.kernels.common import empty_output
from stof.kernels.implementation import BoundCall, Gradients, NeedsGrad, Options, seed_argument
from stof.kernels.quantization import wide_dtype, widened
from stof.kernels.tma_bias import may_be_tma_readable, tma_readable, unbroadcast
from stof.plans.backward import gradients_of
from stof.plans.make import cached_plan, make_sized_plan
from stof.plans.plan import Plan
from stof.plans.replaced_masks import replaced_mask
from stof.runtime.memory import made_for_calls, refuse_values
from stof.runtime.private import past_modes
from stof.selection import IMPLEMENTATIONS, CallSpec, refusals
from stof.validation import with_four_dims


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in the dtype of autocast if it is on, as for PyTorch's own attention; any float64 among them stays."""
    if not isinstance(q, Tensor):
        return q, k, v
    device_type = q.device.type
    # The compiler of torch 2.11 cannot trace this question; devices it compiles for have autocast.
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device_type):
        return q, k, v
    castable = (torch.float16, torch.bfloat16, torch.float32)
    if not torch.is_autocast_enabled(device_type) or not all(getattr(x, "dtype", None) in castable for x in (q, k, v)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def plan_of(mask_or_plan: Any, q: Tensor, k: Tensor) -> Plan:
    """Return the plan of a call: the given one if it fits, else the mask's from the cache, made if it is missing."""
    if isinstance(mask_or_plan, Tensor):
        refuse_values(q.device, also_own=True)
    if (replaced := replaced_mask()) is not None:
        return replaced.plan_of(mask_or_plan if isinstance(mask_or_plan, Plan) else mask_of(mask_or_plan), q, k)
    if not isinstance(mask_or_plan, Plan):
        mask = mask_of(mask_or_plan)
        return cached_plan(mask, q, k) or make_sized_plan(
            mask, q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], device=q.device
        )
    return mask_or_plan.for_call(q, k)


def run_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    options: Options,
    implementation: str | None,
    arguments: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Choose an implementation for arguments that were checked, run it, and store the bound call in the plan.

    Args:
        q, k, v: as for the operator.
        plan: as `plan_of` returns it.
        options: scale, softcap, bias, sinks, 8-bit scales and dropout of the call.
        implementation: a name; None or "" for the fastest.
        arguments: those of `call_key`, as the user gave them.
    """
    device_type = q.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        # `attention` has cast the inputs. Inside an implementation autocast would mix dtypes and round sums.
        with torch.autocast(device_type, enabled=False):
            return run_call(q, k, v, plan, options, implementation, arguments)
    bias, sinks, scales = options.bias, options.sinks, options.scales
    stored = plan.find_call(*arguments)
    if stored is not None:
        # A kernel that fails to launch is replaced below, where its choice is rejected.
        with contextlib.suppress(KernelError):
            return stored(*arguments[:5], *scales, **seed_argument(options.seed))
    plan.refuse_first_call()
    call = call_spec(plan, q, k, v, options)
    if implementation:
        _check_forced(implementation, call)
    while True:
        choice = plan.choice(call, implementation or None)
        try:
            prepared = plan.prepared(choice)
            operands, bound_options = (q, k, v), options
            if choice.widened:
                operands, bound_options = _widened(q, k, v, scales), options._replace(scales=())
            implemented = IMPLEMENTATIONS[choice.implementation]
            bound = made_for_calls(q.device, partial(implemented.bind, *operands, prepared, bound_options))
            if choice.widened:
                bound = partial(_widened_call, bound)
            results = bound(q, k, v, bias, sinks, *scales, **seed_argument(options.seed))
            is_unchanged = arguments[3] is bias and arguments[4] is sinks
            plan.store_call(arguments, bound if is_unchanged else partial(_reshaped, bound))
            return results
        except KernelError as error:
            # The loop tries the next best candidate. The last is plain PyTorch, which compiles nothing.
            plan.reject(choice, (call.widened() if choice.widened else None) or call, error)


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether the call has no queries or no keys: nothing is planned or computed."""
    return 0 in q.shape or 0 in k.shape


def run_empty(q: Tensor, k: Tensor, v: Tensor, mask_or_plan: Any, implementation: str | None) -> tuple[Tensor, Tensor]:
    """Check the mask or plan of an empty call and return its results, as `run_call` does for others."""
    _check_name(implementation)
    if isinstance(mask_or_plan, Plan):
        mask_or_plan.check_call(q, k)
    else:
        mask = mask_of(mask_or_plan)
        mask.check(q.shape[2], k.shape[2])
        if not mask.depends_on_sizes:
            mask.dims(q.shape[0], q.shape[1])
    return _empty_call_results(q, v)


def _widened(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Convert 8-bit q, k and v to 16 or 32 bits, for kernels that do not take 8 bits."""
    dtype = wide_dtype(q.device.type)
    return widened(q, scales[0], dtype), widened(k, scales[1], dtype), widened(v, scales[2], dtype)


def _widened_call(
    bound: BoundCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a call that is bound to wide tensors on 8-bit ones."""
    out, lse = bound(*_widened(q, k, v, scales), bias, sinks)
    return out.bfloat16(), lse


def _reshaped(
    bound: BoundCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *scales: Tensor,
    **seed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a bound call after giving the bias four dimensions and making the sinks contiguous."""
    bias = None if bias is None else with_four_dims(bias)
    return bound(q, k, v, bias, None if sinks is None else sinks.contiguous(), *scales, **seed)


def call_spec(plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: Options) -> CallSpec:
    """Return the properties of a call that decide which implementations can run it, and how fast."""
    bias = options.bias
    sizes = q.shape[2], k.shape[2]
    tiled = bias is None or may_be_tma_readable(bias, *sizes)
    to_copy = bias is not None and tiled and not tma_readable(bias, *sizes)
    return CallSpec(
        device=q.device.type,
        dtype=q.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        has_bias=bias is not None,
        bias_itemsize=2 if bias is None else bias.itemsize,
        tiled_bias=tiled,
        bias_to_copy=unbroadcast(bias).nbytes if bias is not None and to_copy else 0,
        has_softcap=options.softcap > 0,
        has_sinks=options.sinks is not None,
        has_dropout=options.dropout_p > 0,
        permuted_rows=plan.permuted_rows,
        batch=q.shape[0],
        q_len=q.shape[2],
        kv_len=k.shape[2],
        mask_heads=plan.mask_heads,
        compute_capability=torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else (0, 0),
    )


def _check_name(implementation: str | None) -> None:
    if implementation and implementation not in IMPLEMENTATIONS:
        raise ArgumentError(f"unknown implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")


def _check_forced(name: str, call: CallSpec) -> None:
    _check_name(name)
    reasons = refusals(name, call)
    if reasons:
        raise ArgumentError(f"implementation {name!r} cannot run this call: {'; '.join(reasons)}")


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` as every implementation returns them, uninitialised."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_output(q, v), q.new_empty(q.shape[:-1], dtype=lse_dtype)


def _empty_call_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of a call without queries or keys: 0 and minus infinity."""
    out, lse = empty_results(q, v)
    return out.zero_(), lse.fill_(-torch.inf)


@past_modes
def plan_for_backward(mask_or_plan: Any, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Plan:
    """Return the plan of a call whose backward pass may follow, whatever happens to the mask meanwhile.

    Raises:
        UnsupportedError: a dynamic plan without gradients of such calls.
    """
    plan = plan_of(mask_or_plan, q, k)
    if plan.is_dynamic:
        plan.prepare_backward(call_spec(plan, q, k, v, options))
    return plan


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    plan: Plan,
    options: Options,
    needs: NeedsGrad,
) -> Gradients:
    """Return the gradients of a call that `run_call` computed.

    Args:
        q, k, v: as for the operator.
        out, lse: what the call returned.
        d_out, d_lse: the gradients of both, `d_lse` None for zero.
        plan, options: of the call.
        needs: which gradients are wanted.

    Raises:
        UnsupportedError: no implementation can compute them.
    """
    device_type = q.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            return run_backward(q, k, v, out, lse, d_out, d_lse, plan, options, needs)
    plan.wait_for_update()
    gradients = gradients_of(plan)
    bias, sinks = options.bias, options.sinks
    tensors: tuple[Tensor | None, ...] = (q, k, v, out, lse, d_out, d_lse, bias, sinks)
    if options.seed is not None:
        tensors = (*tensors, options.seed)
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
    key = (*layouts, options.scale, options.softcap, options.dropout_p, needs)
    stored = gradients.calls.get(key)
    if stored is not None:
        plan.keep_in_graph(stored)
        with contextlib.suppress(KernelError):
            return stored(*tensors)
    plan.refuse_first_call()
    call = call_spec(plan, q, k, v, options)
    while True:
        name, tiling = gradients.choices(call)[0]
        backward = IMPLEMENTATIONS[name].backward
        assert backward is not None
        try:
            bind = partial(backward.bind, q, k, v, out, d_out, d_lse, gradients.prepared(name, tiling), options, needs)
            bound = made_for_calls(q.device, bind)
            computed = bound(*tensors)
        except KernelError as error:
            gradients.reject(name, tiling, error)
            continue
        gradients.store(key, bound)
        plan.keep_in_graph(bound)
        return computed
