"""Whether a model of transformers may be given a stof mask where a call has none, read from its `forward`."""

from __future__ import annotations

import ast
import inspect

from stof.integrations.transformers.layer_code import syntax_tree

_NAME = "attention_mask"
# Mistral calls either `mask_function`. That of chunks (Llama 4) counts each sequence's padding: it needs a tensor.
_MAKE_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "mask_function"}
_OTHER_SEQUENCE = "create_bidirectional_mask"  # makes the mask of the encoder's states
_HARMLESS_CALLS = _MAKE_MASKS | {"isinstance", "warn_if_padding_and_no_attention_mask"}
# GPT-2 flattens masks of fewer than four dimensions.
_HARMLESS_ATTRIBUTES = {"ndim", "view"}


def hands_mask_on(model: type) -> bool:
    """Whether `model.forward` makes a causal mask of tokens and positions, and its `attention_mask` is for that alone.

    Models that also compute with it (OPT's positions, ESM's embeddings, the masks of linear attention) need a tensor,
    and so do those that put another mask in the place of none (T5Gemma). Where the source is not known, it is False.
    """
    forward = getattr(model, "forward", None)
    if forward is None or not {"input_ids", _NAME, "position_ids"} <= set(inspect.signature(forward).parameters):
        return False
    nodes = list(ast.walk(syntax_tree(forward) or ast.Module([], [])))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    makers = {node.id for node in names if node.id.startswith("create_") or node.id in _MAKE_MASKS}
    if not makers & _MAKE_MASKS or makers - _MAKE_MASKS - {_OTHER_SEQUENCE} or any(map(_replaces_none, nodes)):
        return False
    allowed = {place for node in nodes for place in _handed_on(node)}
    # A plain assignment gives the mask another name (OPT).
    masks = {_NAME} | {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == _NAME
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return all(node.id not in masks or isinstance(node.ctx, ast.Store) or node in allowed for node in names)


def _replaces_none(node: ast.AST) -> bool:
    """Whether it is a condition under which another mask takes the place of none."""
    if not isinstance(node, ast.If) or f"{_NAME} is None" not in map(ast.unparse, ast.walk(node.test)):
        return False
    inside = [part for statement in node.body for part in ast.walk(statement)]
    return any(isinstance(part, ast.Name) and part.id == _NAME and isinstance(part.ctx, ast.Store) for part in inside)


def _handed_on(node: ast.AST) -> list[ast.AST]:
    """Parts of a node that are only looked at, kept under another name, or handed to a function that makes masks."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _HARMLESS_CALLS:
            return [*node.args, *(word.value for word in node.keywords)]
        case ast.Dict():  # arguments of several masks
            pairs = zip(node.keys, node.values, strict=True)
            return [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == _NAME]
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return [node.left]
        case ast.Attribute() if node.attr in _HARMLESS_ATTRIBUTES:
            return [node.value]
        case ast.NamedExpr() | ast.Assign():
            return [node.value]
    return []
