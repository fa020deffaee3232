"""Layouts as the Hopper kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.hopper.tile_scheduler import order_first_tiles
from stof.kernels.triton.work import accumulator_order, parts_of
from stof.layout import Layout
from stof.layout.aside import listed_keys
from stof.layout.orders import by_remainder

# Where the number of a bitmap then ends in `TileLists.tile_bitmap`, and that of tiles left out before begins.
LEFT_OUT_BIT = 28
# Integers that a device writes for an item: tiles [begin, partial end, end), bitmap of the first tile, and the bits of
# a float32 that is added to the results, 0 or NaN.
RANGE_FIELDS = 5
# Columns that one copy brings when they follow each other: half a tile.
RUN = 64
# Rows of a row block: a warpgroup for each 64.
ROW_BLOCKS = (64, 128, 192)
# Where tiles come from two places: from here on, first columns count keys that were put side by side beforehand.
ASIDE = 2**30
# Tiles of which a job's first decides what maximum the others go by (`begins.py`).
SMALL_TILE = (64, 64)
# Keys whose values trade places among themselves where they are laid across (`across.py`).
ACROSS = 16
# Values of a bias's rows that TMA wants multiples of: 16 bytes.
BIAS_STEP = 8
# Rows and keys of the only tiles that the kernel for 8-bit operands takes.
FP8_TILE = (128, 128)


def padded_width(head_dim: int) -> int:
    """Columns of Q, K and V in shared memory: zeros past the head's own."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def q_stages(block_m: int, width: int, biased: bool = False, paired: bool = False) -> int:
    """Row blocks whose Q (or output, on its way out) is in shared memory at once.

    Of three one is computed, one is finished, and one leaves. Of pairs two: what is computed is in
    registers. 128 rows of 256 take 64 KB: there is place for one, which the next row block takes after
    the last product with it, and for some of the output. So it is where tiles of a bias take their place.
    """
    return 1 if biased or (block_m, width) == (128, 256) else 2 if paired else 3


def out_tile_width(width: int) -> int:
    """Columns of output that leave at once where it has a place of its own, no fewer than TMA copies at best."""
    return max(RUN, width // 2)


def oob_column(kv_len: int) -> int:
    """First column of a tile that is not computed: where TMA fills in zeros, so that no key is read for nothing.

    A tile of a bias begins there too, or of values laid across, and TMA takes only multiples of 16 bytes along the rows
    it copies; others are an illegal instruction.
    """
    return -(-kv_len // ACROSS) * ACROSS


def tma_readable(bias: Tensor, q_len: int, kv_len: int) -> bool:
    """Whether TMA can copy tiles of a 4-D bias: 16 bits for each key, in rows (or one) at multiples of 16 bytes."""
    return may_be_tma_readable(bias, q_len, kv_len) and has_aligned_rows(bias)


def has_aligned_rows(bias: Tensor) -> bool:
    """Whether values of a 4-D bias follow each other along the keys, in rows that begin at multiples of BIAS_STEP."""
    outer = zip(bias.shape[:3], bias.stride()[:3], strict=True)
    contiguous = bias.shape[3] == 1 or bias.stride(3) == 1
    return contiguous and all(n == 1 or (s >= 0 and s % BIAS_STEP == 0) for n, s in outer)


def may_be_tma_readable(bias: Tensor, q_len: int, kv_len: int) -> bool:
    """Whether TMA can copy tiles of a 4-D bias or of `laid_out(bias)`: 16 bits with a value for every key."""
    return bias.dtype in (torch.float16, torch.bfloat16) and bias.shape[2] in (1, q_len) and bias.shape[3] == kv_len


def narrow(bias: Tensor) -> Tensor:
    """A bias without the copies that strides of 0 stand for: batch entries, heads and queries that share one."""
    for dim in range(3):
        if bias.stride(dim) == 0:
            bias = bias.narrow(dim, 0, 1)
    return bias


def rows_for(bias: Tensor, device: torch.device | str) -> Tensor:
    """Memory for a copy of a bias, narrowed, that TMA can copy tiles of: rows of whole multiples of 16 bytes."""
    *outer, keys = narrow(bias).shape
    return torch.empty(*outer, -(-keys // BIAS_STEP) * BIAS_STEP, dtype=bias.dtype, device=device)[..., :keys]


def laid_out(bias: Tensor) -> Tensor:
    """That copy."""
    return rows_for(bias, bias.device).copy_(narrow(bias))


def resident(block_m: int, block_n: int, width: int) -> int:
    """Thread blocks that a multiprocessor holds at once.

    A single warpgroup leaves the tensor cores idle during its exponentials, and the other way round; thread blocks
    beside it fill in. Three leave 136 registers to a consumer's thread and 75 KB of shared memory to each block,
    enough where scores and output are 64 columns wide. With many short row blocks they are 10 % faster than two.
    """
    if block_m != 64 or width > 128:
        return 1
    return 3 if (block_n, width) == (64, 64) else 2


@dataclass(frozen=True, eq=False)
class TileLists:
    """What the kernel needs of a layout. `P` patterns, `T` tiles.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        items: int32 `[I, 8]` on the CPU, the items (jobs of any head) of all patterns: row block, tiles [begin, partial
            end, end), the best to begin with first (`begins.py`), parts of its row block, first chunk and chunk, bitmap
            of the first tile. Of pairs `[I, 11]`: bitmaps of the first tile for each of the two row blocks, and how
            many tiles each leaves out.
        item_ptr: int32 `[P + 1]` on the CPU, items of a pattern.
        tile_columns: int32 `[T + 2, slabs of a tile]`, first column of each slab, or `-1 - c` in all slabs of a half
            tile whose 64 columns follow each other from c. Without slabs `[T + 2, 1]`, the first column of the tile.
        tile_bitmap: int32 `[T + 3]`, row of bitmaps. Of pairs `[T + 3, 2]`: of the tiles that each row block computes,
            in this order, from the item's first tile on; and from bit `LEFT_OUT_BIT` on, how many it leaves out before.
        bitmaps: int32 `[U, block_m, 4]`, of pairs `[U, 64, 4]`; bit `2 j + b` of word `q` is column `8 j + 2 q + b`.
        row_order: int32 `[P, q_len]`, empty when rows keep their order.
        ranges: int32 `[I, RANGE_FIELDS]` for tiles that change on the device: what items say of tiles then only serves
            to put them in order, and every call takes this instead. Empty when items say what is so.
        aside: int32 `[mask_batch, mask_heads, n]`, keys that every call first puts side by side, -1 for none; n is a
            multiple of block_n. A tile of them begins at `ASIDE` plus its place among them, and slab is block_n. Empty
            when all tiles are of the keys as they lie.
        block_m, block_n, q_len, kv_len: sizes of the layout.
        slab: columns of a slab, 0 when every tile is evenly spaced columns.
        row_step: rows follow each other at this distance: `i`, `i + row_step`, ..., residue after residue.
        column_step: distance of neighbouring columns of evenly spaced tiles.
        chunks: of all split row blocks of a pattern, at most.
        has_full: whether there are full tiles.
        paired: whether row blocks are two of 64 rows, each with tiles of its own (`pairs.py`).
    """

    pattern_of: Tensor
    items: Tensor
    item_ptr: Tensor
    tile_columns: Tensor
    tile_bitmap: Tensor
    bitmaps: Tensor
    row_order: Tensor
    ranges: Tensor
    aside: Tensor
    block_m: int
    block_n: int
    q_len: int
    kv_len: int
    slab: int
    row_step: int
    column_step: int
    chunks: int
    has_full: int
    paired: int = 0

    def flatten(self) -> tuple[list[Tensor], list[int]]:
        """Tensors and integers, as operators carry them."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [v for v in values if isinstance(v, Tensor)], [v for v in values if not isinstance(v, Tensor)]

    @staticmethod
    def unflatten(tensors: list[Tensor], sizes: list[int]) -> TileLists:
        return TileLists(*tensors, *sizes)  # type: ignore[arg-type]


def make_tile_lists(layout: Layout, split_tiles: int = 0) -> TileLists:
    """Prepare a layout.

    Args:
        layout: row blocks of 64, 128 or 192 rows and tiles of 64 or 128 columns: contiguous ones, gathered in slabs of
            8 or 16, or, where gathered one by one, with columns put aside or evenly spaced.
        split_tiles: row blocks with more tiles are cut into equal chunks of at most so many; 0 never cuts.

    Raises:
        UnfitLayoutError: other sizes; columns or rows lie in a way that TMA cannot copy.
    """
    config = layout.config
    if config.block_m not in ROW_BLOCKS or config.block_n not in (64, 128):
        raise UnfitLayoutError(
            f"tiles of {config.block_m} x {config.block_n} do not fit the Hopper kernel's warpgroups"
        )
    pointers = layout.row_block_ptr.long().cpu()
    partial = layout.partial_count.long().cpu()
    columns, aside, slab, column_step = _columns(layout)
    bitmaps = accumulator_order(layout.bitmaps, config.block_n)
    # Row blocks without a tile get one that keeps nothing; full tiles may come first in a job and then need a bitmap.
    nothing, everything = len(bitmaps), len(bitmaps) + 1
    bitmaps = torch.cat([bitmaps, torch.zeros_like(bitmaps[:1]), torch.full_like(bitmaps[:1], -1)])
    full = layout.tile_bitmap < 0
    tile_bitmap = torch.where(full, everything, layout.tile_bitmap)
    dummy = len(columns)
    items, item_ptr, chunks = split_items(pointers, partial, layout.patterns, split_tiles, dummy)
    if dummy and (config.block_m, config.block_n) == SMALL_TILE:
        covered = (bitmaps != 0).any(2).sum(1)[tile_bitmap.long()]
        items, order = order_first_tiles(items, covered, full)
        columns, tile_bitmap = columns[order], tile_bitmap[order]
    spare = columns.new_full((1, columns.shape[1]), oob_column(layout.kv_len))
    columns = torch.cat([columns, spare, spare])
    tile_bitmap = torch.cat([tile_bitmap, tile_bitmap.new_tensor([nothing, nothing, nothing])])

    items[:, 7] = tile_bitmap.cpu()[items[:, 1].long()]
    return TileLists(
        pattern_of=layout.pattern_of.contiguous(),
        items=items,
        item_ptr=item_ptr,
        tile_columns=columns.int().contiguous(),
        tile_bitmap=tile_bitmap.int().contiguous(),
        bitmaps=bitmaps.contiguous(),
        row_order=layout.pattern_of.new_empty(0) if layout.row_order is None else layout.row_order.contiguous(),
        ranges=layout.pattern_of.new_empty(0),
        aside=aside,
        block_m=config.block_m,
        block_n=config.block_n,
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        slab=slab,
        row_step=_row_step(layout),
        column_step=column_step,
        chunks=chunks,
        has_full=bool((items[:, 2] < items[:, 3]).any()),
    )


def make_fp8_lists(layout: Layout, split_tiles: int = 0) -> TileLists:
    """Prepare a layout for 8-bit operands; as `make_tile_lists`.

    Raises:
        UnfitLayoutError: also other sizes than `FP8_TILE`, slabs, rows or columns that do not follow each other, and
            tiles that begin within 16 keys whose values trade places.
    """
    config = layout.config
    if (config.block_m, config.block_n) != FP8_TILE or not (config.slab is None or config.aside):
        raise UnfitLayoutError("operands of 8 bits take whole tiles of {} x {}".format(*FP8_TILE))
    if layout.row_order is not None:
        raise UnfitLayoutError("operands of 8 bits take rows in their own order")
    lists = make_tile_lists(layout, split_tiles)
    if bool((lists.tile_columns % ACROSS != 0).any()):
        raise UnfitLayoutError(f"operands of 8 bits take tiles that begin at multiples of {ACROSS}")
    return lists


def _columns(layout: Layout) -> tuple[Tensor, Tensor, int, int]:
    """`tile_columns` (int64, without the spare ones), `aside`, `slab` and `column_step` of `TileLists`."""
    block_n, slab, column_step = layout.config.block_n, layout.config.slab or 0, 1
    aside = layout.pattern_of.new_empty(0)
    if layout.config.aside:
        columns, read, aside = _put_aside(layout)
        slab = block_n if aside.numel() else 0
    elif slab == 1:
        first, column_step = _evenly_spaced(layout)
        columns, slab = first[:, None], 0
        read = columns + column_step * torch.arange(block_n, device=columns.device)
    else:
        columns, read = slabs_and_reads(layout)
        slab = slab if columns.shape[1] > 1 else 0
    check_reads(layout, read)
    return columns, aside, slab, column_step


def check_reads(layout: Layout, read: Tensor) -> None:
    """Refuse to read keys that no query of a pattern sees: their values may be anything, and 0 * NaN is NaN.

    Args:
        read: int64 `[T, block_n]`, key columns that copies of the tiles touch; past the end they are zeros.
    """
    kv_len = layout.kv_len
    pattern = torch.div(layout.tile_row_block(), layout.row_blocks, rounding_mode="floor")
    columns = layout.tile_columns()
    live = layout.tile_live()
    # One spare column stands for those past the end, which are read as zeros.
    kept = torch.zeros(layout.patterns, kv_len + 1, dtype=torch.bool, device=read.device)
    kept[pattern[:, None].expand_as(columns)[live], columns[live]] = True
    kept[:, kv_len] = True
    if not bool(kept[pattern[:, None], read.clamp(max=kv_len)].all()):
        raise UnfitLayoutError("its tiles hold keys that no query sees, whose values may be anything")


def slabs_and_reads(layout: Layout) -> tuple[Tensor, Tensor]:
    """`TileLists.tile_columns` of contiguous tiles and slabs, and all columns they read, `[T, block_n]`."""
    base = layout.tile_base.long()
    contiguous = base >= 0
    if bool(contiguous.all()):
        return base[:, None], base[:, None] + torch.arange(layout.config.block_n, device=base.device)
    slab = layout.config.slab_columns
    slots = layout.gathered.long()
    # Unused slots repeat the tile's slabs from the first: runs stay runs, and nothing is read that no row keeps.
    used = (slots >= 0).sum(1, keepdim=True)
    slots = slots.gather(1, torch.arange(slots.shape[1], device=slots.device) % used)
    along = torch.arange(0, layout.config.block_n, slab, device=base.device)
    columns = torch.where(contiguous[:, None], base[:, None] + along, slots[torch.where(contiguous, 0, ~base)])
    read = (columns[:, :, None] + torch.arange(slab, device=base.device)).flatten(1)
    halves = read.unflatten(1, (-1, RUN))
    is_run = (halves == halves[..., :1] + torch.arange(RUN, device=base.device)).all(-1)
    coded = torch.where(is_run[..., None], -1 - halves[..., :1], columns.unflatten(1, (-1, RUN // slab)))
    return coded.flatten(1), read


def _put_aside(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """`TileLists.tile_columns` of tiles in either place, all columns these read, `[T, block_n]`, and `aside`."""
    base = layout.tile_base.long()
    along = torch.arange(layout.config.block_n, device=base.device)
    read = base[:, None] + along
    lists = listed_keys(layout)
    if lists is None:
        raise UnfitLayoutError("gathered tiles are not stretches of one list of columns")
    keys, begins = lists
    of_list = base < 0
    begin = begins[~base[of_list]]
    columns = base.masked_scatter(of_list, ASIDE + begin)
    pattern = torch.div(layout.tile_row_block()[of_list], layout.row_blocks, rounding_mode="floor")
    # Behind the list are zeros, as behind the last key.
    padded = torch.where(keys < 0, layout.kv_len, keys)
    padded = torch.nn.functional.pad(padded, (0, len(along)), value=layout.kv_len)
    read[of_list] = padded[pattern[:, None], begin[:, None] + along]
    aside = keys[layout.pattern_of.long()]
    # Lists that are alike are copied once.
    for dim in (0, 1):
        if torch.equal(aside, aside.narrow(dim, 0, 1).expand_as(aside)):
            aside = aside.narrow(dim, 0, 1)
    return columns[:, None], read, aside.int().contiguous()


def _evenly_spaced(layout: Layout) -> tuple[Tensor, int]:
    """First column of each tile, and the distance of columns, the same in all tiles."""
    columns = layout.tile_columns()
    live = columns >= 0
    pairs = live[:, 1:] & live[:, :-1]
    distances = (columns[:, 1:] - columns[:, :-1])[pairs]
    step = int(distances[0]) if len(distances) else 1
    if step < 1 or bool((distances != step).any()) or bool((live[:, 1:] & ~live[:, :-1]).any()):
        raise UnfitLayoutError("columns gathered one by one are not evenly spaced")
    if layout.kv_len % step:
        raise UnfitLayoutError(f"{layout.kv_len} keys do not divide by the distance of columns, {step}")
    return columns[:, 0], step


def _row_step(layout: Layout) -> int:
    """Distance of neighbouring rows."""
    order = layout.row_order
    if order is None:
        return 1
    step = int(order[0, 1] - order[0, 0]) if layout.q_len > 1 else 1
    per_residue = layout.q_len // max(step, 1)
    if step < 1 or layout.q_len % step or per_residue % 64:
        raise UnfitLayoutError("rows are not in an order that TMA can copy")
    if not bool((order == by_remainder(layout.q_len, step).to(order)).all()):
        raise UnfitLayoutError("rows are not in an order that TMA can copy")
    return step


def split_items(
    pointers: Tensor, partial: Tensor, patterns: int, split_tiles: int, dummy: int
) -> tuple[Tensor, Tensor, int]:
    """Items `[I, 8]` of all row blocks, where each pattern's begin, and the most chunks of one.

    Args:
        pointers: int64 `[P * R + 1]`, where the tiles of each row block begin.
        partial: int64 `[P * R]`, how many of them are partial.
        patterns: P.
        split_tiles: see `make_tile_lists`.
        dummy: the tile of row blocks without any.
    """
    tiles = pointers.diff()
    blocks = len(tiles) // patterns
    parts = parts_of(tiles, split_tiles)
    owner = torch.repeat_interleave(torch.arange(len(tiles)), parts)
    chunk = torch.arange(len(owner)) - (parts.cumsum(0) - parts)[owner]
    low = torch.div(chunk * tiles[owner], parts[owner], rounding_mode="floor")
    high = torch.div((chunk + 1) * tiles[owner], parts[owner], rounding_mode="floor")
    begin, end = pointers[owner] + low, pointers[owner] + high
    partial_end = torch.minimum(torch.maximum(pointers[owner] + partial[owner], begin), end)
    empty = begin == end
    begin = torch.where(empty, dummy, begin)
    partial_end, end = torch.where(empty, dummy + 1, partial_end), torch.where(empty, dummy + 1, end)

    split_parts = torch.where(parts > 1, parts, 0).view(patterns, blocks)
    first_chunk = (split_parts.cumsum(1) - split_parts).flatten()
    items = torch.stack(
        [owner % blocks, begin, partial_end, end, parts[owner], first_chunk[owner], chunk, chunk * 0], 1
    ).int()
    pattern = torch.div(owner, blocks, rounding_mode="floor")
    item_ptr = torch.nn.functional.pad(torch.bincount(pattern, minlength=patterns).cumsum(0), (1, 0)).int()
    return items, item_ptr, int(split_parts.sum(1).max())
