"""Arguments of the block-wise kernels, forward and backward: sizes of a call, its programs, compile-time choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from stof.kernels.config import KernelConfig
from stof.kernels.dropout import scale_of, threshold_of
from stof.kernels.implementation import Options
from stof.kernels.triton.backward_tiles import BackwardTiles
from stof.kernels.triton.operands import BiasStrides, needs_int64_offsets, row_strides
from stof.kernels.triton.work_list import Work
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl


@dataclass(frozen=True)
class BlockWiseConfig:
    """Compile-time choices of the block-wise kernels.

    Fields alone: Triton's cache keys hold their values, but no code of properties.

    Attributes:
        block_r, block_n: rows of a row block, columns of a tile.
        pack: query heads in the rows of a tile, rounded up to a power of two.
        block_m: rows of the matrix products, at least 16 and `block_r * pack`.
        block_d, block_v: head dimensions in registers.
        pad_d, pad_v: these are larger than those in memory.
        patterns: there are several masks.
        has_partial, has_full: kinds of tiles that there are.
        permuted: rows have an order of their own.
        has_score_mod: scores are modified by a bias, a softcap, or a scale that is not positive.
        has_softcap, has_bias, has_sinks, has_dropout: options of the call.
        unit: elements that `Problem` counts in.
        int64_offsets: offsets within a head pass 2^31.
        precision: of matrix products.
        stages: of the pipeline.
        split: some row blocks are cut into chunks.
        has_nan: row blocks may ask for NaN.
        full_contiguous: columns of each full tile are consecutive (backward).
        full_gathered: full tiles of an item have lists of columns; else they follow each other (this and what comes
            after it: forward).
        shared, contiguous_tiles: as in `Work`.
        full_bias_vectors: the bias of full tiles is read in vectors, see `Work.bias_vectors`, at aligned offsets.
        partial_bias_vectors: the same of partial tiles, where no vector reaches past the last key.
        same_stride: rows of k and v are equally far apart.
    """

    block_r: int
    block_n: int
    pack: int
    block_m: int
    block_d: int
    block_v: int
    pad_d: bool
    pad_v: bool
    patterns: bool
    has_partial: bool
    has_full: bool
    permuted: bool
    has_score_mod: bool
    has_softcap: bool
    has_bias: bool
    has_sinks: bool
    has_dropout: bool
    unit: int
    int64_offsets: bool
    precision: str
    stages: int
    split: bool = False
    has_nan: bool = False
    full_contiguous: bool = False
    full_gathered: bool = False
    shared: bool = False
    contiguous_tiles: bool = False
    full_bias_vectors: bool = False
    partial_bias_vectors: bool = False
    same_stride: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        tiles: Work | BackwardTiles,
        options: Options,
        config: KernelConfig,
        unit: int,
        tensors: tuple[Tensor | None, ...],
        pack: int = 1,
        **fields: bool,
    ) -> BlockWiseConfig:
        """Choices for a call.

        Args:
            tensors: whose offsets may need 64 bits.
            fields: those that have defaults.
        """
        head_dim, value_dim = q.shape[3], v.shape[3]
        block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (head_dim, value_dim))
        has_bias, has_softcap = options.bias is not None, options.softcap > 0
        return cls(
            block_r=tiles.block_m,
            block_n=tiles.block_n,
            pack=pack,
            block_m=max(16, tiles.block_m * pack),
            block_d=block_d,
            block_v=block_v,
            pad_d=block_d != head_dim,
            pad_v=block_v != value_dim,
            patterns=tiles.pattern_of.numel() > 1,
            has_partial=bool(tiles.has_partial),
            has_full=bool(tiles.has_full),
            permuted=tiles.row_order.numel() > 0,
            has_score_mod=has_bias or has_softcap or options.scale <= 0,
            has_softcap=has_softcap,
            has_bias=has_bias,
            has_sinks=options.sinks is not None,
            has_dropout=options.dropout_p > 0,
            unit=unit,
            int64_offsets=needs_int64_offsets(*tensors, options.bias),
            precision="tf32x3" if q.dtype == torch.float32 else "tf32",
            stages=config.num_stages,
            **fields,
        )


class Problem(NamedTuple):
    """Numbers of a call that every block-wise kernel reads.

    Not those that only some read: Triton compiles a kernel anew for each number that is 1 or a multiple of 16.

    Attributes:
        q_b, q_h, q_s: strides of batch entries, heads and rows of q; those of k and v count `BlockWiseConfig.unit`
            elements, and so do those of q in the backward. Not a tuple within the tuple: in loops, Triton 3.6 loses
            those of its numbers that are 1.
        out_b, out_h, out_s: of the output in elements; in the backward, of its gradient in units.
        bias_b, bias_h, bias_q, bias_k: of the bias.
        mask_b, mask_h: strides of `pattern_of`.
        heads: query heads.
        heads_per_group: query heads per key head.
        q_len: query rows.
        head_dim, value_dim: in units.
        scale: of scores, times log2(e) unless `BlockWiseConfig.has_score_mod`.
        softcap: of scores.
        threshold, dropout_scale: of dropout, see `stof.kernels.dropout`.
    """

    q_b: int
    q_h: int
    q_s: int
    k_b: int
    k_h: int
    k_s: int
    v_b: int
    v_h: int
    v_s: int
    out_b: int
    out_h: int
    out_s: int
    bias_b: int
    bias_h: int
    bias_q: int
    bias_k: int
    mask_b: int
    mask_h: int
    heads: int
    heads_per_group: int
    q_len: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    threshold: int
    dropout_scale: float

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        pattern_of: Tensor,
        options: Options,
        config: BlockWiseConfig,
        q_unit: int = 1,
    ) -> Problem:
        batch, heads = pattern_of.shape
        return cls(
            *row_strides(q, q_unit),
            *row_strides(k, config.unit),
            *row_strides(v, config.unit),
            *row_strides(out, q_unit),
            *BiasStrides.of(options.bias),
            mask_b=0 if batch == 1 else heads,
            mask_h=0 if heads == 1 else 1,
            heads=q.shape[1],
            heads_per_group=q.shape[1] // k.shape[1],
            q_len=q.shape[2],
            head_dim=q.shape[3] // config.unit,
            value_dim=v.shape[3] // config.unit,
            scale=options.scale * (1.0 if config.has_score_mod else math.log2(math.e)),
            softcap=options.softcap,
            threshold=threshold_of(options.dropout_p),
            dropout_scale=scale_of(options.dropout_p),
        )


class Schedule(NamedTuple):
    """Which program computes what: a program has one work item for one group.

    Attributes:
        groups: those that share a list of items, batch entries times `heads`.
        heads: of a batch entry: query heads, or key heads where a program has the query heads of one.
        items: work items of a group.
        heads_at_once: neighbouring groups that run the same item at the same time, for the L2 cache.
        slots: partial results of a group.
    """

    groups: int
    heads: int
    items: int
    heads_at_once: int
    slots: int

    @classmethod
    def of(cls, config: KernelConfig, batch: int, heads: int, items: int, slots: int) -> Schedule:
        groups = batch * heads
        return cls(groups, heads, items, min(config.side or groups, groups), slots)

    @property
    def programs(self) -> int:
        """How many are launched; groups are rounded up to a multiple of `heads_at_once`."""
        return self.items * -(-self.groups // self.heads_at_once) * self.heads_at_once


@triton.jit
@no_type_check
def item_of(schedule):
    """The work item of this program, and the group, which may not exist."""
    program, at_once = tl.program_id(0), schedule.heads_at_once
    item = program % (schedule.items * at_once) // at_once
    return item, program // (schedule.items * at_once) * at_once + program % at_once


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
