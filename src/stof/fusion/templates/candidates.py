"""The configurations that a search tries."""

from __future__ import annotations

import torch

from stof.fusion.templates.gemm_config import GemmConfig, GemmShape, config_problems


def configs(shape: GemmShape, dtype: torch.dtype, capability: tuple[int, int]) -> list[GemmConfig]:
    """Configurations worth measuring for a shape: those of the lists below that fit and do not waste most of a tile."""
    if shape.inner:
        return [
            c for c in _FOR_CHAINS if c.block_m < 4 * shape.m + 16 and not config_problems(c, shape, dtype, capability)
        ]
    found = []
    for config in (*_CANDIDATES, *(_FOR_STORED if shape.stored else ())):
        tall = config.block_m > 16 and config.block_m >= 4 * shape.m
        wide = config.block_n > 32 and config.block_n >= 4 * shape.n * (2 if shape.gated else 1)
        # Splitting pays where the tiles alone leave most of a device idle.
        tiles = -(-shape.m // config.block_m) * -(-shape.n // config.block_n)
        idle = config.split == 1 or tiles * config.split <= 512
        # Fewer programs than that leave nine tenths of a large GPU idle; small tiles do not.
        small = config.block_m * config.block_n <= 64 * 64
        few = tiles * config.split < 13 and not small
        many = tiles > 2048 and small
        if not (tall or wide or few or many) and idle and not config_problems(config, shape, dtype, capability):
            found.append(config)
    return found


_CANDIDATES = (
    GemmConfig("pingpong", 128, 128, 64, stages=5),
    GemmConfig("pingpong", 128, 128, 64, stages=6),
    GemmConfig("pingpong", 64, 256, 64, stages=4),
    GemmConfig("pingpong", 64, 128, 64, stages=7),
    GemmConfig("together", 256, 128, 64, stages=6),
    GemmConfig("together", 256, 128, 64, stages=5),
    GemmConfig("together", 256, 128, 64, stages=3),
    GemmConfig("together", 256, 128, 64, stages=6, group=4),
    GemmConfig("together", 128, 256, 64, stages=5),
    GemmConfig("together", 128, 256, 64, stages=3),
    GemmConfig("together", 128, 128, 64, stages=7),
    GemmConfig("together", 128, 192, 64, stages=5),
    GemmConfig("together", 128, 192, 64, stages=4),
    GemmConfig("together", 192, 128, 64, stages=5),
    GemmConfig("together", 192, 128, 64, stages=4),
    GemmConfig("tilelang", 128, 128, 64, warps=8, stages=4),
    GemmConfig("tilelang", 128, 256, 64, warps=8, stages=3),
    GemmConfig("tilelang", 64, 128, 64, warps=4, stages=4),
    GemmConfig("tile", 128, 256, 64, warps=8, stages=3),
    GemmConfig("tile", 128, 128, 64, warps=8, stages=3),
    GemmConfig("tile", 128, 128, 64, warps=4, stages=3),
    GemmConfig("tile", 128, 128, 32, warps=4, stages=3),
    GemmConfig("tile", 128, 64, 64, warps=4, stages=4),
    GemmConfig("tile", 64, 128, 64, warps=4, stages=4),
    GemmConfig("tile", 64, 64, 64, warps=4, stages=4),
    GemmConfig("tile", 64, 64, 32, warps=4, stages=3),
    GemmConfig("tile", 64, 64, 128, warps=4, stages=3, split=2),
    GemmConfig("tile", 64, 64, 128, warps=4, stages=3, split=4),
    GemmConfig("tile", 64, 64, 64, warps=4, stages=4, split=8),
    GemmConfig("tile", 64, 64, 64, warps=4, stages=6),
    GemmConfig("tile", 64, 64, 64, warps=4, stages=6, split=5),
    GemmConfig("tile", 64, 64, 128, warps=4, stages=3, split=3),
    GemmConfig("tile", 64, 64, 128, warps=4, stages=3, split=5),
    GemmConfig("tile", 64, 32, 128, warps=4, stages=4),
    GemmConfig("tile", 64, 32, 128, warps=4, stages=4, split=2),
    GemmConfig("tile", 64, 32, 128, warps=4, stages=4, split=4),
    GemmConfig("tile", 32, 64, 128, warps=4, stages=4),
    GemmConfig("tile", 32, 64, 128, warps=4, stages=4, split=4),
    GemmConfig("tile", 16, 32, 128, warps=4, stages=3),
    GemmConfig("tile", 16, 64, 128, warps=4, stages=4),
    GemmConfig("tile", 16, 64, 128, warps=4, stages=4, split=4),
    GemmConfig("tile", 16, 32, 256, warps=4, stages=3, split=2),
)
# Few rows of 8-bit weights: as many bytes under way as 16-bit ones have with half the depth.
_FOR_STORED = (
    GemmConfig("tile", 16, 64, 128, warps=4, stages=4, split=2),
    GemmConfig("tile", 16, 64, 128, warps=4, stages=4, split=8),
    GemmConfig("tile", 16, 64, 256, warps=4, stages=3),
    GemmConfig("tile", 16, 64, 256, warps=4, stages=3, split=2),
    GemmConfig("tile", 16, 64, 256, warps=4, stages=3, split=4),
    GemmConfig("tile", 16, 64, 256, warps=4, stages=4, split=8),
    GemmConfig("tile", 16, 128, 128, warps=4, stages=4),
    GemmConfig("tile", 16, 128, 128, warps=8, stages=5, split=4),
    GemmConfig("tile", 32, 64, 128, warps=4, stages=4, split=2),
    GemmConfig("tile", 32, 64, 128, warps=4, stages=4, split=8),
    GemmConfig("tile", 64, 64, 128, warps=4, stages=4),
    GemmConfig("tile", 64, 64, 128, warps=4, stages=4, split=8),
)
_FOR_CHAINS = (
    *(GemmConfig("tile", 16, 64, 128, warps=4, stages=3, split=split) for split in (1, 4, 8, 16, 32)),
    *(GemmConfig("tile", 32, 64, 64, warps=4, stages=4, split=split) for split in (1, 4, 8)),
    *(GemmConfig("tile", 64, 128, 64, warps=4, stages=3, split=split) for split in (1, 2, 4)),
    GemmConfig("tile", 16, 64, 32, warps=4, stages=2, split=4),
    GemmConfig("tile", 64, 64, 32, warps=4, stages=2),
    GemmConfig("tile", 128, 128, 64, warps=8, stages=3),
)
