"""Arguments that the backward kernels share: sizes, strides, compile-time choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from stof.kernels.config import KernelConfig
from stof.kernels.dropout import scale_of, threshold_of
from stof.kernels.implementation import Options
from stof.kernels.triton.backward_tiles import BackwardTiles
from stof.kernels.triton.operands import row_strides, row_unit
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl


@dataclass(frozen=True)
class Shapes:
    """Sizes of a call, as the kernels take them."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    block_d: int
    block_v: int
    unit: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shapes:
        batch, heads, q_len, head_dim = q.shape
        kv_heads, kv_len, value_dim = v.shape[1:]
        block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (head_dim, value_dim))
        return cls(batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, block_d, block_v, row_unit(q))

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def stat_size(self) -> int:
        return self.batch * self.heads * self.q_len

    def strides(self, *tensors: Tensor) -> list[int]:
        """Strides of q, k, v and d_out as the kernels count them."""
        return [n // self.unit for x in tensors for n in row_strides(x)]

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim // self.unit, self.value_dim // self.unit

    @property
    def blocks(self) -> tuple[int, int, bool, bool]:
        """BLOCK_D, BLOCK_V, PAD_D, PAD_V."""
        return self.block_d, self.block_v, self.block_d != self.head_dim, self.block_v != self.value_dim


def kernel_launch(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    config: KernelConfig,
    device: torch.device,
) -> Launch:
    """A launch of a kernel whose last constant is USE_PDL."""
    return Launch(
        kernel,
        grid,
        tensors,
        numbers,
        (*constants, supports_pdl(device)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        use_pdl=supports_pdl(device),
        device=device,
    )


def grid_of(tiles: BackwardTiles, config: KernelConfig, groups: int) -> tuple[int, int]:
    """`heads_at_once`, and how many programs there are."""
    heads_at_once = min(config.side or groups, groups)
    return heads_at_once, len(tiles.items) * -(-groups // heads_at_once) * heads_at_once


def row_order_of(tiles: BackwardTiles) -> Tensor:
    """Kernels compiled for rows in order do not read it, but take a pointer."""
    return tiles.row_order if tiles.row_order.numel() else tiles.pattern_of


def lists_of(tiles: BackwardTiles) -> tuple[Tensor, ...]:
    return (
        tiles.pattern_of, tiles.items, tiles.row_block_ptr, tiles.partial_count, tiles.columns, tiles.tile_bitmap,
        tiles.bitmaps, row_order_of(tiles),
    )  # fmt: skip


def block_sizes(tiles: BackwardTiles) -> tuple[int, int, int]:
    """BLOCK_R, BLOCK_M, BLOCK_N."""
    return tiles.block_m, max(16, tiles.block_m), tiles.block_n


def kinds_of(tiles: BackwardTiles) -> tuple[bool, ...]:
    """PATTERNS, HAS_PARTIAL, HAS_FULL, FULL_CONTIGUOUS, PERMUTED, SPLIT, HAS_NAN."""
    several, permuted, split = tiles.pattern_of.numel() > 1, tiles.row_order.numel() > 0, tiles.slots > 0
    return several, tiles.has_partial, tiles.has_full, tiles.full_contiguous, permuted, split, tiles.has_nan


def modes_of(options: Options) -> tuple[bool, ...]:
    """HAS_SCORE_MOD, HAS_SOFTCAP, HAS_BIAS, HAS_SINKS."""
    has_bias, has_softcap = options.bias is not None, options.softcap > 0
    return has_bias or has_softcap, has_softcap, has_bias, options.sinks is not None


def dropout_of(options: Options) -> tuple[int, float]:
    """The threshold and the scale of dropout, of a call without any 0 and 1."""
    return threshold_of(options.dropout_p), scale_of(options.dropout_p)


def scales_of(options: Options) -> tuple[float, float, float]:
    """The scale of scores, in units of log 2 where nothing is added to them; the scale of gradients; the softcap."""
    has_score_mod = modes_of(options)[0]
    return options.scale * (1.0 if has_score_mod else math.log2(math.e)), options.scale, options.softcap


def mask_strides(tiles: BackwardTiles) -> tuple[int, int]:
    batch, heads = tiles.pattern_of.shape
    return 0 if batch == 1 else heads, 0 if heads == 1 else 1


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    if bias is None:
        return 0, 0, 0, 0
    return tuple([0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)])


def precision_of(q: Tensor) -> str:
    return "tf32x3" if q.dtype == torch.float32 else "tf32"
