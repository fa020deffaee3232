"""Text to mask: the inverse of a mask's repr, for command lines and configuration files; and number to mask.

Only calls of named masks, literals and `& | ~` are read; nothing is executed.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Callable

from stof.errors import MaskError, MaskSyntaxError, StofError, UnknownMaskError
from stof.masks import named_masks
from stof.masks.base import LIVING
from stof.masks.compose import Mask, placed, transposed
from stof.masks.per_head import for_batch, for_heads

NAMED_MASKS: dict[str, Callable[..., Mask]] = {
    fn.__name__: fn
    for fn in (
        named_masks.full,
        named_masks.causal,
        named_masks.sliding_window,
        named_masks.dilated_window,
        named_masks.strided,
        named_masks.global_tokens,
        named_masks.sink_tokens,
        named_masks.random_blocks,
        named_masks.longformer,
        named_masks.bigbird,
        named_masks.prefix_lm,
        named_masks.documents,
        named_masks.padding,
        named_masks.neighborhood_2d,
        named_masks.per_head,
    )
}
# What is made of another mask, the first argument.
_OF_MASKS: dict[str, Callable[..., Mask]] = {fn.__name__: fn for fn in (placed, for_batch, for_heads)}


def mask_by_key(key: str) -> Mask:
    """The mask whose `key` this is: a living one, else a named mask built again from its text.

    Raises:
        MaskError: the key names a function or tensor that no longer exists.
    """
    mask: Mask | None = LIVING.find(key) if "<" in key else None
    if mask is not None:
        return mask
    try:
        return _parsed(key)
    except MaskSyntaxError:
        raise MaskError(
            f"the mask {key} no longer exists; make masks of functions or tensors outside of compiled code, as by "
            "mask = masks.from_function(f) or masks.from_block_mask(b), and keep them for as long as compiled code "
            "uses them"
        ) from None


def mask_by_number(number: int) -> Mask:
    """The living mask whose `number` this is.

    Raises:
        MaskError: it is gone; a compiled graph outlived its mask.
    """
    mask: Mask | None = LIVING.get(number)
    if mask is None:
        raise MaskError(
            f"the mask number {number} no longer exists; keep masks for as long as code compiled with them runs"
        )
    return mask


@functools.lru_cache(maxsize=256)
def _parsed(key: str) -> Mask:
    """`parse`, once: compiled code asks by key in every call, and reading takes longer than a call is launched."""
    return parse(key)


def parse(text: str) -> Mask:
    """The mask that `text` describes, e.g. `"sliding_window(511) | global_tokens(64)"`.

    A bare name means a call without arguments: `"causal"` is `causal()`.

    Raises:
        MaskSyntaxError: not a mask expression, or arguments the named mask does not take.
        UnknownMaskError: an unknown mask; the message names the nearest valid one.
    """
    if not isinstance(text, str):
        raise MaskSyntaxError(f"a mask expression is text, got {type(text).__name__}")
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, StofError):
            raise
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise MaskSyntaxError(
            f"{shown!r} is not a mask expression ({error}); "
            'write e.g. "longformer(window=64, global_tokens=64) & causal()"'
        ) from None


def _mask(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            return _chain(node)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.Name(id=name):
            return _call(name, [], {})
        case ast.Call(func=ast.Attribute(value=inner, attr="with_query_offset"), args=args, keywords=keywords):
            values, named = _arguments(args, keywords)
            return _checked("with_query_offset", _mask(inner).with_query_offset, values, named)
        case ast.Call(func=ast.Name(id="per_head"), args=[ast.List(elts=items)], keywords=[]):
            return named_masks.per_head([_mask(item) for item in items])
        case ast.Call(func=ast.Name(id=name), args=[inner, *args], keywords=keywords) if name in _OF_MASKS:
            values, named = _arguments(args, keywords)
            return _checked(name, _OF_MASKS[name], [_mask(inner), *values], named)
        case ast.Call(func=ast.Name(id="transposed"), args=[inner], keywords=[]):
            return transposed(_mask(inner))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _call(name, *_arguments(args, keywords))
    raise MaskSyntaxError(
        f"{ast.unparse(node)!r} is not part of a mask expression; use calls of named masks combined with & | ~"
    )


def _chain(node: ast.expr) -> Mask:
    """Operands joined by `&` and `|`, in a loop: a chain of many nests as deeply to the left."""
    rest: list[tuple[bool, ast.expr]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        rest.append((isinstance(node.op, ast.BitAnd), node.right))
        node = node.left
    mask = _mask(node)
    for both, right in reversed(rest):
        mask = mask & _mask(right) if both else mask | _mask(right)
    return mask


def _arguments(args: list[ast.expr], keywords: list[ast.keyword]) -> tuple[list[object], dict[str, object]]:
    try:
        named = {str(k.arg): _mask(k.value) if k.arg == "within" else ast.literal_eval(k.value) for k in keywords}
        values = [ast.literal_eval(arg) for arg in args]
    except (ValueError, TypeError):
        raise MaskSyntaxError("arguments of a named mask are literals: numbers, true/false, lists of numbers") from None
    if len(named) < len(keywords):
        raise MaskSyntaxError("an argument is given twice")
    return values, named


def _call(name: str, args: list[object], named: dict[str, object]) -> Mask:
    if name not in NAMED_MASKS:
        near = difflib.get_close_matches(name, NAMED_MASKS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownMaskError(f"unknown mask {name!r}; {hint}Known masks: {', '.join(NAMED_MASKS)}")
    return _checked(name, NAMED_MASKS[name], args, named)


def _checked(name: str, fn: Callable[..., Mask], args: list[object], named: dict[str, object]) -> Mask:
    try:
        return fn(*args, **named)
    except StofError:
        raise
    except TypeError as error:
        raise MaskSyntaxError(f"{name}: {str(error).removeprefix(f'{fn.__name__}() ')}") from None


# How masks that hold functions and tensors write those parts, with numbers that tell living objects apart.
_HELD = (
    (re.compile(r"from_function\(<(?:\S*\.)?(\S+) #[^>]*>\)"), r"function '\1'"),
    (re.compile(r"from_dense\(<bool (\[[^]]*\]) #[^>]*>\)"), r"bool tensor \1"),
    (re.compile(r"from_block_mask\(<([^ >]+) [^>]*>\)"), r"BlockMask \1"),
)


def readable(text: str) -> str:
    """A mask's text for people: functions by their names, tensors by their sizes."""
    for held, shown in _HELD:
        text = held.sub(shown, text)
    return text
