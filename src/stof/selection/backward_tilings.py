"""Tile sizes of the backward kernels, best first."""

from __future__ import annotations

from dataclasses import dataclass

from stof.kernels.config import KernelConfig
from stof.layout import LayoutConfig
from stof.selection.capabilities import CallSpec
from stof.selection.resources import head_dim_class


@dataclass(frozen=True)
class BackwardTiling:
    """Layouts and configurations of the kernels for dQ, and for dK and dV; None for the plan's layout.

    Attributes:
        dq_layout: of the mask.
        dkv_layout: of the transposed mask.
        dq, dkv: how the kernels run.
    """

    dq_layout: LayoutConfig | None = None
    dkv_layout: LayoutConfig | None = None
    dq: KernelConfig | None = None
    dkv: KernelConfig | None = None


# Tiles of a row block that one program goes through; the row block of a global token has more, and is split.
_SPLIT = 32
# (rows, columns, warps) of dQ, and of dK and dV, by head_dim class. Registers and spilled bytes for sm_90: `python -m
# tests.kernels.compile_kernels`. The last of each class needs the least shared memory.
_TILES: dict[int, tuple[tuple[tuple[int, int, int], tuple[int, int, int]], ...]] = {
    64: (((128, 64, 8), (128, 64, 8)), ((64, 64, 4), (64, 64, 4)), ((32, 32, 4), (32, 32, 4))),
    128: (((128, 64, 8), (64, 64, 8)), ((64, 32, 4), (64, 32, 4)), ((32, 32, 4), (32, 32, 4))),
    256: (((64, 32, 8), (64, 32, 8)), ((32, 32, 4), (32, 32, 4)), ((16, 32, 4), (16, 32, 4))),
}


def triton_tilings(call: CallSpec) -> tuple[BackwardTiling, ...]:
    """Tile sizes to try: float32 takes twice the registers and memory, and begins with the second."""
    tiles = _TILES[head_dim_class(call.head_dim, call.value_dim)]
    return tuple(_tiling(dq, dkv) for dq, dkv in tiles[call.dtype.itemsize > 2 :])


def _tiling(dq: tuple[int, int, int], dkv: tuple[int, int, int]) -> BackwardTiling:
    configs = [KernelConfig(num_warps=warps, num_stages=2, split_tiles=_SPLIT) for _, _, warps in (dq, dkv)]
    return BackwardTiling(LayoutConfig(*dq[:2]), LayoutConfig(*dkv[:2]), *configs)
