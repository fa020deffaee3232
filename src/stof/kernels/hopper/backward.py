"""Calling the backward kernel of Hopper: tensor maps, memory, launches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from stof.kernels.common import empty_gradient
from stof.kernels.hopper.backward_kernel import backward_kernel
from stof.kernels.hopper.backward_lists import BackwardLists
from stof.kernels.hopper.backward_rows import backward_rows_kernel, convert_dq_kernel
from stof.kernels.hopper.binding import Window
from stof.kernels.hopper.config import BackwardConfig, padded_width
from stof.kernels.implementation import BackwardCall, Gradients, NeedsGrad, Options
from stof.runtime.launch import Launch, TensorMap
from stof.runtime.pdl import supports_pdl

KEYS = 128


class MatrixWindow(NamedTuple):
    """Boxes of a contiguous float32 matrix `[rows, columns]`."""

    rows: int
    columns: int
    box: tuple[int, int]
    swizzle: int

    def key(self) -> tuple[object, ...]:
        return tuple(self)

    def at(self, tensor: Tensor) -> TensorMap:
        layout = NVMMASharedLayout(swizzle_byte_width=self.swizzle, element_bitwidth=32, rank=2)
        return TensorMap(tensor, [self.rows, self.columns], [self.columns, 1], list(self.box), layout)


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
    *,
    ordered: int = 1,
    groups_at_once: int = 0,
) -> BackwardCall:
    """Gradients of masked attention, bound to tensors like these; equal calls give equal bits."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    width, device, pdl = padded_width(head_dim), q.device, supports_pdl(q.device)
    queries = lists.queries
    q_blocks = -(-q_len // queries)
    blocks = batch * heads * q_blocks
    slots = lists.slots if ordered else 1
    groups = batch * kv_heads
    dq_like, dk_like, dv_like = empty_gradient(q), empty_gradient(k), empty_gradient(v)
    of_rows = Launch(
        backward_rows_kernel, blocks, (),
        (out.stride()[:3], d_out.stride()[:3], heads, q_len, q_blocks), (queries, head_dim, width, d_lse is not None, pdl),
        num_warps=4, use_pdl=pdl, device=device,
    )  # fmt: skip
    convert = Launch(
        convert_dq_kernel, blocks, (),
        (dq_like.stride()[:3], heads, q_len, q_blocks, blocks, options.scale), (slots, queries, head_dim, width, pdl),
        num_warps=4, use_pdl=pdl, device=device,
    )  # fmt: skip
    mask_batch, mask_heads = lists.pattern_of.shape
    row_blocks = len(lists.order)
    config = BackwardConfig(width, head_dim, queries, ordered)
    main = Launch(
        backward_kernel, groups * row_blocks,
        (lists.tiles, lists.row_block_ptr, lists.bitmaps, lists.pattern_of, lists.order),
        (row_blocks, row_blocks, groups, groups_at_once or groups, kv_heads, heads // kv_heads,
         mask_heads if mask_batch > 1 else 0, int(mask_heads > 1), q_blocks, blocks, kv_len,
         (*dk_like.stride()[:3], *dv_like.stride()[:3]), options.scale, options.scale * math.log2(math.e)),
        (config, pdl),
        num_warps=4,
        windows=(
            Window.over(q, queries, width), Window.over(k, KEYS, width),
            Window.over(v, KEYS, width), Window.over(d_out, queries, width),
            MatrixWindow(blocks, 2 * queries, (1, 2 * queries), 0),
            MatrixWindow(slots * blocks * queries, width, (queries, width // 2), min(128, 2 * width)),
        ),
        use_pdl=pdl, device=device,
    )  # fmt: skip

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        del bias, sinks, seed
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        stats = lse.new_empty(blocks, 2 * queries)
        counters = torch.empty(1 + 2 * blocks, dtype=torch.int32, device=device)
        sums = (lse.new_empty if ordered else lse.new_zeros)(slots * blocks * queries, width)
        dq, dk, dv = empty_gradient(q), empty_gradient(k), empty_gradient(v)
        of_rows(out, d_out, lse, lse if d_lse is None else d_lse, stats, counters)
        main(dk, dv, counters, bases=(q, k, v, d_out, stats, sums))
        if not ordered:
            counters.fill_(1)
        convert(sums, counters, dq)
        return Gradients(dq, dk, dv, None, None)

    return call
