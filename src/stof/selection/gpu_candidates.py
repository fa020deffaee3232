"""The choices of each implementation for a call on a GPU: tiles, gathering, row orders, splitting.

`implementations.py` names these functions; `name` is the implementation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from stof.kernels.common import L2_SHARE, heads_in_l2
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import FP8_STAGES, FP8_TILE, SMALL_TILE, padded_width
from stof.layout import LayoutConfig
from stof.selection.capabilities import CallSpec
from stof.selection.kernel_choice import KernelChoice
from stof.selection.mask_geometry import Geometry
from stof.selection.resources import head_dim_class, spills_registers, tile_shared_memory

# Names of row orders to try; None is the rows' own order.
RowOrders = tuple[str | None, ...]
_Tile = tuple[tuple[int, int, int, int, int], bool]
# (block_m, block_n, warps, stages, registers) worth having, by head_dim class; `stof tune --device` times them all.
# Three stages keep K and V of two tiles in flight; four warps on 64 rows leave room for two thread blocks or more
# on a multiprocessor, which hide each other's softmax (benchmarks/notes/attention.md has the sweep).
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
# (block_m, block_n, stages) of the Hopper kernel by head_dim class: two warpgroups, three where registers allow, or,
# for short row blocks, one in each of two or three thread blocks on a multiprocessor. Stages fill shared memory.
_HOPPER_TILES = {
    64: ((128, 128, 4), (192, 128, 3), (64, 128, 2), (64, 64, 3)),
    128: ((128, 128, 2), (64, 64, 2)),
    256: ((128, 64, 2), (64, 64, 2)),
}
# Stages of paired row blocks (heads of 128), as many as fit in shared memory.
_PAIRED_STAGES = 5
# With a bias, whose tiles take shared memory and registers.
_HOPPER_BIAS_TILES = {
    64: ((128, 128, 3), (192, 64, 4), (64, 64, 2)),
    128: ((128, 64, 3), (64, 64, 2)),
    256: ((64, 64, 2),),
}
# Keys of a chunk: short ones fill the machine when there are few sequences, long ones need fewer merges.
_CHUNK_KEYS = (512, 1024, 2048, 4096)
# Row blocks that fill a GPU without being split, and the most chunks that the Hopper kernel then cuts one into, by
# whether its thread blocks have one warpgroup. Several warpgroups merge chunks in a binary tree: eight chunks instead
# of four took 227 us instead of 171 (Longformer, 8192 tokens, head_dim 128). With one, the last reads all others.
_ENOUGH, _MOST_CHUNKS = 256, {False: 4, True: 8}
# Keys of another chunk size with one warpgroup: six chunks (Longformer, 4096 tokens, head_dim 64) are 5 % faster than
# four or eight.
_CHUNK_KEYS_OF_ONE = 768
# As `L2_SHARE`. Thread blocks of the Hopper kernel drift further apart, so fewer heads share the L2 cache.
_HOPPER_L2_SHARE = 16 * 2**20


def tile_choices(name: str, call: CallSpec, geometry: Geometry, orders: RowOrders) -> list[KernelChoice]:
    """Contiguous and gathered tiles of Triton's kernel."""
    return _triton_choices(name, call, geometry, orders, _block_tiles(call))


def decode_choices(name: str, call: CallSpec, geometry: Geometry, orders: RowOrders) -> list[KernelChoice]:
    """The same for few query rows, in one tile with those of the other heads that read the same keys."""
    return _triton_choices(name, call, geometry, orders, _decode_tiles(call))


def _triton_choices(
    name: str, call: CallSpec, geometry: Geometry, orders: RowOrders, tiles: list[_Tile]
) -> list[KernelChoice]:
    choices: list[KernelChoice] = []
    for order in orders:
        for (block_m, block_n, warps, stages, registers), pack in tiles:
            for layout in _layouts(geometry.fixed, block_m, block_n, order):
                kernel = KernelConfig(warps, stages, registers, pack=pack, side=heads_at_once(call))
                choice = KernelChoice(name, layout, order, kernel)
                if geometry.fixed or not spills_registers(choice, call):
                    choices += _variants(choice, call)
    return choices


def row_choices(name: str, call: CallSpec, geometry: Geometry, orders: RowOrders) -> list[KernelChoice]:
    """One choice: the kernel reads lists of keys, whatever the layout."""
    del call
    return [KernelChoice(name, geometry.fixed or LayoutConfig(64, 64, 1))] if None in orders else []


def hopper_choices(name: str, call: CallSpec, geometry: Geometry, orders: RowOrders) -> list[KernelChoice]:
    """Contiguous tiles, slabs of 16 or 8 columns, compacted columns, and evenly spaced rows and columns.

    Contiguous tiles also with unseen keys as zeros. With a bias, which is copied in whole tiles, contiguous ones alone.
    """
    choices: list[KernelChoice] = []
    fixed, side = geometry.fixed, heads_at_once(call, persistent=True)
    table = _HOPPER_BIAS_TILES if call.has_bias else _HOPPER_TILES
    slabs = (None,) if call.has_bias else (None, 16, 8)
    for block_m, block_n, stages in table[head_dim_class(call.head_dim, call.value_dim)]:
        kernel = KernelConfig(4, stages, side=side)
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
            choices += _variants(KernelChoice(name, layout, order, kernel), call, persistent=True)
            # A copy for each query head could be many times K and V.
            one_copy = call.mask_heads == 1 or call.heads == call.kv_heads
            if layout.slab is None and not call.has_bias and one_copy:
                zeroed = KernelChoice(name, layout, order, replace(kernel, zero_unseen=True))
                choices += _variants(zeroed, call, persistent=True)
            if _can_pair(layout, order, call):
                # Without splits: splitting paired row blocks is not faster in any measured cell.
                paired = replace(kernel, num_stages=_PAIRED_STAGES, paired=True)
                choices.append(KernelChoice(name, layout, order, paired))
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


def fp8_choices(name: str, call: CallSpec, geometry: Geometry, orders: RowOrders) -> list[KernelChoice]:
    """Contiguous tiles of the one size there is, and compacted columns."""
    if None not in orders:
        return []
    kernel = KernelConfig(4, FP8_STAGES, side=heads_at_once(call, persistent=True))
    layouts = [LayoutConfig(*FP8_TILE), LayoutConfig(*FP8_TILE, 1, compact_columns=True)]
    if geometry.fixed is not None:
        layouts = [layout for layout in layouts if layout == geometry.fixed]
    choices = [KernelChoice(name, layout, None, kernel) for layout in layouts]
    return [variant for choice in choices for variant in _variants(choice, call, persistent=True)]


def as_16_bits(name: str, choice: KernelChoice) -> KernelChoice:
    """The choice of the Hopper kernel for 16 bits, of this name, that has the tiles of one for 8 bits."""
    assert choice.kernel is not None
    stages = next(tile[2] for tile in _HOPPER_TILES[128] if tile[:2] == FP8_TILE)
    return replace(choice, implementation=name, kernel=replace(choice.kernel, num_stages=stages))


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


def runtime_choice(name: str, call: CallSpec, layout: LayoutConfig, limit: int) -> KernelChoice:
    """How Triton's kernel runs work that is made on the device; `limit` as `shared_memory_limit` gives it."""
    kernel = KernelConfig(4, 3, side=heads_at_once(call))
    choice = KernelChoice(name, layout, None, kernel)
    if tile_shared_memory(choice, call) <= limit:
        return choice
    return replace(choice, kernel=replace(kernel, num_stages=2))


def runtime_hopper_choices(name: str, call: CallSpec, serves: Callable[[LayoutConfig], bool]) -> list[KernelChoice]:
    """How the Hopper kernel may run tiles that are made on the device, in the shapes that can be made."""
    side = heads_at_once(call, persistent=True)
    choices: list[KernelChoice] = []
    for block_m, block_n, stages in _HOPPER_TILES[head_dim_class(call.head_dim, call.value_dim)]:
        layouts = [LayoutConfig(block_m, block_n, slab) for slab in (None, 16)]
        for layout in filter(serves, layouts):
            choice = KernelChoice(name, layout, None, KernelConfig(4, stages, side=side))
            choices += _variants(choice, call, persistent=True)
    return choices


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


def _variants(choice: KernelChoice, call: CallSpec, persistent: bool = False) -> Iterator[KernelChoice]:
    """The choice with heavy row blocks whole, and split at several lengths."""
    assert choice.kernel is not None
    assert choice.layout is not None
    row_blocks = call.batch * call.heads * -(-call.q_len // choice.layout.block_m)
    few = persistent and row_blocks >= _ENOUGH
    one = persistent and choice.layout.block_m == 64 and not choice.kernel.paired
    for keys in sorted((0, *_CHUNK_KEYS, *([_CHUNK_KEYS_OF_ONE] if one else []))):
        if keys < call.kv_len and not (few and 0 < keys * _MOST_CHUNKS[one] < call.kv_len):
            yield replace(choice, kernel=replace(choice.kernel, split_tiles=keys // choice.layout.block_n))


def heads_at_once(call: CallSpec, *, persistent: bool = False) -> int:
    """Heads side by side: as many as keep their K and V in the L2 cache together, 0 for all of them."""
    kv_bytes = call.kv_heads * call.kv_len * (call.head_dim + call.value_dim) * call.dtype.itemsize
    share = _HOPPER_L2_SHARE if persistent else L2_SHARE
    count = heads_in_l2(call.batch * call.heads, kv_bytes // call.heads, share)
    return 0 if count == call.batch * call.heads else count
