"""The host's part of counting tiles on the device: a kernel for every height of row blocks, and one wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.layout.device.source import on_device, source_of
from stof.masks.base import Mask

# Programs of a kernel; masks of more are counted where their spans say.
_MOST = 2**22
# Columns of a program, and kinds of slabs: powers of two up to them.
_COLUMNS = 256
_KINDS = _COLUMNS.bit_length()
# Rows at once at most: a thread has registers for 32 scores.
_ROWS = 16


@dataclass(frozen=True)
class SlabCounts:
    """Slabs of every power of two columns, and scores.

    Attributes:
        slabs: by rows of a row block, int32 `[P, row blocks, 9, 2]`: needed and full slabs of 1, 2, .. 256 columns.
        kept: int32 `[P, q_len]`, keys each row keeps. All on the CPU.
    """

    slabs: dict[int, Tensor]
    kept: Tensor


def device_counts(
    mask: Mask,
    q_len: int,
    kv_len: int,
    heights: Sequence[int],
    mask_heads: int,
    entries: list[int],
    device: torch.device,
) -> SlabCounts | None:
    """Slabs that keep something, and everything, in row blocks of these heights; None where no kernel serves the mask.

    Args:
        mask, q_len, kv_len: as for `build_layout`.
        heights: of row blocks, at least one.
        mask_heads: heads of the mask.
        entries: `batch entry * mask_heads + head` of the masks to count.
        device: where to count.
    """
    return on_device(device, lambda device: _counted(mask, q_len, kv_len, heights, mask_heads, entries, device))


def _counted(
    mask: Mask,
    q_len: int,
    kv_len: int,
    heights: Sequence[int],
    mask_heads: int,
    entries: list[int],
    device: torch.device,
) -> SlabCounts | None:
    row_blocks = [-(-q_len // height) for height in heights]
    columns, patterns = -(-kv_len // _COLUMNS), len(entries)
    if max(row_blocks) * columns * patterns > _MOST:
        return None
    source = source_of(mask, q_len, kv_len, mask_heads, entries, device)
    if source is None:
        return None

    from stof.layout.device.counting import count_slabs
    from stof.layout.device.launch import launch

    places = [patterns * blocks * _KINDS * 2 for blocks in row_blocks]
    counted = sum(places) + patterns * q_len
    state, letter, first = source.prepared(counted, 0, 0, device)
    tensors = (state if source.dense is None else source.dense, state)
    for n, (height, blocks) in enumerate(zip(heights, row_blocks, strict=True)):
        # Every pass sees every score: the first counts those of rows.
        first_row = -1 if n else sum(places)
        sizes = (
            *source.strides,
            source.heads,
            q_len,
            kv_len,
            blocks,
            columns,
            patterns,
            first,
            first + source.programs.first,
        )
        constants = (source.kind, height, _COLUMNS, min(source.rows_at_once(height, _COLUMNS), _ROWS))
        numbers = (*sizes, sum(places[:n]), first_row)
        launch(count_slabs, patterns * blocks * columns, tensors, numbers, constants, device=device)
    counts = state[:counted].cpu()
    letter.read(0)
    *parts, kept = counts.split([*places, patterns * q_len])
    shaped = {
        height: part.view(patterns, blocks, _KINDS, 2)
        for height, blocks, part in zip(heights, row_blocks, parts, strict=True)
    }
    return SlabCounts(shaped, kept.view(patterns, q_len))
