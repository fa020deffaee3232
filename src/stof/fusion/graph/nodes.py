"""What a node of a Dynamo graph is: its name whatever the spelling, its value, and whether it is a view or identity.

Dynamo keeps `F.linear`, `x + y`, `torch.add(x, y)` and `x.add(y)` apart; here they are "linear" and "add".
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, fx

from stof.runtime.private import HigherOrderOperator, OpOverload, OpOverloadPacket

# Modules whose functions are known by their name; a user's function called `linear` is another thing.
_KNOWN_MODULES = {"_operator", "torch", "torch._C._nn", "torch._C", "torch.functional", "torch.nn.functional"}


def op_name(node: object) -> str:
    """`add` for `operator.add`, `torch.add` and `Tensor.add`; `stof.attention` for operators of torch.library.

    In-place forms end in `_` or are Python's (`iadd`). "" for what is no call, or of an unknown function.
    """
    if not isinstance(node, fx.Node):
        return ""
    target: Any = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return ""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).removesuffix(".default")
    if isinstance(target, HigherOrderOperator):
        return target.name()
    name: str = getattr(target, "__name__", "")
    if getattr(target, "__module__", None) not in _KNOWN_MODULES and target is not getattr(torch, name, None):
        return ""
    place = _inplace_position(target)
    return f"{name}_" if place is not None and argument(node, place, "inplace", False) else name


@functools.cache
def _inplace_position(function: Any) -> int | None:
    """The place of an argument `inplace`, which functions of `torch.nn.functional` have."""
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def argument(node: fx.Node, position: int, keyword: str, default: Any = None) -> Any:
    """An argument by place or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(keyword, default)


def source_of(node: fx.Node) -> Any:
    """What a function of one tensor (a view, a cast, a norm) reads, by place or by name."""
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("tensor"))


def fake_value(node: object) -> Tensor | None:
    """The fake tensor Dynamo computed for a node; None for what is no plain tensor."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def scalar_value(given: object) -> float | None:
    """A scalar argument; one that Dynamo keeps symbolic is taken, with a guard, at its value in this call."""
    if isinstance(given, fx.Node):
        given = given.meta.get("example_value")
    return float(given) if isinstance(given, int | float | torch.SymFloat) else None


def is_floating(node: object) -> bool:
    value = fake_value(node)
    return value is not None and value.is_floating_point()


def same_size(a: Any, b: Any) -> bool:
    """Whether two shapes are known to be equal, without adding a guard on symbolic sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def is_cast(node: object) -> bool:
    """A change of dtype alone (or none at all) between floating-point tensors."""
    if op_name(node) not in ("to", "float", "half", "bfloat16", "double", "type_as", "type"):
        return False
    assert isinstance(node, fx.Node)
    if not (is_floating(node) and is_floating(source_of(node))):
        return False
    before, after = fake_value(source_of(node)), fake_value(node)
    return before is not None and after is not None and before.device == after.device


def is_identity(node: object) -> bool:
    """Values, dtype and shape pass unchanged: dropout outside training, `contiguous`, a cast to the same dtype."""
    name = op_name(node)
    if name == "dropout":
        assert isinstance(node, fx.Node)
        return not argument(node, 2, "training", True) or argument(node, 1, "p", 0.5) == 0.0
    if name == "contiguous":
        return True
    if is_cast(node):
        assert isinstance(node, fx.Node)
        before, after = fake_value(source_of(node)), fake_value(node)
        return before is not None and after is not None and before.dtype == after.dtype
    return False


def is_row_view(node: object) -> bool:
    """`view` or `reshape` that keeps the last dimension, so that rows stay rows."""
    if op_name(node) not in ("view", "reshape"):
        return False
    assert isinstance(node, fx.Node)
    before, after = fake_value(source_of(node)), fake_value(node)
    return (
        before is not None and after is not None and before.dim() > 0 and same_size(before.shape[-1:], after.shape[-1:])
    )


_VIEWS = {
    "view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "expand", "getitem", "chunk",
    "split", "flatten", "unflatten", "t", "narrow", "select", "expand_as", "swapaxes", "unbind",
}  # fmt: skip


def is_view(node: object) -> bool:
    """Values pass unchanged, in another shape or only some of them: no work of their own."""
    return op_name(node) in _VIEWS or is_identity(node)


def skip_identities(node: Any, kept: set[fx.Node] | None = None) -> Any:
    """What an identity was applied to; the identities passed are added to `kept`."""
    while is_identity(node):
        if kept is not None:
            kept.add(node)
        node = source_of(node)
    return node


def column_slice(node: object) -> tuple[fx.Node, int, int] | None:
    """`(source, start, stop)` when a node is some neighbouring columns (of the last dimension) of another.

    Read from the spellings `x[..., a:b]`, `x[:, :, a:b]`, `x.narrow(-1, a, n)`, `x.chunk(2, -1)[i]` and
    `x.split(n, -1)[i]`.
    """
    name = op_name(node)
    if name not in ("getitem", "narrow"):
        return None
    assert isinstance(node, fx.Node)
    source, value = source_of(node), fake_value(node)
    if not isinstance(source, fx.Node) or value is None:
        return None
    width = value.shape[-1] if value.dim() else None
    if not isinstance(width, int):
        return None
    if name == "narrow":
        dim, start = argument(node, 1, "dim"), argument(node, 2, "start")
        last = isinstance(start, int) and start >= 0 and dim in (-1, value.dim() - 1)
        return (source, start, start + width) if last else None
    if op_name(source) in ("chunk", "split"):
        return _part_of_split(node, source)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole = fake_value(source)
    if whole is None or not isinstance(index[-1], slice) or any(i not in (Ellipsis, slice(None)) for i in index[:-1]):
        return None
    if Ellipsis not in index and len(index) != whole.dim():
        return None
    columns, cut = whole.shape[-1], index[-1]
    if not isinstance(columns, int) or not all(isinstance(i, int | None) for i in (cut.start, cut.stop, cut.step)):
        return None
    start, stop, step = cut.indices(columns)
    return (source, start, stop) if step == 1 and stop - start == width else None


def _part_of_split(node: fx.Node, split: fx.Node) -> tuple[fx.Node, int, int] | None:
    source, dim = source_of(split), argument(split, 2, "dim", 0)
    whole, parts, index = fake_value(source), split.meta.get("example_value"), node.args[1]
    if whole is None or dim not in (-1, whole.dim() - 1) or not isinstance(parts, tuple | list):
        return None
    if not isinstance(index, int) or not isinstance(source, fx.Node):
        return None
    widths = [part.shape[-1] for part in parts]
    if not all(isinstance(width, int) for width in widths):
        return None
    index %= len(widths)
    start = sum(widths[:index])
    return source, start, start + widths[index]
