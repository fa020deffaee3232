"""What a model of transformers does with its `attention_mask`, read from the source of its `forward`."""

from __future__ import annotations

import ast
import inspect
import textwrap

_NAME = "attention_mask"
# GPT-2 flattens masks of fewer than four dimensions.
_HARMLESS_ATTRIBUTES = {"ndim", "view"}
_HARMLESS_CALLS = {"isinstance", "warn_if_padding_and_no_attention_mask"}


def hands_mask_on(model: type) -> bool:
    """Whether `model.forward` makes a causal mask of tokens and positions, and its `attention_mask` is for that alone.

    Models that also compute with it (OPT's positions, ESM's embeddings, the masks of linear attention) need a tensor.
    """
    function = getattr(model, "forward", None)
    if function is None or not {"input_ids", _NAME, "position_ids"} <= set(inspect.signature(function).parameters):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False  # written at run time: nothing is known
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    others = {node.id for node in names if node.id.startswith("create_") and not _makes_masks(node.id)}
    if others - {"create_bidirectional_mask"}:  # that one is for the encoder's
        return False
    copies = _other_names(tree)
    reads = [node for node in names if node.id == _NAME or node.id in copies]
    allowed = _handed_on(tree)
    return any(_makes_masks(node.id) for node in names) and all(
        isinstance(node.ctx, ast.Store) or node in allowed for node in reads
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
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call() if _makes_masks(_called(node)):
                found.update(node.args, (word.value for word in node.keywords))
            case ast.Call() if _called(node) in _HARMLESS_CALLS:
                found.update(node.args)
            case ast.Dict():  # arguments of several masks
                pairs = zip(node.keys, node.values, strict=True)
                found.update(value for key, value in pairs if isinstance(key, ast.Constant) and key.value == _NAME)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                found.add(node.left)
            case ast.Attribute() if node.attr in _HARMLESS_ATTRIBUTES:
                found.add(node.value)
            case ast.NamedExpr() | ast.Assign():  # under another name, to tell masks that are there already
                found.add(node.value)
    return found
