"""A mask evaluated a few row blocks at a time: no `S x S` tensor is ever held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import ShapeError
from stof.layout.head_mask import HeadMask
from stof.layout.limits import check_strip
from stof.masks.bounds import Interval

# Scores evaluated at once: bounds the memory of a build (bool and int64 temporaries of this many elements). A GPU wants
# larger strips: each one launches some 40 small kernels.
STRIP_SCORES = 2**22
STRIP_SCORES_GPU = 2**25
# Keys are evaluated or left out in aligned spans of this many: whole tiles of every width there is.
SPAN = 256

# From this many keys on, bounds of each span are computed first: with fewer keys this costs more than it saves.
ASKED_FROM = 2**10
# Spans, or groups of as many spans each, that the first call of the mask's bounds covers.
ASKED_AT_ONCE = 2**12
# Numbers of row blocks, each twice the one before, whose bounds are computed in one call.
_ASKED_DOUBLINGS = 3


def strip_scores(device: torch.device) -> int:
    return STRIP_SCORES if device.type == "cpu" else STRIP_SCORES_GPU


@dataclass(frozen=True)
class Strip:
    """Evaluated scores of some whole row blocks.

    Attributes:
        keep: bool `[n, block_m, K]`, rows past the end False; columns are those of `spans`.
        valid_rows: int64 `[n]`, rows of each block that exist.
        spans: int64 `[K / SPAN]`, which spans of SPAN keys the columns are, in order; None for all keys.
    """

    keep: Tensor
    valid_rows: Tensor
    spans: Tensor | None = None


def strips(head_mask: HeadMask, block_m: int) -> Iterator[Strip]:
    """Evaluate a mask a few blocks of `block_m` rows at a time.

    Raises:
        ShapeError: the mask evaluates to another dtype than bool.
    """
    device = head_mask.device
    row_blocks = head_mask.row_blocks(block_m)
    most = strip_scores(device)
    all_keys: Tensor | None = None
    first = 0
    while first < row_blocks:
        count = min(max(1, most // (block_m * head_mask.kv_len)), row_blocks - first)
        spans = None
        if head_mask.order is None:
            known: dict[int, Tensor | None] = {}
            more = count
            while True:
                if more not in known:
                    doubled = (min(more << doublings, row_blocks - first) for doublings in range(_ASKED_DOUBLINGS))
                    counts = list(dict.fromkeys(doubled))
                    known.update(zip(counts, _spans(head_mask, first, counts, block_m), strict=True))
                wider = known[more]
                # With few keys, take more rows at once. If the keys move along with the rows, more rows would
                # evaluate scores far from the diagonal.
                if more > count and (
                    wider is None
                    or spans is None
                    or more * block_m * len(wider) * SPAN > most
                    or (2 * len(wider) > 3 * len(spans) and count * block_m * len(spans) * SPAN >= most // 16)
                ):
                    break
                count, spans = more, wider
                if spans is None or count == row_blocks - first:
                    break
                more = min(2 * count, row_blocks - first)
        check_strip(head_mask, count * block_m, head_mask.kv_len if spans is None else len(spans) * SPAN)
        if spans is None:
            all_keys = kv = torch.arange(head_mask.kv_len, device=device) if all_keys is None else all_keys
            chosen = None
        else:
            chosen = spans.to(device)
            kv = (chosen[:, None] * SPAN + torch.arange(SPAN, device=device)).flatten()
            kv = kv[: len(kv) - max(0, (int(spans[-1]) + 1) * SPAN - head_mask.kv_len)]
        start, stop = first * block_m, min((first + count) * block_m, head_mask.q_len)
        rows = torch.arange(start, stop, device=device) if head_mask.order is None else head_mask.order[start:stop]
        evaluated = head_mask.mask.evaluate(head_mask.index(rows.view(1, 1, -1, 1), kv.view(1, 1, 1, -1)))
        if evaluated.dtype != torch.bool:
            raise ShapeError(f"{head_mask.mask!r} evaluated to {evaluated.dtype}, expected bool")
        keep = evaluated.expand(1, 1, stop - start, len(kv))[0, 0]
        if stop - start < count * block_m:
            keep = torch.nn.functional.pad(keep, (0, 0, 0, count * block_m - (stop - start)))
        starts = torch.arange(start, start + count * block_m, block_m, device=device)
        valid = (head_mask.q_len - starts).clamp(max=block_m)
        yield Strip(keep.reshape(count, block_m, len(kv)), valid, chosen)
        first += count


def _spans(head_mask: HeadMask, first: int, counts: list[int], block_m: int) -> list[Tensor | None]:
    """Which spans of SPAN keys each number of row blocks from `first` on may see, in order; None for most of them.

    At least one span each. Of many spans, groups are asked about first. Masks without tensors are asked on the host,
    which waits for no GPU.
    """
    kv_len = head_mask.kv_len
    if kv_len < ASKED_FROM:
        return [None] * len(counts)
    device = torch.device("cpu") if head_mask.is_device_independent else head_mask.device
    ends = [min((first + count) * block_m, head_mask.q_len) - 1 for count in counts]
    q_low = torch.tensor(first * block_m, device=device).view(1, 1, 1, 1)
    q = Interval(q_low, torch.tensor(ends, device=device).view(1, 1, -1, 1))
    size = SPAN
    while size * ASKED_AT_ONCE < kv_len:
        size *= ASKED_AT_ONCE
    at = torch.arange(0, kv_len, size, device=device)
    while True:
        kv = Interval(at.view(1, 1, 1, -1), (at + size - 1).clamp(max=kv_len - 1).view(1, 1, 1, -1))
        seen = ~head_mask.tile_bounds(q, kv).empty.expand(1, 1, len(ends), len(at))[0, 0]
        if size == SPAN:
            break
        size //= ASKED_AT_ONCE
        at = at[seen.any(0)]
        at = (at[:, None] + torch.arange(0, size * ASKED_AT_ONCE, size, device=device)).flatten()
        at = at[at < kv_len]
    number = torch.div(at, SPAN, rounding_mode="floor")
    seen_spans = [number[some] for some in seen]
    few = [None if len(some) * SPAN > 0.9 * kv_len else some for some in seen_spans]
    return [number.new_zeros(1) if some is not None and not len(some) else some for some in few]
