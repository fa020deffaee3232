"""Mask to layout, one strip of row blocks at a time: no `S x S` tensor is ever held.

Vectorised torch throughout, so it runs where the mask's tensors are: CPU or GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.layout import bitmaps as bits
from stof.layout.builders.closed_form import tiles_of, tiles_of_dense
from stof.layout.builders.slabs import Pattern, Slabs, in_slabs, slab_tiles
from stof.layout.builders.strips import SPAN, STRIP_SCORES, Strip, strip_scores, strips
from stof.layout.compaction import compacted_tiles
from stof.layout.config import LayoutConfig
from stof.layout.fill.layouts import device_layout
from stof.layout.head_mask import HeadMask
from stof.layout.layout import Layout, gathered_row
from stof.layout.limits import check_numbers, check_tiles
from stof.masks import Index, Mask
from stof.masks.base import check_lengths, check_sizes

# Scores of a mask up to which evaluating all is faster than asking which of its tiles are empty or full.
_FEW_SCORES = 2**18


def build_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    config: LayoutConfig | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
    row_order: Tensor | None = None,
) -> Layout:
    """Compile `mask` for one pair of lengths.

    Args:
        mask: what to keep.
        q_len, kv_len: lengths; they may differ.
        config: block sizes and gathering.
        batch, heads: sizes of the call, for masks that depend on them.
        device: where to evaluate the mask and keep the layout.
        row_order: int tensor `[q_len]`, a permutation that says which original row stands at each position;
            like rows side by side make denser tiles (see `stof.layout.orders.named`).

    Raises:
        ShapeError: the mask does not fit the lengths, batch or heads, or one of them is below 1.
        ArgumentError: `row_order` is not a permutation.
        TooLargeError: the layout takes more memory than there is.
    """
    config = LayoutConfig() if config is None else config
    check_lengths(q_len, kv_len)
    check_sizes(batch, heads)
    mask.check(q_len, kv_len)
    mask_batch, mask_heads = mask.dims(batch, heads, device)
    order = checked_order(row_order, q_len, device)
    check_tiles(HeadMask(mask, q_len, kv_len, 0, 0, order, torch.device(device)), config)
    if order is None and torch.device(device).type == "cuda":
        dims = (mask_batch, mask_heads)
        layout = device_layout(mask, q_len, kv_len, config, dims, device=torch.device(device))
        if layout is not None:
            return layout
    numbers = mask.pattern_ids(mask_batch, mask_heads).expand(mask_batch, mask_heads)
    if order is None and torch.device(device).type == "cpu":
        layout = _of_small_masks(mask, q_len, kv_len, config, numbers)
        if layout is not None:
            return layout
    distinct: list[Pattern] = []
    pattern_of = torch.empty(mask_batch, mask_heads, dtype=torch.int32, device="cpu")
    known: dict[int, int] = {}
    for at, number in enumerate(numbers.flatten().tolist()):
        b, h = divmod(at, mask_heads)
        if number not in known:
            built = build_pattern(HeadMask(mask, q_len, kv_len, b, h, order, torch.device(device)), config)
            known[number] = next((n for n, other in enumerate(distinct) if other.equals(built)), len(distinct))
            if known[number] == len(distinct):
                distinct.append(built)
        pattern_of[b, h] = known[number]
    return assemble(distinct, pattern_of.to(device), q_len, kv_len, config, order)


def _of_small_masks(mask: Mask, q_len: int, kv_len: int, config: LayoutConfig, numbers: Tensor) -> Layout | None:
    """The layout of several masks of few scores, which are evaluated together; None for others.

    Args:
        numbers: `mask.pattern_ids` of all batch entries and heads.
    """
    if q_len * kv_len > _FEW_SCORES or config.compact_columns or numbers.numel() == 1:
        return None
    ids = numbers.flatten().tolist()
    known = {number: place for place, number in enumerate(dict.fromkeys(ids))}
    first = [divmod(ids.index(number), numbers.shape[1]) for number in known]
    b, h = (sorted({place[dim] for place in first}) for dim in (0, 1))
    if len(known) == 1 or len(b) * len(h) > len(known) or len(known) * q_len * kv_len > STRIP_SCORES:
        return None
    at = (torch.tensor(b, device="cpu"), torch.tensor(h, device="cpu"))
    q, kv = (torch.arange(n, device="cpu") for n in (q_len, kv_len))
    keep = mask.evaluate(Index.make(q, kv, q_len=q_len, kv_len=kv_len, b=at[0], h=at[1]))
    if keep.dtype != torch.bool:
        return None
    keep = keep.expand(len(b), len(h), q_len, kv_len)
    distinct: dict[bytes, int] = {}
    pattern = [
        distinct.setdefault(np.packbits(keep[b.index(one), h.index(other)].numpy()).tobytes(), len(distinct))
        for one, other in first
    ]
    kept = [first[pattern.index(number)] for number in range(len(distinct))]
    scores = torch.stack([keep[b.index(one), h.index(other)] for one, other in kept])
    tiles = Pattern(*tiles_of_dense(scores, config.contiguous()))
    if config.slab is not None:
        tiles = in_slabs(tiles, q_len, config)
    which = torch.tensor([pattern[known[number]] for number in ids], dtype=torch.int32, device="cpu")
    return assemble([tiles], which.view(numbers.shape), q_len, kv_len, config, None)


def checked_order(row_order: Tensor | None, q_len: int, device: torch.device | str) -> Tensor | None:
    if row_order is None:
        return None
    if not isinstance(row_order, Tensor):
        raise ArgumentError(f"row_order is an integer tensor [{q_len}], got {type(row_order).__name__}")
    if row_order.dtype not in (torch.int32, torch.int64) or row_order.shape != (q_len,):
        raise ArgumentError(f"row_order is an integer tensor [{q_len}], got {row_order.dtype} {list(row_order.shape)}")
    row_order = row_order.to(device=device, dtype=torch.int64)
    if not torch.equal(row_order.sort().values, torch.arange(q_len, device=device)):
        raise ArgumentError("row_order is not a permutation of 0 .. q_len - 1")
    return row_order


def build_pattern(head_mask: HeadMask, config: LayoutConfig) -> Pattern:
    """Tiles of a mask: in closed form where it can be asked for whole tiles, else strip by strip."""
    if config.compact_columns:
        tiles = compacted_tiles(head_mask, config)
        if tiles is not None:
            return Pattern(*tiles)
        # Without such columns tiles are aligned and contiguous, their columns one by one here.
        plain = build_pattern(head_mask, config.contiguous())
        columns = plain.columns + torch.arange(config.block_n, device=plain.columns.device)
        return replace(plain, columns=torch.where(columns < head_mask.kv_len, columns, -1))
    tiles = tiles_of(head_mask, config.contiguous())
    if tiles is not None:
        plain = Pattern(*tiles)
        return plain if config.slab is None else in_slabs(plain, head_mask.q_len, config)
    return Pattern.join([_compile_strip(strip, config) for strip in strips(head_mask, config.block_m)])


def _compile_strip(strip: Strip, config: LayoutConfig) -> Pattern:
    """Choose and pack the tiles of some row blocks (contiguous tiles are slabs as wide as the tile)."""
    keep = strip.keep
    count, _block_m, kv_len = keep.shape
    slab = config.slab_columns
    kept = keep.sum(1, dtype=torch.int32)  # [n, kv_len] kept scores of each column
    slabs = -(-kv_len // slab)
    kept = torch.nn.functional.pad(kept, (0, slabs * slab - kv_len)).view(count, slabs, slab)
    needed = (kept > 0).any(-1)  # [n, slabs]
    full = (kept == strip.valid_rows.view(-1, 1, 1)).all(-1)

    block, number = needed.nonzero(as_tuple=True)
    slabs_needed = Slabs(block, number * slab, full[block, number])
    chosen = slab_tiles(slabs_needed, count, config)
    columns, partial = chosen.columns(slabs_needed), chosen.partial
    bitmaps = _bitmaps(keep, chosen.owner[partial], columns[partial], config)
    if strip.spans is not None:
        span = strip.spans[torch.div(columns.clamp(min=0), SPAN, rounding_mode="floor")]
        columns = torch.where(columns < 0, columns, span * SPAN + torch.remainder(columns, SPAN))
    return Pattern(chosen.tile_count, chosen.partial_count, columns, partial, bitmaps)


def _bitmaps(keep: Tensor, owner: Tensor, columns: Tensor, config: LayoutConfig) -> Tensor:
    """Packed bits `[t, block_m, words]` of the tiles with these slabs, in pieces that bound memory."""
    count, block_m, kv_len = keep.shape
    words = bits.words(config.block_n)
    out = torch.empty(len(owner), block_m, words, dtype=torch.int32, device=keep.device)
    step = max(1, strip_scores(keep.device) // (block_m * config.block_n))
    padded = torch.nn.functional.pad(keep, (0, -kv_len % config.slab_columns))
    slabbed = padded.view(count, block_m, -1, config.slab_columns)
    for start in range(0, len(owner), step):
        slots = columns[start : start + step]
        number = torch.div(slots.clamp(min=0), config.slab_columns, rounding_mode="floor")
        # [t, slabs, block_m, slab]: advanced indices around a slice move to the front
        picked = slabbed[owner[start : start + step, None], :, number]
        picked = picked & (slots >= 0)[:, :, None, None]
        out[start : start + step] = bits.pack(picked.transpose(1, 2).flatten(2))
    return out


def in_columns(layout: Layout) -> Layout:
    """The layout of the same mask with columns gathered one by one, from one of contiguous tiles."""
    config = replace(layout.config, slab=1)
    partial = layout.tile_bitmap >= 0
    plain = Pattern(
        layout.row_block_ptr.diff().long(),
        layout.partial_count.long(),
        layout.tile_base[:, None].long(),
        partial,
        layout.bitmaps[layout.tile_bitmap[partial].long()],
    )
    gathered = in_slabs(plain, layout.q_len, config)
    columns = assemble([gathered], layout.pattern_of, layout.q_len, layout.kv_len, config, None)
    return replace(columns, row_order=layout.row_order)


def assemble(
    patterns: list[Pattern],
    pattern_of: Tensor,
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    order: Tensor | None,
) -> Layout:
    """A layout of the distinct masks."""
    joined = Pattern.join(patterns)
    bitmaps, number = deduplicate(joined.bitmaps)
    return pack_layout(joined, bitmaps, number, pattern_of, q_len, kv_len, config, order)


def pack_layout(
    joined: Pattern,
    bitmaps: Tensor,
    number: Tensor,
    pattern_of: Tensor,
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    order: Tensor | None,
) -> Layout:
    """The same from the tiles of all masks, one after the other, and the number of each partial tile's bitmap."""
    check_numbers(config, len(joined.partial), len(bitmaps), bitmaps.device)
    bitmaps, number = _by_first_use(bitmaps, number)
    partial_count = joined.partial_count
    pointers = torch.nn.functional.pad(joined.tile_count.cumsum(0), (1, 0))
    base, gathered = tile_bases(joined.columns, kv_len, config)
    row_blocks = -(-q_len // config.block_m)
    tile_bitmap = torch.full_like(base, -1)
    tile_bitmap[joined.partial] = number
    return Layout(
        q_len=q_len,
        kv_len=kv_len,
        config=config,
        pattern_of=pattern_of,
        row_block_ptr=pointers.int(),
        partial_count=partial_count.int(),
        tile_base=base.int(),
        gathered=gathered.int(),
        tile_bitmap=tile_bitmap.int(),
        bitmaps=bitmaps,
        row_order=None if order is None else order.int().expand(len(partial_count) // row_blocks, -1).contiguous(),
    )


def _by_first_use(bitmaps: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Bitmaps in the order in which tiles use them: one order, however they were found."""
    tiles = torch.arange(len(number), device=number.device)
    first = torch.full((len(bitmaps),), len(number), dtype=torch.int64, device=number.device)
    order = first.scatter_reduce_(0, number, tiles, reduce="amin").argsort()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return bitmaps[order], place[number]


def tile_bases(columns: Tensor, kv_len: int, config: LayoutConfig) -> tuple[Tensor, Tensor]:
    """`tile_base` and `gathered`: tiles whose slabs follow each other, to the last key at most, are contiguous."""
    steps = torch.arange(config.slabs_per_tile, device=columns.device) * config.slab_columns
    expected = columns[:, :1] + steps
    follows = (columns == expected) | ((columns < 0) & (expected >= kv_len))
    contiguous = follows.all(1) & (columns[:, 0] >= 0)
    if config.compact_columns:
        # A tile cut from the list stays one where its columns happen to be neighbours, unless it is aligned.
        contiguous &= torch.remainder(columns[:, 0], config.block_n) == 0
    slot = (~contiguous).cumsum(0) - 1
    return torch.where(contiguous, columns[:, 0], gathered_row(slot)), columns[~contiguous]


def deduplicate(bitmaps: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct bitmaps and, for each given one, its row among them."""
    if len(bitmaps) < 2:
        return bitmaps, torch.arange(len(bitmaps), device=bitmaps.device)
    flat = bitmaps.flatten(1)
    generator = torch.Generator("cpu").manual_seed(0x570F)
    weights = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator, device="cpu").to(flat.device)
    hashes = torch.cat([(part.long() * weights).sum(1) for part in flat.split(2**12)])
    _, number = torch.unique(hashes, return_inverse=True)
    first = torch.full((int(number.max()) + 1,), len(flat), dtype=torch.int64, device=flat.device)
    first.scatter_reduce_(0, number, torch.arange(len(flat), device=flat.device), reduce="amin")
    if not torch.equal(flat[first[number]], flat):  # two bitmaps with one hash: keep them all apart
        return bitmaps, torch.arange(len(bitmaps), device=bitmaps.device)
    return bitmaps[first], number
