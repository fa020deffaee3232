"""Masks that change in every step, made from what a step holds: stof's, and as FlexAttention's users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.mask_formats import MaskMod
from stof import masks
from stof.testing.mask_grid import Shape

# Documents have log-normal lengths with this median, and an eighth of the sequence where that is less.
_MEDIAN_LENGTH = 512
_BLOCK, _BLOCK_SHARE = 64, 8
# Sequences of a batch, and their length where the tokens of a size allow it.
_BATCH, _ROW = 16, 1024


@dataclass(frozen=True)
class Kind:
    """One kind of mask, and what each step's mask is made from: its source.

    Attributes:
        draw: the source of one step's mask, as a caller holds it; drawn before any time is taken.
        mask: stof's mask of a source.
        mod: FlexAttention's function of a source, which also defines the mask for the float64 check.
        batched: whether batch entries have masks of their own.
        per_head: whether query heads have masks of their own.
        dynamic: whether stof serves it by a dynamic plan.
        longest: tokens of the longest sequences that it is measured with.
        ends: cumulative lengths of a source, for interfaces of variable lengths; None where it has none.
    """

    name: str
    draw: Callable[[Shape, torch.device, torch.Generator], Any]
    mask: Callable[[Any], Any]
    mod: Callable[[Any, Shape, torch.device], MaskMod]
    batched: bool = False
    per_head: bool = False
    dynamic: bool = False
    longest: int = 2**20
    ends: Callable[[Any], Any] | None = None

    def shape(self, size: Shape) -> Shape:
        """The shape to measure: a batch of 16 where entries have masks of their own and `size` has one entry."""
        if not self.batched or size.batch > 1:
            return size
        length = _ROW if size.q_len >= 8 * _ROW else max(1, size.q_len // _BATCH)
        return replace(size, batch=_BATCH, q_len=length, kv_len=length)

    def dense(self, source: Any, shape: Shape, device: torch.device) -> Tensor:
        """The mask as bool `[B or 1, H or 1, S, S]`."""
        at = torch.arange(shape.q_len, device=device)
        b = torch.arange(shape.batch if self.batched else 1, device=device)[:, None, None, None]
        h = torch.arange(shape.heads if self.per_head else 1, device=device)[:, None, None]
        return self.mod(source, shape, device)(b, h, at[:, None], at).expand(len(b), len(h), -1, -1)


def drawn_ends(length: int, generator: torch.Generator) -> list[int]:
    """Cumulative lengths of documents that fill `length` tokens, from 0."""
    median = max(1, min(_MEDIAN_LENGTH, length // 8))
    drawn = (torch.randn(length // median * 4 + 8, generator=generator).exp() * median).ceil().int().tolist()
    return [0, *(end for end in accumulate(drawn) if end < length), length]


def _documents_mod(source: Any, shape: Shape, device: torch.device) -> MaskMod:
    ends = torch.as_tensor(source, dtype=torch.int32).to(device)
    document = torch.searchsorted(ends, torch.arange(shape.q_len, device=device, dtype=torch.int32), right=True)
    return _same_document(document)


def _same_document(document: Tensor) -> MaskMod:
    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[q] == document[k])

    return keep


def _documents_mask(source: Any) -> masks.Mask:
    return masks.causal() & masks.documents(cu_seqlens=source)


def _documents(name: str, held: Callable[[list[int], torch.device], Any]) -> Kind:
    def draw(shape: Shape, device: torch.device, generator: torch.Generator) -> Any:
        return held(drawn_ends(shape.q_len, generator), device)

    return Kind(name, draw, _documents_mask, _documents_mod, ends=lambda source: source)


def _drawn_ids(shape: Shape, device: torch.device, generator: torch.Generator) -> Tensor:
    lengths = torch.tensor(drawn_ends(shape.q_len, generator)).diff()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)


def _drawn_rows(shape: Shape, device: torch.device, generator: torch.Generator) -> list[list[int]]:
    del device
    return [drawn_ends(shape.q_len, generator) for _ in range(shape.batch)]


def _patterns_mod(source: list[list[int]], shape: Shape, device: torch.device) -> MaskMod:
    ids = [[number for number, (a, b) in enumerate(pairwise(row)) for _ in range(b - a)] for row in source]
    document = torch.tensor(ids).to(device)

    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    return keep


def _drawn_lengths(shape: Shape, device: torch.device, generator: torch.Generator) -> list[int]:
    del device
    least = max(1, shape.q_len // 16)
    lengths = torch.randint(least, shape.q_len + 1, (shape.batch,), generator=generator).tolist()
    return [int(length) for length in lengths]


def _padding_mod(source: list[int], shape: Shape, device: torch.device) -> MaskMod:
    lengths = torch.tensor(source).to(device)

    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < lengths[b]

    return keep


def _drawn_window(shape: Shape, device: torch.device, generator: torch.Generator) -> int:
    del device
    low, high = min(64, shape.q_len // 4), min(4096, shape.q_len // 2)
    return int(torch.randint(max(1, low), max(2, high + 1), (), generator=generator))


def _window_mod(source: int, shape: Shape, device: torch.device) -> MaskMod:
    # A tensor: torch.compile compiles again for each Python number.
    window = torch.tensor(source).to(device)

    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < window)

    return keep


def _drawn_bool(shape: Shape, device: torch.device, generator: torch.Generator) -> Tensor:
    """A causal band of some width, some columns, and scattered scores; `[S, S]`."""
    on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    band = _drawn_window(shape, device, generator) // 4
    at = torch.arange(shape.q_len, device=device)
    columns = torch.rand(shape.q_len, generator=on_device, device=device) < 0.01
    keep = torch.rand(shape.q_len, shape.q_len, generator=on_device, device=device) < 1e-4
    return (keep | columns | (at[:, None] - at <= band)) & (at[:, None] >= at)


def _bool_mod(source: Tensor, shape: Shape, device: torch.device) -> MaskMod:
    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return source[q, k]

    return keep


def _drawn_scores(shape: Shape, device: torch.device, generator: torch.Generator) -> Tensor:
    blocks = -(-shape.q_len // _BLOCK)
    on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.randn(shape.heads, blocks, blocks, generator=on_device, device=device)


def _taken(source: Tensor) -> int:
    return max(1, source.shape[-1] // _BLOCK_SHARE)


def _topk_mask(source: Tensor) -> masks.Mask:
    return masks.block_topk(source, _taken(source), block_size=_BLOCK, causal=True)


def _topk_mod(source: Tensor, shape: Shape, device: torch.device) -> MaskMod:
    blocks = source.shape[-1]
    later = torch.ones(blocks, blocks, dtype=torch.bool, device=device).triu(1)
    chosen = source.masked_fill(later, -torch.inf).topk(_taken(source)).indices
    table = torch.zeros_like(source, dtype=torch.bool).scatter_(-1, chosen, True)

    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & table[h, q // _BLOCK, k // _BLOCK]

    return keep


_ALL = (
    _documents("documents", lambda ends, device: ends),
    _documents("documents-host", lambda ends, device: torch.tensor(ends, dtype=torch.int32)),
    _documents("documents-device", lambda ends, device: torch.tensor(ends, dtype=torch.int32, device=device)),
    Kind("padding", _drawn_lengths, masks.padding, _padding_mod, batched=True),
    Kind("window", _drawn_window, lambda size: masks.sliding_window(size - 1), _window_mod),
    Kind("bool", _drawn_bool, lambda source: source, _bool_mod, longest=8192),
    Kind("function", _drawn_ids, lambda ids: _same_document(ids), lambda ids, shape, device: _same_document(ids)),
    Kind(
        "patterns", _drawn_rows, _documents_mask, _patterns_mod, batched=True,
    ),
    Kind("block_topk", _drawn_scores, _topk_mask, _topk_mod, per_head=True, dynamic=True),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}
