"""Work and tile lists rebuilt on the device from tensors that change: no host synchronisation, fixed sizes.

`WorkBuffers` own the lists, whose addresses and sizes never change, so attention and building may both be captured
in a CUDA graph. `fill` writes them anew. What does not fit sets a flag and turns the rows concerned to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from stof.dynamic.backward_lists import TritonLists
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.errors import UnfitLayoutError
from stof.kernels.hopper.tile_lists import TILE_ITEM, TILE_RANGE, TileLists, split_items
from stof.kernels.implementation import tensors_of
from stof.kernels.packed_integers import NAN_BITS
from stof.kernels.triton.work_list import WORK_ITEM, Work
from stof.layout import LayoutConfig
from stof.layout.survey import Survey, TileCounts
from stof.runtime.memory import in_capture, outside_graph_pool, tensors_on_host
from stof.selection import CallSpec
from stof.selection.mask_geometry import Geometry

if TYPE_CHECKING:
    from stof.dynamic.block_topk.one_pass import OnePassLists
    from stof.runtime.launch import Launch

# What fills lists, in their order.
Launches = tuple[Callable[[], None], ...]

# Set beside the mask's own problems: more tiles than there is room for.
OVERFLOW = 1 << 16
# The implementations whose lists buffers hold.
HOPPER, BLOCK_WISE = "hopper", "block_wise"


class HopperLists(NamedTuple):
    """Lists for one shape of tiles, and what fills them.

    Attributes:
        lists: what the kernel reads.
        tables: what the launches keep for themselves.
        launches: in their order.
    """

    lists: TileLists
    tables: tuple[Tensor, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class WorkBuffers(Geometry):
    """Lists of fixed size for the work of one problem, and what the selector asks of them.

    Attributes:
        problem: its sizes.
        work: what the kernel reads; partial and full tiles share one list of columns.
        flags: int32 `[P]`, bits of what was wrong since they were last cleared.
        launches: what reads masks, bound to the lists, for each kind of input.
        hopper: lists for the Hopper kernel, by shape of tiles and where row blocks are split.
        filled: what fills the lists in use, launched by every update; by the kernel that reads them.
        captured_fills: the same for lists first used after an update was captured: its replays do not fill them, calls
            do.
        pending_fills: those of `filled` that as yet only replays of a captured call fill, in which they were first
            used.
        backward: lists for gradients, by the implementation that reads them and its tiles; filled by every update.
    """

    problem: DynamicSizes
    work: Work
    flags: Tensor
    launches: dict[Hashable, Launch] = field(default_factory=dict)
    hopper: dict[tuple[LayoutConfig, int], HopperLists] = field(default_factory=dict)
    filled: dict[Hashable, Launches] = field(default_factory=dict)
    captured_fills: dict[Hashable, Launches] = field(default_factory=dict)
    pending_fills: dict[Hashable, Launches] = field(default_factory=dict)
    backward: dict[tuple[str, LayoutConfig], TritonLists | OnePassLists] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        """All lists."""
        held = [tensor for lists in self.backward.values() for tensor in lists.tensors()]
        return (*tensors_of(self.work), self.flags, *held)

    def launched(self, key: Hashable, make: Callable[[], Launch]) -> Launch:
        """The launch for tensors of some shapes and strides, made once."""
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = make()
        return launch

    def fill(self, *tensors: Tensor) -> None:
        """Write the lists in use from a mask's tensors, as `mask_tensors` gives them; the host is not asked."""
        raise NotImplementedError

    def work_launches(self) -> Launches:
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

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        del row_order
        with tensors_on_host():
            counts = {geometry: self.counts(geometry) for geometry in geometries}
            kept = torch.full((1, self.problem.q_len), self.problem.kv_len)
        return Survey(counts, kept, self.problem.mask_batch, self.problem.mask_heads)

    def hopper_tiles(self, config: LayoutConfig, split_tiles: int) -> HopperLists:
        """Lists for the Hopper kernel, in a shape of tiles that it serves; `split_tiles` as for `make_tile_lists`.

        Raises:
            UnfitLayoutError: more tiles than 32-bit offsets reach.
        """
        raise NotImplementedError

    def backward_size(self, size: int) -> int:
        """The largest tile size of lists for gradients, up to `size`."""
        return size

    def backward_lists(self, size: int) -> TritonLists:
        """Lists for gradients in tiles of `size` x `size`, to be filled by the next update."""
        raise NotImplementedError

    def one_pass_refusals(self, call: CallSpec) -> tuple[str, ...]:
        """Why Hopper's one-pass backward kernel cannot run the gradients of a call under masks like these."""
        del call
        return ("of masks made at run time, takes block_topk",)

    def one_pass_lists(self, config: LayoutConfig) -> OnePassLists:
        """Lists for that kernel, in tiles of a layout of the transposed mask, to be filled by the next update.

        Raises:
            UnfitLayoutError: too many tiles.
        """
        raise NotImplementedError

    def use_work(self, captured: bool) -> None:
        """See to it that `work` is filled, now and later; `captured` says whether an update was captured before."""
        self._use(BLOCK_WISE, self.work_launches(), captured)

    def use_hopper(self, config: LayoutConfig, split_tiles: int, captured: bool) -> TileLists:
        """The same for the Hopper kernel's lists, which are made when first used.

        Raises:
            UnfitLayoutError: it refuses.
        """
        key = (config, split_tiles)
        filled = self.hopper.get(key)
        if filled is None:
            refused = self.hopper_refusals()
            if refused or not self.hopper_serves(config):
                raise UnfitLayoutError(next(iter(refused), f"{config} does not fit masks like these, made at run time"))
            filled = outside_graph_pool(self.flags.device, partial(self.hopper_tiles, config, split_tiles))
            self.hopper[key] = filled
        self._use(key, filled.launches, captured)
        return filled.lists

    def _use(self, key: Hashable, launches: Launches, captured: bool) -> None:
        if key in self.filled or key in self.captured_fills:
            return
        _run({key: launches})
        (self.captured_fills if captured else self.filled)[key] = launches
        if not captured and in_capture():
            self.pending_fills[key] = launches
        else:
            self._complete()

    def _complete(self) -> None:
        """Wait for what was filled on behalf of all calls: those on other streams read it too."""
        device = self.flags.device
        if device.type == "cuda" and not in_capture():
            torch.cuda.current_stream(device).synchronize()

    def fill_lists(self) -> None:
        """Fill the lists in use from what an update has read of the mask."""
        _run(self.filled)

    @property
    def calls_fill(self) -> bool:
        """Whether `run_pending_fills` has anything to do."""
        return bool(self.captured_fills or self.pending_fills)

    def run_pending_fills(self) -> None:
        """Fill the lists that updates may have left as they were; launched before every call."""
        _run(self.captured_fills)
        _run(self.pending_fills)
        if self.pending_fills and not in_capture():
            self.pending_fills.clear()
            self._complete()

    def bytes(self) -> int:
        """Memory of all lists."""
        device = self.flags.device
        hopper = [t for made in self.hopper.values() for t in (*tensors_of(made.lists), *made.tables)]
        held = {t.data_ptr(): t for t in (*self.tensors(), *hopper) if t.device == device}
        return sum(t.numel() * t.element_size() for t in held.values())


def _run(fills: dict[Hashable, Launches]) -> None:
    for launches in fills.values():
        for launch in launches:
            launch()


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
    problem.check_offsets(tiles, width, bitmaps)

    zeros = int_zeros(device)
    columns = zeros(tiles + 2, width)
    items = zeros(patterns, problem.row_blocks, len(WORK_ITEM))
    items[..., WORK_ITEM.parts] = 1
    items[..., WORK_ITEM.row_block] = -1
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
        has_nan_items=1,
        shared=int(shared),
        contiguous_tiles=int(contiguous_tiles),
        # Tiles that are contiguous begin at multiples of their width.
        bias_vectors=int(contiguous_tiles),
    )


def empty_lists(
    work: Work, counts: TileCounts, split_tiles: int, tile_columns: Tensor, **fields: Any
) -> tuple[TileLists, Tensor]:
    """Lists for the Hopper kernel, and int32 `[P * R + 1]`, items before each row block.

    Until the lists are filled, each item's rows become NaN.

    Args:
        work: lists of the same problem.
        counts: how many tiles of either kind row blocks are taken to have; they are divided into items by that.
        split_tiles: see `make_tile_lists`.
        tile_columns, fields: of the lists; the last two tiles keep nothing.
    """
    device, nothing = tile_columns.device, len(tile_columns) - 2
    tiles = (counts.partial + counts.full).flatten()
    pointers = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    items, item_ptr, chunks = split_items(pointers, counts.partial.flatten(), len(counts.partial), split_tiles, nothing)
    begins = (items[:, TILE_ITEM.chunk] == 0).nonzero()[:, 0]
    first_item = torch.nn.functional.pad(begins, (0, 1), value=len(items)).int()
    ranges = torch.tensor([nothing, nothing + 1, nothing + 1, 0, NAN_BITS], dtype=torch.int32)
    lists = TileLists(
        pattern_of=work.pattern_of,
        items=items,
        item_ptr=item_ptr,
        tile_columns=tile_columns,
        tile_bitmap=int_zeros(device)(nothing + 3),
        row_order=int_zeros(device)(0),
        ranges=ranges.expand(len(items), len(TILE_RANGE)).contiguous().to(device),
        q_len=work.q_len,
        kv_len=work.kv_len,
        chunks=chunks,
        **fields,
    )
    return lists, first_item.to(device)
