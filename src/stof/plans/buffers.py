"""The block-wise kernel's work, rebuilt on the device from tensors that change: no host synchronisation, fixed sizes.

`WorkBuffers` own the lists, whose addresses and sizes never change, so attention and building may both be captured
in a CUDA graph. `fill_*` write them anew. What does not fit sets a flag and turns the rows concerned to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.kernels.implementation import tensors_of
from stof.kernels.triton.work_list import ITEM, Work
from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts
from stof.plans.hopper_buffers import FilledTiles
from stof.runtime.cache_keys import settled
from stof.runtime.memory import in_capture, lasting

if TYPE_CHECKING:
    from stof.kernels.hopper.tile_lists import TileLists
    from stof.runtime.launch import Launch

# Set beside the mask's own problems: more tiles than there is room for.
OVERFLOW = 1 << 16
# Columns handled at once, in lists and of a dense mask.
_COPY, _COLUMNS = 1024, 128


@dataclass(frozen=True)
class DynamicSizes:
    """Sizes that never change. Rows and keys of the attention, block sizes, and leading sizes of the mask."""

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    mask_batch: int
    mask_heads: int

    @property
    def patterns(self) -> int:
        return self.mask_batch * self.mask_heads

    @property
    def row_blocks(self) -> int:
        return -(-self.q_len // self.block_m)


@dataclass(frozen=True, eq=False, kw_only=True)
class WorkBuffers:
    """Lists of fixed size for the work of one problem.

    Attributes:
        problem: its sizes.
        work: what the kernel reads; partial and full tiles share one list of columns.
        flags: int32 `[P]`, bits of what was wrong since they were last cleared.
        launches: what reads masks, bound to the lists, for each kind of input.
        hopper: lists for the Hopper kernel, by shape of tiles and where row blocks are split.
        filled: what fills the lists in use, launched by every update; by the kernel that reads them.
        late: the same for lists first used when an update was captured: its replays do not fill them, so calls do.
        unfilled: those of `filled` that as yet only replays of a captured call fill, in which they were first used.
    """

    problem: DynamicSizes
    work: Work
    flags: Tensor
    launches: dict[Hashable, tuple[Launch, ...]] = field(default_factory=dict)
    hopper: dict[tuple[LayoutConfig, int], FilledTiles] = field(default_factory=dict)
    filled: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    late: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    unfilled: dict[Hashable, Callable[[], None]] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        """How many tiles there is room for."""
        return len(self.work.partial_columns) - 2

    def tensors(self) -> tuple[Tensor, ...]:
        """All lists."""
        return (*tensors_of(self.work), self.flags)

    def launched(self, key: Hashable, make: Callable[[], tuple[Launch, ...]]) -> tuple[Launch, ...]:
        """Launches for tensors of some shapes and strides, made once."""
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = make()
        return found

    def work_launches(self) -> tuple[Launch, ...]:
        """What fills `work` from what updates have read of the mask; none where they fill it themselves."""
        return ()

    def hopper_refusals(self) -> tuple[str, ...]:
        """Why the Hopper kernel cannot run masks like these, in any shape of tiles."""
        return ("of masks made at run time, takes block_topk and vertical_slash",)

    def hopper_serves(self, config: LayoutConfig) -> bool:
        """Whether it can in this shape of tiles, if it can in any."""
        return False

    def counts(self, config: LayoutConfig) -> TileCounts:
        """Tiles of row blocks as far as can be told beforehand, for the cost model."""
        raise NotImplementedError

    def hopper_tiles(self, config: LayoutConfig, split_tiles: int) -> FilledTiles:
        """Lists for the Hopper kernel.

        Raises:
            UnfitLayoutError: it refuses.
        """
        raise NotImplementedError

    def use_work(self, captured: bool) -> None:
        """See to it that `work` is filled, now and later; `captured` says whether an update was captured before."""
        launches = self.work_launches()

        def fill() -> None:
            for launch in launches:
                launch()

        self._use("block_wise", fill, captured)

    def use_hopper(self, config: LayoutConfig, split_tiles: int, captured: bool) -> TileLists:
        """The same for the Hopper kernel's lists, which are made when first used.

        Raises:
            UnfitLayoutError: it refuses.
        """
        key = (config, split_tiles)
        found = self.hopper.get(key)
        if found is None:
            found = lasting(self.flags.device, partial(self.hopper_tiles, config, split_tiles))
            self.hopper[key] = found
        self._use(key, found.fill, captured)
        return found.lists

    def _use(self, key: Hashable, fill: Callable[[], None], captured: bool) -> None:
        if key in self.filled or key in self.late:
            return
        fill()
        (self.late if captured else self.filled)[key] = fill
        if not captured and in_capture():
            self.unfilled[key] = fill
        else:
            self._complete()

    def _complete(self) -> None:
        """Wait for what was filled on behalf of all calls: those on other streams read it too."""
        device = self.flags.device
        if device.type == "cuda" and not in_capture():
            torch.cuda.current_stream(device).synchronize()

    def fill(self) -> None:
        """Fill the lists in use from what an update has read of the mask."""
        for fill in self.filled.values():
            fill()

    def catch_up(self) -> None:
        """Fill the lists that updates may have left as they were; launched before every call."""
        for fill in (*self.late.values(), *self.unfilled.values()):
            fill()
        if self.unfilled and not in_capture():
            self.unfilled.clear()
            self._complete()

    def bytes(self) -> int:
        """Memory of all lists."""
        held = {t.data_ptr(): t for t in self.tensors()}
        tiles = sum(tiles.bytes() for tiles in self.hopper.values())
        return sum(t.numel() * t.element_size() for t in held.values()) + tiles


def empty_work(
    problem: DynamicSizes,
    device: torch.device,
    *,
    tiles: int,
    bitmaps: int,
    shared: bool = False,
    contiguous_tiles: bool = False,
) -> Work:
    """Lists for so many tiles and bitmaps; `shared` and `contiguous_tiles` as in `Work`.

    Raises:
        ArgumentError: more than 32-bit offsets reach.
    """
    block_m, block_n, patterns = problem.block_m, problem.block_n, problem.patterns
    width = 1 if contiguous_tiles else block_n
    if max((tiles + 2) * width, bitmaps * block_m * 4) >= 2**31:
        raise ArgumentError(
            f"{tiles} tiles of {block_m}x{block_n} are more than a plan can hold; give a smaller `density`, or fewer "
            "indices, batch entries or heads"
        )

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    columns = zeros(tiles + 2, width)
    items = zeros(patterns, problem.row_blocks, len(ITEM))
    items[..., ITEM.parts] = 1
    items[..., ITEM.row_block] = -1
    return Work(
        pattern_of=torch.arange(patterns, dtype=torch.int32, device=device).view(
            problem.mask_batch, problem.mask_heads
        ),
        items=items,
        first_columns=zeros(patterns, problem.row_blocks, width),
        partial_columns=columns,
        partial_bitmap=zeros(0 if shared else tiles + 2),
        bitmaps=zeros(bitmaps, block_m, 4),
        full_columns=columns,
        row_order=zeros(0),
        block_m=block_m,
        block_n=block_n,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        chunks=0,
        splits=0,
        has_partial=1,
        has_full=1,
        full_runs=0,
        has_nan_items=1,
        shared=int(shared),
        contiguous_tiles=int(contiguous_tiles),
        # Tiles that are contiguous begin at multiples of their width.
        bias_vectors=int(contiguous_tiles),
    )


def _placed(partial: Tensor, full: Tensor, bad: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the tiles of each row block go.

    Args:
        partial, full: int64 `[P, R]`, tiles of each kind, at most.
        bad: bool `[P]`, patterns that are not computed.
        tiles: room there is.

    Returns:
        First partial tile, first full tile, position in the item list (longest first), and whether the row block has no
        room or belongs to a bad pattern; all `[P, R]`.
    """
    needed = torch.where(bad[:, None], 0, partial + full)
    end = needed.flatten().cumsum(0).view_as(needed)
    poisoned = bad[:, None] | (end > tiles)
    begin = torch.where(poisoned, 0, end - needed)
    order = needed.argsort(dim=1, descending=True, stable=True)
    steps = torch.arange(needed.shape[1], device=needed.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, steps)
    return begin, begin + torch.where(poisoned, 0, partial), place, poisoned


def _flag(room: WorkBuffers, problems: Tensor, poisoned: Tensor) -> None:
    """Remember what was wrong."""
    overflow = (poisoned & (problems == 0)[:, None]).any(1)
    room.flags.bitwise_or_(problems | torch.where(overflow, OVERFLOW, 0).int())


def _up(count: Tensor, step: int) -> Tensor:
    return torch.div(count + step - 1, step, rounding_mode="floor")


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseRoom(WorkBuffers):
    """Lists for a dense mask; `owner` is int32 `[tiles, 2]`, see `fill_blocks.dense_bitmaps`."""

    owner: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self.owner)


def dense_buffers(problem: DynamicSizes, density: float | None, device: torch.device) -> DenseRoom:
    """Lists for tiles that hold a share `density` of all scores; None for all of them."""
    per_row = -(-problem.kv_len // problem.block_n)
    # Columns are gathered: two tiles of a row block, one of each kind, may be less than full.
    tiles = problem.row_blocks * (per_row + 1)
    if density is not None:
        tiles = min(tiles, max(1, int(problem.row_blocks * per_row * density)))
    tiles *= problem.patterns
    return DenseRoom(
        problem=problem,
        work=empty_work(problem, device, tiles=tiles, bitmaps=tiles),
        flags=torch.zeros(problem.patterns, dtype=torch.int32, device=device),
        owner=torch.zeros(tiles, 2, dtype=torch.int32, device=device),
    )


def fill_dense(room: DenseRoom, keep: Tensor) -> None:
    """Write the work of a dense mask.

    Args:
        room: from `dense_buffers`.
        keep: bool `[B | 1, H | 1, Sq, Skv]`, or bits of it, int32 `[B | 1, H | 1, Sq, ceil(Skv / 32)]`.
    """
    from stof.plans.fill import block_topk as kernels

    problem, work, device = room.problem, room.work, room.flags.device
    packed = keep.dtype == torch.int32
    keep = keep if packed else keep.view(torch.uint8)
    strides = [0 if size == 1 else stride for size, stride in zip(keep.shape, keep.stride(), strict=True)]
    count = problem.patterns * problem.row_blocks
    column_blocks = -(-problem.kv_len // _COLUMNS)
    classes = torch.empty(count, problem.kv_len, dtype=torch.int8, device=device)
    settled(kernels.dense_classes)[(count * column_blocks,)](
        keep, classes, *strides, problem.mask_heads, problem.row_blocks, column_blocks, problem.q_len,
        problem.kv_len, packed, problem.block_m, _COLUMNS,
    )  # fmt: skip
    shape = (problem.patterns, problem.row_blocks)
    full_columns, any_columns = ((classes >= least).sum(1).view(shape) for least in (2, 1))
    full = torch.div(full_columns, problem.block_n, rounding_mode="floor")
    partial = _up(any_columns - full * problem.block_n, problem.block_n)
    problems = torch.zeros(problem.patterns, dtype=torch.int32, device=device)
    begin, full_begin, place, poisoned = _placed(partial, full, problems != 0, room.tiles)
    _flag(room, problems, poisoned)
    rows = torch.stack([place, begin, partial, full_begin, full, poisoned], -1).int()
    room.owner.fill_(-1)
    settled(kernels.dense_fill)[(count,)](
        rows, classes, work.items, work.first_columns, work.partial_columns, work.partial_bitmap, room.owner,
        problem.row_blocks, problem.kv_len, problem.block_n, _COPY,
    )  # fmt: skip
    settled(kernels.dense_bitmaps)[(room.tiles,)](
        keep, room.owner, work.partial_columns, work.bitmaps, *strides, problem.mask_heads, problem.row_blocks,
        problem.q_len, packed, problem.block_m, problem.block_n,
    )  # fmt: skip
