"""Masks made at run time: index lists and block scores that a model computes, different in every step.

Their tensors may change in place, or under a CUDA graph; `stof.dynamic_plan` then builds the kernels' work on the
device, without asking the host.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import DeviceError, DtypeError, MaskError, ShapeError, shown
from stof.masks.bounds import Interval, TileBounds, bounds_of_blocks
from stof.masks.compose import Mask
from stof.masks.index import Index
from stof.masks.named_masks import _integer
from stof.masks.snapshots import identity, snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

# What can be wrong with the numbers in a mask's tensors: bits that a device sets and the host reads.
OUT_OF_RANGE, NOT_ASCENDING, NOT_A_NUMBER = 1, 2, 4
PROBLEMS = {
    OUT_OF_RANGE: "indices out of range",
    NOT_ASCENDING: "indices that are unsorted or duplicate, or follow a -1",
    NOT_A_NUMBER: "scores that are NaN",
}


def described(bits: int) -> str:
    """The problems that some bits stand for."""
    return " and ".join(text for bit, text in PROBLEMS.items() if bits & bit)


class RuntimeMask(Mask):
    """A mask whose tensors a model computes.

    Attributes:
        copied: whether the tensors are copies, which nobody writes to.
    """

    copied: bool

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What the mask is made from, each with leading dimensions `[B | 1, H | 1]`."""

    @abstractmethod
    def check_sizes(self, q_len: int, kv_len: int) -> None:
        """Raise `ShapeError` when the tensors' sizes, which the host knows, do not fit the lengths."""

    @abstractmethod
    def problems(self, q_len: int, kv_len: int) -> Tensor:
        """int32 `[mask_batch, mask_heads]` on the mask's device: bits of `PROBLEMS`; the host is not asked."""

    @property
    def batch(self) -> int:
        return max(int(t.shape[0]) for t in self.tensors())

    @property
    def heads(self) -> int:
        return max(int(t.shape[1]) for t in self.tensors())

    def _reads_others(self) -> bool:
        return not self.copied

    def frozen(self) -> Self:
        if self.copied:
            return self
        copies = {name: snapshot(x, captured=True) for name, x in self.__dict__.items() if isinstance(x, Tensor)}
        return replace(self, **copies, copied=True)  # type: ignore[type-var]  # subclasses are dataclasses

    def copies(self) -> list[Tensor]:
        return list(self.tensors()) if self.copied else []

    def check(self, q_len: int, kv_len: int) -> None:
        """Sizes, then the numbers themselves, for which the host waits.

        Raises:
            MaskError: indices or scores that mean nothing; names the first batch entry and head.
        """
        self.check_sizes(q_len, kv_len)
        problems = self.problems(q_len, kv_len).cpu()
        if bool(problems.any()):
            b, h = problems.nonzero()[0].tolist()
            raise MaskError(
                f"{self!r} has {described(int(problems[b, h]))} (batch entry {b}, head {h}); {self._accepted()}"
            )

    @abstractmethod
    def _accepted(self) -> str:
        """What its numbers have to be, for messages."""

    def _same_device(self) -> None:
        devices = {t.device for t in self.tensors()}
        if len(devices) > 1:
            raise DeviceError(f"the tensors of a mask share one device, got {sorted(map(str, devices))}")


@dataclass(frozen=True, eq=False, repr=False)
class VerticalSlash(RuntimeMask):
    """Some key columns, and some distances behind the query; causal."""

    vertical: Tensor
    slash: Tensor
    copied: bool = False

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t.view((1,) * (3 - t.ndim) + tuple(t.shape)) for t in (self.vertical, self.slash))

    def tile_bounds(self, index: Index) -> TileBounds:
        """Queries see no later keys; which earlier ones, only the tensors say."""
        return TileBounds.unknown(index.device) & (index.q >= index.kv)

    def check_sizes(self, q_len: int, kv_len: int) -> None:
        del q_len, kv_len  # lists of any length fit

    def _accepted(self) -> str:
        return (
            "indices ascend strictly, columns from 0 to kv_len - 1, distances from 0 to q_len - 1 (with a query "
            "offset, to q_len + offset - 1); fill up short lists with -1 at the end"
        )

    def problems(self, q_len: int, kv_len: int) -> Tensor:
        found: list[Tensor] = []
        for indices, limit in zip(self.tensors(), (kv_len, q_len), strict=True):
            outside = ((indices < -1) | (indices >= limit)).any(-1)
            before, after = indices[..., :-1], indices[..., 1:]
            unsorted = ((after != -1) & (after <= before) | (before == -1) & (after != -1)).any(-1)
            found.append(outside.int() * OUT_OF_RANGE + unsorted.int() * NOT_ASCENDING)
        return found[0] | found[1]

    def evaluate(self, index: Index) -> Tensor:
        vertical, slash = (t.to(index.device) for t in self.tensors())
        distance = index.q - index.kv
        column = _looked_up(_members(vertical, index.kv_len), index, index.kv)
        return (distance >= 0) & (column | _looked_up(_members(slash, index.q_len), index, distance.clamp(min=0)))

    def __repr__(self) -> str:
        return f"vertical_slash({_named(self.vertical)}, {_named(self.slash)})"


def _named(tensor: Tensor) -> str:
    return f"<{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} #{identity(tensor)}>"


def _members(indices: Tensor, size: int) -> Tensor:
    """Bool `[..., size]`: which numbers a list names; -1 names none."""
    out = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    return out.scatter_(-1, torch.where(indices < 0, size, indices.long()), True)[..., :size]


def _looked_up(table: Tensor, index: Index, *at: Tensor) -> Tensor:
    """`table[b, h, *at]` where either leading dimension of the table may be 1."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=index.device)
    place = (index.b if table.shape[0] > 1 else zero, index.h if table.shape[1] > 1 else zero, *at)
    return table[place]


def vertical_slash(vertical_idx: Tensor, slash_idx: Tensor) -> Mask:
    """Query `i` sees key `j <= i` when `j` is one of the vertical columns, or `i - j` one of the slash distances.

    Args:
        vertical_idx: int32 or int64 `[n]`, `[H, n]` or `[B, H, n]`, ascending, -1 in unused places at the end.
        slash_idx: the same for distances, `[m]`, `[H, m]` or `[B, H, m]`; 0 is the query's own position.

    The tensors are held, and read whenever a plan is made or looked up, or a dynamic plan updated. Their numbers are
    checked when a plan is built (`MaskError`), or by `DynamicPlan.check`. Source: MInference (arXiv 2407.02490),
    section 3.2, the vertical-slash pattern, kept exactly instead of rounded to blocks.

    Raises:
        DtypeError, MaskError, DeviceError: tensors of another kind, without a place, or on different devices.
    """
    for name, indices in (("vertical_idx", vertical_idx), ("slash_idx", slash_idx)):
        if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
            got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise DtypeError(f"{name} is an int32 or int64 tensor, got {got}")
        if not 1 <= indices.ndim <= 3 or 0 in indices.shape:
            raise MaskError(
                f"{name} is [n], [H, n] or [B, H, n], n at least 1 (-1 for no index), got {list(indices.shape)}"
            )
    mask = VerticalSlash(vertical_idx, slash_idx)
    mask._same_device()
    # Disagreeing sizes are found here, not in a kernel.
    for size, what in ((0, "batch"), (1, "head")):
        both = {int(t.shape[size]) for t in mask.tensors()} - {1}
        if len(both) > 1:
            raise ShapeError(f"vertical_idx and slash_idx disagree on the number of {what} entries: {sorted(both)}")
    return mask


@dataclass(frozen=True, eq=False, repr=False)
class BitMask(RuntimeMask):
    """A dense mask of one bit per score."""

    words: Tensor
    kv_len: int
    copied: bool = False

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.words.view((1,) * (4 - self.words.ndim) + tuple(self.words.shape)),)

    def check_sizes(self, q_len: int, kv_len: int) -> None:
        if (q_len, kv_len) != (int(self.words.shape[-2]), self.kv_len):
            raise ShapeError(
                f"the bits are those of {self.words.shape[-2]} queries and {self.kv_len} keys, the call has q_len "
                f"{q_len} and kv_len {kv_len}"
            )

    def problems(self, q_len: int, kv_len: int) -> Tensor:
        del q_len, kv_len
        return torch.zeros(self.batch, self.heads, dtype=torch.int32, device=self.words.device)

    def _accepted(self) -> str:
        return "any bits mean something"

    def evaluate(self, index: Index) -> Tensor:
        words = _looked_up(self.tensors()[0].to(index.device), index, index.q, index.kv >> 5)
        return ((words >> (index.kv & 31)) & 1).bool()

    def __repr__(self) -> str:
        return f"from_bits({_named(self.words)}, kv_len={self.kv_len})"


def from_bits(words: Tensor, kv_len: int) -> Mask:
    """A mask from a bitmap: bit `j % 32` of `words[..., i, j // 32]` says whether query `i` sees key `j`.

    Args:
        words: int32 `[Sq, ceil(kv_len / 32)]`, `[H, ...]` or `[B | 1, H | 1, ...]`; bits past `kv_len` do not count.
        kv_len: number of keys.

    The tensor is held, and read whenever a plan is made or looked up, or a dynamic plan updated.

    Raises:
        DtypeError, MaskError, ShapeError: words of another kind, or of another length than `kv_len` asks for.
    """
    if not isinstance(words, Tensor) or words.dtype != torch.int32:
        raise DtypeError(f"words is an int32 tensor, got {words.dtype if isinstance(words, Tensor) else type(words)}")
    kv_len = _integer("kv_len", kv_len, 1)
    if not 2 <= words.ndim <= 4 or 0 in words.shape or words.shape[-1] != -(-kv_len // 32):
        raise MaskError(
            f"words is [Sq, {-(-kv_len // 32)}] up to [B, H, Sq, {-(-kv_len // 32)}] for {kv_len} keys, got "
            f"{list(words.shape)}"
        )
    return BitMask(words, kv_len)


@dataclass(frozen=True, eq=False, repr=False)
class BlockTopK(RuntimeMask):
    """The best key blocks of each query block."""

    scores: Tensor
    k: int
    block_size: int
    causal: bool
    copied: bool = False

    def tile_bounds(self, index: Index) -> TileBounds:
        """By the blocks that are taken; queries of a causal mask see no later keys."""
        chosen = self.selected().to(index.device)
        b, h = (int(x) if size > 1 else 0 for x, size in zip((index.b, index.h), chosen.shape, strict=False))
        q, kv = (Interval.of(x) // self.block_size for x in (index.q, index.kv))
        bounds = bounds_of_blocks(chosen[b, h], q, kv)
        return bounds & (index.q >= index.kv) if self.causal else bounds

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.scores.view((1,) * (4 - self.scores.ndim) + tuple(self.scores.shape)),)

    def check_sizes(self, q_len: int, kv_len: int) -> None:
        wanted = (-(-q_len // self.block_size), -(-kv_len // self.block_size))
        if tuple(self.scores.shape[-2:]) != wanted:
            raise ShapeError(
                f"block_scores has {list(self.scores.shape[-2:])} blocks; q_len {q_len} and kv_len {kv_len} in blocks "
                f"of {self.block_size} make {list(wanted)}"
            )

    def _accepted(self) -> str:
        return "scores are numbers, or -inf for blocks that are never taken"

    def problems(self, q_len: int, kv_len: int) -> Tensor:
        del q_len, kv_len
        return self.tensors()[0].isnan().flatten(2).any(-1).int() * NOT_A_NUMBER

    def selected(self) -> Tensor:
        """Bool `[B | 1, H | 1, query blocks, key blocks]`: the blocks taken; of equal scores, the first ones."""
        scores = self.tensors()[0].float()
        if self.causal:
            rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
            scores = scores.masked_fill(columns > rows[:, None], -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return chosen & (scores > -torch.inf)

    def evaluate(self, index: Index) -> Tensor:
        chosen = self.selected().to(index.device)
        at = (torch.div(x, self.block_size, rounding_mode="floor") for x in (index.q, index.kv))
        keep = _looked_up(chosen, index, *at)
        return keep & (index.q >= index.kv) if self.causal else keep

    def __repr__(self) -> str:
        return f"block_topk({_named(self.scores)}, k={self.k}, block_size={self.block_size}, causal={self.causal})"


def block_topk(block_scores: Tensor, k: int, *, block_size: int = 64, causal: bool = False) -> Mask:
    """Each block of queries sees the `k` key blocks that score best.

    Args:
        block_scores: float16, bfloat16 or float32 `[Sq / bs, Skv / bs]`, `[H, ...]` or `[B, H, ...]`, both lengths
            rounded up to whole blocks; -inf for blocks that are never taken. Of equal scores, the first win.
        k: blocks taken, at most as many as there are.
        block_size: queries and keys in a block: 16, 32, 64 or 128.
        causal: rank only blocks that start no later than the query block does, and drop keys after the query.

    The tensor is held, and read whenever a plan is made or looked up, or a dynamic plan updated. NaN scores are
    reported when a plan is built (`MaskError`), or by `DynamicPlan.check`. Source: the top-k block selection of Quest
    (arXiv 2406.10774), section 3.3, for query blocks.

    Raises:
        DtypeError, MaskError: scores of another kind, or a `k` or block size outside what is accepted.
    """
    if not isinstance(block_scores, Tensor) or block_scores.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        got = block_scores.dtype if isinstance(block_scores, Tensor) else type(block_scores).__name__
        raise DtypeError(f"block_scores is a float16, bfloat16 or float32 tensor, got {got}")
    if not 2 <= block_scores.ndim <= 4 or 0 in block_scores.shape:
        raise MaskError(f"block_scores is [rows, columns] up to [B, H, rows, columns], got {list(block_scores.shape)}")
    if type(block_size) is not int or block_size not in (16, 32, 64, 128):
        raise MaskError(f"block_size is 16, 32, 64 or 128, got {shown(block_size)}")
    if not isinstance(causal, bool):
        raise MaskError(f"causal is True or False, got {type(causal).__name__} {shown(causal)}")
    k = _integer("k, the number of key blocks taken,", k, 1, int(block_scores.shape[-1]))
    return BlockTopK(block_scores, k, block_size, causal)
