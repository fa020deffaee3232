"""The choices there are for a call on a GPU: kernels by head dimension, tiles, gathering, row orders, splitting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from stof.kernels.common import L2_SHARE, heads_in_l2
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import FP8_STAGES, FP8_TILE, SMALL_TILE, blocks_per_sm, padded_width
from stof.layout import LayoutConfig
from stof.layout.survey import Survey
from stof.selection.capabilities import CallSpec
from stof.selection.kernel_choice import KernelChoice
from stof.selection.mask_geometry import Geometry
from stof.selection.resources import (
    fp8_shared_memory,
    head_dim_class,
    hopper_shared_memory,
    shared_memory,
    spills_registers,
)

# (block_m, block_n, warps, stages, registers) worth having, by head_dim class; `stof tune --device` times them all.
# Three stages keep K and V of two tiles in flight; four warps on 64 rows leave room for two programs or more on a
# multiprocessor, which hide each other's softmax (benchmarks/notes/attention.md has the sweep).
_TILES = {
    64: ((64, 64, 4, 3, 128), (64, 128, 4, 3, 168), (64, 32, 4, 3, 0), (64, 32, 4, 3, 96), (128, 128, 4, 3, 0)),
    128: ((64, 64, 4, 3, 0), (64, 32, 4, 3, 168), (128, 128, 8, 3, 0), (128, 64, 8, 4, 0), (64, 64, 4, 2, 0)),
    256: ((64, 64, 4, 2, 0), (64, 32, 4, 2, 0), (128, 64, 8, 2, 0)),
}
_FLOAT32_TILES = {
    64: ((64, 32, 4, 2, 0), (32, 16, 4, 2, 0)),
    128: ((64, 32, 4, 2, 0), (32, 16, 4, 2, 0)),
    256: ((32, 16, 4, 2, 0), (16, 16, 4, 2, 0)),
}
# (block_n, warps, stages): decoding is bound by memory, so what counts is bytes in flight. The first was the fastest
# in every decode cell of `stof tune --device` on an H200; the second is for GPUs with less shared memory.
_DECODE_TILES = ((128, 4, 3), (64, 4, 2))
# (block_m, block_n, stages) of the Hopper kernel by head_dim class: two warpgroups, three where registers allow, or one
# in each of two or three thread blocks on a multiprocessor, for short row blocks; and what shared memory holds.
_HOPPER_TILES = {
    64: ((128, 128, 4), (192, 128, 3), (64, 128, 2), (64, 64, 3)),
    128: ((128, 128, 2), (64, 64, 2)),
    256: ((128, 64, 2), (64, 64, 2)),
}
# Stages where row blocks go in pairs, which is for heads of 128: what shared memory holds.
_PAIRED_STAGES = 5
# With a bias, whose tiles take shared memory and registers.
_HOPPER_BIAS_TILES = {
    64: ((128, 128, 3), (192, 64, 4), (64, 64, 2)),
    128: ((128, 64, 3), (64, 64, 2)),
    256: ((64, 64, 2),),
}
# Keys of a chunk: short ones fill the machine when there are few sequences, long ones need fewer merges.
_CHUNK_KEYS = (512, 1024, 2048, 4096)
# Row blocks that fill a machine without being split, and chunks that the Hopper kernel then makes of one at most, by
# whether its thread blocks are of one warpgroup. Those of several merge a step for every doubling; more never paid:
# Longformer's 8192 tokens of 128 took 227 us instead of 171. Those of one read all others back at the end.
_ENOUGH, _MOST_CHUNKS = 256, {False: 4, True: 8}
# Further numbers of chunks: six for Longformer at 4096 tokens, head_dim 64, are 5 % faster than four or eight.
_CHUNK_KEYS_OF_ONE = 768
# Tiles of a row block, on average, from which on three thread blocks on a multiprocessor cannot be fed: wider tiles are
# 25 % faster at 64 tiles, 5 % at 16, and between 5 % faster and 4 % slower at 8. And tiles of the row block in which
# the average tile is: wider ones are 5 % slower for windows, whose row blocks are alike, at 8.8, and 5 % faster for
# causal masks at 11.
_LONG, _MOSTLY_LONG = 8, 10.5
# Tiles of a row block from which on pairs are slower: by 10 % at 64 (causal, 8192 tokens); at 16 (full, 1024) they are
# 1 % faster.
_LONG_PAIRS = 24
# As `L2_SHARE`. The Hopper kernel's thread blocks keep step less well, so they want more room.
_HOPPER_L2_SHARE = 16 * 2**20


def gpu_choices(
    call: CallSpec, geometry: Geometry, implementation: str, found_order: str | None = None
) -> list[KernelChoice]:
    """Every choice of one implementation for a call, whether it pays or not.

    With `found_order`, those that take the rows in that order.
    """
    named: tuple[str | None, ...] = (None, *(() if geometry.fixed else geometry.row_orders))
    orders = named if found_order is None else (found_order,)
    if implementation == "hopper":
        return _hopper_choices(call, geometry, orders)
    if implementation == "hopper_fp8":
        return _fp8_choices(call, geometry) if None in orders else []
    if implementation == "row_wise":
        return [KernelChoice("row_wise", geometry.fixed or LayoutConfig(64, 64, 1))] if None in orders else []
    tiles = _decode_tiles(call) if implementation == "decode" else _block_tiles(call)
    choices: list[KernelChoice] = []
    for order in orders:
        for (block_m, block_n, warps, stages, registers), pack in tiles:
            for layout in _layouts(geometry.fixed, block_m, block_n, order):
                kernel = KernelConfig(warps, stages, registers, pack=pack, side=_heads_at_once(call))
                choice = KernelChoice(implementation, layout, order, kernel)
                if geometry.fixed or not spills_registers(choice, call):
                    choices += _variants(choice, call)
    return list(dict.fromkeys(choices))


def _hopper_choices(call: CallSpec, geometry: Geometry, orders: tuple[str | None, ...]) -> list[KernelChoice]:
    """Contiguous tiles, slabs of 16 or 8 columns, compacted columns, and evenly spaced rows and columns.

    Contiguous tiles also with unseen keys as zeros. With a bias, which is copied in whole tiles, contiguous ones alone.
    """
    choices: list[KernelChoice] = []
    fixed, heads_at_once = geometry.fixed, _heads_at_once(call, share=_HOPPER_L2_SHARE)
    table = _HOPPER_BIAS_TILES if call.has_bias else _HOPPER_TILES
    slabs = (None,) if call.has_bias else (None, 16, 8)
    for block_m, block_n, stages in table[head_dim_class(call.head_dim, call.value_dim)]:
        kernel = KernelConfig(4, stages, side=heads_at_once)
        layouts: list[tuple[LayoutConfig, str | None]] = []
        if fixed is None:
            layouts += [(LayoutConfig(block_m, block_n, slab), None) for slab in slabs if None in orders]
            if None in orders and not call.has_bias:
                layouts.append((LayoutConfig(block_m, block_n, 1, compact_columns=True), None))
            even = [name for name in orders if _evenly_spaced(name, block_m, call)]
            layouts += [(LayoutConfig(block_m, block_n, 1), name) for name in even]
        elif (fixed.block_m, fixed.block_n) == (block_m, block_n) and not call.permuted_rows:
            serves = not call.has_bias if fixed.compact_columns else fixed.slab in slabs
            layouts += [(fixed, None)] if serves else []
        for layout, order in layouts:
            choices += _variants(KernelChoice("hopper", layout, order, kernel), call)
            # A copy for each query head could be many times K and V.
            one_copy = call.mask_heads == 1 or call.heads == call.kv_heads
            if layout.slab is None and not call.has_bias and one_copy:
                choices += _variants(KernelChoice("hopper", layout, order, replace(kernel, zero_unseen=True)), call)
            if _can_pair(layout, order, call):
                # Without splits: splitting paired row blocks is not faster in any measured cell.
                paired = replace(kernel, num_stages=_PAIRED_STAGES, paired=True)
                choices.append(KernelChoice("hopper", layout, order, paired))
    return choices


def _can_pair(layout: LayoutConfig, order: str | None, call: CallSpec) -> bool:
    """Whether two row blocks of a layout may be one work tile."""
    return (
        (layout.block_m, layout.block_n) == SMALL_TILE
        and layout.slab in (None, 16)
        and head_dim_class(call.head_dim, call.value_dim) == 128
        and order is None
        and not (call.has_bias or call.has_softcap or call.permuted_rows)
    )


def _fp8_choices(call: CallSpec, geometry: Geometry) -> list[KernelChoice]:
    """Contiguous tiles of the one size there is, and compacted columns."""
    kernel = KernelConfig(4, FP8_STAGES, side=_heads_at_once(call, share=_HOPPER_L2_SHARE))
    layouts = [LayoutConfig(*FP8_TILE), LayoutConfig(*FP8_TILE, 1, compact_columns=True)]
    if geometry.fixed is not None:
        layouts = [layout for layout in layouts if layout == geometry.fixed]
    return [choice for one in layouts for choice in _variants(KernelChoice("hopper_fp8", one, None, kernel), call)]


def _evenly_spaced(row_order: str | None, block_m: int, call: CallSpec) -> bool:
    """Whether TMA can copy rows and columns in that order, and no row block holds rows of two remainders."""
    order, *sizes = (row_order or "own").split()
    if call.has_bias:
        return False
    # The elements of a row have to fill the 64, 128 or 256 that TMA copies.
    return (
        order == "remainder"
        and call.head_dim == padded_width(call.head_dim)
        and call.q_len % (int(sizes[0]) * block_m) == 0
    )


def runtime_choice(call: CallSpec, layout: LayoutConfig, limit: int) -> KernelChoice:
    """How the block-wise kernel runs work that is made on the device; `limit` as `shared_memory_limit` gives it."""
    kernel = KernelConfig(4, 3, side=_heads_at_once(call))
    choice = KernelChoice("block_wise", layout, None, kernel)
    return choice if fits(choice, call, limit) else replace(choice, kernel=replace(kernel, num_stages=2))


def runtime_hopper_choices(call: CallSpec, serves: Callable[[LayoutConfig], bool]) -> list[KernelChoice]:
    """How the Hopper kernel may run tiles that are made on the device, in the shapes that can be made."""
    heads_at_once = _heads_at_once(call, share=_HOPPER_L2_SHARE)
    choices: list[KernelChoice] = []
    for block_m, block_n, stages in _HOPPER_TILES[head_dim_class(call.head_dim, call.value_dim)]:
        layouts = [LayoutConfig(block_m, block_n, slab) for slab in (None, 16)]
        for layout in filter(serves, layouts):
            choices += _variants(
                KernelChoice("hopper", layout, None, KernelConfig(4, stages, side=heads_at_once)), call
            )
    return choices


def reads_unseen_too(choice: KernelChoice, refused: KernelChoice) -> bool:
    """Whether tiles of a choice hold keys that no query sees because those of a refused choice do.

    Some slab then holds seen and unseen keys, and so do the wider slabs and contiguous tiles that contain it.
    """
    layout, other = choice.layout, refused.layout
    if layout is None or other is None or 1 in (layout.slab, other.slab) or choice.row_order != refused.row_order:
        return False
    zeroed = choice.kernel is not None and choice.kernel.zero_unseen
    return not zeroed and layout.slab_columns % other.slab_columns == 0


def geometries(choices: list[KernelChoice]) -> tuple[LayoutConfig, ...]:
    """The distinct layouts of some choices."""
    return tuple(dict.fromkeys(choice.layout for choice in choices if choice.layout is not None))


def is_distinct(choice: KernelChoice, survey: Survey, simpler: bool = True) -> bool:
    """Whether a choice differs from a simpler one on this mask; `simpler` says whether that one can run."""
    if choice.kernel is None or choice.layout is None:
        return True
    kernel, layout = choice.kernel, choice.layout
    counts = survey.counts[layout]
    tiles = counts.partial + counts.full
    if kernel.split_tiles and kernel.split_tiles >= int(tiles.max()):
        return False
    contiguous = layout.contiguous()
    if layout.compact_columns and not counts.compacted_keys and contiguous in survey.counts:
        return False
    if simpler and layout.slab is not None and contiguous in survey.counts:
        other = survey.counts[contiguous]
        if torch.equal(other.partial, counts.partial) and torch.equal(other.full, counts.full):
            return False
    return True


def is_l2_bound(choice: KernelChoice, call: CallSpec, survey: Survey) -> bool:
    """Whether three thread blocks on a multiprocessor would wait for the L2 cache, or pairs for their small tiles.

    Each of the three reads keys and values for 64 rows alone. Short row blocks do not notice; with 64 tiles each, 12
    heads of 4096 tokens read 6.4 TB/s so, all that an H200 has. Pairs lose 10 % there to tiles of 128 x 128.
    """
    if choice.implementation != "hopper" or choice.layout is None:
        return False
    if choice.kernel is not None and choice.kernel.paired:
        counts = survey.counts[choice.layout]
        return float((counts.partial + counts.full).double().mean()) >= _LONG_PAIRS
    layout, width = choice.layout, head_dim_class(call.head_dim, call.value_dim)
    if blocks_per_sm(layout.block_m, layout.block_n, width) < 3:
        return False
    counts = survey.counts[layout]
    tiles = (counts.partial + counts.full).double()
    return float(tiles.mean()) >= _LONG and float(tiles.square().sum() / tiles.sum()) >= _MOSTLY_LONG


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory a thread block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return int(properties.shared_memory_per_block_optin)


def fits(choice: KernelChoice, call: CallSpec, limit: int) -> bool:
    """Whether a choice's shared memory stays within the device's."""
    if choice.kernel is None or choice.layout is None:
        return True
    if choice.implementation == "hopper":
        return hopper_shared_memory(choice, call) <= limit
    if choice.implementation == "hopper_fp8":
        return fp8_shared_memory(choice.layout, call, choice.kernel.num_stages) <= limit
    return shared_memory(choice.layout, call, choice.kernel.num_stages, choice.kernel.pack) <= limit


_Tile = tuple[tuple[int, int, int, int, int], bool]


def _block_tiles(call: CallSpec) -> list[_Tile]:
    table = _FLOAT32_TILES if call.dtype == torch.float32 else _TILES
    return [(tile, False) for tile in table[head_dim_class(call.head_dim, call.value_dim)]]


def _decode_tiles(call: CallSpec) -> list[_Tile]:
    rows = 1 << max(0, call.q_len - 1).bit_length()
    pack = call.heads > call.kv_heads
    wide = call.dtype == torch.float32 or head_dim_class(call.head_dim, call.value_dim) > 128
    table = ((32, 4, 2),) if wide else _DECODE_TILES
    # Where packed heads need too much shared memory (many rows of a wide float32 head), each head goes by itself.
    packs = (True, False) if pack and wide else (pack,)
    return [((rows, block_n, warps, stages, 0), packed) for packed in packs for block_n, warps, stages in table]


def _layouts(fixed: LayoutConfig | None, block_m: int, block_n: int, order: str | None) -> list[LayoutConfig]:
    if fixed is not None:
        return [fixed] if fixed.block_n <= 128 and fixed.block_m.bit_count() == 1 else []
    gathered = LayoutConfig(block_m, block_n, 1)
    return [gathered] if order else [LayoutConfig(block_m, block_n, None), gathered]


def _variants(choice: KernelChoice, call: CallSpec) -> Iterator[KernelChoice]:
    """The choice with heavy row blocks whole, and split at several lengths."""
    assert choice.kernel is not None
    assert choice.layout is not None
    row_blocks = call.batch * call.heads * -(-call.q_len // choice.layout.block_m)
    few = choice.implementation in ("hopper", "hopper_fp8") and row_blocks >= _ENOUGH
    one = choice.implementation == "hopper" and choice.layout.block_m == 64 and not choice.kernel.paired
    for keys in sorted((0, *_CHUNK_KEYS, *([_CHUNK_KEYS_OF_ONE] if one else []))):
        if keys < call.kv_len and not (few and 0 < keys * _MOST_CHUNKS[one] < call.kv_len):
            yield replace(choice, kernel=replace(choice.kernel, split_tiles=keys // choice.layout.block_n))


def _heads_at_once(call: CallSpec, share: int = L2_SHARE) -> int:
    """Heads side by side: as many as keep their K and V in the L2 cache together, 0 for all of them."""
    kv_bytes = call.kv_heads * call.kv_len * (call.head_dim + call.value_dim) * call.dtype.itemsize
    heads_at_once = heads_in_l2(call.batch * call.heads, kv_bytes // call.heads, share)
    return 0 if heads_at_once == call.batch * call.heads else heads_at_once
