"""Exchanges between ranks with gradients: heads against tokens, keys of all ranks, and whole tensors.

Tensors are moved as rows `[S, ...]`, in which a range of tokens is contiguous: it is sent and received in place.
Gradients are summed over ranks locally, in the order of ranks and in at least 32 bits: two equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stof.distributed.row_ranges import Range


@dataclass(frozen=True, eq=False)
class Exchange:
    """The rows of each rank, and exchanges of them.

    Attributes:
        group: the ranks.
        rank: this one, in the group.
        ranges: for each rank its ranges of rows, `(first, end)` in ascending order.
    """

    group: dist.ProcessGroup
    rank: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(stop - first for first, stop in ranges) for ranges in self.ranges)

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return self.tokens[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: rows `[local, ...]` of every rank as `[S, ...]`, by position."""
        return self.from_ranks(x.contiguous().expand(self.ranks, *x.shape))  # the same rows to each rank

    def from_ranks(self, x: Tensor) -> Tensor:
        """Send contiguous rows `[local, ...]` to each rank, `[ranks, local, ...]`; `[S, ...]`, by position."""
        out = x.new_empty(sum(self.tokens), *x.shape[2:])
        self._exchange(
            [self._local_parts(x[rank]) for rank in range(self.ranks)],
            [self._global_parts(out, rank) for rank in range(self.ranks)],
        )
        return out

    def to_ranks(self, *tensors: Tensor) -> list[Tensor]:
        """The reverse: send rows `[S, ...]` to the ranks that hold them; `[ranks, local, ...]`, sender by sender.

        A message for each tensor: outputs and gradients of attention come as contiguous rows, and packing copies them.
        """
        tensors = tuple(x.contiguous() for x in tensors)
        outs = [x.new_empty(self.ranks, self.local, *x.shape[1:]) for x in tensors]
        self._exchange(
            [[part for x in tensors for part in self._global_parts(x, rank)] for rank in range(self.ranks)],
            [[part for out in outs for part in self._local_parts(out[rank])] for rank in range(self.ranks)],
        )
        return outs

    def sum_to_ranks(self, *tensors: Tensor) -> list[Tensor]:
        """Reduce-scatter: rows `[S, ...]` by position, summed over ranks; this rank's `[local, ...]`."""
        return [_sum(parts) for parts in self.to_ranks(*tensors)]

    def _global_parts(self, x: Tensor, rank: int) -> list[Tensor]:
        """The ranges of a rank in rows `[S, ...]`."""
        return [x[first:stop] for first, stop in self.ranges[rank]]

    def _local_parts(self, x: Tensor) -> Sequence[Tensor]:
        """The ranges of this rank in its rows `[local, ...]`."""
        return x.split([stop - first for first, stop in self.ranges[self.rank]])

    def _exchange(self, to_send: Sequence[Sequence[Tensor]], to_receive: Sequence[Sequence[Tensor]]) -> None:
        """Send contiguous tensors to each rank, and receive from each; those of this rank are copied."""
        operations = []
        for rank, (sent, received) in enumerate(zip(to_send, to_receive, strict=True)):
            if rank != self.rank:
                operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=rank) for x in sent]
                operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=rank) for x in received]
        works = dist.batch_isend_irecv(operations)
        for source, target in zip(to_send[self.rank], to_receive[self.rank], strict=True):
            target.copy_(source)
        for work in works:
            work.wait()

    def gather_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All tokens `[B, H, S, D]` of `[B, H, local, D]` each."""
        rows = [_rows(x) for x in tensors]
        return _unpacked(self.gather(_packed(rows)), rows)

    def tokens_to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From this rank's tokens of all heads, `[B, H, local, D]` each, to all tokens of its heads."""
        by_rank = [x.unflatten(1, (self.ranks, -1)).permute(1, 3, 0, 2, 4) for x in tensors]
        return _unpacked(self.from_ranks(_packed(by_rank)), by_rank)

    def heads_to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The reverse: from all tokens of this rank's heads, `[B, H / ranks, S, D]`, to its tokens of all heads."""
        received = self.to_ranks(*map(_rows, tensors))  # [ranks, local, B, H / ranks, D] each
        return tuple(x.permute(2, 0, 3, 1, 4).flatten(1, 2) for x in received)


def _sum(parts: Tensor) -> Tensor:
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _rows(x: Tensor) -> Tensor:
    """`[S, B, H, D]` of `[B, H, S, D]`."""
    return x.permute(2, 0, 1, 3)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """`[..., B, H, D]` each as one contiguous `[..., B, sum of H * D]`, for one message; heads are copied anyway."""
    widths = [x.shape[-2] * x.shape[-1] for x in tensors]
    out = tensors[0].new_empty(*tensors[0].shape[:-2], sum(widths))
    for x, part in zip(tensors, out.split(widths, -1), strict=True):
        part.unflatten(-1, x.shape[-2:]).copy_(x)
    return out


def _unpacked(x: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The reverse, as views `[B, H, S, D]` of `[S, B, columns]`, with the heads and head dimensions of `like`."""
    shapes = [each.shape[-2:] for each in like]
    parts = x.split([heads * dim for heads, dim in shapes], -1)
    return tuple(part.unflatten(-1, shape).permute(1, 2, 0, 3) for part, shape in zip(parts, shapes, strict=True))


class TokensToHeads(torch.autograd.Function):
    """All tokens of this rank's heads, `[B, H / ranks, S, D]` of each `[B, H, local, D]`."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.tokens_to_heads(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.heads_to_tokens(*gradients)


class HeadsToTokens(torch.autograd.Function):
    """This rank's tokens of all heads, `[B, H, local, D]` of each `[B, H / ranks, S, D]`."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.heads_to_tokens(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.tokens_to_heads(*gradients)


class GatherKeys(torch.autograd.Function):
    """Keys and values of all tokens, `[B, Hkv, S, D]` of `[B, Hkv, local, D]`; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.gather_tokens(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed = ctx.exchange.sum_to_ranks(*map(_rows, gradients))
        return None, *(x.permute(1, 2, 0, 3) for x in summed)


class Join(torch.autograd.Function):
    """The rows of all ranks, in dimension `dim`; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor, dim: int) -> Tensor:
        ctx.exchange, ctx.dim = exchange, dim
        return exchange.gather(x.movedim(dim, 0)).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (summed,) = ctx.exchange.sum_to_ranks(gradient.movedim(ctx.dim, 0))
        return None, summed.movedim(0, ctx.dim), None
