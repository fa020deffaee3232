"""Which attention layers are self-attention: told from a layer's class and name, else from its calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from stof.errors import ShapeError

# How transformers calls attention over another sequence in class, attribute and module names.
_CROSS = ("cross", "encdec", "encoder_attn", "encoder_decoder_attention")
# Parameters of layers for the sequence of the keys, where it may be another one than the queries'.
_SEQUENCE = re.compile(r"(key_value|encoder_hidden|cross_attention|context_hidden|image_hidden)_states|context|memory")
_KEYS = re.compile(r"k|keys?|key_tensor")
_QUERIES = re.compile(r"q|query|queries|query_tensor")


class KeyArgument(NamedTuple):
    """The parameter of a layer's `forward` for its keys' sequence, and the one for its queries'.

    Attributes:
        keys, queries: name and position of each.
        projected: whether keys are handed over apart from the values (SAM), maybe with positions added.
        required: whether every call has it.
    """

    keys: tuple[str, int]
    queries: tuple[str, int]
    projected: bool
    required: bool


def key_argument(layer: type[nn.Module]) -> KeyArgument | None:
    """How calls of a layer hand over the sequence of the keys; None for layers that have one sequence."""
    parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    for position, parameter in enumerate(parameters):
        projected = _KEYS.fullmatch(parameter.name) is not None
        if projected or _SEQUENCE.fullmatch(parameter.name):
            query = next((n for n, name in enumerate(names) if _QUERIES.fullmatch(name)), 0)
            required = parameter.default is inspect.Parameter.empty
            return KeyArgument((parameter.name, position), (names[query], query), projected, required)
    return None


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether a layer always attends to another sequence, as its name or its class says."""
    if getattr(module, "is_cross_attention", False):
        return True
    # The layer's own name and its parent's: "decoder.block.0.layer.1.EncDecAttention", "layer.0.crossattention.self".
    words = [type(module).__name__, *name.split(".")[-2:]]
    if any(mark in word.lower() for word in words for mark in _CROSS):
        return True
    keys = key_argument(type(module))
    return keys is not None and keys.required and not keys.projected


def attends_to_another_sequence(
    name: str, argument: KeyArgument, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether this call of a layer hands over another sequence for the keys.

    Raises:
        ShapeError: it may be the same sequence or another one of its length.
    """
    keys, queries = (
        kwargs.get(word, args[position] if position < len(args) else None)
        for word, position in (argument.keys, argument.queries)
    )
    if not isinstance(keys, Tensor) or not isinstance(queries, Tensor) or keys is queries:
        return False
    if argument.projected and keys.shape == queries.shape:
        raise ShapeError(
            f"layer {name} has a sparse mask, which is for self-attention, and was called with queries and keys that "
            f"are two tensors of the same shape {list(keys.shape)}, so whether they are one sequence is not known; "
            "give sparsify() a mapping or function that returns None for this layer"
        )
    return True
