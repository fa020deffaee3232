"""What binding has in common for both forward kernels: tensor maps for TMA, the work on the device, addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.split_kv_merge import MAX_AND_SUM_SIZE
from stof.kernels.hopper.tile_lists import TileLists
from stof.kernels.hopper.tile_scheduler import chunk_slots, work_list
from stof.kernels.implementation import Bind, BoundCall, Options
from stof.runtime.counters import zeroed_counters
from stof.runtime.launch import TensorMap
from stof.runtime.memory import made_for_calls, refuse_capture

# Rows of Q for one warpgroup.
ROWS = 64
# 128-byte swizzle, as TMA writes and wgmma reads, of elements of so many bytes.
_SWIZZLED = {n: NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * n, rank=4) for n in (1, 2)}
# What TMA wants addresses and strides to be multiples of, in bytes.
_ALIGNED = 16


class Window(NamedTuple):
    """Boxes of a `[B, H, S, D]` tensor whose rows lie `step` apart: seen as `[B, H, S / step, step * row stride]`."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    @staticmethod
    def over(tensor: Tensor, rows: int, width: int, step: int = 1) -> Window:
        batch, heads, length, dim = tensor.shape
        stride = tensor.stride()
        inner = dim if step == 1 else (step - 1) * stride[2] + dim
        # A dimension of size 1 may have any stride; tensor maps want multiples of 16 bytes.
        strides = [
            _ALIGNED // tensor.element_size() if n == 1 else s
            for n, s in zip(tensor.shape[:3], stride[:3], strict=True)
        ]
        strides[2] *= step
        return Window([batch, heads, length // step, inner], [*strides, 1], [1, 1, rows, width])

    def key(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.shape), tuple(self.strides), tuple(self.block_shape)

    def at(self, tensor: Tensor) -> TensorMap:
        """These boxes of a tensor with the same shape and strides."""
        return TensorMap(tensor, self.shape, self.strides, self.block_shape, _SWIZZLED[tensor.element_size()])


def readable(x: Tensor) -> bool:
    """Whether TMA can read these strides: rows contiguous, all other strides positive multiples of 16 bytes."""
    outer = zip(x.shape[:3], x.stride()[:3], strict=True)
    return x.stride(3) == 1 and all(n == 1 or (s > 0 and s * x.element_size() % _ALIGNED == 0) for n, s in outer)


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The work list of a call on its device.

    Attributes:
        work_list: see `tile_scheduler.work_list`.
        count: work tiles.
        persistent: whether there are more of them than thread blocks, which then take one after another.
        chunks: partial results that are stored, one for each warpgroup of a chunk.
        width: elements of a row of them.
    """

    work_list: Tensor
    count: int
    persistent: bool
    chunks: int
    width: int

    @staticmethod
    def of(lists: TileLists, like_lse: Tensor, heads_at_once: int, blocks: int, width: int) -> DeviceWork:
        """The work of `[B, H, Sq]` rows for so many thread blocks; `heads_at_once` is `KernelConfig.side`."""
        batch, heads = like_lse.shape[:2]
        pairs = batch * heads
        if isinstance(lists, FilledTileLists):
            count = pairs * lists.row_blocks
            filled = lists.work_list(batch, heads, min(heads_at_once or pairs, pairs))
            return DeviceWork(filled, count, count > blocks, 0, width)
        work = work_list(lists, batch, heads, blocks, min(heads_at_once or pairs, pairs))
        slots = 0 if lists.paired else chunk_slots(work)
        count = len(work) - 1
        return DeviceWork(work.to(like_lse.device), count, count > blocks, slots * (lists.block_m // ROWS), width)

    def memory(self, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for partial outputs, float32, their maxima and sums, and counters of work tiles and chunks.

        Pointers that the kernel is compiled not to read take any tensor: `lse`, and the work list for integers.
        """
        if not self.chunks:
            return lse, lse, zeroed_counters(1, lse.device) if self.persistent else self.work_list
        out = self.chunks * ROWS * self.width
        scratch = torch.empty(out + self.chunks * MAX_AND_SUM_SIZE, dtype=torch.float32, device=lse.device)
        return scratch, scratch[out:], zeroed_counters(1 + self.chunks, lse.device)


def moving_call(bind: Bind, prepared: PreparedTiles, options: Options, device: torch.device) -> BoundCall:
    """A call for tensors at addresses that TMA cannot read: it copies them, and binds once more, when it is first used.

    Making the work list for that takes long.
    """
    bound: list[BoundCall] = []
    scalars = options.scalars

    def call(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not bound:
            refuse_capture(device)
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        if not bound:
            again = scalars._replace(bias=bias, sinks=sinks, scales=scales)
            bound.append(made_for_calls(device, partial(bind, q, k, v, prepared, again)))
        return bound[0](q, k, v, bias, sinks, *scales)

    return call


def like_lse(q: Tensor) -> Tensor:
    """float32 `[B, H, Sq]`. `empty_like` of it is contiguous, and takes half as long as `empty`."""
    return torch.empty((), dtype=torch.float32, device=q.device).expand(q.shape[:3])


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; those of an H200 where there is none, for compiling and tests."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
