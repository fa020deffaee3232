"""Calling the row-wise kernel: the kept columns of every row, configurations, launch.

For masks with few columns per row or with columns that no two rows share, where tiles would be mostly empty, and for
short sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import ArgumentError, LayoutError
from stof.kernels.common import empty_output
from stof.kernels.config import BoundCall
from stof.kernels.triton.row_wise_kernel import row_wise_kernel
from stof.layout.layout import Layout
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl

LOG2E = math.log2(math.e)
# Scores of tiles unpacked at once while preparing; at 70 bytes each, temporaries stay below 0.3 GB.
STRIP_SCORES = 2**22
# Rows whose counts round up to the same multiple of this keep the layout's order, which has like rows side by side.
COUNT_STEP = 16


@dataclass(frozen=True)
class RowWiseConfig:
    """How the kernel cuts its work; every size is a power of two.

    Attributes:
        rows: query rows of a program.
        cols: columns of a row read in one step.
        slots: softmax states of a row; `cols // slots` columns go to a slot in one step.
        width: neighbouring elements of a key read by one load of the program; 16 bytes go to a thread.
        num_warps: warps of a program.
    """

    rows: int = 1
    cols: int = 16
    slots: int = 8
    width: int = 32
    num_warps: int = 1

    def __post_init__(self) -> None:
        limits = {"rows": (1, 16), "cols": (1, 256), "slots": (1, 256), "width": (8, 128), "num_warps": (1, 16)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ArgumentError(f"{name} is a power of two between {least} and {most}, got {value!r}")
        if self.cols < self.slots:
            raise ArgumentError(f"cols is a multiple of slots, got {self.cols} and {self.slots}")


def default_config(head_dim: int, max_count: int, itemsize: int = 2) -> RowWiseConfig:
    """A config for the wider of head_dim and value width, the longest row in columns, and bytes of an input element.

    A thread holds 8 to 32 elements of a key and of the result. The lanes of a warp that are left take other rows, which
    leaves nothing to merge, or, the more columns a row has, columns of the same row; very long rows get several warps.
    """
    lanes = 2  # 16 bytes each: a whole sector
    while lanes * 24 < head_dim and lanes < 8:
        lanes *= 2
    groups = 32 // lanes
    slots = 1
    while slots * 64 < max_count and slots < 4 * groups:
        slots *= 2
    # Columns a state has in flight, kept to what 128 registers hold.
    unroll = 4 if head_dim <= lanes * 16 else 2
    if itemsize > 2:
        unroll //= 2
    while unroll > 1 and unroll * slots >= 2 * max_count:
        unroll //= 2
    rows, warps = max(1, groups // slots), max(1, slots // groups)
    return RowWiseConfig(rows, slots * unroll, slots, lanes * 16 // itemsize, warps)


def prepare_row_wise(layout: Layout) -> tuple[list[Tensor], list[int]]:
    """The kept columns of every row, rows with like counts side by side and the longest first.

    Memory beyond the result is one strip of row blocks, never `q_len x kv_len`. Synchronises; done once per plan.

    Returns:
        `([pattern_of, rows, row_ptr, columns], [most])`: `rows` int32 `[P * q_len]` holds the query row at each
        position of a pattern, `row_ptr` int32 `[P * q_len + 1]` where the columns of each position start in
        `columns` (int32, ascending within a row), `most` the largest count of a row.

    Raises:
        LayoutError: the mask keeps 2**31 scores or more, which int32 pointers cannot count.
    """
    device, patterns, q_len = layout.device, layout.patterns, layout.q_len
    padded = layout.row_blocks * layout.config.block_m
    strips = [_strip(layout, blocks) for blocks in _strips(layout)]
    counts = torch.cat([counts for counts, _ in strips]).view(patterns, padded)
    # Stable: rows of one class stay neighbours, as the layout's order has rows with like columns side by side.
    classes = (counts[:, :q_len] + COUNT_STEP - 1) // COUNT_STEP
    order = classes.argsort(dim=1, descending=True, stable=True)
    sorted_counts = counts.gather(1, order).flatten()
    row_ptr = torch.nn.functional.pad(sorted_counts.cumsum(0), (1, 0))
    total, most = int(row_ptr[-1]), int(counts.max())
    if total >= 2**31:
        raise LayoutError([f"row-wise attention takes fewer than 2**31 kept scores, this mask keeps {total}"])
    starts = torch.zeros(patterns, padded, dtype=torch.int64, device=device)
    starts.scatter_(1, order, row_ptr[:-1].view(patterns, q_len))
    columns = torch.empty(total, dtype=torch.int32, device=device)
    first = 0
    for strip_counts, strip_columns in strips:
        last = first + len(strip_counts)
        before = strip_counts.cumsum(0) - strip_counts
        shift = starts.view(-1)[first:last] - before
        kept = len(strip_columns)
        places = torch.repeat_interleave(shift, strip_counts, output_size=kept) + torch.arange(kept, device=device)
        columns[places] = strip_columns
        first = last
    rows = layout.rows().gather(1, order)
    return [layout.pattern_of, rows.flatten().int(), row_ptr.int(), columns], [most]


def _strips(layout: Layout) -> list[range]:
    """Row blocks of all patterns in runs of at most `STRIP_SCORES` scores (always one row block at least)."""
    pointers = layout.row_block_ptr.tolist()
    tiles = STRIP_SCORES // (layout.config.block_m * layout.config.block_n)
    out, start = [], 0
    for stop in range(1, len(pointers)):
        if stop + 1 == len(pointers) or pointers[stop + 1] - pointers[start] > tiles:
            out.append(range(start, stop))
            start = stop
    return out


def _strip(layout: Layout, blocks: range) -> tuple[Tensor, Tensor]:
    """Counts int64 `[len(blocks) * block_m]` and sorted columns int32 of the rows of these row blocks."""
    block_m, device = layout.config.block_m, layout.device
    pointers = layout.row_block_ptr[blocks.start : blocks.stop + 1].long()
    first, last = pointers[[0, -1]].tolist()
    tiles = torch.arange(first, last, device=device)
    block = torch.repeat_interleave(torch.arange(len(blocks), device=device), pointers.diff(), output_size=len(tiles))
    columns = layout.tile_columns(tiles)
    exists = layout.rows().view(-1, block_m)[blocks.start : blocks.stop] >= 0
    keep = layout.tile_keep(tiles) & (columns >= 0)[:, None, :] & exists[block][:, :, None]
    tile, row, within = keep.nonzero(as_tuple=True)
    positions = block[tile] * block_m + row
    keys = (positions * layout.kv_len + columns[tile, within]).sort().values
    counts = torch.bincount(positions, minlength=len(blocks) * block_m)
    return counts, (keys % layout.kv_len).int()


def row_wise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    sizes: list[int],
    *,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    config: RowWiseConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked attention; arguments and results as `reference_attention`, the mask as `prepare_row_wise` made it.

    Inputs are float16, bfloat16 or float32, arithmetic is float32. `bias` has 4 dimensions, each 1 or the full size.
    Only kept columns of `k` and `v` are read. Equal calls give equal bits.

    Returns:
        `(out, lse)`: `[B, H, Sq, Dv]` as `empty_output` lays it out, and float32 `[B, H, Sq]`.
    """
    result = empty_output(q, v)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    options = {"scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks, "config": config}
    out, lse = bind_row_wise(q, k, v, tensors, sizes, **options)(q, k, v, bias, sinks)  # type: ignore[arg-type]
    return (out if out.stride() == result.stride() else result.copy_(out)), lse


def bind_row_wise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    sizes: list[int],
    *,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    config: RowWiseConfig | None = None,
) -> BoundCall:
    """`row_wise_attention` with everything but the data decided, for tensors like these.

    The call takes tensors with the shapes, strides, dtypes and device of those given here.
    """
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return lambda q, k, v, bias, sinks: row_wise_attention(
            q, k, v, tensors, sizes, scale=scale, softcap=softcap, bias=bias, sinks=sinks, config=config
        )
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    out = empty_output(q, v)
    pattern_of, rows, row_ptr, columns = tensors
    mask_batch, mask_heads = pattern_of.shape
    config = config or default_config(max(head_dim, value_dim), sizes[0], q.element_size())
    bias_strides = [0, 0, 0, 0]
    if bias is not None:
        bias_strides = [0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)]
    ready = Launch(
        row_wise_kernel,
        -(-q_len // config.rows) * batch * heads,
        (pattern_of, rows, row_ptr, columns),
        (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride(), *bias_strides,
            0 if mask_batch == 1 else mask_heads, 0 if mask_heads == 1 else 1,
            batch * heads, heads, q_len,
            # Scores are in base 2; under a softcap the scale is inside the tanh and the base outside.
            scale / softcap if softcap else scale * LOG2E, softcap * LOG2E,
        ),
        (
            heads // kv_heads, mask_batch * mask_heads == 1, head_dim, value_dim,
            bias is not None, softcap != 0.0, sinks is not None,
            (kv_len - 1) * max(k.stride(2), v.stride(2), bias_strides[3]) >= 2**31,
            config.rows, config.slots, config.cols // config.slots, config.width, supports_pdl(q.device),
        ),
        num_warps=config.num_warps,
        num_stages=1,
        use_pdl=supports_pdl(q.device),
        device=q.device,
    )  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out = empty_output(q, v)
        lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
        # What the kernel does not read may be anything.
        ready(q, k, v, out, lse, q if bias is None else bias, q if sinks is None else sinks)
        return out, lse

    return call
