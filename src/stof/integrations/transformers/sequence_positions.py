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


def offsets_of_rows(valid: Tensor, device: torch.device) -> tuple[Tensor, list[int]] | None:
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


def offsets_of_documents(documents: Documents, device: torch.device) -> tuple[Tensor, list[int]] | None:
    """Where the sequence of each token begins, in packed rows; a sequence may have padding within.

    Returns:
        int64 `[rows, tokens]`, or `[1, tokens]` if all rows are alike, and the lengths of the sequences; None if all
        begin at 0.
    """
    offsets, lengths = [], list[int]()
    for runs in documents.runs:
        first, last, place = dict[int, int](), dict[int, int](), 0
        row = []
        for number, length in runs:
            begin = first.setdefault(number, place) if number >= 0 else place
            row += [begin] * length
            place += length
            last[number] = place
        offsets.append(row)
        lengths += [last[number] - begin for number, begin in first.items()]
    table = torch.tensor(offsets, device="cpu")
    return (table.to(device), lengths) if table.any() else None


def documents_in(mask: object) -> Documents | None:
    """The documents that a mask is intersected with."""
    if isinstance(mask, Documents):
        return mask
    parts = mask.masks if isinstance(mask, And) else ()
    return next((one for one in map(documents_in, parts) if one is not None), None)


def in_sequences(mask: Mask, offsets: Tensor, lengths: Sequence[int], packed: bool) -> Mask:
    """The mask with positions within each sequence, for queries and keys of one sequence. Distances stay.

    Args:
        mask: a sparse mask, written for one sequence.
        offsets: int64 `[B or 1, tokens]`, where in its row the sequence of each token begins.
        lengths: of the sequences.
        packed: whether rows hold several sequences, so that the number of a row says nothing.

    Raises:
        UnsupportedError: the mask depends on the length of the row, or belongs to rows, or is not evaluated score by
            score.
        ShapeError: the mask does not fit a sequence.
    """
    if not_by_distance(mask) is None:
        return mask
    if isinstance(mask, And | Or | Not | PerHead):
        return mask._with_parts([in_sequences(part, offsets, lengths, packed) for part in mask.masks])
    if not mask.grows or mask.batch != 1 or mask.heads != 1 or (packed and mask.depends_on_batch):
        raise UnsupportedError(_refusal(mask, "it depends on the length of a row, or belongs to rows or heads"), {})
    for length in set(lengths):
        mask.check(length, length)
    longest = offsets.shape[1]

    def within_sequences(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b if len(offsets) > 1 else b * 0
        # Padding before a sequence, and room of a cache behind it, count as its ends: nothing reads them.
        q, kv = ((x - offsets[row, x.clamp(max=longest - 1)]).clamp(min=0) for x in (q_idx, kv_idx))
        return mask.evaluate(Index(b, h, q, kv, longest, longest))

    zero = torch.zeros((), dtype=torch.int64, device=offsets.device)
    try:
        is_single = within_sequences(zero, zero, zero, zero).numel() == 1
    except IndexError:  # rules over tensors take indices of four dimensions
        is_single = False
    if not is_single:
        raise UnsupportedError(_refusal(mask, "it is a tensor or list of tokens in rows"), {})
    return from_function(within_sequences)


def _refusal(mask: Mask, reason: str) -> str:
    return (
        f"{mask} cannot count positions within sequences that do not begin where their rows do (packed, or padded on "
        f"the left): {reason}; pad on the right, or use another mask"
    )
