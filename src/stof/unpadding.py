"""Padded batches without their padding: where each token goes, and the document mask that keeps sequences apart."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from stof.errors import ArgumentError, DtypeError, ShapeError, shown
from stof.masks import Mask, documents


@dataclass(frozen=True, eq=False)
class Unpadding:
    """The way from a padded batch `[B, S]` to its `N` real tokens in `R` rows of `T`, and back.

    Attributes:
        position_ids: int64 `[R, T]`, restarting in every sequence.
        mask: document mask of the packed rows.
        lengths: tokens of each sequence.
        padded_shape: `(B, S)`.
        source: int64 `[N]`, place of each token in the flattened padded batch.
        target: int64 `[N]`, its place in the flattened packed rows.
    """

    position_ids: Tensor
    mask: Mask
    lengths: tuple[int, ...]
    padded_shape: tuple[int, int]
    source: Tensor
    target: Tensor

    @property
    def tokens(self) -> int:
        """Number of real tokens, `N`."""
        return sum(self.lengths)

    @property
    def packed_shape(self) -> tuple[int, int]:
        """`(R, T)`."""
        rows, width = self.position_ids.shape
        return rows, width

    def pack_tokens(self, values: Tensor, fill: float = 0) -> Tensor:
        """Per-token values `[B, S, ...]` in packed order `[R, T, ...]`; `fill` where short rows end."""
        if tuple(values.shape[:2]) != self.padded_shape:
            raise ShapeError(f"per-token values are {list(self.padded_shape)} + [...], got {list(values.shape)}")
        if self.packed_shape == (1, self.tokens):
            return values.flatten(0, 1).index_select(0, self.source.to(values.device))[None]
        return _moved(values, self.source, self.target, self.packed_shape, fill)

    def unpack(self, values: Tensor, fill: float = 0) -> Tensor:
        """What a model returned, `[R, T, ...]`, back in the padded batch `[B, S, ...]`; `fill` at padding."""
        if not isinstance(values, Tensor):
            raise DtypeError(f"packed values are a torch.Tensor, got {type(values).__name__}")
        if tuple(values.shape[:2]) != self.packed_shape:
            raise ShapeError(
                f"packed values are {list(self.packed_shape)} + [...], got {list(values.shape)}; pass what the "
                "model returned for these rows, e.g. outputs.last_hidden_state"
            )
        return _moved(values, self.target, self.source, self.padded_shape, fill)


def unpad(valid: Tensor, *, max_tokens: int | None = None, first_position: int = 0) -> Unpadding:
    """Where the real tokens of a padded batch go. Reads the lengths on the host.

    Args:
        valid: bool `[B, S]`, true at real tokens, wherever the padding is.
        max_tokens: bound on the tokens of a row; sequences are then dealt over several rows, longest first, and
            rows end in padding. None packs everything in one row without any.
        first_position: position of a sequence's first token.

    Raises:
        ShapeError: a batch without tokens.
        ArgumentError: `max_tokens` below the longest sequence, a negative `first_position`.
    """
    if isinstance(first_position, bool) or not isinstance(first_position, int) or first_position < 0:
        raise ArgumentError(f"first_position is an int >= 0, got {shown(first_position)}")
    counts = valid.sum(1)
    lengths: list[int] = counts.tolist()  # waits for the device; nothing below does in one row
    if not any(lengths):
        raise ShapeError("the attention mask marks no token; there is nothing to pack")
    rows = _rows_of_sequences(lengths, max_tokens)
    width = max(sum(lengths[sequence] for sequence in row) for row in rows)
    tokens = sum(lengths)
    source = torch.nonzero_static(valid.flatten(), size=tokens)[:, 0]  # sequences in order, tokens in order
    target = torch.arange(tokens, device=valid.device)
    position = (valid.cumsum(1) - 1).flatten().index_select(0, source)
    shape = (len(rows), width)
    position_ids = (position + first_position)[None]
    if len(rows) > 1:
        starts = [0] * len(lengths)
        for number, row in enumerate(rows):
            before = accumulate((lengths[sequence] for sequence in row), initial=number * width)
            for sequence, start in zip(row, before, strict=False):
                starts[sequence] = start
        target = position + torch.repeat_interleave(
            torch.tensor(starts, device=valid.device), counts, output_size=tokens
        )
        position_ids = position.new_zeros(shape).view(-1).index_put_((target,), position_ids[0]).view(shape)
    return Unpadding(
        position_ids=position_ids,
        mask=_documents([[lengths[sequence] for sequence in row] for row in rows], width),
        lengths=tuple(lengths),
        padded_shape=(int(valid.shape[0]), int(valid.shape[1])),
        source=source,
        target=target,
    )


def _rows_of_sequences(lengths: list[int], max_tokens: int | None) -> list[list[int]]:
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
    return rows if len(rows) > 1 else [present]  # tokens of one row keep their order


def _documents(rows: list[list[int]], width: int) -> Mask:
    """The document mask of rows of sequence lengths; rows shorter than `width` end in padding."""
    if len(rows) == 1:
        return documents(cu_seqlens=list(accumulate(rows[0], initial=0)))
    ids = [[*range(len(row)), -1] for row in rows]
    return documents(ids, cu_seqlens=[[*accumulate(row, initial=0), width] for row in rows])


def _moved(values: Tensor, taken: Tensor, put: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    """Tokens `taken` of `values [a, b, ...]` at places `put` of a new `[*shape, ...]`."""
    rest = values.shape[2:]
    out = values.new_full((shape[0] * shape[1], *rest), fill)
    out.index_copy_(0, put.to(values.device), values.flatten(0, 1).index_select(0, taken.to(values.device)))
    return out.view(*shape, *rest)
