"""A mask evaluated a few row blocks at a time: no `S x S` tensor is ever held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stof.errors import ShapeError
from stof.layout.head_mask import HeadMask
from stof.layout.limits import check_strip
from stof.masks import Mask
from stof.masks.bounds import Range
from stof.masks.index import Index

# Scores evaluated at once: bounds the memory of a build (bool and int64 temporaries of this many elements). A GPU wants
# larger strips: each one launches some 40 small kernels.
STRIP_SCORES = 2**22
STRIP_SCORES_GPU = 2**25
# Keys are evaluated or left out in aligned stretches of this many: whole tiles of every width there is.
SPAN = 256

# Masks that list no spans are asked about each stretch where there are so many keys that this costs less than it saves.
ASKED_FROM = 2**13
# Stretches, or groups of as many stretches each, that one question covers where nothing is known of larger groups.
ASKED_AT_ONCE = 2**12


def strip_scores(device: torch.device) -> int:
    return STRIP_SCORES if device.type == "cpu" else STRIP_SCORES_GPU


@dataclass(frozen=True)
class Strip:
    """Evaluated scores of some whole row blocks.

    Attributes:
        keep: bool `[n, block_m, K]`, rows past the end False; columns are those of `spans`.
        valid_rows: int64 `[n]`, rows of each block that exist.
        spans: int64 `[K / SPAN]`, which stretches of SPAN keys the columns are, in order; None for all keys.
    """

    keep: Tensor
    valid_rows: Tensor
    spans: Tensor | None = None


def strips(own: HeadMask, block_m: int) -> Iterator[Strip]:
    """Evaluate a mask a few blocks of `block_m` rows at a time."""
    mask, q_len, kv_len, order, device = own.mask, own.q_len, own.kv_len, own.order, own.device
    row_blocks = own.row_blocks(block_m)
    most = strip_scores(device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    batch_index = torch.tensor([own.b], device=device)
    head_index = torch.tensor([own.h], device=device)
    corner = Index.make(zero, zero, q_len=q_len, kv_len=kv_len, b=batch_index, h=head_index)
    everything: Tensor | None = None
    first = 0
    while first < row_blocks:
        count = min(max(1, most // (block_m * kv_len)), row_blocks - first)
        spans = None
        if order is None:
            spans = _stretches(mask, first * block_m, min((first + count) * block_m, q_len), corner)
            # Where keys are few, more rows at once.
            while spans is not None and count < row_blocks - first:
                more = min(2 * count, row_blocks - first)
                wider = _stretches(mask, first * block_m, min((first + more) * block_m, q_len), corner)
                if wider is None or more * block_m * len(wider) * SPAN > most:
                    break
                # Where keys move along with the rows, more of both evaluates scores far from the diagonal.
                if 2 * len(wider) > 3 * len(spans) and count * block_m * len(spans) * SPAN >= most // 16:
                    break
                count, spans = more, wider
        start, stop = first * block_m, min((first + count) * block_m, q_len)
        check_strip(own, count * block_m, kv_len if spans is None else len(spans) * SPAN)
        if spans is None:
            everything = kv = torch.arange(kv_len, device=device) if everything is None else everything
            chosen = None
        else:
            chosen = torch.tensor(spans, device=device)
            kv = (chosen[:, None] * SPAN + torch.arange(SPAN, device=device)).flatten()
            kv = kv[: len(kv) - max(0, (spans[-1] + 1) * SPAN - kv_len)]
        rows = torch.arange(start, stop, device=device) if order is None else order[start:stop]
        index = Index.make(rows, kv, q_len=q_len, kv_len=kv_len, b=batch_index, h=head_index)
        evaluated = mask.evaluate(index)
        if evaluated.dtype != torch.bool:
            raise ShapeError(f"{mask!r} evaluated to {evaluated.dtype}, expected bool")
        keep = evaluated.expand(1, 1, stop - start, len(kv))[0, 0]
        if stop - start < count * block_m:
            keep = torch.nn.functional.pad(keep, (0, 0, 0, count * block_m - (stop - start)))
        starts = torch.arange(start, start + count * block_m, block_m, device=device)
        valid = (q_len - starts).clamp(max=block_m)
        yield Strip(keep.reshape(count, block_m, len(kv)), valid, chosen)
        first += count


def _stretches(mask: Mask, start: int, stop: int, corner: Index) -> list[int] | None:
    """Which stretches of SPAN keys queries `start` to `stop - 1` may see, at least one; None when most of them.

    `corner` is any rectangle of the problem: it knows the lengths, the sequence and the head.
    """
    kv_len = corner.kv_len
    known = mask.spans(start, stop - 1, kv_len)
    if known is not None:
        ranges = _merged(known, kv_len)
        few = sum(map(len, ranges)) * SPAN <= 0.9 * kv_len
        return (list(itertools.chain.from_iterable(ranges)) or [0]) if few else None
    if kv_len < ASKED_FROM:
        return None
    asked = _asked(mask, start, stop, corner)
    return (asked.tolist() or [0]) if len(asked) * SPAN <= 0.9 * kv_len else None


def _merged(known: list[tuple[int, int]], kv_len: int) -> list[range]:
    """The stretches that key ranges `[start, stop)` overlap: disjoint, in order."""
    out: list[range] = []
    for low, high in sorted(known):
        low, high = max(low, 0), min(high, kv_len)
        if low >= high:
            continue
        first, stop = low // SPAN, (high - 1) // SPAN + 1
        if out and first <= out[-1].stop:
            out[-1] = range(out[-1].start, max(stop, out[-1].stop))
        else:
            out.append(range(first, stop))
    return out


def _asked(mask: Mask, start: int, stop: int, corner: Index) -> Tensor:
    """The stretches that may keep something, in order; of many, groups are asked about first."""
    kv_len = corner.kv_len
    rows = Range(corner.q - corner.q + start, corner.q - corner.q + (stop - 1))
    size = SPAN
    while size * ASKED_AT_ONCE < kv_len:
        size *= ASKED_AT_ONCE
    first = torch.arange(0, kv_len, size, device=corner.device)
    while True:
        columns = Range(first.view(1, 1, 1, -1), (first + size - 1).clamp(max=kv_len - 1).view(1, 1, 1, -1))
        nothing = mask.over(replace(corner, q=rows, kv=columns)).nothing  # type: ignore[arg-type]
        first = first[~nothing.expand(1, 1, 1, len(first)).flatten()]
        if size == SPAN:
            return torch.div(first, SPAN, rounding_mode="floor")
        size //= ASKED_AT_ONCE
        first = (first[:, None] + torch.arange(0, size * ASKED_AT_ONCE, size, device=first.device)).flatten()
        first = first[first < kv_len]
