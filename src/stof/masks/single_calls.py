"""Mask functions as they are defined: calls for one score each, of many scores by `torch.vmap`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stof.errors import MaskFunctionError
from stof.runtime.private import vmap_enabled

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Indices = tuple[Tensor, Tensor, Tensor, Tensor]

# Elements of the largest tensor of one call under vmap: bounds its memory to some 100 MB.
_AT_ONCE = 2**23

_aten = torch.ops.aten
DECIDES = "the value of an index decides in Python (if, and, or, not, int(), .item(), printing it, using it as a size)"


def function_name(fn: MaskFunction) -> str:
    return str(getattr(fn, "__name__", None) or repr(fn))


def check_result(fn: MaskFunction, keep: object) -> None:
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        got = f"a {keep.dtype} tensor" if isinstance(keep, Tensor) else type(keep).__name__
        raise MaskFunctionError(
            f"the mask function {function_name(fn)} returned {got}; "
            "return a torch.bool tensor, true where the key is seen"
        )
    if keep.numel() != 1:
        raise MaskFunctionError(
            f"the mask function {function_name(fn)} returned shape {list(keep.shape)} for one score; return one bool: "
            "it is called with b, h, q_idx and kv_idx of a single score, as FlexAttention's mask_mod"
        )


def check_promotion(name: str, operands: list[Tensor], tracked: list[Tensor]) -> None:
    """Raise where operands promote to other dtypes when computed for many scores at once, also by `torch.vmap`.

    A tensor without dimensions does not widen one with dimensions of the same category.

    Args:
        name: of the operator.
        operands: as in a call for one score.
        tracked: those that have more dimensions in a call for many scores.
    """
    widened = {id(x) for x in tracked}
    single = _promoted([(x.dtype, x.ndim > 0) for x in operands])
    many = _promoted([(x.dtype, x.ndim > 0 or id(x) in widened) for x in operands])
    # Positions fit into 32 bits.
    if single != many and (single, many) != (torch.int32, torch.int64):
        dtypes = " and ".join(dict.fromkeys(str(x.dtype) for x in operands))
        raise RuntimeError(f"{name} of {dtypes} computes in {single} for one score, in {many} for many; use one dtype")


def _promoted(operands: list[tuple[torch.dtype, bool]]) -> torch.dtype | None:
    """The dtype that tensors promote to, given whether each has dimensions."""
    with_dims, without = (
        functools.reduce(torch.promote_types, dtypes) if dtypes else None
        for dtypes in ([dtype for dtype, has_dims in operands if has_dims is wanted] for wanted in (True, False))
    )
    if with_dims is None or without is None:
        return with_dims or without
    return torch.promote_types(with_dims, without) if _category(without) > _category(with_dims) else with_dims


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype != torch.bool)


class Indexing(TorchFunctionMode):
    """Lets tensors without dimensions index others under `torch.vmap`, as FlexAttention does.

    PyTorch reads such an index as a Python int, which has no meaning under vmap. `isin`, which vmap has no rule for, is
    written with operators that it has rules for.

    The text of a tensor is refused: it shows values under vmap too.
    """

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__repr__:
            raise RuntimeError(DECIDES)
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_position, items)):
                return _indexed(args[0], items)
        elif func is torch.isin:
            return _isin(*args, **kwargs)
        return func(*args, **kwargs)


def _is_position(item: object) -> bool:
    """Whether an index is a tensor that stands for one position."""
    return isinstance(item, Tensor) and item.ndim == 0 and item.dtype in (torch.int64, torch.int32)


def _indexed(table: Tensor, items: tuple[Any, ...]) -> Tensor:
    """`table[items]`, where positions in tensors stay tensors."""
    # Dimensions that each item stands for; an ellipsis stands for those left.
    widths = [item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items]
    widths = [0 if item is None or item is Ellipsis else width for item, width in zip(items, widths, strict=True)]
    picks: list[Tensor | None] = []
    rest = []
    for item, width in zip(items, widths, strict=True):
        if _is_position(item):
            picks.append(item)
        else:
            picks += [None] * (table.ndim - sum(widths) if item is Ellipsis else width)
            rest.append(item)
    picked = _aten.index.Tensor(table, picks)
    return picked[tuple(rest)] if rest else picked


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    del assume_unique  # a promise that this does not need
    both = [x for x in (elements, test_elements) if isinstance(x, Tensor)]
    check_promotion("isin", both, both)
    left, right = elements, test_elements
    if isinstance(right, Tensor):
        right = right.reshape(-1)
        left = left.unsqueeze(-1) if isinstance(left, Tensor) else left
        isin = (left == right).any(-1)
    else:
        isin = left == right
    return ~isin if invert else isin


def shape_of(indices: Indices) -> tuple[int, ...]:
    """The shape that indices broadcast to."""
    return tuple(map(max, *(index.shape for index in indices)))


def under_vmap(fn: MaskFunction, indices: Indices, elements: dict[frozenset[int], int]) -> Tensor:
    """Evaluate a mask function score by score: bool, of the shape that the indices broadcast to.

    Args:
        fn: the function.
        indices: int64 tensors of four dimensions each, which broadcast to the scores.
        elements: of `Traits`; large results are computed in parts.
    """
    shape = shape_of(indices)
    parts = _parts(indices, shape, elements)

    def one(*at: Tensor) -> Tensor:
        keep = fn(*at)
        check_result(fn, keep)
        return keep.reshape(())

    call: Callable[..., Tensor] = one
    # Outer levels come first, so the dimension of each level is the first one left of a tensor that has it.
    for dim in reversed(range(4)):
        if shape[dim] > 1:
            in_dims = tuple(0 if index.shape[dim] > 1 else None for index in indices)
            call = torch.vmap(call, in_dims=in_dims, chunk_size=parts[dim] if parts[dim] < shape[dim] else None)
    with torch.no_grad(), Indexing(), vmap_enabled():
        # Copies, because a function may write to its arguments.
        return call(*(index.squeeze().clone() for index in indices)).reshape(shape)


def _parts(indices: Indices, shape: Sequence[int], elements: dict[frozenset[int], int]) -> list[int]:
    """How much of each dimension to compute at once."""
    dims = [{d for d in range(4) if index.shape[d] > 1} for index in indices]
    wanted = [(count, set[int]().union(*(dims[n] for n in used))) for used, count in elements.items()]
    wanted.append((1, {0, 1, 2, 3}))  # the result
    parts = list(shape)
    for dim in range(4):
        while parts[dim] > 1 and max(n * math.prod(parts[d] for d in dims_of) for n, dims_of in wanted) > _AT_ONCE:
            parts[dim] = -(-parts[dim] // 2)
    return parts
