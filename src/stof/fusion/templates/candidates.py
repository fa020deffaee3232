"""The configurations that a search tries."""

from __future__ import annotations

import torch

from stof.fusion.templates.gemm_config import GemmConfig, GemmShape, config_problems


def configs(shape: GemmShape, dtype: torch.dtype, capability: tuple[int, int]) -> list[GemmConfig]:
    """Configurations worth measuring for a shape: those of the lists below that fit and do not waste most of a tile."""
    fitting = []
    for config in _CANDIDATES:
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
            fitting.append(config)
    return fitting


def _parsed(*lines: str) -> tuple[GemmConfig, ...]:
    return tuple(GemmConfig.parse(text) for line in lines for text in line.split())


_CANDIDATES = _parsed(
    "128x128x64,5s,pingpong  128x128x64,6s,pingpong",
    "64x256x64,4s,pingpong  64x128x64,7s,pingpong",
    "256x128x64,6s,cooperative  256x128x64,5s,cooperative  256x128x64,3s,cooperative  256x128x64,6s,cooperative,group4",
    "128x256x64,5s,cooperative  128x256x64,3s,cooperative  128x128x64,7s,cooperative",
    "128x192x64,5s,cooperative  128x192x64,4s,cooperative  192x128x64,5s,cooperative  192x128x64,4s,cooperative",
    "128x128x64,8w,4s,tilelang  128x256x64,8w,3s,tilelang",
    "64x128x64,4w,4s,tilelang",
    "128x256x64,8w,3s,tile  128x128x64,8w,3s,tile  128x128x64,4w,3s,tile  128x128x32,4w,3s,tile",
    "128x64x64,4w,4s,tile",
    "64x128x64,4w,4s,tile  64x64x64,4w,4s,tile  64x64x32,4w,3s,tile  64x64x128,4w,3s,tile,split2",
    "64x64x128,4w,3s,tile,split4  64x64x64,4w,4s,tile,split8  64x64x64,4w,6s,tile  64x64x64,4w,6s,tile,split5",
    "64x64x128,4w,3s,tile,split3  64x64x128,4w,3s,tile,split5  64x32x128,4w,4s,tile  64x32x128,4w,4s,tile,split2",
    "64x32x128,4w,4s,tile,split4",
    "32x64x128,4w,4s,tile  32x64x128,4w,4s,tile,split4",
    "16x32x128,4w,3s,tile  16x64x128,4w,4s,tile  16x64x128,4w,4s,tile,split4  16x32x256,4w,3s,tile,split2",
)
