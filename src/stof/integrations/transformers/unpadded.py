"""Encoders that compute on the tokens of a padded batch alone: it is packed before the model and unpacked behind it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stof.errors import UnsupportedError
from stof.integrations.transformers.packing import PackedBatch, pack
from stof.integrations.transformers.sparsify import self_attention_layers

_log = logging.getLogger(__name__)


def encoders_of(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost base models of a model; each must be an encoder.

    Raises:
        UnsupportedError: one is no encoder.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    inner = {id(child) for part in parts for child in part.modules() if child is not part}
    bases = [part.base_model for part in parts if id(part) not in inner]
    for base in bases:
        config: Any = base.config
        layers = self_attention_layers(base)
        if not layers or config.is_encoder_decoder or any(getattr(layer.module, "is_causal", True) for layer in layers):
            raise UnsupportedError(
                f"unpad=True takes encoders, and {type(base).__name__} is none; pack its batches with pack()", {}
            )
    return bases


def unpad_calls(encoders: Sequence[PreTrainedModel], *, required: bool) -> None:
    """Have encoders leave out padding on the right; see `enable`.

    Args:
        required: raise in calls of models that cannot be packed, in place of computing on padding from then on. Calls
            that are not packed (see `enable`) compute on padding in any case.
    """
    for encoder in encoders:
        # An attribute of the base model, whose `forward` some libraries call in place of the model.
        vars(encoder)["forward"] = _UnpaddedForward(encoder, required)


def compile_packed_calls(model: nn.Module, compiler: Callable[[nn.Module], Callable[..., Any]]) -> None:
    """Compile the encoders that leave out padding; batches are packed and unpacked outside of compiled code."""
    for part in model.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, _UnpaddedForward):
            forward.compiled = compiler(part)


def undo_unpad_calls(model: nn.Module) -> None:
    """Undo `unpad_calls`."""
    for part in model.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, _UnpaddedForward):
            forward.remove()


def is_sentence_transformer(model: nn.Module) -> bool:
    """Whether a model is one of sentence-transformers, which is not imported for that."""
    return any(base.__module__.startswith("sentence_transformers.") for base in type(model).__mro__)


class _UnpaddedForward:
    """The attribute `forward` of a base model; copies of the model hold a copy, bound to them."""

    def __init__(self, base: PreTrainedModel, required: bool) -> None:
        self._base: Any = base
        self._required = required
        # What another library put in the place of the method, such as a hook of accelerate.
        self._replaced = vars(base).get("forward")
        # Models that count positions from the padding's number on (RoBERTa).
        padding: Any = getattr(getattr(base, "embeddings", None), "padding_idx", None)
        self._first_position = 0 if padding is None else padding + 1
        # Outputs that are known to be the pooler's.
        self._pooled: set[object] = set()
        # The compiled model, for packed batches; copies have none.
        self.compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"compiled": None}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        replaced: Callable[..., Any] = self._replaced or functools.partial(type(self._base).forward, self._base)
        return replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packed = self._pack(args, kwargs)
        if packed is None:
            return self._forward(*args, **kwargs)
        try:
            return self._run(*packed)
        except UnsupportedError as error:
            if self._required:
                raise
            _log.info("%s computes on padding from now on: %s", type(self._base).__name__, error)
            self.remove()
            return self._base(*args, **kwargs)

    def remove(self) -> None:
        """Give the model its `forward` back."""
        del vars(self._base)["forward"]
        if self._replaced is not None:
            self._base.forward = self._replaced

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PackedBatch, dict[str, Any]] | None:
        """The packed batch of a call and its options, or None if it computes on padding."""
        if torch.compiler.is_compiling():
            return None
        names = inspect.signature(self._forward).parameters
        if len(args) > len(names):
            return None
        arguments = dict(zip(names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        ids, valid = tensors.pop("input_ids", None), tensors.pop("attention_mask", None)
        options = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
        if ids is None or valid is None or ids.ndim != 2 or valid.shape != ids.shape or not has_right_padding(valid):
            return None
        known = set(tensors) <= {"token_type_ids"} and all(x.shape == ids.shape for x in tensors.values())
        if not known or options.get("past_key_values") is not None or options.get("output_attentions"):
            return None
        per_token: dict[str, Any] = tensors
        return pack(ids, valid, first_position=self._first_position, **per_token), options

    def _run(self, packed: PackedBatch, options: dict[str, Any]) -> Any:
        # The model, not its `forward`: a hook checks that it keeps sequences apart. The packed batch has no padding, so
        # this function passes it on.
        call = self._base if self.compiled is None else self.compiled
        output = call(**{**options, **packed.model_inputs()})
        values: dict[Any, Any] = dict(enumerate(output)) if isinstance(output, tuple) else dict(output.items())
        unpacked = {name: _unpacked(packed, value) for name, value in values.items()}
        first_name = next(iter(values))
        # What is left describes rows, such as BERT's pooled first tokens.
        for name, value in values.items():
            if isinstance(value, Tensor) and not _has_tokens(packed, value):
                self._check_pooler(values[first_name], value, name)
                unpacked[name] = self._base.pooler(unpacked[first_name])
        return tuple(unpacked.values()) if isinstance(output, tuple) else type(output)(**unpacked)

    def _check_pooler(self, hidden: Tensor, value: Tensor, name: object) -> None:
        """Refuse a model whose output of this name is not `base.pooler` of the hidden states."""
        if name in self._pooled:
            return
        pooler: Any = getattr(self._base, "pooler", None)
        again = None if pooler is None else pooler(hidden)
        if again is None or again.shape != value.shape or not torch.allclose(again, value, atol=1e-3, rtol=1e-3):
            raise UnsupportedError(
                f"{type(self._base).__name__} returns {name}, which its pooler does not make of the hidden states, so "
                "it is not known for each sequence; leave out unpad=True",
                {},
            )
        self._pooled.add(name)


def has_right_padding(valid: Tensor) -> bool:
    """Whether there is padding, on the right alone, and a token in each row. Waits for the device."""
    is_token = valid != 0
    decreasing = (is_token[:, 1:] <= is_token[:, :-1]).all() & is_token[:, 0].all()
    return bool(decreasing & ~is_token.all())


def _has_tokens(packed: PackedBatch, value: Tensor) -> bool:
    """Whether a tensor is `[R, T, ...]` of a packed batch; pooled outputs have two dimensions."""
    return value.ndim > 2 and value.shape[:2] == packed.packed_shape


def _unpacked(packed: PackedBatch, value: Any) -> Any:
    if isinstance(value, Tensor) and _has_tokens(packed, value):
        return packed.unpack(value)
    if isinstance(value, tuple):
        return tuple(_unpacked(packed, part) for part in value)
    if isinstance(value, Mapping):
        return {name: _unpacked(packed, part) for name, part in value.items()}
    return value
