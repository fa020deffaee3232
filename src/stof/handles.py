"""How compiled code names a mask or plan: the arguments `mask`, `number` and `keep` of the operators.

Compilers guard on text, and take numbers and tensors as inputs of their graphs. So a mask that can be rebuilt from its
key is named by the key, and one that varies from call to call by a number.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stof.masks import Mask, documents, full
from stof.masks.parse import mask_by_key, mask_by_number
from stof.masks.tensors import DenseMask, as_mask, dense_view, is_function_or_block_mask
from stof.masks.traced import DOCUMENTS, NUMBERED, SEPARATOR, Intersection
from stof.plans.plan import Plan
from stof.runtime.memory import refuse_values
from stof.runtime.private import FakeTensor, is_exporting

FULL = full()
# Intersections that plans keep alive, by the numbers of their documents and of a mask, and handle.
_INTERSECTIONS: WeakValueDictionary[tuple[int, int, str], Mask] = WeakValueDictionary()
# The operators' argument `mask` is a mask's key or one of these, which are keys of no mask. PLAN: the argument `number`
# is a plan's. NUMBERED: it is a mask's. TENSOR: `keep` is the mask. Or it is the handle of an `Intersection`.
PLAN, TENSOR = "<plan>", "<tensor>"

# The last documents that operators were given, newest first: layers and backward passes ask for the same ones. Replaced
# as a whole, so that threads need no lock.
_RECENT: tuple[tuple[tuple[object, ...], Mask], ...] = ()
_MOST_RECENT = 8


def is_full(mask: Mask | Intersection) -> bool:
    """Whether the mask is `masks.full()`, asked without a look at the keys of masks with numbers.

    Compiled code that looks at a key is compiled anew for every other one.
    """
    return not isinstance(mask, Intersection) and not mask.number and mask == FULL


def intersection(mask: Mask | Intersection, other: Mask | Intersection) -> Mask | Intersection:
    """`mask & other`, without `masks.full()`; in code that is being compiled, an `Intersection` if one has a number."""
    if is_full(other):
        return mask
    if is_full(mask):
        return other
    if isinstance(mask, Intersection) or isinstance(other, Intersection):
        return mask & other
    if (mask.number or other.number) and torch.compiler.is_compiling() and not is_exporting():
        return Intersection((mask, other))
    return mask & other


def _documents_of(ids: Tensor) -> Mask:
    """`documents(ids)`, made once for the calls that share ids."""
    global _RECENT
    refuse_values(torch.device("cuda"), also_own=True)
    key = (ids.dtype, ids.shape, ids.numpy().tobytes())
    for known, mask in _RECENT:
        if known == key:
            return mask
    mask = documents(ids)
    _RECENT = ((key, mask), *_RECENT[: _MOST_RECENT - 1])
    return mask


def _numbered(number: int, handle: str, ids: Tensor | None = None) -> Mask:
    """The mask that `NUMBERED`, or the handle of an `Intersection`, names; all masks in it must be alive."""
    if handle == NUMBERED:
        return mask_by_number(number)
    packed = [] if ids is None else [_documents_of(ids)]
    if handle == DOCUMENTS:
        return packed[0]
    key = (packed[0].number if packed else 0, number, handle)
    intersected = _INTERSECTIONS.get(key)
    if intersected is None:
        masks = [mask_by_number(number) if text == "?" else _named(text) for text in handle.split(SEPARATOR)[1:]]
        equal = functools.reduce(operator.and_, [*masks, *packed])
        # Where an equal mask lives already, such as a plan's, that one: `equal` is freed with this call, and its entry.
        intersected = _INTERSECTIONS[key] = mask_by_number(equal.number)
    return intersected


def named(mask: str, number: int, keep: Tensor | None) -> Any:
    """The plan, mask or bool tensor that these arguments of the operators name; errors as of the operators."""
    if mask == PLAN:
        return Plan.by_number(number)
    if mask == TENSOR:
        return keep
    if mask.startswith((NUMBERED, DOCUMENTS)):
        return _numbered(number, mask, keep)
    return mask_by_key(mask)


def _named(text: str) -> Mask:
    """The mask of a text in a handle, `#N` or a key."""
    return mask_by_number(int(text[1:])) if text.startswith("#") else mask_by_key(text)


def mask_of(mask: Any) -> Mask:
    """The mask of an argument.

    Eager calls get an `Intersection` as well: `torch.compiler.is_compiling()` is true while another thread compiles.
    """
    if not isinstance(mask, Intersection):
        return as_mask(mask)
    packed = () if mask.ids is None else (_documents_of(mask.ids),)
    return functools.reduce(operator.and_, (*mask.masks, *packed))


class Handle(NamedTuple):
    """How an operator is told its mask or plan: a compiler guards on the key, and takes the others as inputs.

    Attributes:
        key: the key of a mask that text alone rebuilds, else `PLAN`, `NUMBERED`, `TENSOR` or that of an `Intersection`.
        number: of the living plan or mask, else 0.
        keep: bool tensor, the mask itself; or the ids of an `Intersection`.
        may_change: whether the mask reads what may be written to: a CUDA graph would not see it.
        mask: kept alive until the operator has looked it up by its number.
    """

    key: str
    number: int = 0
    keep: Tensor | None = None
    may_change: bool = False
    mask: Mask | None = None


def handle_of(mask_or_plan: Any, q: Tensor, k: Tensor, traced: bool) -> Handle:
    """How the operator of a call is told its mask or plan; `traced`: see `is_traced`."""
    if isinstance(mask_or_plan, str):
        return Handle(mask_or_plan)  # the operator parses it: compilers cannot trace the parser
    if isinstance(mask_or_plan, Intersection):
        number = 0 if is_exporting() else mask_or_plan.number
        return Handle(mask_or_plan.handle, number, mask_or_plan.ids, mask_or_plan.may_change)
    exporting = traced and is_exporting()
    if isinstance(mask_or_plan, Plan):
        mask_or_plan.check_call(q, k)
        if not exporting:
            return Handle(PLAN, mask_or_plan.number)
    # No operator takes real tensors beside fake ones.
    mixed = not traced and isinstance(q, FakeTensor) and not isinstance(mask_or_plan, FakeTensor)
    if isinstance(mask_or_plan, Tensor) and not mixed:
        # An argument, which modes and tracers see; a mask made of it here would not outlive a trace.
        return Handle(TENSOR, 0, mask_or_plan if traced else dense_view(mask_or_plan).keep)
    if traced and is_function_or_block_mask(mask_or_plan):
        # It may close over tensors of the trace: the operator refuses it.
        return Handle("<a function>")
    if not exporting:
        mask = dense_view(mask_or_plan) if isinstance(mask_or_plan, Tensor) else as_mask(mask_or_plan)
        if not mask.number:
            return Handle(mask.key)
        return Handle(NUMBERED, mask.number, None, mask.may_change, None if traced else mask)
    # A number means nothing to the process that loads the program, which takes masks by their keys, and tensors.
    named_mask = mask_or_plan.mask if isinstance(mask_or_plan, Plan) else as_mask(mask_or_plan)
    if isinstance(named_mask, DenseMask):
        return Handle(TENSOR, 0, named_mask.keep)
    return Handle("<a plan that was read from a file or moved>" if named_mask is None else named_mask.key)


def is_constant(handle: Handle, traced: bool) -> bool:
    """Whether compiled code has this mask as a constant; one that changed before, or can, stays out of CUDA graphs."""
    if not traced or is_exporting():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return handle.keep is None and not handle.may_change and has_static_value(handle.number)
