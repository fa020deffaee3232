"""Calling the Hopper kernel: tensor maps for TMA, the work list, launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.common import empty_output
from stof.kernels.hopper.binding import ROWS, DeviceWork, Window, like_lse, moving_call, multiprocessors, readable
from stof.kernels.hopper.config import RUN, ForwardConfig, blocks_per_sm, out_tile_width, padded_width, q_stages
from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.kernels.hopper.forward_kernel import forward_kernel
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.tile_lists import TileLists
from stof.kernels.hopper.tile_scheduler import skips_empty_groups
from stof.kernels.implementation import BoundCall, Options
from stof.kernels.tma_bias import copy_for_tma, empty_for_tma, tma_readable, unbroadcast
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl

# Columns of one TMA box.
_BOX = 64
# Registers of a thread, before warps trade them, by thread blocks on a multiprocessor: 256 threads each where there are
# several, and 65,536 registers for all.
_REGISTERS = {1: 0, 2: 128, 3: 80}
# Work tiles refreshed by one program.
_WORK_PER_PROGRAM = 128
# Keys gathered by one program.
_KEYS_PER_PROGRAM = 32


def bind(q: Tensor, k: Tensor, v: Tensor, prepared: PreparedTiles, options: Options) -> BoundCall:
    """The kernel bound to tensors like these: `call(q, k, v, bias, sinks) -> (out, lse)`.

    Args:
        q, k, v: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]`, `[B, Hkv, Skv, D]`; float16 or bfloat16, D a multiple of 8 up to
            256; a call copies what TMA cannot read (strides that are no multiples of 8, rows that are not contiguous).
        prepared: tile lists, and stages and `side` of their configuration.
        options: its bias is None, or `[B or 1, H or 1, Sq or 1, Skv]` in 16 bits (`may_be_tma_readable`), with
            contiguous tiles and rows in order; a call copies one whose tiles TMA cannot read (`tma_readable`).

    Returns (the call):
        `out [B, H, Sq, D]` in q's memory order, `lse [B, H, Sq]` float32.

    Raises:
        UnfitLayoutError: evenly spaced rows or columns, and a head_dim that is not 64, 128 or 256; gathered columns or
            permuted rows, and a bias.
        KernelError: (the call) the kernel does not compile here.
    """
    lists, config = prepared.lists, prepared.config
    scale, softcap, bias, sinks = options.scale, options.softcap, options.bias, options.sinks
    device = q.device
    key = _shape_key(q, k, v, prepared, options)
    known = _bound_by_shape.get(key)
    if known is not None:
        return known(prepared)
    _, heads, q_len, head_dim = q.shape
    width = padded_width(head_dim)
    stages = q_stages(lists.block_m, width, bias is not None, bool(lists.paired))
    if head_dim != width and (lists.row_step > 1 or lists.column_step > 1):
        raise UnfitLayoutError(f"evenly spaced rows of {head_dim} elements do not fill the {width} that TMA copies")
    if bias is not None and (lists.slab or lists.row_step > 1 or lists.column_step > 1):
        raise UnfitLayoutError("a bias is copied in whole tiles, of rows and columns that follow each other")
    # The output has the memory order of q as it was given.
    out = empty_output(q, v)
    copy_out = not readable(out)
    if copy_out:
        out = out.contiguous()
    copied = [not readable(x) for x in (q, k, v)]
    copy_any = any(copied)
    q, k, v = (x.contiguous() if copy else x for x, copy in zip((q, k, v), copied, strict=True))
    q_window = Window.over(q, ROWS, width, lists.row_step)
    out_window = Window.over(out, ROWS, width if stages > 1 else out_tile_width(width), lists.row_step)
    # Whole tiles, or runs of columns and slabs.
    compacted = _CompactedColumns(k, v, lists, heads) if lists.compacted_keys.numel() else None
    box = (RUN, _BOX) if lists.slab and compacted is None else (lists.block_n, width)
    k_window = Window.over(k, *box, lists.column_step)
    v_window = Window.over(v, *box, lists.column_step)
    k_slab = Window.over(k, lists.slab, _BOX) if lists.slab else None
    v_slab = Window.over(v, lists.slab, _BOX) if lists.slab else None
    copy_bias = bias is not None and not tma_readable(bias, q_len, k.shape[2])
    if bias is not None and copy_bias:
        bias = empty_for_tma(bias, "meta")  # sizes and strides alone
    # One row for all queries is read again and again: TMA takes a stride of 0.
    shared = None if bias is None else unbroadcast(bias).expand(-1, -1, q_len, -1)
    bias_window = None if shared is None else Window.over(shared, ROWS, lists.block_n)
    if compacted is not None:
        k_slab = v_slab = Window.over(compacted.like, *box)

    groups = lists.block_m // ROWS
    processors = multiprocessors(device)
    blocks = blocks_per_sm(lists.block_m, lists.block_n, width) * processors
    lse_like = like_lse(q)
    work = DeviceWork.of(lists, lse_like, config.side, blocks, width)
    has_score_mod = softcap > 0 or scale <= 0 or bias is not None
    if lists.paired and has_score_mod:
        raise UnfitLayoutError("pairs of row blocks take scores as they are, times a positive scale")
    permuted, refreshed = lists.row_order.numel() > 0, lists.ranges.numel() > 0
    refresh = _refresh_launch(work.work_list, lists) if refreshed else None
    # Rows of one residue: what lies past them is past the width, whatever stride a single row has.
    residues = (q.stride(2), out.stride(2)) if lists.row_step > 1 else (width, width)
    compiled_config = ForwardConfig(
        groups=groups,
        block_n=lists.block_n,
        width=width,
        slab=lists.slab,
        stages=config.num_stages,
        q_stages=stages,
        split=work.chunks > 0,
        has_score_mod=has_score_mod,
        has_softcap=softcap > 0,
        has_sinks=sinks is not None,
        has_full=lists.has_full > 0,
        persistent=work.persistent,
        permuted=permuted,
        has_bias=bias is not None,
        dynamic=refreshed or isinstance(lists, FilledTileLists),
        skip_empty=work.persistent and not lists.paired and skips_empty_groups(q_len, lists.block_m),
        paired=lists.paired > 0,
        exact_tiles=1 if has_score_mod or width > 128 else lists.exact_tiles,
    )
    ready = Launch(
        forward_kernel,
        min(blocks, work.count),
        (work.work_list, lists.tile_columns, lists.tile_bitmap, lists.bitmaps,
         lists.row_order if permuted else work.work_list),
        (heads, heads // k.shape[1], q_len, q_len // lists.row_step, *residues, lists.column_step,
         k.stride(2), v.stride(2), heads // (k.shape[1] if compacted is None else compacted.like.shape[1]),
         *_bias_dims(bias),
         float(scale if has_score_mod else scale * math.log2(math.e)), float(softcap)),
        (compiled_config, supports_pdl(device)),
        num_warps=4,
        num_stages=config.num_stages,
        max_registers=_REGISTERS[blocks // processors],
        windows=(q_window, k_window, v_window, k_slab, v_slab, out_window, bias_window),
        use_pdl=supports_pdl(device),
        device=device,
    )  # fmt: skip

    scalars = options.scalars

    def bound(prepared: PreparedTiles, work: DeviceWork, ready: Launch) -> BoundCall:
        moved = moving_call(bind, prepared, scalars, device)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
            result = out = torch.empty_like(q)
            if copy_out:
                out = torch.empty_like(result, memory_format=torch.contiguous_format)
            if copy_any:
                q, k, v = (x.contiguous() if copy else x for x, copy in zip((q, k, v), copied, strict=True))
            if bias is not None:
                bias = copy_for_tma(bias) if copy_bias else unbroadcast(bias)
                if bias.data_ptr() % 16:
                    bias = _moved(bias)
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:  # what TMA asks of an address
                out, lse = moved(q, k, v, bias, sinks)
                return result.copy_(out), lse
            lse = torch.empty_like(lse_like)
            chunk_out, chunk_ml, counters = work.memory(lse)
            k_slabs, v_slabs = (k, v) if compacted is None else compacted(k, v)
            if refresh is not None:
                refresh()
            bases = (q, k, v, k_slabs, v_slabs, out, q if bias is None else bias)
            ready(lse, q if sinks is None else sinks, chunk_out, chunk_ml, counters, bases=bases)
            return (result.copy_(out) if copy_out else result), lse

        return call

    if key is not None:
        bare = ready.with_tensors(())  # without the lists of this mask

        def with_lists(prepared: PreparedTiles) -> BoundCall:
            lists = prepared.lists
            work = DeviceWork.of(lists, lse_like, config.side, blocks, width)
            tensors = (work.work_list, lists.tile_columns, lists.tile_bitmap, lists.bitmaps, work.work_list)
            return bound(prepared, work, bare.with_tensors(tensors))

        if len(_bound_by_shape) >= _MOST_BOUND:
            _bound_by_shape.clear()
        _bound_by_shape[key] = with_lists
    return bound(prepared, work, ready)


# What binds a call to filled lists, by everything but the lists: they differ in tensors alone from mask to mask.
_bound_by_shape: dict[Hashable, Callable[[PreparedTiles], BoundCall]] = {}
_MOST_BOUND = 256


def _shape_key(q: Tensor, k: Tensor, v: Tensor, prepared: PreparedTiles, options: Options) -> Hashable:
    """Calls with equal keys differ in the tensors of their lists alone; None where a call is bound by itself."""
    lists, sinks = prepared.lists, options.sinks
    if not isinstance(lists, FilledTileLists) or options.bias is not None:
        return None
    tensors = [(x.shape, x.stride(), x.dtype) for x in (q, k, v)]
    sizes = lists.block_m, lists.block_n, lists.row_blocks, lists.pattern_of.shape
    return *tensors, q.device, prepared.config, sizes, options.scale, options.softcap, sinks is not None and sinks.dtype


class _CompactedColumns:
    """Keys and values of compacted columns, which every call gathers anew.

    Attributes:
        like: shape and strides of either, `[B, heads with a mask of their own, or key heads, n, D]`.
    """

    def __init__(self, k: Tensor, v: Tensor, lists: TileLists, heads: int) -> None:
        from stof.kernels.hopper.gather_columns import gather_columns

        batch, kv_heads, _, head_dim = k.shape
        mask_batch, mask_heads, count = lists.compacted_keys.shape
        owners = heads if mask_heads > 1 else kv_heads
        self.like = torch.empty(batch, owners, count, head_dim, dtype=k.dtype, device="meta")
        self._gather = Launch(
            gather_columns,
            batch * owners * (count // _KEYS_PER_PROGRAM),
            (lists.compacted_keys,),
            (
                owners, owners // kv_heads, int(mask_batch > 1) * mask_heads, int(mask_heads > 1), count, head_dim,
                *k.stride()[:3], *v.stride()[:3],
            ),
            (_KEYS_PER_PROGRAM, 2 ** (head_dim - 1).bit_length(), supports_pdl(k.device)),
            num_warps=4,
            num_stages=1,
            use_pdl=supports_pdl(k.device),
            device=k.device,
        )  # fmt: skip

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.empty(2, *self.like.shape, dtype=k.dtype, device=k.device)
        self._gather(k, v, both[0], both[1])
        return both[0], both[1]


def _refresh_launch(work: Tensor, lists: TileLists) -> Launch:
    """The launch that updates the work list from tile lists that the GPU has rebuilt."""
    from stof.kernels.hopper.refresh_work import refresh_work

    count = len(work) - 1
    return Launch(
        refresh_work,
        -(-count // _WORK_PER_PROGRAM),
        (work, lists.ranges, lists.tile_columns),
        (count,),
        (lists.tile_columns.shape[1], _WORK_PER_PROGRAM),
        num_warps=4,
        num_stages=1,
        device=work.device,
    )


def _bias_dims(bias: Tensor | None) -> tuple[int, int]:
    """Whether batch entries, and heads, have a bias of their own: 0 or 1 each."""
    if bias is None:
        return 0, 0
    shape = unbroadcast(bias).shape
    return int(shape[0] > 1), int(shape[1] > 1)


def _moved(bias: Tensor) -> Tensor:
    """A copy with the same strides, at an address that is a multiple of 16."""
    return torch.empty_strided(bias.shape, bias.stride(), dtype=bias.dtype, device=bias.device).copy_(bias)
