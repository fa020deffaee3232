"""Every invariant of a layout, checked on its tensors alone."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import LayoutError
from stof.layout import bitmaps as bits
from stof.layout.compaction import listed_keys
from stof.layout.layout import Layout


def validate(layout: Layout) -> None:
    """Raise `LayoutError` with all problems found; return None for a sound layout.

    Shapes and dtypes first: contents are looked at only when those hold, so corrupt files cannot index
    out of range.
    """
    problems = _shape_problems(layout) or _range_problems(layout) or _content_problems(layout)
    if problems:
        raise LayoutError(problems)


def _shape_problems(layout: Layout) -> list[str]:
    config, problems = layout.config, []
    if not (0 < layout.q_len < 2**31 and 0 < layout.kv_len < 2**31):
        return [f"lengths are between 1 and 2**31 - 1, got q_len {layout.q_len}, kv_len {layout.kv_len}"]
    devices = {tensor.device for tensor in layout.tensors().values()}
    if len(devices) != 1:
        problems.append(f"tensors are on several devices: {sorted(map(str, devices))}")
    numbered, tiles = layout.partial_count.numel(), layout.tile_base.numel()
    if layout.pattern_of.ndim != 2 or 0 in layout.pattern_of.shape:
        problems.append(f"pattern_of is [mask_batch, mask_heads], got {list(layout.pattern_of.shape)}")
    if numbered == 0 or numbered % layout.row_blocks:
        problems.append(f"partial_count has {numbered} entries, not a multiple of {layout.row_blocks} row blocks")
    wanted: dict[str, tuple[torch.dtype, tuple[int | None, ...]]] = {
        "pattern_of": (torch.int32, (None, None)),
        "row_block_ptr": (torch.int32, (numbered + 1,)),
        "partial_count": (torch.int32, (numbered,)),
        "tile_base": (torch.int32, (tiles,)),
        "gathered": (torch.int32, (None, config.slabs_per_tile)),
        "tile_bitmap": (torch.int32, (tiles,)),
        "bitmaps": (torch.int32, (None, config.block_m, bits.words(config.block_n))),
        "cost": (torch.float32, (numbered,)),
        "order": (torch.int32, (numbered,)),
        "row_order": (torch.int32, (numbered // layout.row_blocks, layout.q_len)),
    }
    for name, tensor in layout.tensors().items():
        dtype, shape = wanted[name]
        fits = len(shape) == tensor.ndim and all(
            size in (None, own) for size, own in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            problems.append(f"{name} is {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    return problems


def _range_problems(layout: Layout) -> list[str]:
    problems: list[str] = []
    pointers, partial = layout.row_block_ptr, layout.partial_count
    steps = pointers.long().diff()  # int32 differences wrap around
    gathered, bitmaps = len(layout.gathered), len(layout.bitmaps)
    slab = layout.config.slab_columns

    def require(good: Tensor | bool, problem: str) -> None:
        if not bool(good):
            problems.append(problem)

    require(pointers[0] == 0, "row_block_ptr does not start at 0")
    require(pointers[-1] == layout.tiles, f"row_block_ptr does not end at the number of tiles {layout.tiles}")
    require((steps >= 0).all(), "row_block_ptr decreases")
    require(((partial >= 0) & (partial <= steps)).all(), "partial_count is not between 0 and the tile count")
    require(_within(layout.pattern_of, 0, layout.patterns), "pattern_of names a pattern that is not there")
    require(_within(layout.tile_base, -gathered, layout.kv_len), "tile_base is out of range")
    require(_within(layout.tile_bitmap, -1, bitmaps), "tile_bitmap is out of range")
    require(_within(layout.gathered, -1, layout.kv_len), "gathered has columns out of range")
    used = layout.gathered[layout.gathered >= 0]
    require((torch.remainder(used, slab) == 0).all(), f"gathered slabs do not start at multiples of {slab}")
    require(_is_permutation(layout.order[None]), "order is not a permutation of the row blocks")
    if layout.row_order is not None:
        require(_is_permutation(layout.row_order), "row_order is not a permutation of the rows")
    require(torch.isfinite(layout.cost).all() and (layout.cost >= 0).all(), "cost is not finite and >= 0")
    return problems


def _within(values: Tensor, low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())


def _is_permutation(rows: Tensor) -> bool:
    return bool((rows.sort(-1).values == torch.arange(rows.shape[-1], device=rows.device)).all())


def _content_problems(layout: Layout) -> list[str]:
    problems: list[str] = []
    owner = layout.tile_row_block()
    position = torch.arange(layout.tiles, device=layout.device) - layout.row_block_ptr[:-1].long()[owner]
    partial = position < layout.partial_count.long()[owner]
    if not torch.equal(partial, layout.tile_bitmap >= 0):
        problems.append("tiles with a bitmap are not the partial ones, or do not come first")
    slots = layout.tile_base[layout.tile_base < 0]
    if len(slots.unique()) != len(slots):
        problems.append("two tiles share one row of gathered columns")
    costs = layout.cost[layout.order.long()]
    if not bool((costs[:-1] >= costs[1:]).all()):
        problems.append("order is not longest first")
    columns = layout.tile_columns()
    exists = columns >= 0
    key = (owner[:, None] * layout.kv_len + columns)[exists]
    if len(key.unique()) != len(key):
        problems.append("a row block lists the same column twice")
    if layout.config.aside and listed_keys(layout) is None:
        problems.append("gathered tiles are not stretches of one list of columns put aside")
    if not bool(exists[~partial].all()):
        problems.append("a full tile reaches past kv_len or has unused slots")
    if problems:
        return problems
    rows = layout.rows().view(-1, layout.config.block_m) >= 0
    step = max(1, 2**24 // (layout.config.block_m * layout.config.block_n))
    for tiles in partial.nonzero()[:, 0].split(step):
        outside = ~(rows[owner[tiles]][:, :, None] & exists[tiles][:, None, :])
        if bool((layout.tile_keep(tiles) & outside).any()):
            problems.append("a bitmap keeps rows or columns that do not exist")
            break
    return problems
