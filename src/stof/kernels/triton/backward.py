"""Calling the backward kernels: strides, constants, memory for partial sums, launches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.common import empty_gradient
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import BackwardCall, Gradients, NeedsGrad, Options
from stof.kernels.triton.arguments import BlockWiseConfig, Problem, Schedule, kernel_launch
from stof.kernels.triton.backward_common import merge_kernel, row_stats_kernel
from stof.kernels.triton.backward_tiles import BackwardTiles, PreparedBackward
from stof.kernels.triton.bias_gradient_kernel import bias_gradient_kernel
from stof.kernels.triton.dkv_kernel import dkv_kernel
from stof.kernels.triton.dq_kernel import dq_kernel
from stof.kernels.triton.operands import Strides, padded_rows, row_unit, rows_fit

# Rows of a program of `row_stats_kernel`.
_STATS_ROWS = 32


def bind_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    prepared: PreparedBackward,
    options: Options,
    needs: NeedsGrad,
) -> BackwardCall:
    """Gradients of masked attention, bound to tensors like these; equal calls give equal bits.

    Args:
        q, k, v: as for the forward's `bind`.
        out: `[B, H, Sq, Dv]`, any strides.
        d_out: the gradient of `out`, any strides.
        d_lse: `[B, H, Sq]`, the gradient of the log-sum-exp, None for zero.
        prepared: tiles of both layouts.
        options: of the call.
        needs: which gradients are computed.

    Returns:
        `call(q, k, v, out, lse, d_out, d_lse, bias, sinks, seed=None) -> Gradients`, with the forward's `out` and
        its `lse [B, H, Sq]`, float32 and contiguous.

    Raises:
        UnfitLayoutError: the layouts are not for tensors of these sizes.
        KernelError: (the call) a kernel does not compile here, or needs too much shared memory.
    """
    _check(q, k, prepared)
    if not all(rows_fit(x, row_unit(x)) for x in (q, k, v, d_out)):
        return _with_copies(prepared, options, needs)
    key = _shape_key(q, k, v, out, d_out, d_lse, prepared, options, needs)
    kernels = _bound_by_shape.get(key)
    if kernels is None:
        kernels = _Kernels.of(q, k, v, out, d_out, d_lse, prepared, options, needs)
        if key is not None:
            if len(_bound_by_shape) >= _MOST_BOUND:
                _bound_by_shape.clear()
            _bound_by_shape[key] = kernels.with_tiles(None)
    else:
        kernels = kernels.with_tiles(prepared)
    of_rows, of_q, of_kv, of_bias = kernels
    copied = _with_copies(prepared, options, needs)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None = None,
    ) -> Gradients:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | d_out.data_ptr()) & 15:
            return copied(q, k, v, out, lse, d_out, d_lse, bias, sinks, seed)
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        stats = of_rows(out, lse, d_out, d_lse, sinks)
        # Pointers the kernels are compiled not to read take any tensor.
        tensors = (q, k, v, d_out, stats, q if bias is None else bias, lse if seed is None else seed)
        dq = None if of_q is None else of_q(*tensors)
        dk, dv = (None, None) if of_kv is None else of_kv(*tensors)
        d_bias = d_sinks = None
        if needs.bias and bias is not None:
            d_bias = _d_row_bias(bias, lse, d_lse, stats) if of_bias is None else of_bias(*tensors)
        if needs.sinks and sinks is not None:
            d_sinks = -stats[3].sum((0, 2)).to(sinks.dtype)
        return Gradients(dq, dk, dv, d_bias, d_sinks)

    return call


class _Kernels(NamedTuple):
    """The kernels of a backward call, bound to its tensors' shapes and to tiles; None for gradients not asked for."""

    of_rows: Callable[..., Tensor]
    of_q: _QueryGradient | None
    of_kv: _KeyGradients | None
    of_bias: Callable[..., Tensor] | None

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor | None,
        prepared: PreparedBackward, options: Options, needs: NeedsGrad,
    ) -> _Kernels:  # fmt: skip
        by_key = needs.bias and options.bias is not None and options.bias.shape[3] > 1
        return _Kernels(
            _bind_row_stats(out, d_out, d_lse, options),
            _QueryGradient(q, k, v, d_out, prepared, options) if needs.q else None,
            _KeyGradients(q, k, v, d_out, prepared, options) if needs.kv else None,
            _bind_d_bias(q, k, v, d_out, prepared, options) if by_key else None,
        )

    def with_tiles(self, prepared: PreparedBackward | None) -> _Kernels:
        """The same kernels with tiles of another mask, or without any; neither has row blocks that are split."""
        dq, dkv = (None, None) if prepared is None else (prepared.dq, prepared.dkv)
        return self._replace(
            of_q=self.of_q and self.of_q.with_tiles(dq), of_kv=self.of_kv and self.of_kv.with_tiles(dkv)
        )


# What binds a backward call, by everything but the tensors of its tiles: many masks differ in those alone.
_bound_by_shape: dict[Hashable, _Kernels] = {}
_MOST_BOUND = 256


def _shape_key(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor | None,
    prepared: PreparedBackward, options: Options, needs: NeedsGrad,
) -> Hashable:  # fmt: skip
    """Calls with equal keys differ in the tensors of their tiles alone; None where a call is bound by itself."""
    if prepared.dq.slots or prepared.dkv.slots or options.bias is not None:
        return None
    tensors = [
        None if x is None else (x.shape, x.stride(), x.dtype) for x in (q, k, v, out, d_out, d_lse, options.sinks)
    ]
    tiles = [
        (
            *(one.pattern_of.shape, one.pattern_of.stride(), one.rows, one.block_m, one.block_n, len(one.row_order)),
            *(one.has_partial, one.has_full, one.full_contiguous, one.has_nan),
        )
        for one in (prepared.dq, prepared.dkv)
    ]
    return *tensors, *tiles, q.device, prepared.dq_config, prepared.dkv_config, options.scalars, needs


def _check(q: Tensor, k: Tensor, prepared: PreparedBackward) -> None:
    lengths, expected = (q.shape[2], k.shape[2]), (prepared.dq.rows, prepared.dkv.rows)
    if lengths != expected:
        raise UnfitLayoutError(
            f"layouts for lengths {expected[0]} and {expected[1]} do not serve {lengths[0]}, {lengths[1]}"
        )


def _with_copies(prepared: PreparedBackward, options: Options, needs: NeedsGrad) -> BackwardCall:
    """A call for tensors that the kernels cannot read as they are: they read copies, padded with zeros to whole units.

    `out` is read in any memory order, but has the width of `d_out`.
    """
    scalars = options.scalars

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None = None,
    ) -> Gradients:
        head_dim, value_dim = q.shape[3], v.shape[3]
        q, k, v, d_out = (padded_rows(x, row_unit(x)) for x in (q, k, v, d_out))
        missing = v.shape[3] - value_dim
        out = torch.nn.functional.pad(out, (0, missing)) if missing else out
        called = scalars._replace(bias=bias, sinks=sinks, seed=seed)
        bound = bind_backward(q, k, v, out, d_out, d_lse, prepared, called, needs)
        gradients = bound(q, k, v, out, lse, d_out, d_lse, bias, sinks, seed)
        dq, dk, dv = (
            x if x is None or x.shape[3] == width else x[..., :width].contiguous()
            for x, width in zip(gradients[:3], (head_dim, head_dim, value_dim), strict=True)
        )
        return gradients._replace(q=dq, k=dk, v=dv)

    return call


def _bind_row_stats(out: Tensor, d_out: Tensor, d_lse: Tensor | None, options: Options) -> Callable[..., Tensor]:
    """`call(out, lse, d_out, d_lse, sinks) -> stats`, see `row_stats_kernel`."""
    batch, heads, q_len, value_dim = out.shape
    row_blocks = -(-q_len // _STATS_ROWS)
    launch = kernel_launch(
        row_stats_kernel,
        batch * heads * row_blocks,
        (),
        (*out.stride(), *d_out.stride(), heads, q_len, row_blocks, value_dim, batch * heads * q_len),
        (d_lse is not None, options.sinks is not None, _STATS_ROWS, max(16, triton.next_power_of_2(value_dim))),
        KernelConfig(),
        out.device,
    )
    rows = 2 if options.sinks is None else 4

    def call(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, sinks: Tensor | None) -> Tensor:
        stats = lse.new_empty(rows, *lse.shape)
        launch(out, d_out, lse, lse if d_lse is None else d_lse, lse if sinks is None else sinks, stats)
        return stats

    return call


class _TileLists(NamedTuple):
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
    def of(cls, tiles: BackwardTiles) -> _TileLists:
        lists = cls(*[getattr(tiles, name) for name in cls._fields])
        # Kernels compiled for rows in order do not read it, but take a pointer.
        return lists if tiles.row_order.numel() else lists._replace(row_order=tiles.pattern_of)


def _common(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, tiles: BackwardTiles, config: KernelConfig, options: Options,
    *gradients: Tensor,
) -> tuple[Problem, tuple[int, int], BlockWiseConfig]:  # fmt: skip
    """What all three kernels of gradients take: the call, row blocks and size of the statistics, choices."""
    unit = row_unit(q)
    choices = BlockWiseConfig.of(
        q, v, tiles, options, config, unit, (q, k, v, d_out, *gradients),
        split=tiles.slots > 0, has_nan=tiles.has_nan, full_contiguous=tiles.full_contiguous,
    )  # fmt: skip
    problem = Problem.of(q, k, v, d_out, tiles.pattern_of, options, choices, unit)
    return problem, (tiles.row_blocks, q.shape[:3].numel()), choices


class _QueryGradient:
    """`call(q, k, v, d_out, stats, bias, seed) -> dq`."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, prepared: PreparedBackward, options: Options
    ) -> None:
        tiles, config = prepared.dq, prepared.dq_config
        dq = empty_gradient(q)
        problem, sizes, choices = _common(q, k, v, d_out, tiles, config, options, dq)
        schedule = Schedule.of(config, q.shape[0], q.shape[1], len(tiles.items), tiles.slots)
        self.launch = kernel_launch(
            dq_kernel, schedule.programs, (_TileLists.of(tiles),),
            (problem, schedule, *sizes, options.scale, Strides(*dq.stride()[:3])), (choices,), config, q.device,
        )  # fmt: skip
        self.merge = _bind_merge(tiles, dq, choices, choices.block_d, options.scale)
        self.chunks = schedule.groups * tiles.slots * choices.block_m * choices.block_d

    def with_tiles(self, tiles: BackwardTiles | None) -> _QueryGradient:
        """As `_Kernels.with_tiles`."""
        other = copy.copy(self)
        other.launch = self.launch.with_tensors(() if tiles is None else (_TileLists.of(tiles),))
        return other

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, stats: Tensor, bias: Tensor, seed: Tensor
    ) -> Tensor:
        dq = empty_gradient(q)
        chunk = stats.new_empty(self.chunks) if self.chunks else stats
        self.launch(q, k, v, d_out, stats, bias, seed, dq, chunk)
        self.merge(dq, chunk)
        return dq


class _KeyGradients:
    """`call(q, k, v, d_out, stats, bias, seed) -> (dk, dv)`."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, prepared: PreparedBackward, options: Options
    ) -> None:
        tiles, config = prepared.dkv, prepared.dkv_config
        dk, dv = empty_gradient(k), empty_gradient(v)
        problem, sizes, choices = _common(q, k, v, d_out, tiles, config, options, dk, dv)
        schedule = Schedule.of(config, k.shape[0], k.shape[1], len(tiles.items), tiles.slots)
        strides = Strides(*dk.stride()[:3]), Strides(*dv.stride()[:3])
        self.launch = kernel_launch(
            dkv_kernel, schedule.programs, (_TileLists.of(tiles),),
            (problem, schedule, *sizes, options.scale, *strides, k.shape[2]), (choices,), config, q.device,
        )  # fmt: skip
        self.merge_dk = _bind_merge(tiles, dk, choices, choices.block_d, options.scale)
        self.merge_dv = _bind_merge(tiles, dv, choices, choices.block_v, 1.0)
        self.rows = schedule.groups * tiles.slots * choices.block_m
        self.widths = choices.block_d, choices.block_v

    def with_tiles(self, tiles: BackwardTiles | None) -> _KeyGradients:
        """As `_Kernels.with_tiles`."""
        other = copy.copy(self)
        other.launch = self.launch.with_tensors(() if tiles is None else (_TileLists.of(tiles),))
        return other

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, stats: Tensor, bias: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        dk, dv = empty_gradient(k), empty_gradient(v)
        dk_chunk = dv_chunk = stats
        if self.rows:
            dk_chunk, dv_chunk = (stats.new_empty(self.rows * width) for width in self.widths)
        self.launch(q, k, v, d_out, stats, bias, seed, dk, dv, dk_chunk, dv_chunk)
        self.merge_dk(dk, dk_chunk)
        self.merge_dv(dv, dv_chunk)
        return dk, dv


def _bind_d_bias(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, prepared: PreparedBackward, options: Options
) -> Callable[..., Tensor]:
    """`call(q, k, v, d_out, stats, bias, seed) -> d_bias` for a bias that has a value for every key."""
    tiles, config, bias = prepared.dkv, prepared.dkv_config, options.bias
    assert bias is not None
    bias_batch, bias_heads, bias_rows, _ = bias.shape
    problem, sizes, choices = _common(q, k, v, d_out, tiles, config, options)
    launch = kernel_launch(
        bias_gradient_kernel,
        bias_batch * bias_heads * tiles.row_blocks,
        (_TileLists.of(tiles),),
        (problem, *sizes, bias_heads, q.shape[0] // bias_batch, q.shape[1] // bias_heads, k.shape[2]),
        (bias_rows > 1, replace(choices, int64_offsets=True)),
        config,
        q.device,
    )

    def call(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, stats: Tensor, bias: Tensor, seed: Tensor) -> Tensor:
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        launch(q, k, v, d_out, stats, bias, seed, d_bias)
        return d_bias.to(bias.dtype)

    return call


def _d_row_bias(bias: Tensor, lse: Tensor, d_lse: Tensor | None, stats: Tensor) -> Tensor:
    """The gradient of a bias with one value for all keys of a row: the row's sum of the gradients of its scores.

    Weights sum up to `share`, so it is `delta * (1 - share) + d_lse`.
    """
    by_row = torch.zeros_like(lse) if d_lse is None else d_lse.masked_fill(lse == -torch.inf, 0.0)
    if len(stats) > 2:
        by_row = by_row + stats[3]
    return by_row[..., None].sum_to_size(bias.shape).to(bias.dtype)


def _bind_merge(
    tiles: BackwardTiles, out: Tensor, choices: BlockWiseConfig, width: int, scale: float
) -> Callable[[Tensor, Tensor], None]:
    """`call(out, chunk)` adds up the partial sums of split row blocks; it does nothing where there are none."""
    splits = len(tiles.splits)
    if not splits:
        return lambda out, chunk: None
    batch, heads, rows, out_width = out.shape
    return kernel_launch(
        merge_kernel,
        batch * heads * splits,
        (tiles.splits, _TileLists.of(tiles).row_order),
        (Strides(*out.stride()[:3]), heads, rows, out_width, splits, tiles.slots, scale),
        (choices.block_r, choices.block_m, width, choices.permuted),
        KernelConfig(),
        out.device,
    )
