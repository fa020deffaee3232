"""The host's part of counting tiles on the device: a kernel for every height of row blocks, and one wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.layout.bitmaps import unpack
from stof.layout.fill.mask_input import Prepared, Source, on_device, source_of
from stof.layout.head_mask import HeadMask
from stof.masks import Mask

# Most thread blocks of a kernel; larger masks are counted strip by strip.
_MOST = 2**22
# Columns of a thread block, and kinds of slabs: powers of two up to them.
_COLUMNS = 256
_KINDS = _COLUMNS.bit_length()
# Bits unpacked at once: bounds memory.
_UNPACKED = 2**24
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


@on_device
def device_counts(
    mask: Mask,
    q_len: int,
    kv_len: int,
    heights: Sequence[int],
    mask_heads: int,
    entries: list[int],
    *,
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
    row_blocks = [-(-q_len // height) for height in heights]
    columns, patterns = -(-kv_len // _COLUMNS), len(entries)
    if max(row_blocks) * columns * patterns > _MOST:
        return None
    source = source_of(mask, q_len, kv_len, mask_heads, entries, device)
    if source is None:
        return None

    places = [patterns * blocks * _KINDS * 2 for blocks in row_blocks]
    counted = sum(places) + patterns * q_len
    prepared = source.prepared(counted, 0, 0, device)
    for n, height in enumerate(heights):
        # Every pass sees every score: the first counts those of rows.
        first_row = -1 if n else sum(places)
        _launch(source, prepared, q_len, kv_len, height, (sum(places[:n]), first_row, -1))
    counts = prepared.state[:counted].cpu()
    prepared.mailbox.read(0)
    *parts, kept = counts.split([*places, patterns * q_len])
    shaped = {
        height: part.view(patterns, blocks, _KINDS, 2)
        for height, blocks, part in zip(heights, row_blocks, parts, strict=True)
    }
    return SlabCounts(shaped, kept.view(patterns, q_len))


def device_columns(head_mask: HeadMask, height: int) -> tuple[Tensor, Tensor] | None:
    """Columns that row blocks of `height` rows see; None where no kernel serves the mask.

    Returns:
        bool `[row blocks, kv_len]` twice: whether some row of the block keeps the key, and whether every row does.
    """
    return _columns(head_mask, height, device=head_mask.device)


@on_device
def _columns(head_mask: HeadMask, height: int, *, device: torch.device) -> tuple[Tensor, Tensor] | None:
    mask, q_len, kv_len, h = head_mask.mask, head_mask.q_len, head_mask.kv_len, head_mask.h
    row_blocks, columns = head_mask.row_blocks(height), -(-kv_len // _COLUMNS)
    if row_blocks * columns > _MOST:
        return None
    # A dense mask numbers its entries by its heads; other masks need a number that `divmod` maps to (b, h).
    heads = h + 1 if mask.as_tensor(q_len, kv_len) is None else mask.heads
    source = source_of(mask, q_len, kv_len, heads, [head_mask.b * heads + h], device)
    if source is None:
        return None
    counted, words = row_blocks * _KINDS * 2, 2 * row_blocks * columns * (_COLUMNS // 32)
    prepared = source.prepared(counted + words, 0, 0, device)
    _launch(source, prepared, q_len, kv_len, height, (0, -1, counted))
    packed = prepared.state[counted : counted + words].view(2 * row_blocks, -1)
    pieces = [unpack(piece, kv_len) for piece in packed.split(max(1, _UNPACKED // kv_len))]
    some, every = torch.cat(pieces).view(2, row_blocks, kv_len)
    prepared.mailbox.wait(0, device)
    prepared.mailbox.read(0)
    return some, every


def _launch(
    source: Source, prepared: Prepared, q_len: int, kv_len: int, height: int, places: tuple[int, int, int]
) -> None:
    """Count in row blocks of one height; `places` are numbers of `count_slabs`."""
    from stof.layout.fill.slab_kernel import count_slabs
    from stof.runtime.launch import launch

    row_blocks, columns = -(-q_len // height), -(-kv_len // _COLUMNS)
    state = prepared.state
    tensors = (state if source.dense is None else source.dense, state)
    sizes = (
        *source.strides,
        source.heads,
        q_len,
        kv_len,
        row_blocks,
        columns,
        source.patterns,
        prepared.first,
    )
    constants = (source.kind, _COLUMNS, source.rows_at_once(_ROWS, _COLUMNS))
    programs = source.patterns * row_blocks * columns
    launch(count_slabs, programs, tensors, (*sizes, *places, height), constants, device=state.device)
