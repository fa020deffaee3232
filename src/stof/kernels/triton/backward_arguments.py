"""Arguments of the backward kernels: what they are told of a call and of its tiles, and compile-time choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stof.kernels.config import KernelConfig
from stof.kernels.dropout import scale_of, threshold_of
from stof.kernels.implementation import Options
from stof.kernels.triton.backward_tiles import BackwardTiles
from stof.kernels.triton.operands import BiasStrides, Strides, mask_strides, row_strides, row_unit
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl


@dataclass(frozen=True)
class Shapes:
    """Sizes of a call."""

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
    def stat_size(self) -> int:
        return self.batch * self.heads * self.q_len


class Problem(NamedTuple):
    """What each of the three kernels reads of a call; a number that only some read would specialise the others.

    Attributes:
        q, k, v, d_out: strides, in units of `BackwardConfig.unit` elements.
        bias: strides.
        mask_b, mask_h: strides of `BackwardTiles.pattern_of`.
        heads_per_group: query heads per key head.
        q_len: query rows.
        head_dim, value_dim: in units of `BackwardConfig.unit` elements.
        row_blocks: of a pattern.
        stat_size: values of each kind in the output of `row_stats_kernel`.
        score_scale: scale of scores, times log2(e) unless `BackwardConfig.has_score_mod`.
        scale: scale of gradients.
        softcap: of scores.
        threshold, dropout_scale: of dropout, see `stof.kernels.dropout`.
    """

    q: Strides
    k: Strides
    v: Strides
    d_out: Strides
    bias: BiasStrides
    mask_b: int
    mask_h: int
    heads_per_group: int
    q_len: int
    head_dim: int
    value_dim: int
    row_blocks: int
    stat_size: int
    score_scale: float
    scale: float
    softcap: float
    threshold: int
    dropout_scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, tiles: BackwardTiles, options: Options) -> Problem:
        shapes = Shapes.of(q, k, v)
        mask_b, mask_h = mask_strides(tiles.pattern_of)
        base_2 = 1.0 if _has_score_mod(options) else math.log2(math.e)
        return cls(
            q=row_strides(q, shapes.unit),
            k=row_strides(k, shapes.unit),
            v=row_strides(v, shapes.unit),
            d_out=row_strides(d_out, shapes.unit),
            bias=BiasStrides.of(options.bias),
            mask_b=mask_b,
            mask_h=mask_h,
            heads_per_group=shapes.heads // shapes.kv_heads,
            q_len=shapes.q_len,
            head_dim=shapes.head_dim // shapes.unit,
            value_dim=shapes.value_dim // shapes.unit,
            row_blocks=tiles.row_blocks,
            stat_size=shapes.stat_size,
            score_scale=options.scale * base_2,
            scale=options.scale,
            softcap=options.softcap,
            threshold=threshold_of(options.dropout_p),
            dropout_scale=scale_of(options.dropout_p),
        )


class Schedule(NamedTuple):
    """Which program of dQ, or of dK and dV, computes what.

    Attributes:
        groups: batch entries times `heads`.
        heads: query heads for dQ, key heads for dK and dV.
        items: work items of a group.
        heads_at_once: neighbouring groups that run the same item at the same time, for the L2 cache.
        slots: of partial sums.
    """

    groups: int
    heads: int
    items: int
    heads_at_once: int
    slots: int

    @classmethod
    def of(cls, tiles: BackwardTiles, config: KernelConfig, batch: int, heads: int) -> Schedule:
        groups = batch * heads
        return cls(groups, heads, len(tiles.items), min(config.side or groups, groups), tiles.slots)

    @property
    def programs(self) -> int:
        return self.items * -(-self.groups // self.heads_at_once) * self.heads_at_once


class TileLists(NamedTuple):
    """Tensors of `BackwardTiles`; in a kernel, pointers to them."""

    pattern_of: Tensor
    items: Tensor
    row_block_ptr: Tensor
    partial_count: Tensor
    columns: Tensor
    tile_bitmap: Tensor
    bitmaps: Tensor
    row_order: Tensor

    @classmethod
    def of(cls, tiles: BackwardTiles) -> TileLists:
        lists = cls(*[getattr(tiles, name) for name in cls._fields])
        # Kernels compiled for rows in order do not read it, but take a pointer.
        return lists if tiles.row_order.numel() else lists._replace(row_order=tiles.pattern_of)


@dataclass(frozen=True)
class BackwardConfig:
    """Compile-time choices of the backward kernels.

    Fields alone: Triton's cache keys hold their values, but no code of properties.

    Attributes:
        block_r, block_m: rows of a row block, and of the matrix products, which have at least 16.
        block_n: columns of a tile.
        block_d, block_v: head dimensions in registers.
        pad_d, pad_v: these are larger than those in memory.
        patterns: there are several masks.
        has_partial, has_full: kinds of tiles that there are.
        full_contiguous: columns of full tiles are consecutive.
        permuted: rows have an order of their own.
        split: some row blocks are cut into chunks.
        has_nan: row blocks may ask for NaN.
        has_score_mod: scores have a bias or a softcap.
        has_softcap, has_bias, has_sinks, has_dropout: options of the call.
        unit: elements that `Problem` counts strides and widths in, which are multiples of them.
        int64_offsets: offsets within a head pass 2^31.
        precision: of matrix products.
        stages: of the pipeline.
    """

    block_r: int
    block_m: int
    block_n: int
    block_d: int
    block_v: int
    pad_d: bool
    pad_v: bool
    patterns: bool
    has_partial: bool
    has_full: bool
    full_contiguous: bool
    permuted: bool
    split: bool
    has_nan: bool
    has_score_mod: bool
    has_softcap: bool
    has_bias: bool
    has_sinks: bool
    has_dropout: bool
    unit: int
    int64_offsets: bool
    precision: str
    stages: int

    @classmethod
    def of(
        cls,
        shapes: Shapes,
        dtype: torch.dtype,
        tiles: BackwardTiles,
        options: Options,
        stages: int,
        int64_offsets: bool,
    ) -> BackwardConfig:
        return cls(
            block_r=tiles.block_m,
            block_m=product_rows(tiles),
            block_n=tiles.block_n,
            block_d=shapes.block_d,
            block_v=shapes.block_v,
            pad_d=shapes.block_d != shapes.head_dim,
            pad_v=shapes.block_v != shapes.value_dim,
            patterns=tiles.pattern_of.numel() > 1,
            has_partial=tiles.has_partial,
            has_full=tiles.has_full,
            full_contiguous=tiles.full_contiguous,
            permuted=tiles.row_order.numel() > 0,
            split=tiles.slots > 0,
            has_nan=tiles.has_nan,
            has_score_mod=_has_score_mod(options),
            has_softcap=options.softcap > 0,
            has_bias=options.bias is not None,
            has_sinks=options.sinks is not None,
            has_dropout=options.dropout_p > 0,
            unit=shapes.unit,
            int64_offsets=int64_offsets,
            precision="tf32x3" if dtype == torch.float32 else "tf32",
            stages=stages,
        )


def _has_score_mod(options: Options) -> bool:
    return options.bias is not None or options.softcap > 0


def product_rows(tiles: BackwardTiles) -> int:
    """Rows of the matrix products."""
    return max(16, tiles.block_m)


def kernel_launch(
    kernel: Any,
    grid: int,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
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
