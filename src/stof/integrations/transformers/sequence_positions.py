"""Sparse masks whose positions are those within each sequence, where sequences do not begin where their rows do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stof.errors import UnsupportedError
from stof.masks import Mask, from_function
from stof.masks.aligned import not_by_distance
from stof.masks.compose import And, Not, Or
from stof.masks.index import Index
from stof.masks.per_head import PerHead
from stof.masks.rules import Documents


def begins_of_rows(valid: Tensor, device: torch.device) -> tuple[Tensor, list[int]] | None:
    """Where the sequence of each token begins, in rows that are padded on the left.

    Args:
        valid: bool `[B, tokens]`, false at padding.
        device: of the result.

    Returns:
        int64 `[B, tokens]`, and the lengths of the sequences; None if all begin at 0. Waits for the device.
    """
    first = valid.int().argmax(1)
    if not first.any():
        return None
    return first.to(device)[:, None].expand(valid.shape).contiguous(), valid.sum(1).tolist()


def begins_of_documents(documents: Documents, device: torch.device) -> tuple[Tensor, list[int]] | None:
    """The same for packed rows: int64 `[rows, tokens]`, or `[1, tokens]` if all rows are alike."""
    begins, lengths = [], list[int]()
    for runs in documents.runs:
        counts = torch.tensor([length for _, length in runs], device="cpu")
        begins.append(torch.repeat_interleave(counts.cumsum(0) - counts, counts))
        lengths += [length for number, length in runs if number >= 0]
    begin = torch.stack(begins)
    return (begin.to(device), lengths) if begin.any() else None


def in_sequences(mask: Mask, begins: Tensor, lengths: Sequence[int]) -> Mask:
    """The mask with positions within each sequence, for queries and keys of one sequence. Distances stay.

    Args:
        mask: a sparse mask, written for one sequence.
        begins: int64 `[B or 1, tokens]`, where in its row the sequence of each token begins.
        lengths: of the sequences.

    Raises:
        UnsupportedError: the mask depends on the length of the row.
        ShapeError: the mask does not fit a sequence.
    """
    if not_by_distance(mask) is None:
        return mask
    if isinstance(mask, And | Or | Not | PerHead):
        return mask._with_parts([in_sequences(part, begins, lengths) for part in mask.masks])
    if not mask.grows:
        raise UnsupportedError(
            f"{mask} depends on the length of a row, and the sequences of this batch begin at other positions than 0 "
            "(packed sequences, or padding on the left); pad on the right, or use a mask without random blocks",
            {},
        )
    for length in set(lengths):
        mask.check(length, length)
    longest = begins.shape[1]

    def within_sequences(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b if len(begins) > 1 else b * 0
        # Padding before a sequence, and room of a cache behind it, count as its ends: nothing reads them.
        q, kv = ((x - begins[row, x.clamp(max=longest - 1)]).clamp(min=0) for x in (q_idx, kv_idx))
        return mask.evaluate(Index(b, h, q, kv, longest, longest))

    return from_function(within_sequences)
