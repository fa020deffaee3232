"""The custom operators behind `stof.attention`: schema, fake, refusals, and how a call runs."""

from __future__ import annotations

import contextlib
import functools
import operator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stof.errors import ArgumentError, KernelError, UnsupportedError
from stof.kernels.common import empty_output
from stof.kernels.implementation import BoundCall, Options
from stof.kernels.quantization import wide_dtype, widened
from stof.kernels.tma_bias import may_be_tma_readable, tma_readable, unbroadcast
from stof.masks import Mask, full
from stof.masks.base import numbered_mask
from stof.masks.parse import mask_by_key
from stof.masks.tensors import as_mask
from stof.plans.make import make_sized_plan
from stof.plans.plan import Plan
from stof.runtime.memory import outside_graph_pool, refuse_values
from stof.runtime.private import is_exporting
from stof.selection import IMPLEMENTATIONS, CallSpec, refusals
from stof.validation import check_bias, check_sinks, refuse_derivatives, refuse_tangents

FULL = full()
# Intersections that plans keep alive, by number and handle.
_INTERSECTIONS: WeakValueDictionary[tuple[int, str], Mask] = WeakValueDictionary()
# The operators' argument `mask` is a mask's key or one of these, which are keys of no mask. PLAN: the argument `number`
# is a plan's. NUMBERED: it is a mask's; handles of an `Intersection` begin with this. TENSOR: `keep` is the mask.
PLAN, NUMBERED, TENSOR = "<plan>", "<mask>", "<tensor>"
# Between the masks of an `Intersection`: in no key, and no new line, since Inductor writes arguments into comments.
_SEPARATOR = "; "


class Intersection(NamedTuple):
    """Masks that the operators intersect: a score is kept if every mask keeps it.

    For compiled code. At least one of the masks has a number (see `Mask`). Their intersection, made at once, would get
    one too, and Dynamo cannot trace how a mask gets its number.

    Attributes:
        masks: in the positions of the call.
    """

    masks: tuple[Mask, ...]

    @property
    def number(self) -> int:
        """The operators' argument `number`: that of the first mask with a number."""
        return next(mask.number for mask in self.masks if mask.number)

    @property
    def may_change(self) -> bool:
        """Whether one of the masks reads what may be written to."""
        return any(mask.may_change for mask in self.masks)

    @property
    def handle(self) -> str:
        """The operators' argument `mask`: `NUMBERED`, then a text for each mask.

        The text is the mask's key; `?` for the first mask with a number; `#N` for others, which are thus constants of
        the compiled code: it is compiled anew where they change.
        """
        texts, named = [NUMBERED], False
        for mask in self.masks:
            if not mask.number:
                texts.append(mask.key)
            else:
                # Dynamo cannot write a number that it made an input of its graph; int() makes it a constant.
                texts.append(f"#{int(mask.number)}" if named else "?")
                named = True
        return _SEPARATOR.join(texts)

    def made(self) -> Mask:
        """The intersection as a mask."""
        return functools.reduce(operator.and_, self.masks)


def is_full(mask: Mask | Intersection) -> bool:
    """Whether the mask is `masks.full()`, asked without a look at the keys of masks with numbers.

    Compiled code that looks at a key is compiled anew for every other one.
    """
    return not isinstance(mask, Intersection) and not mask.number and mask == FULL


def intersection(own: Mask | Intersection, other: Mask) -> Mask | Intersection:
    """`own & other`, without `masks.full()`; in code that is being compiled, an `Intersection` if one has a number."""
    if is_full(other):
        return own
    if is_full(own):
        return other
    if isinstance(own, Intersection):
        return Intersection((*own.masks, other))
    if (own.number or other.number) and torch.compiler.is_compiling() and not is_exporting():
        return Intersection((own, other))
    return own & other


def _numbered(number: int, handle: str) -> Mask:
    """The mask that `NUMBERED`, or the handle of an `Intersection`, names; all masks in it must be alive."""
    first = numbered_mask(number)
    if handle == NUMBERED:
        return first
    found = _INTERSECTIONS.get((number, handle))
    if found is None:
        texts = handle.split(_SEPARATOR)[1:]
        made = Intersection(tuple(first if text == "?" else _named(text) for text in texts)).made()
        # Where an equal mask lives already, such as a plan's, that one: `made` is freed with this call, and its entry.
        found = _INTERSECTIONS[number, handle] = numbered_mask(made.number)
    return found


def named(mask: str, number: int, keep: Tensor | None) -> Any:
    """The plan, mask or bool tensor that these arguments of the operators name; errors as of the operators."""
    if mask == PLAN:
        return Plan.by_number(number)
    if mask == TENSOR:
        return keep
    return _numbered(number, mask) if mask.startswith(NUMBERED) else mask_by_key(mask)


def _named(text: str) -> Mask:
    """The mask of a text in a handle, `#N` or a key."""
    return numbered_mask(int(text[1:])) if text.startswith("#") else mask_by_key(text)


def _mask_of(given: Any) -> Mask:
    """The mask of an argument.

    Eager calls get an `Intersection` as well: `torch.compiler.is_compiling()` is true while another thread compiles.
    """
    return given.made() if isinstance(given, Intersection) else as_mask(given)


def plan_of(mask_or_plan: Any, q: Tensor, k: Tensor) -> Plan:
    """Return the plan of a call: the given one if it fits, else the mask's from the cache, made if it is missing."""
    if isinstance(mask_or_plan, Tensor):
        refuse_values(q.device, also_own=True)
    if not isinstance(mask_or_plan, Plan):
        return make_sized_plan(
            _mask_of(mask_or_plan), q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], device=q.device
        )
    return mask_or_plan.for_call(q, k)


def run_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    options: Options,
    implementation: str | None,
    given: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Choose an implementation for arguments that were checked, run it, and store the bound call in the plan.

    Args:
        q, k, v: as for the operator.
        plan: as `plan_of` returns it.
        options: scale, softcap, bias, sinks and 8-bit scales of the call.
        implementation: a name; None or "" for the fastest.
        given: the arguments of `call_key` as the user gave them.
    """
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # `attention` has cast the inputs. Inside an implementation autocast would mix dtypes and round sums.
        with torch.autocast(kind, enabled=False):
            return run_call(q, k, v, plan, options, implementation, given)
    bias, sinks, scales = options.bias, options.sinks, options.scales
    stored = plan.find_call(*given)
    if stored is not None:
        # A kernel that fails to launch is replaced below, where its choice is rejected.
        with contextlib.suppress(KernelError):
            return stored(*given[:5], *scales)
    plan.refuse_first_call()
    call = call_spec(plan, q, k, v, options)
    if implementation:
        _check_forced(implementation, call)
    while True:
        choice = plan.choice(call, implementation or None)
        try:
            prepared = plan.prepared(choice)
            operands, own = ((q, k, v), options)
            if choice.widened:
                operands, own = _widened(q, k, v, scales), options._replace(scales=())
            implemented = IMPLEMENTATIONS[choice.implementation]
            bound = outside_graph_pool(q.device, partial(implemented.bind, *operands, prepared, own))
            if choice.widened:
                bound = partial(_widened_call, bound)
            found = bound(q, k, v, bias, sinks, *scales)
            as_given = given[3] is bias and given[4] is sinks
            plan.store_call(given, bound if as_given else partial(_reshaped, bound))
            return found
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
        mask = _mask_of(mask_or_plan)
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
    bound: BoundCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a bound call after giving the bias four dimensions and making the sinks contiguous."""
    return bound(q, k, v, check_bias(bias, q, k.shape[2]), check_sinks(sinks, q), *scales)


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
    return _empty_results(q, v)


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` as every implementation returns them, uninitialised."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_output(q, v), q.new_empty(q.shape[:-1], dtype=lse_dtype)


def _empty_call_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of a call without queries or keys: 0 and minus infinity."""
    out, lse = _empty_results(q, v)
    return out.zero_(), lse.fill_(-torch.inf)


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
