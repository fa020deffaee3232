"""Calling the backward kernel of Hopper: tensor maps, memory for the sums of dQ, launches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from stof.errors import UnfitLayoutError
from stof.kernels.common import empty_gradient
from stof.kernels.hopper.backward_kernel import backward_kernel
from stof.kernels.hopper.backward_lists import (
    DQ_HALF,
    ITEM,
    KEYS_OF_BLOCK,
    LAST_ITEMS,
    MOST_PARTS,
    SHORT_BLOCK,
    BackwardLists,
    slots_of,
    split_blocks,
)
from stof.kernels.hopper.backward_rows import backward_rows_kernel, convert_dq_kernel
from stof.kernels.hopper.backward_tickets import TICKET_SIZE
from stof.kernels.hopper.binding import Window, multiprocessors, readable
from stof.kernels.hopper.config import BackwardConfig, padded_width
from stof.kernels.implementation import BackwardCall, Gradients, NeedsGrad, Options
from stof.kernels.triton.operands import Strides
from stof.runtime.launch import Launch, TensorMap
from stof.runtime.pdl import supports_pdl

_ALIGNED = 16  # TMA takes addresses that are multiples of so many bytes
_MOST_ROWS = 2**31  # coordinates of TMA have 32 bits
# Most thread blocks of `convert_dq_kernel` for each multiprocessor.
_CONVERTERS = 8


class _MatrixWindow(NamedTuple):
    """Boxes of so many rows of a contiguous float32 matrix `[rows, columns]`."""

    rows: int
    columns: int
    of_box: int

    def key(self) -> tuple[Any, ...]:
        return tuple(self)

    def at(self, tensor: Tensor) -> TensorMap:
        layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        return TensorMap(tensor, [self.rows, self.columns], [self.columns, 1], [self.of_box, self.columns], layout)


class _Strides(NamedTuple):
    """Strides of the gradients: those of the call's tensors, which may be copied before they are read."""

    q: Strides
    k: Strides
    v: Strides


def bind_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    lists: BackwardLists,
    options: Options,
    needs: NeedsGrad,
) -> BackwardCall:
    """Gradients of masked attention, bound to tensors like these; equal calls give equal bits.

    Arguments, result and errors as for `stof.kernels.triton.backward.bind_backward`. dQ is summed in float32
    memory of `[B, H, lists.sums, 2, *DQ_HALF]`.

    Raises:
        UnfitLayoutError: lists for other lengths, more rows of sums than 32 bits count, gradients of both the
            log-sum-exp and sinks, or query heads of one key head that differ in their masks, where nothing sees some
            keys.
    """
    if options.sinks is not None and d_lse is not None:
        # Its part of dS has the weights without sinks, and the kernel computes the others.
        raise UnfitLayoutError("the Hopper backward kernel has no gradients of both the log-sum-exp and sinks")
    if (q.shape[2], k.shape[2]) != (lists.q_len, lists.kv_len):
        raise UnfitLayoutError(
            f"lists for lengths {lists.q_len} and {lists.kv_len} do not serve {q.shape[2]}, {k.shape[2]}"
        )
    if lists.seen_keys is not None and lists.pattern_of.shape[1] > 1 and q.shape[1] > k.shape[1]:
        raise UnfitLayoutError("query heads that share a key head do not see the same keys")
    gradients = _Strides(*(Strides(*empty_gradient(x).stride()[:3]) for x in (q, k, v)))
    patterns = lists.pattern_of.long()
    of_queries, of_keys = (None if x is None else x[patterns][..., None] for x in (lists.seen_queries, lists.seen_keys))
    # Of q, k, v and d_out. V is not a factor of dQ, dK or dV, and what it makes NaN of dP is dropped by the bitmaps.
    seen = of_queries, of_keys, None, of_queries
    copied = [not readable(x) or kept is not None for x, kept in zip((q, k, v, d_out), seen, strict=True)]
    q, k, v, d_out = (x.contiguous() if copy else x for x, copy in zip((q, k, v, d_out), copied, strict=True))
    kernels = _Kernels(q, k, v, _dense_rows(out), d_out, gradients, d_lse is not None, lists, options)

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        del bias, seed
        inputs = [_readable(*each) for each in zip((q, k, v, d_out), copied, seen, strict=True)]
        dq, dk, dv = empty_gradient(q), empty_gradient(k), empty_gradient(v)
        d_sinks = kernels(inputs, _dense_rows(out), lse, d_lse, sinks, dq, dk, dv)
        return Gradients(
            dq if needs.q else None, dk if needs.kv else None, dv if needs.kv else None, None,
            d_sinks if needs.sinks else None,
        )  # fmt: skip

    return call


def _readable(x: Tensor, copy: bool, seen: Tensor | None) -> Tensor:
    """The tensor, or a copy: with zeros where `seen` is false, of strides or at an address that TMA can read."""
    if seen is not None:
        return torch.where(seen, x, x.new_zeros(()), out=x.new_empty(x.shape))
    if copy:
        return x.contiguous()
    if x.data_ptr() % _ALIGNED == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _dense_rows(out: Tensor) -> Tensor:
    """A tensor whose columns are contiguous."""
    return out if out.stride(3) == 1 else out.contiguous()


class _Kernels:
    """The three kernels of a backward call, bound to its tensors' shapes and to lists."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, gradients: _Strides, has_d_lse: bool,
        lists: BackwardLists, options: Options,
    ) -> None:  # fmt: skip
        batch, heads, q_len, head_dim = q.shape
        kv_heads, kv_len = k.shape[1:3]
        device, pdl, queries, width = q.device, supports_pdl(q.device), lists.queries, padded_width(head_dim)
        q_blocks = -(-q_len // queries)
        blocks = batch * heads * q_blocks
        processors = multiprocessors(device)
        split = split_blocks(lists, batch * heads, heads // kv_heads, processors)
        items, slots = lists.row_blocks, lists.row_blocks * slots_of(heads // kv_heads)
        items_of_head, all_items, heads_of_items = items, batch * heads * items, 0
        if split is not None:
            items, slots = len(split), int(split[-1, ITEM.slot]) + slots_of(int(split[-1, ITEM.adding]))
            items_of_head, all_items = int(split[:, ITEM.heads].sum()) * kv_heads // heads, batch * kv_heads * items
            heads_of_items = int(split[:, ITEM.heads].max())
        programs = min(all_items * MOST_PARTS, processors)  # all items may be split
        last_items = 0  # an upper bound of what the device chooses (`_schedule` in `backward_tickets`)
        if len(lists.tiles) > SHORT_BLOCK * (len(lists.row_block_ptr) - 1):
            last_items = min(int(LAST_ITEMS * programs), all_items)
        first_part_slot = batch * kv_heads * slots
        all_slots = first_part_slot + last_items * slots_of(MOST_PARTS)
        # With at least one end ticket for each thread block.
        self.tickets = (all_items + last_items * (MOST_PARTS - 1) + programs, TICKET_SIZE.value)
        self.stats, self.of_sinks = (blocks, 2 * queries), (batch, heads, q_blocks * queries)
        self.counters = 2 + batch * heads * (lists.sums + 1) + 4 * all_slots
        self.kv_sums = (all_slots, 2, KEYS_OF_BLOCK, width)
        self.sums = (batch * heads * lists.sums * 2 * DQ_HALF[0], DQ_HALF[1])
        if self.sums[0] >= _MOST_ROWS:
            raise UnfitLayoutError(f"{self.sums[0]} rows of dQ are more than 32-bit coordinates reach")
        of_d_out = Strides(*d_out.stride()[:3])
        sizes = heads, q_len, q_blocks
        mask_batch, mask_heads = lists.pattern_of.shape
        mask_strides = mask_heads * int(mask_batch > 1), int(mask_heads > 1)
        patterns = (len(lists.row_block_ptr) - 1) // lists.row_blocks
        launch = partial(Launch, num_warps=4, use_pdl=pdl, device=device)
        self.rows = launch(
            backward_rows_kernel,
            blocks,
            (lists.tiles if split is None else split.to(device), lists.tiles, lists.row_block_ptr, lists.pattern_of),
            (Strides(*out.stride()[:3]), of_d_out, *sizes, self.counters, self.tickets[0], programs, items,
             heads_of_items, slots, first_part_slot, lists.row_blocks, patterns, batch * heads,
             heads // kv_heads, *mask_strides),
            (queries, head_dim, width, has_d_lse, options.sinks is not None, pdl),
        )  # fmt: skip
        self.convert = launch(
            convert_dq_kernel, min(blocks, _CONVERTERS * processors), (lists.sum_ptr, lists.pattern_of),
            (gradients.q, *sizes, batch * heads, 2 * MOST_PARTS * items_of_head, lists.sums, *mask_strides,
             float(options.scale)),
            (queries, head_dim, width, pdl),
        )  # fmt: skip
        score_scale = options.scale * math.log2(math.e) * (2 / options.softcap if options.softcap else 1)
        self.main = launch(
            backward_kernel,
            programs,
            (lists.tiles, lists.bitmaps),
            (heads, batch * heads, heads // kv_heads, q_blocks, lists.sums, kv_len, gradients.k, gradients.v,
             float(options.scale), score_scale, options.softcap * math.log2(math.e)),
            (BackwardConfig(width, head_dim, queries, options.softcap > 0), pdl),
            windows=(
                Window.over(q, queries, width), Window.over(k, KEYS_OF_BLOCK, width),
                Window.over(v, KEYS_OF_BLOCK, width), Window.over(d_out, queries, width),
                _MatrixWindow(*self.stats, 1),
                _MatrixWindow(*self.sums, DQ_HALF[0]),
            ),
        )  # fmt: skip

    def __call__(
        self, inputs: list[Tensor], out: Tensor, lse: Tensor, d_lse: Tensor | None, sinks: Tensor | None, dq: Tensor,
        dk: Tensor, dv: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Compute dq, dk and dv, and return the gradient of the sinks; `inputs` are q, k, v and d_out."""
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        stats, sums = lse.new_empty(self.stats), lse.new_empty(self.sums)
        counters = torch.empty(self.counters, dtype=torch.int32, device=lse.device)
        of_sinks = lse if sinks is None else lse.new_empty(self.of_sinks)
        optional = [lse if x is None else x for x in (d_lse, sinks)]
        tickets = torch.empty(self.tickets, dtype=torch.int32, device=lse.device)
        self.rows(out, inputs[3], lse, *optional, of_sinks, stats, counters, tickets)
        kv_sums = lse.new_empty(self.kv_sums) if self.kv_sums[0] else lse
        self.main(dk, dv, kv_sums, counters, tickets, bases=(*inputs, stats, sums))
        self.convert(sums, dq, counters)
        return None if sinks is None else -of_sinks.sum((0, 2)).to(sinks.dtype)
