"""Exchanges between ranks with gradients: heads against tokens, keys of all ranks, and whole tensors.

Rows are moved as `[S, B, columns]`, so that the rows of one rank are contiguous. Sums over ranks are local, in the
order of ranks, after an all-to-all: two equal calls give equal bits, and 16-bit gradients are summed in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# PyTorch 2.13 renames it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """Who holds which rows.

    Attributes:
        group: the ranks.
        rank: this one, in the group.
        tokens: rows of each rank.
        by_rank: int64 `[S]`, positions of rank 0, then those of rank 1, and so on; None if that is 0, 1, 2, ...
        by_position: int64 `[S]`, place of each position in that order; None likewise.
        padded: int64 `[S]`, the same where each rank's rows are padded to the longest's; None likewise.
    """

    group: dist.ProcessGroup
    rank: int
    tokens: tuple[int, ...]
    by_rank: Tensor | None
    by_position: Tensor | None
    padded: Tensor | None

    @staticmethod
    def of(group: dist.ProcessGroup, rank: int, positions: Sequence[Tensor]) -> Exchange:
        """From the positions of each rank, int64 on the device of the tensors to come."""
        tokens = tuple(len(each) for each in positions)
        order, most = torch.cat(list(positions)), max(tokens)
        places = torch.cat([torch.arange(n, device=order.device) + r * most for r, n in enumerate(tokens)])
        inverse = order.argsort()
        padded = places[inverse]

        def unless_sorted(index: Tensor, length: int) -> Tensor | None:
            is_sorted = length == len(index) and bool((index.diff() == 1).all())
            return None if is_sorted else index

        return Exchange(
            group,
            rank,
            tokens,
            unless_sorted(order, len(order)),
            unless_sorted(inverse, len(order)),
            unless_sorted(padded, most * len(tokens)),
        )

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return self.tokens[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """Rows `[local, ...]` of every rank as `[S, ...]`, by position."""
        most = max(self.tokens)
        if self.local < most:
            x = torch.cat([x, x.new_zeros(most - self.local, *x.shape[1:])])
        out = x.new_empty(self.ranks * most, *x.shape[1:])
        _all_gather(out, x.contiguous(), group=self.group)
        return _picked(out, self.padded)

    def sum_to_ranks(self, x: Tensor) -> Tensor:
        """Rows `[S, ...]` by position, summed over ranks in their order: this rank's `[local, ...]`."""
        parts = self.to_ranks(x).unflatten(0, (self.ranks, self.local))
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def to_ranks(self, x: Tensor) -> Tensor:
        """Send rows `[S, ...]` by position to the ranks that hold them; `[ranks * local, ...]`, sender by sender."""
        out = x.new_empty(self.ranks * self.local, *x.shape[1:])
        splits = [self.local] * self.ranks
        dist.all_to_all_single(out, _picked(x, self.by_rank).contiguous(), splits, list(self.tokens), group=self.group)
        return out

    def from_ranks(self, x: Tensor) -> Tensor:
        """The reverse: send rows `[ranks * local, ...]`, receiver by receiver; `[S, ...]` by position."""
        out = x.new_empty(sum(self.tokens), *x.shape[1:])
        splits = [self.local] * self.ranks
        dist.all_to_all_single(out, x, list(self.tokens), splits, group=self.group)
        return _picked(out, self.by_position)

    def heads_of_tokens(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From this rank's tokens of all heads, `[B, H, local, D]` each, to all tokens of its heads."""
        batch, ranks = tensors[0].shape[0], self.ranks
        shapes = [(x.shape[1] // ranks, x.shape[3]) for x in tensors]
        widths = [heads * dim for heads, dim in shapes]
        send = tensors[0].new_empty(ranks, self.local, batch, sum(widths))
        for x, part, shape in zip(tensors, send.split(widths, -1), shapes, strict=True):
            part.unflatten(-1, shape).copy_(x.unflatten(1, (ranks, shape[0])).permute(1, 3, 0, 2, 4))
        return _split(self.from_ranks(send.flatten(0, 1)), shapes)

    def tokens_of_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The reverse: from all tokens of this rank's heads, `[B, H / ranks, S, D]`, to its tokens of all heads."""
        parts = _split(self.to_ranks(_packed(tensors)), [(x.shape[1], x.shape[3]) for x in tensors])
        # [B, H / ranks, ranks * local, D]
        split = [part.unflatten(2, (self.ranks, self.local)).transpose(1, 2) for part in parts]
        return tuple(x.flatten(1, 2) for x in split)


def _picked(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """`[B, H, S, D]` each as one contiguous `[S, B, sum of H * D]`."""
    batch, _, rows, _ = tensors[0].shape
    widths = [x.shape[1] * x.shape[3] for x in tensors]
    out = tensors[0].new_empty(rows, batch, sum(widths))
    for x, part in zip(tensors, out.split(widths, -1), strict=True):
        part.unflatten(-1, (x.shape[1], x.shape[3])).copy_(x.permute(2, 0, 1, 3))
    return out


def _split(x: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """The reverse, as views: heads and head dimension of each tensor."""
    parts = x.split([heads * dim for heads, dim in shapes], -1)
    return tuple(part.unflatten(-1, shape).permute(1, 2, 0, 3) for part, shape in zip(parts, shapes, strict=True))


class HeadsOfTokens(torch.autograd.Function):
    """All tokens of this rank's heads, `[B, H / ranks, S, D]` of each `[B, H, local, D]`."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.heads_of_tokens(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.tokens_of_heads(gradients)


class TokensOfHeads(torch.autograd.Function):
    """This rank's tokens of all heads, `[B, H, local, D]` of each `[B, H / ranks, S, D]`."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.tokens_of_heads(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.heads_of_tokens(gradients)


class GatherKeys(torch.autograd.Function):
    """Keys and values of all tokens, `[B, Hkv, S, D]` of `[B, Hkv, local, D]`; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return _split(exchange.gather(_packed((k, v))), [(x.shape[1], x.shape[3]) for x in (k, v)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        summed = ctx.exchange.sum_to_ranks(_packed((dk, dv)))
        return None, *_split(summed, [(x.shape[1], x.shape[3]) for x in (dk, dv)])


class Join(torch.autograd.Function):
    """The rows of all ranks, in dimension `dim`; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor, dim: int) -> Tensor:
        ctx.exchange, ctx.dim = exchange, dim
        return exchange.gather(x.movedim(dim, 0)).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.exchange.sum_to_ranks(gradient.movedim(ctx.dim, 0)).movedim(0, ctx.dim), None
