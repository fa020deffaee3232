"""The choices of a call on a GPU, and which of them differ, fit, and can be fed by the L2 cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from stof.kernels.hopper.config import blocks_per_sm
from stof.layout import LayoutConfig
from stof.layout.survey import Survey
from stof.selection.capabilities import CallSpec
from stof.selection.gpu_candidates import heads_at_once
from stof.selection.implementations import IMPLEMENTATIONS, gpu_of
from stof.selection.kernel_choice import KernelChoice
from stof.selection.mask_geometry import Geometry
from stof.selection.resources import head_dim_class

# From these numbers of tiles on, three thread blocks on a multiprocessor wait for the L2 cache. `_LONG` is the mean of
# all row blocks: wider tiles are 25 % faster at 64 tiles, 5 % at 16, and between 5 % faster and 4 % slower at 8.
# `_MOSTLY_LONG` is the mean over tiles of the tiles in their row block: wider ones are 5 % slower at 8.8 (windows,
# whose row blocks are alike), and 5 % faster at 11 (causal masks).
_LONG, _MOSTLY_LONG = 8, 10.5
# From this mean number of tiles on, paired row blocks are slower: by 10 % at 64 (causal, 8192 tokens); at 16 (full,
# 1024 tokens) they are 1 % faster.
_LONG_PAIRS = 24


def gpu_choices(
    call: CallSpec, geometry: Geometry, implementation: str, found_order: str | None = None
) -> list[KernelChoice]:
    """Every choice of one implementation for a call, whether it pays or not.

    With `found_order`, those that take the rows in that order.
    """
    named: tuple[str | None, ...] = (None, *(() if geometry.fixed else geometry.row_orders))
    orders = named if found_order is None else (found_order,)
    gpu = IMPLEMENTATIONS[implementation].gpu
    return [] if gpu is None else list(dict.fromkeys(gpu.choices(implementation, call, geometry, orders)))


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

    Each of the three reads keys and values for its own 64 rows. With 64 tiles a row block, 12 heads of 4096 tokens read
    6.4 TB/s, all that an H200's L2 cache gives. Pairs take 10 % longer there than tiles of 128 x 128.
    """
    if choice.layout is None or not gpu_of(choice).persistent:
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


def for_call(choice: KernelChoice, call: CallSpec) -> KernelChoice:
    """A choice that was made for another batch or other lengths, with as many heads side by side as suit this call."""
    if choice.kernel is None:
        return choice
    side = heads_at_once(call, persistent=gpu_of(choice).persistent)
    return choice if side == choice.kernel.side else replace(choice, kernel=replace(choice.kernel, side=side))


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory a thread block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return int(properties.shared_memory_per_block_optin)


def fits(choice: KernelChoice, call: CallSpec, limit: int) -> bool:
    """Whether a choice's shared memory stays within the device's."""
    if choice.kernel is None or choice.layout is None:
        return True
    return gpu_of(choice).shared_memory(choice, call) <= limit
