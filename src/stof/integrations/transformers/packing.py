"""Padded batches without the padding: all tokens in one row, sequences kept apart by a document mask."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError, DtypeError, ShapeError, shown
from stof.integrations.transformers.model_mask import ModelMask
from stof.masks import Mask, documents


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A padded batch `[B, S]` with its padding removed; `N` real tokens in `R` rows of `T`.

    Attributes:
        input_ids: `[R, T]` (`[1, N]` unless `max_tokens` asked for several rows).
        position_ids: int64 `[R, T]`, restarting in every sequence.
        mask: document mask of the packed rows; a causal model intersects it with its own.
        extras: other per-token tensors, packed alike, under the names they came with.
        lengths: tokens of each sequence.
        padded_shape: `(B, S)`.
        source: int64 `[N]`, place of each token in the flattened padded batch.
        target: int64 `[N]`, its place in the flattened packed rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Mask
    extras: dict[str, Tensor]
    lengths: tuple[int, ...]
    padded_shape: tuple[int, int]
    source: Tensor
    target: Tensor

    @property
    def tokens(self) -> int:
        """Number of real tokens, `N`."""
        return sum(self.lengths)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a model with `attn_implementation="stof"`: `model(**packed.model_inputs())`.

        Other implementations cannot read the mask and say so. Outputs that a model takes from the first token of
        a row (BERT's `pooler_output`) describe the first sequence only: pool what `unpack` returns instead.
        """
        rows, width = self.input_ids.shape
        attention_mask = ModelMask(self.mask, (rows, 1, width, width), includes_model_mask=False)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": attention_mask,
            **self.extras,
        }

    def pack_tokens(self, values: Tensor, fill: float = 0) -> Tensor:
        """Per-token values `[B, S, ...]` in packed order `[R, T, ...]`; `fill` where short rows end."""
        if tuple(values.shape[:2]) != self.padded_shape:
            raise ShapeError(f"per-token values are {list(self.padded_shape)} + [...], got {list(values.shape)}")
        return _moved(values, self.source, self.target, tuple(self.input_ids.shape), fill)

    def unpack(self, values: Tensor, fill: float = 0) -> Tensor:
        """What a model returned, `[R, T, ...]`, back in the padded batch `[B, S, ...]`; `fill` at padding."""
        if not isinstance(values, Tensor):
            raise DtypeError(f"packed values are a torch.Tensor, got {type(values).__name__}")
        if tuple(values.shape[:2]) != tuple(self.input_ids.shape):
            raise ShapeError(
                f"packed values are {list(self.input_ids.shape)} + [...], got {list(values.shape)}; pass what the "
                "model returned for these rows, e.g. outputs.last_hidden_state"
            )
        return _moved(values, self.target, self.source, self.padded_shape, fill)


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_tokens: int | None = None,
    first_position: int = 0,
    **per_token: Tensor,
) -> PackedBatch:
    """Remove the padding of a batch: its tokens in one row, each sequence seeing itself only.

        packed = pack(**tokenizer(texts, padding=True, return_tensors="pt"))
        hidden = packed.unpack(model(**packed.model_inputs()).last_hidden_state)   # [B, S, D], zeros at padding

    Results equal those of the padded batch for right padding; sequences padded on the left get positions from 0,
    as they would alone. A sparse mask of `sparsify` counts positions from the start of the row, so with one that does
    not depend on distances alone, such as `sink_tokens`, results differ. Reads the lengths on the host.

    The model has to keep sequences apart, which stof checks by running it before its first packed call: on one sequence
    repeated in a row of at most 512 tokens, with the embeddings of one copy NaN. The call raises `UnsupportedError` if

    - another copy's outputs are NaN: layers besides attention mix tokens (recurrent, convolution and pooling layers,
      embeddings that read neighbours), or a decoder's attention lacks the packed mask;
    - outputs of the first and the last copy differ by more than rounding: positions are counted from the start of the
      row, or experts have a limited capacity;
    - the model cannot be run so, or returns nothing with one entry per token.

    The check runs once for each set of arguments, and again where rows are twice as long; compiled models are checked
    while they are traced. It covers the model and the parts in it that are a `PreTrainedModel`, in evaluation mode,
    without hooks but those of torch and transformers, and changes no random state, mode or cache. It does not cover
    layers and hooks that are added later (`enable` has the model checked again), code around the model, and layers that
    mix tokens in longer rows only. Calls that bypass the model, such as `model.forward`, are refused.

    `position_ids` that begin anew within a row, given without this function, are treated and checked alike. A token
    whose position is not above that of the token before it begins a sequence; padding is skipped. Compiled code and
    CUDA graphs cannot read positions: there, calls with `position_ids` evaluate a mask of every score, calls with a
    cache are not checked, and models that do not keep sequences apart refuse `position_ids`.

    Args:
        input_ids: int `[B, S]`.
        attention_mask: int or bool `[B, S]`, nonzero at real tokens, wherever the padding is.
        max_tokens: bound on the tokens of a row; sequences are then dealt over several rows, longest first, and
            rows end in padding. None packs everything in one row without any.
        first_position: position of a sequence's first token; RoBERTa counts from `padding_idx + 1`.
        per_token: more tensors `[B, S, ...]` to pack alike, such as `token_type_ids`.

    Raises:
        ShapeError: tensors that are not `[B, S]`, or a batch without tokens.
        DtypeError: an `attention_mask` of floats.
        ArgumentError: `max_tokens` below the longest sequence, a negative `first_position`.
    """
    valid = _checked(input_ids, attention_mask, per_token)
    if isinstance(first_position, bool) or not isinstance(first_position, int) or first_position < 0:
        raise ArgumentError(f"first_position is an int >= 0, got {shown(first_position)}")
    lengths: list[int] = valid.sum(1).tolist()
    if not any(lengths):
        raise ShapeError("the attention mask marks no token; there is nothing to pack")
    rows = _deal(lengths, max_tokens)
    width = max(sum(lengths[sequence] for sequence in row) for row in rows)
    source = valid.flatten().nonzero()[:, 0]  # sequences in order, tokens in order
    starts = [0] * len(lengths)
    for number, row in enumerate(rows):
        before = accumulate((lengths[sequence] for sequence in row), initial=number * width)
        for sequence, start in zip(row, before, strict=False):
            starts[sequence] = start
    counts = torch.tensor(lengths, device=source.device)
    position = torch.arange(len(source), device=source.device) - _repeated(
        counts.cumsum(0) - counts, counts, len(source)
    )
    target = _repeated(torch.tensor(starts, device=source.device), counts, len(source)) + position
    shape = (len(rows), width)
    positions = position.new_zeros(shape).view(-1).index_put_((target,), position + first_position).view(shape)
    return PackedBatch(
        input_ids=_moved(input_ids, source, target, shape, 0),
        position_ids=positions,
        mask=_documents([[lengths[sequence] for sequence in row] for row in rows], width),
        extras={name: _moved(values, source, target, shape, 0) for name, values in per_token.items()},
        lengths=tuple(lengths),
        padded_shape=(int(input_ids.shape[0]), int(input_ids.shape[1])),
        source=source,
        target=target,
    )


def _checked(input_ids: Tensor, attention_mask: Tensor, per_token: dict[str, Tensor]) -> Tensor:
    """Bool `[B, S]`, true at real tokens."""
    for name, values in {"input_ids": input_ids, "attention_mask": attention_mask, **per_token}.items():
        if not isinstance(values, Tensor):
            raise DtypeError(f"{name} is a torch.Tensor, got {type(values).__name__}")
    if input_ids.ndim != 2:
        raise ShapeError(f"input_ids is [B, S], got {list(input_ids.shape)}")
    if attention_mask.is_floating_point():
        raise DtypeError(f"attention_mask is an int or bool tensor, nonzero at real tokens, got {attention_mask.dtype}")
    for name, values in {"attention_mask": attention_mask, **per_token}.items():
        if values.shape[:2] != input_ids.shape or (name == "attention_mask" and values.ndim != 2):
            raise ShapeError(
                f"{name} has one value per token of input_ids {list(input_ids.shape)}, got {list(values.shape)}"
            )
    return attention_mask != 0


def _deal(lengths: list[int], max_tokens: int | None) -> list[list[int]]:
    """Sequences of each row; empty sequences take part in none. Several rows: first fit, longest first."""
    present = [sequence for sequence, length in enumerate(lengths) if length]
    if max_tokens is None:
        return [present]
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
        raise ArgumentError(f"max_tokens is an int or None, got {shown(max_tokens)}")
    if max_tokens < max(lengths):
        raise ArgumentError(
            f"max_tokens is at least the longest sequence, {max(lengths)}, got {max_tokens}; "
            "raise it, or truncate the sequences"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    for sequence in sorted(present, key=lambda s: -lengths[s]):
        row = next((n for n, free in enumerate(room) if free >= lengths[sequence]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max_tokens)
        rows[row].append(sequence)
        room[row] -= lengths[sequence]
    return rows


def _documents(rows: list[list[int]], width: int) -> Mask:
    """The document mask of rows of sequence lengths; rows shorter than `width` end in padding."""
    if len(rows) == 1:
        return documents(cu_seqlens=list(accumulate(rows[0], initial=0)))
    ids = [[number for number, length in enumerate(row) for _ in range(length)] for row in rows]
    return documents([row + [-1] * (width - len(row)) for row in ids])


def _repeated(values: Tensor, counts: Tensor, total: int) -> Tensor:
    return torch.repeat_interleave(values, counts, output_size=total)


def _moved(values: Tensor, taken: Tensor, put: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    """Tokens `taken` of `values [a, b, ...]` at places `put` of a new `[*shape, ...]`."""
    rest = values.shape[2:]
    out = values.new_full((shape[0] * shape[1], *rest), fill)
    out.index_copy_(0, put.to(values.device), values.flatten(0, 1).index_select(0, taken.to(values.device)))
    return out.view(*shape, *rest)
