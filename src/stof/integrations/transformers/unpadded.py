"""Encoders that compute on the tokens of a padded batch alone: it is packed before the model and unpacked behind it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stof.errors import StofError, UnsupportedError
from stof.integrations.torch.cuda_graphs import CudaGraphRunner
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.packed_calls import before_forward, refuse_numbered_mask
from stof.integrations.transformers.packing import PackedBatch
from stof.integrations.transformers.sparse_mask import NAME
from stof.integrations.transformers.sparsify import self_attention_layers
from stof.masks import Mask, documents

_log = logging.getLogger(__name__)
_STATE = "_stof_unpadding"


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
        if "forward" in vars(base):
            raise UnsupportedError(
                f"unpad=True takes models with the forward of their class, and that of this {type(base).__name__} was "
                "replaced, as accelerate's hooks do; enable the model before",
                {},
            )
    return bases


def unpad_calls(encoders: Sequence[PreTrainedModel], *, required: bool) -> None:
    """Have encoders leave out padding on the right; see `enable`.

    Args:
        required: raise in calls of models that cannot be packed, in place of computing on padding from then on. Calls
            that are not packed (see `enable`) compute on padding in any case.
    """
    for encoder in encoders:
        setattr(encoder, _STATE, _State(encoder, required))
        kind: Any = type(encoder)
        encoder.__class__ = _unpadding_class(kind)


def compile_packed_calls(
    model: nn.Module,
    compiler: Callable[..., Callable[..., Any]],
    recorder: Callable[[Callable[..., Any], nn.Module], CudaGraphRunner] | None = None,
) -> None:
    """Compile the encoders that leave out padding; batches are packed and unpacked outside of compiled code.

    Args:
        model: whose encoders `unpad_calls` was called with.
        compiler: compiles a function.
        recorder: records a call of a module as CUDA graphs, for numbers of tokens rounded up by `_graph_tokens`.
    """
    for part in model.modules():
        state: _State | None = vars(part).get(_STATE)
        if state is not None:
            # The function of the class, because shallow copies of the model have the same state.
            kind: Any = type(part)
            state.compiled = compiler(kind._stof_unpadded_class.forward)
            call = functools.partial(_masked_call, state.compiled, part)
            state.recorded = None if recorder is None else (part, recorder(call, part))


def undo_unpad_calls(model: nn.Module) -> None:
    """Undo `unpad_calls`."""
    for part in model.modules():
        vars(part).pop(_STATE, None)
        # Others may have derived classes from this one: without a state, it computes on padding.
        original: Any = vars(type(part)).get("_stof_unpadded_class")
        if original is not None:
            part.__class__ = original


def is_sentence_transformer(model: nn.Module) -> bool:
    """Whether a model is one of sentence-transformers, which is not imported for that."""
    return any(base.__module__.startswith("sentence_transformers.") for base in type(model).__mro__)


class _State:
    """What an encoder that leaves out padding knows.

    Attributes:
        required: see `unpad_calls`.
        padding: the token that the model's positions pass over; None if they count all tokens.
        pooled: names of outputs that are known to be the pooler's.
        compiled: the compiled `forward` of the model's class, for packed batches; None to run it as it is. Copies have
            none.
        recorded: an encoder, and what records its calls of `compiled`.
    """

    def __init__(self, encoder: Any, required: bool) -> None:
        self.required = required
        # RoBERTa's positions begin behind the padding's number.
        self.padding: int | None = getattr(getattr(encoder, "embeddings", None), "padding_idx", None)
        self.pooled: set[object] = set()
        self.compiled: Callable[..., Any] | None = None
        self.recorded: tuple[Any, CudaGraphRunner] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"compiled": None, "recorded": None}

    def run(self, encoder: Any, padded: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output for a packed batch of an encoder, which may be a shallow copy with the state of another one.

        Args:
            encoder: whose weights compute it.
            padded: its call without compilation.
            arguments: of `padded`.
        """
        if self.compiled is None:
            return padded(**arguments)
        attention_mask: ModelMask = arguments.pop("attention_mask")
        if self.recorded is None or self.recorded[0] is not encoder:
            return self.compiled(encoder, attention_mask=attention_mask.after_check(breaks_graphs=True), **arguments)
        assert isinstance(attention_mask.mask, Mask)
        return self.recorded[1].call_with_mask(attention_mask.mask, **arguments)


def _masked_call(forward: Callable[..., Any], encoder: Any, *, mask: Mask, **arguments: Any) -> Any:
    """The output of an encoder that keeps packed sequences apart, for a batch in one row."""
    width = arguments["input_ids"].shape[1]
    attention_mask = ModelMask(mask, (1, 1, width, width), includes_model_mask=False)
    return forward(encoder, attention_mask=attention_mask.after_check(breaks_graphs=True), **arguments)


@functools.cache
def _unpadding_class(kind: Any) -> Any:
    """A model class that leaves out padding. Its name is that of `kind`, which checkpoints and messages show.

    Some libraries call a model's `forward`, so hooks would not do; a function on the model would compute by the weights
    of another model after a shallow copy, such as the replicas of `nn.DataParallel`.
    """
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (_Unpadding, kind), names | {"_stof_unpadded_class": kind})


def _new(kind: type) -> Any:
    """An empty model that leaves out padding, for copies."""
    cls: Any = _unpadding_class(kind)
    return cls.__new__(cls)


class _Unpadding:
    """The methods of encoders that leave out padding, in front of those of their class."""

    _stof_unpadded_class: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_new, (self._stof_unpadded_class,), *super().__reduce_ex__(protocol)[2:])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the class, on packed batches where they are padded on the right."""
        padded: Callable[..., Any] = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return padded(*args, **kwargs)
        state: _State | None = vars(self).get(_STATE)
        parameters = _parameters(self._stof_unpadded_class)
        packed = None if state is None else _packed(state, parameters, args, kwargs)
        if state is None or packed is None:
            if self.config._attn_implementation == NAME:  # type: ignore[attr-defined]
                refuse_numbered_mask(dict(zip(parameters, args, strict=False)) | kwargs)
            return padded(*args, **kwargs)
        batch, options = packed
        try:
            # The hook that checks that the model keeps sequences apart. The model's hooks run once, on padded batches.
            changed = before_forward(self, (), {**options, **batch.model_inputs()})  # type: ignore[arg-type]
            if changed is None:  # it has another attention implementation by now
                return padded(*args, **kwargs)
            return _unpacked_output(self, state, batch, state.run(self, padded, changed[1]))
        except StofError as error:
            if state.required:
                raise
            _log.info("%s computes on padding from now on: %s", type(self).__name__, error)
            delattr(self, _STATE)
            return padded(*args, **kwargs)

    # See `packed_calls.FORWARD_READS_MASKS`.
    _stof_forward_reads_masks = forward


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of a model's `forward`."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _packed(
    state: _State, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PackedBatch, dict[str, Any]] | None:
    """The packed batch of a call and its options, or None if it computes on padding."""
    if len(args) > len(parameters):
        return None
    arguments = dict(zip(parameters, args, strict=False)) | kwargs
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    ids, mask = tensors.pop("input_ids", None), tensors.pop("attention_mask", None)
    options = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    if ids is None or mask is None or ids.ndim != 2 or mask.shape != ids.shape:
        return None
    only_token_types = set(tensors) <= {"token_type_ids"} and all(x.shape == ids.shape for x in tensors.values())
    if not only_token_types or options.get("past_key_values") is not None or options.get("output_attentions"):
        return None
    lengths = right_padded_lengths(mask, ids, state.padding)
    # With compilation, batches without padding are packed too, so that compiled code runs them.
    if lengths is None or (state.compiled is None and min(lengths) == ids.shape[1]):
        return None
    width = sum(lengths) if state.recorded is None else _graph_tokens(sum(lengths))
    first_position = 0 if state.padding is None else state.padding + 1
    return _in_one_row({"input_ids": ids, **tensors}, mask, lengths, width, first_position), options


def _in_one_row(
    per_token: dict[str, Tensor], mask: Tensor, lengths: list[int], width: int, first_position: int
) -> PackedBatch:
    """What `pack` returns for a batch padded on the right, in few kernels, with padding behind its tokens.

    Args:
        per_token, mask: int `[B, S]`; the ids of tokens are among them.
        lengths: of `right_padded_lengths`.
        width: tokens of the row. Behind those of the batch, the first token is repeated, as a sequence of its own.
        first_position: as for `pack`.
    """
    tokens, (batch, length) = sum(lengths), mask.shape
    source = torch.nonzero_static(mask.flatten(), size=width, fill_value=0).view(1, width)
    ends = [*accumulate(lengths, initial=0), *([] if width == tokens else [width])]
    # `take` copies: Dynamo compiles again when an input was a view and is none, as in recorded CUDA graphs.
    packed = {name: x.take(source) for name, x in per_token.items()}
    return PackedBatch(
        position_ids=source % length + first_position,
        mask=documents(cu_seqlens=ends),
        lengths=tuple(lengths),
        padded_shape=(batch, length),
        source=source[0, :tokens],
        target=torch.arange(tokens, device=source.device),
        input_ids=packed.pop("input_ids"),
        first_position=first_position,
        extras=packed,
    )


def _graph_tokens(tokens: int) -> int:
    """A number of tokens, rounded up to a multiple of 256 and of a sixteenth of the next power of two.

    Up to 16,384 tokens these are 32 numbers, as many as are recorded (`MOST_RECORDED`). Above 4096 tokens, padding is
    4 % on average.
    """
    step = max(256, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def right_padded_lengths(mask: Tensor, ids: Tensor, pad_token: int | None) -> list[int] | None:
    """Return the number of tokens in each row of a batch padded on the right; waits for the device, once.

    Args:
        mask: `[B, S]`, 1 at tokens and 0 at padding.
        ids: int `[B, S]`.
        pad_token: may be at padding alone; None if there is none.

    Returns:
        None if a row has no token, a `pad_token` among them, or padding before them, and for other values in the mask.
    """
    counts = mask.sum(1, dtype=torch.int64)
    is_token = torch.arange(mask.shape[1], device=mask.device) < counts[:, None]
    wrong = mask != is_token
    if pad_token is not None:
        wrong |= is_token & (ids == pad_token)
    *lengths, any_wrong = torch.cat([counts, wrong.any()[None]]).tolist()
    return None if not lengths or 0 in lengths or any_wrong else lengths


def _unpacked_output(encoder: Any, state: _State, batch: PackedBatch, output: Any) -> Any:
    """The output of a packed batch, as one of the padded batch."""
    if not isinstance(output, (tuple, Mapping)):
        raise _unknown_output(encoder, type(output).__name__)
    values: dict[Any, Any] = dict(enumerate(output)) if isinstance(output, tuple) else dict(output.items())
    first = next(iter(values))
    unpacked: dict[Any, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and not _has_tokens(batch, value) and name != first:
            # What describes rows, such as BERT's pooled first tokens.
            _check_pooler(encoder, state, values[first], value, name)
            unpacked[name] = encoder.pooler(unpacked[first])
        else:
            unpacked[name] = _unpacked(encoder, batch, value)
    return tuple(unpacked.values()) if isinstance(output, tuple) else type(output)(**unpacked)


def _check_pooler(encoder: Any, state: _State, hidden: Tensor, value: Tensor, name: object) -> None:
    """Refuse a model whose output of this name is not the pooler's of the hidden states."""
    if name in state.pooled:
        return
    pooler: Any = getattr(encoder, "pooler", None)
    again = None if pooler is None else pooler(hidden)
    if again is None or again.shape != value.shape or not torch.allclose(again, value, atol=1e-3, rtol=1e-3):
        raise _unknown_output(encoder, f"{name}, which its pooler does not make of the hidden states")
    state.pooled.add(name)


def _has_tokens(batch: PackedBatch, value: Tensor) -> bool:
    """Whether a tensor is `[R, T, ...]` of a packed batch; pooled outputs have two dimensions."""
    return value.ndim > 2 and value.shape[:2] == batch.packed_shape


def _unpacked(encoder: Any, batch: PackedBatch, value: Any) -> Any:
    if isinstance(value, Tensor):
        if not _has_tokens(batch, value):
            raise _unknown_output(encoder, f"a tensor {list(value.shape)}")
        return batch.unpack(value)
    if isinstance(value, tuple):
        return tuple(_unpacked(encoder, batch, part) for part in value)
    if isinstance(value, Mapping):
        return {name: _unpacked(encoder, batch, part) for name, part in value.items()}
    return value


def _unknown_output(encoder: Any, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(encoder).__name__} returns {what}, so it is not known for each sequence; leave out unpad=True", {}
    )
