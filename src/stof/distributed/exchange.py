"""Differentiable exchanges between ranks: tokens for heads by all-to-all, gathered keys, and whole tensors.

Tensors are moved as rows `[S, ...]`, one for each token, in the order of ranks: not that of the sequence where a rank
holds several ranges. Each rank receives the gradients of all ranks and adds them in the order of ranks, in at least 32
bits: two equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Its name from PyTorch 2.13 on, else the former name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Exchanges of rows between the ranks of a group.

    Attributes:
        group: the ranks.
        rank: this one, in the group.
        tokens: rows of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, tokens: Sequence[int]) -> None:
        self.group, self.rank, self.tokens = group, rank, tuple(tokens)

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return self.tokens[self.rank]

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather: rows `[local, ...]` of every rank as `[S, ...]`."""
        longest = max(self.tokens)
        missing = longest - self.local
        x = torch.cat([x, x.new_empty(missing, *x.shape[1:])]) if missing else _contiguous(x)
        out = x.new_empty(self.ranks * longest, *x.shape[1:])
        # As bytes, because gloo lacks some dtypes.
        _all_gather(out[..., None].view(torch.uint8), x[..., None].view(torch.uint8), group=self.group)
        if all(count == longest for count in self.tokens[:-1]):  # nothing to leave out between ranks
            return out[: sum(self.tokens)]
        return torch.cat([part[:count] for part, count in zip(out.chunk(self.ranks), self.tokens, strict=True)])

    def from_ranks(self, x: Tensor) -> Tensor:
        """All-to-all: send contiguous `x[r]` of `[ranks, local, ...]` to rank r; `[S, ...]` of all senders."""
        out = x.new_empty(sum(self.tokens), *x.shape[2:])
        dist.all_to_all_single(out, x.flatten(0, 1), self.tokens, [self.local] * self.ranks, group=self.group)
        return out

    def to_ranks(self, x: Tensor) -> Tensor:
        """The reverse of `from_ranks`: send each rank its rows of `[S, ...]`; `[ranks, local, ...]` by sender."""
        out = x.new_empty(self.ranks * self.local, *x.shape[1:])
        dist.all_to_all_single(out, _contiguous(x), [self.local] * self.ranks, self.tokens, group=self.group)
        return out.unflatten(0, (self.ranks, -1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: rows `[S, ...]`, summed over ranks; this rank's `[local, ...]`."""
        return _sum(self.to_ranks(x))

    def gather_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All tokens `[B, H, S, D]` of `[B, H, local, D]` each."""
        rows = [_rows(x) for x in tensors]
        return _unpacked(self.all_gather(_packed(rows)), rows)

    def tokens_to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From this rank's tokens of all heads, `[B, H, local, D]` each, to all tokens of its heads."""
        if len({x.dtype for x in tensors}) > 1:  # as gradients of the output and of its log-sum-exp
            return tuple(self.tokens_to_heads(x)[0] for x in tensors)
        by_rank = [x.unflatten(1, (self.ranks, -1)).permute(1, 3, 0, 2, 4) for x in tensors]
        return _unpacked(self.from_ranks(_packed(by_rank)), by_rank)

    def heads_to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The reverse: from all tokens of this rank's heads, `[B, H / ranks, S, D]`, to its tokens of all heads."""
        outs = []
        for x in tensors:
            received = self.to_ranks(_rows(x))  # [ranks, local, B, H / ranks, D]
            by_head = received.permute(2, 0, 3, 1, 4)
            out = x.new_empty(by_head.shape)
            _copy(out, by_head)
            outs.append(out.flatten(1, 2))
        return tuple(outs)


def _contiguous(x: Tensor) -> Tensor:
    """Contiguous, and without the negation or conjugation that a view may stand for: exchanges read memory."""
    return x.resolve_conj().resolve_neg().contiguous()


def _sum(parts: Tensor) -> Tensor:
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _rows(x: Tensor) -> Tensor:
    """`[S, B, H, D]` of `[B, H, S, D]`."""
    return x.permute(2, 0, 1, 3)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors `[..., B, H, D]` into one contiguous `[..., B, sum of H * D]`, which one exchange sends."""
    widths = [x.shape[-2] * x.shape[-1] for x in tensors]
    out = tensors[0].new_empty(*tensors[0].shape[:-2], sum(widths))
    for x, part in zip(tensors, out.split(widths, -1), strict=True):
        _copy(part.unflatten(-1, x.shape[-2:]), x)
    return out


def _copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, in 64-bit words if possible: a strided copy moves one element per thread."""
    count = 8 // source.itemsize
    if not source.is_neg() and all(
        x.stride(-1) == 1
        and x.data_ptr() % 8 == 0
        and not any(n % count for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in (target, source)
    ):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _unpacked(x: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The reverse of `_packed`: views `[B, H, S, D]` of `[S, B, columns]`, with heads and head dimensions of `like`."""
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
        return None, *(ctx.exchange.reduce_scatter(_rows(x)).permute(1, 2, 0, 3) for x in gradients)


class Join(torch.autograd.Function):
    """The rows of all ranks, in the order of ranks, in dimension `dim`; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor, dim: int) -> Tensor:
        ctx.exchange, ctx.dim = exchange, dim
        return exchange.all_gather(x.movedim(dim, 0)).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.exchange.reduce_scatter(gradient.movedim(ctx.dim, 0)).movedim(0, ctx.dim), None
