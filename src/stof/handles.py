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

from stof.masks import Mask, full
from stof.masks.parse import mask_by_key, mask_by_number
from stof.masks.tensors import DenseMask, as_mask, dense_view, is_function_or_block_mask
from stof.plans.plan import Plan
from stof.runtime.private import FakeTensor, is_exporting

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

    def as_mask(self) -> Mask:
        """The intersection as a mask."""
        return functools.reduce(operator.and_, self.masks)


def is_full(mask: Mask | Intersection) -> bool:
    """Whether the mask is `masks.full()`, asked without a look at the keys of masks with numbers.

    Compiled code that looks at a key is compiled anew for every other one.
    """
    return not isinstance(mask, Intersection) and not mask.number and mask == FULL


def intersection(mask: Mask | Intersection, other: Mask) -> Mask | Intersection:
    """`mask & other`, without `masks.full()`; in code that is being compiled, an `Intersection` if one has a number."""
    if is_full(other):
        return mask
    if is_full(mask):
        return other
    if isinstance(mask, Intersection):
        return Intersection((*mask.masks, other))
    if (mask.number or other.number) and torch.compiler.is_compiling() and not is_exporting():
        return Intersection((mask, other))
    return mask & other


def _numbered(number: int, handle: str) -> Mask:
    """The mask that `NUMBERED`, or the handle of an `Intersection`, names; all masks in it must be alive."""
    first = mask_by_number(number)
    if handle == NUMBERED:
        return first
    intersected = _INTERSECTIONS.get((number, handle))
    if intersected is None:
        texts = handle.split(_SEPARATOR)[1:]
        equal = Intersection(tuple(first if text == "?" else _named(text) for text in texts)).as_mask()
        # Where an equal mask lives already, such as a plan's, that one: `equal` is freed with this call, and its entry.
        intersected = _INTERSECTIONS[number, handle] = mask_by_number(equal.number)
    return intersected


def named(mask: str, number: int, keep: Tensor | None) -> Any:
    """The plan, mask or bool tensor that these arguments of the operators name; errors as of the operators."""
    if mask == PLAN:
        return Plan.by_number(number)
    if mask == TENSOR:
        return keep
    return _numbered(number, mask) if mask.startswith(NUMBERED) else mask_by_key(mask)


def _named(text: str) -> Mask:
    """The mask of a text in a handle, `#N` or a key."""
    return mask_by_number(int(text[1:])) if text.startswith("#") else mask_by_key(text)


def mask_of(mask: Any) -> Mask:
    """The mask of an argument.

    Eager calls get an `Intersection` as well: `torch.compiler.is_compiling()` is true while another thread compiles.
    """
    return mask.as_mask() if isinstance(mask, Intersection) else as_mask(mask)


class Handle(NamedTuple):
    """How an operator is told its mask or plan: a compiler guards on the key, and takes the others as inputs.

    Attributes:
        key: the key of a mask that text alone rebuilds, else `PLAN`, `NUMBERED`, `TENSOR` or that of an `Intersection`.
        number: of the living plan or mask, else 0.
        keep: bool tensor, the mask itself.
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
        return Handle(mask_or_plan.handle, mask_or_plan.number, None, mask_or_plan.may_change)
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
