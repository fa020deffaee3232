"""What models and layers of transformers do with their attention masks, read from the source of their `forward`."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType

from stof.integrations.transformers.layer_code import methods, names_in, syntax_tree

_NAME = "attention_mask"
# GPT-2 flattens masks of fewer than four dimensions.
_HARMLESS_ATTRIBUTES = {"ndim", "view"}
_HARMLESS_CALLS = {"isinstance", "warn_if_padding_and_no_attention_mask"}
# Statements of a function's body that every call runs.
_ALWAYS = ast.Assign | ast.Expr | ast.Return
# Methods that masks of stof have.
_METHODS = {"to", "contiguous", "get", "update", "append"}


def hands_mask_on(model: type) -> bool:
    """Whether `model.forward` makes a causal mask of tokens and positions, and its `attention_mask` is for that alone.

    Models that also compute with it (OPT's positions, ESM's embeddings, the masks of linear attention) need a tensor.
    """
    function = getattr(model, "forward", None)
    if function is None or not {"input_ids", _NAME, "position_ids"} <= set(inspect.signature(function).parameters):
        return False
    tree = syntax_tree(function)
    if tree is None:
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    others = {node.id for node in names if node.id.startswith("create_") and not _makes_masks(node.id)}
    if others - {"create_bidirectional_mask"}:  # which makes the mask of the encoder's states
        return False
    if _replaces_none(tree):
        return False
    copies = _other_names(tree)
    reads = [node for node in names if node.id == _NAME or node.id in copies]
    allowed = _handed_on(tree)
    return any(_makes_masks(node.id) for node in names) and all(
        isinstance(node.ctx, ast.Store) or node in allowed for node in reads
    )


def _replaces_none(tree: ast.AST) -> bool:
    """Whether another mask takes the place of none, such as that of the padding among the tokens (T5Gemma)."""
    absent = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and f"{_NAME} is None" in map(ast.unparse, ast.walk(node.test))
    ]
    return any(
        isinstance(node, ast.Name) and node.id == _NAME and isinstance(node.ctx, ast.Store)
        for branch in absent
        for statement in branch.body
        for node in ast.walk(statement)
    )


def _makes_masks(function: str) -> bool:
    # Mistral's name for either of two. That of chunks (Llama 4) counts each sequence's padding: it needs a tensor.
    return function in ("create_causal_mask", "create_sliding_window_causal_mask", "mask_function")


def _other_names(tree: ast.AST) -> set[str]:
    """Names the mask itself is given by a plain assignment, under which it may be computed with (OPT)."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == _NAME
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _handed_on(tree: ast.AST) -> set[ast.AST]:
    """Places where a name is handed to the function that makes masks, or only looked at."""
    places: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call() if _makes_masks(_called(node)):
                places.update(node.args, (word.value for word in node.keywords))
            case ast.Call() if _called(node) in _HARMLESS_CALLS:
                places.update(node.args)
            case ast.Dict():  # arguments of several masks
                pairs = zip(node.keys, node.values, strict=True)
                places.update(value for key, value in pairs if isinstance(key, ast.Constant) and key.value == _NAME)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                places.add(node.left)
            case ast.Attribute() if node.attr in _HARMLESS_ATTRIBUTES:
                places.add(node.value)
            case ast.NamedExpr() | ast.Assign():  # kept under another name, to recognise a mask made earlier
                places.add(node.value)
    return places


@functools.lru_cache(maxsize=1024)
def makes_masks(model: type) -> bool:
    """Whether a model's code has transformers make the masks of its layers, as the attention implementation says."""
    return any(_creates(name) for function in methods(model) for name in names_in(function.__code__))


@functools.lru_cache(maxsize=1024)
def computes_with_masks_it_makes(model: type) -> bool:
    """Whether every call of `model.forward` hands masks made by transformers to operators of torch (T5Gemma 2).

    Other uses are left to `ModelMask`, which refuses them: conditions may never hold.
    """
    function = _forward_of(model)
    tree = None if function is None else syntax_tree(function)
    if tree is None:
        return False
    new_tensors: set[str] = set()
    for statement in tree.body[0].body:  # type: ignore[attr-defined]
        if isinstance(statement, _ALWAYS) and any(_is_handed_to_torch(call, new_tensors) for call in _calls(statement)):
            return True
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and any(_creates(_called(one)) for one in _calls(node)):
                new_tensors.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return False


@functools.lru_cache(maxsize=1024)
def computes_with_its_mask(layer: type) -> bool:
    """Whether a layer's code computes with its mask, which needs a tensor (DeepSeek-V4, Doge).

    Read are `forward` and the methods that each call of it hands the mask to.
    """
    function = _forward_of(layer)
    tree = None if function is None else syntax_tree(function)
    if tree is None:
        return False
    return any(
        _computes(node, _mask_parameters(part))
        for part in (tree, *_always_called(tree, layer))
        for node in ast.walk(part)
    )


def _forward_of(kind: type) -> FunctionType | None:
    function = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    return function if isinstance(function, FunctionType) else None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _creates(name: str) -> bool:
    return name.startswith("create_") and "mask" in name


def _mask_parameters(tree: ast.Module) -> set[str]:
    arguments = tree.body[0].args  # type: ignore[attr-defined]
    return {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs) if "mask" in argument.arg}


def _always_called(tree: ast.Module, layer: type) -> Iterator[ast.Module]:
    """Sources of the layer's methods that statements outside conditions hand a mask to."""
    masks = _mask_parameters(tree)
    always = [node for node in tree.body[0].body if isinstance(node, _ALWAYS)]  # type: ignore[attr-defined]
    for call in (call for node in always for call in _calls(node)):
        handed = (*call.args, *(word.value for word in call.keywords))
        if ast.unparse(call.func).startswith("self.") and any(_is_mask(value, masks) for value in handed):
            method = inspect.getattr_static(layer, _called(call), None)
            source = syntax_tree(method) if isinstance(method, FunctionType) else None
            if source is not None:
                yield source


def _is_mask(node: ast.AST, masks: set[str]) -> bool:
    """A mask, or an entry of a dictionary of masks."""
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple):
        node = node.value
    return isinstance(node, ast.Name) and node.id in masks


def _computes(node: ast.AST, masks: set[str]) -> bool:
    """Whether an expression is an operation on a mask that needs a tensor."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if _is_mask(value, masks):
            return attr not in _METHODS
        case ast.Call():
            return _is_handed_to_torch(node, masks)
        case ast.Subscript(slice=ast.Slice() | ast.Tuple()):
            return _is_mask(node.value, masks)
        case ast.BinOp():
            return _is_mask(node.left, masks) or _is_mask(node.right, masks)
        case ast.UnaryOp(op=ast.Invert()):
            return _is_mask(node.operand, masks)
    return False


def _is_handed_to_torch(call: ast.Call, masks: set[str]) -> bool:
    """Whether a function of PyTorch is called with a mask, or with a list of masks."""
    handed = [*call.args, *(word.value for word in call.keywords)]
    handed += [one for value in handed if isinstance(value, ast.List | ast.Tuple) for one in value.elts]
    module = ast.unparse(call.func).split(".")[0]
    return module in ("torch", "F", "nn") and any(_is_mask(value, masks) for value in handed)
