"""Masks made from a dense tensor or a FlexAttention `BlockMask`, and from anything that describes one."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stof.errors import DeviceError, DtypeError, MaskError, ShapeError
from stof.masks.base import foreign_layout
from stof.masks.bounds import TileBounds
from stof.masks.compose import Mask
from stof.masks.functions import FunctionMask, current_record, from_function
from stof.masks.index import Index
from stof.masks.named_masks import full
from stof.masks.parse import NAMED_MASKS, parse
from stof.masks.snapshots import identity, snapshot


@dataclass(frozen=True, eq=False, repr=False)
class DenseMask(Mask):
    """A bool tensor `[Sq|1, Skv]` up to `[B|1, H|1, Sq|1, Skv]`.

    Attributes:
        copied: whether the tensor is a copy, which nobody writes to; else it is read when a dynamic plan is filled.
    """

    keep: Tensor
    copied: bool = False

    @property
    def batch(self) -> int:
        return int(self.keep.shape[0]) if self.keep.ndim == 4 else 1

    @property
    def heads(self) -> int:
        return int(self.keep.shape[-3]) if self.keep.ndim > 2 else 1

    def _reads_others(self) -> bool:
        return not self.copied

    def copies(self) -> list[Tensor]:
        return [self.keep] if self.copied else []

    def frozen(self) -> DenseMask:
        return self if self.copied else DenseMask(snapshot(self.keep, captured=True), copied=True)

    def check(self, q_len: int, kv_len: int) -> None:
        rows, columns = self.keep.shape[-2:]
        if rows not in (1, q_len) or columns != kv_len:
            hint = ""
            if self.keep.ndim == 2 and columns == kv_len:
                hint = "; padding that is [B, Skv] becomes mask[:, None, None, :], or masks.padding(lengths)"
            raise ShapeError(
                f"the dense mask is {list(self.keep.shape)}, the call has q_len {q_len} and kv_len {kv_len}{hint}"
            )

    def for_rows(self, q_len: int) -> Tensor:
        """Bool `[B|1, H|1, q_len, Skv]`, a view; a tensor with one row says the same for all of them."""
        keep = self.keep.view((1,) * (4 - self.keep.ndim) + tuple(self.keep.shape))
        return keep.expand(-1, -1, q_len, -1) if keep.shape[2] == 1 else keep

    def as_tensor(self, q_len: int, kv_len: int) -> Tensor:
        del kv_len
        return self.for_rows(q_len)

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        """By comparing the tensors, which ends at the first difference on a CPU."""
        del mask_batch, mask_heads
        every = self.keep.view((1,) * (4 - self.keep.ndim) + tuple(self.keep.shape))
        distinct: list[Tensor] = []
        out = torch.empty(self.batch, self.heads, dtype=torch.int64, device="cpu")
        for b, h in itertools.product(range(self.batch), range(self.heads)):
            same = next((n for n, other in enumerate(distinct) if torch.equal(other, every[b, h])), len(distinct))
            distinct += [every[b, h]] if same == len(distinct) else []
            out[b, h] = same
        return out

    def evaluate(self, index: Index) -> Tensor:
        keep = self.for_rows(self.keep.shape[-2]).to(index.device)
        zero = torch.zeros_like(index.b)[:1]
        b = index.b if self.batch > 1 else zero
        h = index.h if self.heads > 1 else zero.view(1, 1, 1, 1)
        return keep[b, h, index.q if keep.shape[2] > 1 else torch.zeros_like(index.q), index.kv]

    def __repr__(self) -> str:
        return f"from_dense(<bool {list(self.keep.shape)} #{identity(self.keep)}>)"


def from_dense(keep: Tensor) -> Mask:
    """A mask from a bool tensor `[Sq|1, Skv]`, `[H, Sq|1, Skv]` or `[B|1, H|1, Sq|1, Skv]`; true = seen.

    One row stands for all: padding as `[B, 1, 1, Skv]`, say, which `padding(lengths)` says without a tensor to read.
    The mask has the values of this moment: they are copied. Masks of one tensor are equal while its values are the
    same; comparing them with the last copy waits for the device on a GPU.

    Raises:
        DtypeError: not a bool tensor (additive float masks belong in `bias`).
        MaskError: fewer than 2 or more than 4 dimensions, or not a strided tensor.
        DeviceError: a meta tensor, which holds no values.
    """
    return DenseMask(snapshot(_checked(keep)), copied=True)


def dense_view(keep: Tensor) -> DenseMask:
    """A mask that reads a bool tensor when it is used; checks and errors as of `from_dense`."""
    return DenseMask(_checked(keep))


def _checked(keep: Tensor) -> Tensor:
    if not isinstance(keep, Tensor):
        raise MaskError(f"from_dense() takes a torch.Tensor, got {type(keep).__name__}")
    layout = foreign_layout(keep)
    if layout is not None:
        raise MaskError(
            f"a dense mask is a strided tensor, got a {layout} one; pass a padded or dense bool tensor, or a named "
            "mask such as documents(cu_seqlens=...) or padding(lengths)"
        )
    if keep.device.type == "meta":
        raise DeviceError("a dense mask holds values, got a meta tensor; make it on the device of the calls")
    if keep.dtype != torch.bool:
        if keep.is_floating_point() or keep.is_complex():
            hint = "an additive float mask (0 where seen, -inf elsewhere) goes into `bias=`; one of 1 and 0"
        else:
            hint = "an integer mask of 1 (seen) and 0"
        raise DtypeError(
            f"a dense mask is torch.bool (true = seen), got {keep.dtype}; {hint} becomes boolean with `mask.bool()`"
        )
    if not 2 <= keep.ndim <= 4:
        raise MaskError(f"a dense mask is [Sq, Skv] up to [B, H, Sq, Skv], got {list(keep.shape)}")
    return keep


def from_block_mask(block_mask: Any) -> Mask:
    """A mask from FlexAttention's `BlockMask`: its `mask_mod`, its lengths, batch and heads.

    The exact element mask is taken (`mask_mod`), so a coarse BLOCK_SIZE loses nothing. Lists and `mask_mod` are read
    when a plan is made or looked up, as those of `from_function` are.

    Raises:
        MaskError: not a `BlockMask`, or a slice of one.
    """
    mask_mod = getattr(block_mask, "mask_mod", None)
    lengths = getattr(block_mask, "seq_lengths", None)
    if mask_mod is None or lengths is None or not hasattr(block_mask, "kv_num_blocks"):
        raise MaskError(
            f"from_block_mask() takes torch.nn.attention.flex_attention.BlockMask, got {type(block_mask).__name__}"
        )
    q_len, kv_len = map(int, lengths)
    blocks, rows = block_mask.kv_num_blocks.shape[-1], block_mask.BLOCK_SIZE[0]
    if blocks * rows < q_len:
        raise MaskError(
            f"the BlockMask has lists for {blocks} blocks of {rows} queries, and {q_len} queries: it is a slice. Give "
            "its mask_mod the position of the first query, or give masks.from_function(mask_mod).with_query_offset(n)"
        )
    return BlockMaskMask(mask_mod, q_len, kv_len, block_mask=block_mask)


_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@dataclass(frozen=True, eq=False, repr=False)
class BlockMaskMask(FunctionMask):
    """A `BlockMask`: kept where both its block lists and its `mask_mod` keep, as FlexAttention computes.

    Attributes:
        block_mask: a frozen mask has a copy, whose lists nobody writes to.
    """

    block_mask: Any = None

    @property
    def batch(self) -> int:
        return int(self.block_mask.kv_num_blocks.shape[-3]) if self.block_mask.kv_num_blocks.ndim > 2 else 1

    @property
    def heads(self) -> int:
        return int(self.block_mask.kv_num_blocks.shape[-2]) if self.block_mask.kv_num_blocks.ndim > 1 else 1

    def _reads_others(self) -> bool:
        return self.record is None

    def copies(self) -> list[Tensor]:
        lists = [getattr(self.block_mask, name) for name in _LISTS]
        return super().copies() + ([] if self.record is None else [blocks for blocks in lists if blocks is not None])

    def frozen(self) -> BlockMaskMask:
        if self.record is not None:
            return self
        block_mask = copy.copy(self.block_mask)
        for name in _LISTS:
            if (blocks := getattr(block_mask, name)) is not None:
                setattr(block_mask, name, snapshot(blocks, captured=True))
        now = from_block_mask(block_mask)  # others may have assigned another function or other lists
        assert isinstance(now, BlockMaskMask)
        return replace(now, record=current_record(now.fn))

    @property
    def depends_on_batch(self) -> bool:
        return self.batch != 1 or super().depends_on_batch

    @property
    def depends_on_heads(self) -> bool:
        return self.heads != 1 or super().depends_on_heads

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        mask_batch, mask_heads = Mask.dims(self, batch, heads, device)
        own_batch, own_heads = super().dims(batch, heads, device)
        return max(mask_batch, own_batch), max(mask_heads, own_heads)

    def tile_bounds(self, index: Index) -> TileBounds:
        return TileBounds.unknown(index.device)  # the block lists may say otherwise than the function

    def evaluate(self, index: Index) -> Tensor:
        block_mask = self.block_mask
        rows, columns = block_mask.BLOCK_SIZE
        blocks = -(-(self.kv_len or index.kv_len) // columns)
        partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
        full = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None:
            full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks)
        b = index.b if partial.shape[0] > 1 else torch.zeros_like(index.b)[:1]
        h = index.h if partial.shape[1] > 1 else torch.zeros_like(index.h)[:, :1]
        at = (
            b,
            h,
            torch.div(index.q, rows, rounding_mode="floor"),
            torch.div(index.kv, columns, rounding_mode="floor"),
        )
        return full.to(index.device)[at] | (partial.to(index.device)[at] & super().evaluate(index))

    def __repr__(self) -> str:
        if self.record is None:
            # Other lists and another function may be assigned.
            return f"from_block_mask(<{self.q_len}x{self.kv_len} #{identity(self.block_mask)} #{identity(self.fn)}>)"
        lists = [getattr(self.block_mask, name) for name in _LISTS]
        numbers = " ".join(f"#{identity(blocks)}" for blocks in lists if blocks is not None)
        return f"from_block_mask(<{self.q_len}x{self.kv_len} {self.block_mask.BLOCK_SIZE} {numbers} {self.name}>)"


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Bool `[B, H, row blocks, key blocks]`: which blocks a padded index list names."""
    indices = indices.view((1,) * (4 - indices.ndim) + tuple(indices.shape))
    slots = torch.arange(indices.shape[-1], device=indices.device)
    blocks = max(blocks, indices.shape[-1])
    out = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    # One spare block swallows the unused slots.
    target = torch.where(slots < counts[..., None], indices.long(), blocks)
    return out.scatter_(-1, target, True)[..., :-1]


def is_function_or_block_mask(value: Any) -> bool:
    """Whether `as_mask` calls a user's function for this value."""
    return (callable(value) or hasattr(value, "mask_mod")) and not isinstance(value, Mask | Tensor)


def as_mask(value: Any) -> Mask:
    """A mask from anything that describes one: a mask, a bool tensor, a `BlockMask`, a mask function, or text.

    None means no mask: every query sees every key.
    """
    if isinstance(value, Mask):
        return value
    if value is None:
        return full()
    if isinstance(value, Tensor):
        return from_dense(value)
    if isinstance(value, str):
        return parse(value)
    if hasattr(value, "kv_num_blocks"):
        return from_block_mask(value)
    if any(value is function for function in NAMED_MASKS.values()):
        raise MaskError(f"{value.__name__} is what makes a mask; call it, as in masks.causal()")
    if callable(value):
        return from_function(value)
    raise MaskError(
        f"a mask is a stof mask, a bool tensor, a FlexAttention BlockMask, a function (b, h, q_idx, kv_idx), "
        f"text or None; got {type(value).__name__}"
    )
