"""A layout in the form that the Hopper kernels read, with the configuration they run it under."""

from __future__ import annotations

from dataclasses import dataclass

from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import FP8_STAGES
from stof.kernels.hopper.paired_tile_lists import make_paired_lists
from stof.kernels.hopper.tile_lists import TileLists, make_fp8_lists, make_tile_lists
from stof.layout import Layout


@dataclass(frozen=True, eq=False)
class PreparedTiles:
    """Tile lists, and how the kernel runs them."""

    lists: TileLists
    config: KernelConfig


def prepare(layout: Layout, config: KernelConfig | None) -> PreparedTiles:
    """Tile lists for 16-bit operands; `config` defaults to two stages.

    Raises:
        UnfitLayoutError: the kernel cannot read the layout.
    """
    config = config or KernelConfig(num_stages=2)
    if config.paired:
        return PreparedTiles(make_paired_lists(layout), config)
    return PreparedTiles(make_tile_lists(layout, config.split_tiles, config.zero_unseen), config)


def prepare_fp8(layout: Layout, config: KernelConfig | None) -> PreparedTiles:
    """Tile lists for 8-bit operands; `config` defaults to `FP8_STAGES` stages.

    Raises:
        UnfitLayoutError: the kernel cannot read the layout.
    """
    config = config or KernelConfig(num_stages=FP8_STAGES)
    return PreparedTiles(make_fp8_lists(layout, config.split_tiles), config)
