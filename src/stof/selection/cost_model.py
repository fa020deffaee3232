"""Estimated time of a choice on a GPU: a few physical terms, with constants measured on the device.

A thread block takes for a work item a fixed time (launch, first loads, last stores), and a time for each partial and
each full tile. Thread blocks run on `multiprocessors * occupancy` slots, longest first. Where slots stay empty, each
runs faster. The constants are those of a `DeviceModel`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from stof.kernels.common import parts_of
from stof.kernels.hopper.tile_scheduler import LATE, may_split_tail
from stof.kernels.quantization import FP8
from stof.kernels.triton.row_lists import default_config
from stof.layout.survey import Survey, TileCounts
from stof.selection.capabilities import DECODE_ROWS, CallSpec
from stof.selection.device_model import DeviceModel, KernelTimes
from stof.selection.implementations import IMPLEMENTATIONS, gpu_of
from stof.selection.kernel_choice import KernelChoice
from stof.selection.resources import head_dim_class, loads_bias_scalar
from stof.selection.slot_assignment import last_slot

# Operations of a thread block in a microsecond while another one shares its multiprocessor: in float16 and bfloat16,
# and in float32 (three TF32 matmuls).
_FLOPS_PER_US = (2e6, 0.3e6)
_GUESS_PENALTY = 1.5
# Factors of a bias on the time of a tile, for configurations without measurements with one. The Triton kernel takes 1.3
# to 1.4 times as long on an H200 where it loads 8 values of the bias at once (`h200-biases.json` against
# `h200-selector.json`), and 4 to 9 times where it loads them one by one; the Hopper kernel takes up to 1.7 times.
_BIAS_COST, _NARROW_BIAS_COST, _HOPPER_BIAS_COST = 1.45, 6.0, 1.6
# A further factor for the Triton kernel where rows of the bias are not contiguous: T5 at 8 x 512 tokens takes 191 us a
# layer with the heads last (`python -m benchmarks kernels --cases t5,8,512,full`) and 66 with contiguous rows. For rows
# of odd strides it is a guess.
_SCATTERED_BIAS_COST = 3.0
# In the row-wise kernel the cost of a key grows with this power of the head's width where thread blocks fill all slots
# (random masks, an H200).
_ROW_KEY_WIDTH = 0.8
# The row-wise kernel's longest row, where thread blocks are few: the latency of one step's loads, and each column of a
# step (an H200; without a launch, one key a row takes 1 us, 17 keys 5, one query with 4096 keys and 32 heads 85).
_ROW_STEP_US, _ROW_COLUMN_US = 0.95, 0.008
# Factor on the time in which PyTorch copies a bias to another memory order, for its scattered reads: a guess.
_SCATTERED = 4.0
# The launch that compacts keys, which the Hopper kernel waits for (an H200, see `benchmarks/notes/attention.md`).
_COMPACTION_US = 1.5


def estimate(choice: KernelChoice, call: CallSpec, survey: Survey, model: DeviceModel) -> float | None:
    """Microseconds of one call with a cold L2 cache, or None for implementations the model does not know."""
    gpu = IMPLEMENTATIONS[choice.implementation].gpu
    if gpu is None:
        return None
    if gpu.by_rows:
        kept = float(survey.kept.double().mean(0).sum()) * call.batch * call.heads
        row_us, key_us = model.row_wise
        rows = call.batch * call.heads * call.q_len
        features = row_wise_features(rows, kept, (call.head_dim + call.value_dim) / 2)
        work_us = features[0] * row_us + features[1] * key_us
        return model.launch + overlapped(work_us, longest_row_us(call, math.ceil(float(survey.kept.max()))))
    if choice.kernel is None or choice.layout is None:
        return None
    if call.q_len <= DECODE_ROWS and call.dtype != FP8 and not gpu.few_rows:
        return None  # `decode` is made for this
    times = _times(choice, call, model)
    if times is not None:
        return estimate_tiles(choice, call, survey, model, _with_scattered_bias(times, choice, call))
    # Guessed constants are penalised, so that they seldom outrank measured ones.
    times = _costlier(guessed_times(choice, call), _bias_cost(choice, call) if call.has_bias else 1.0)
    return _GUESS_PENALTY * estimate_tiles(choice, call, survey, model, _with_scattered_bias(times, choice, call))


def longest_row_us(call: CallSpec, keys: int) -> float:
    """Time of the row-wise kernel for the row with most keys, which it reads in sequential steps."""
    columns = default_config(max(call.head_dim, call.value_dim), keys, call.dtype.itemsize).cols
    steps = max(1, math.ceil(keys / columns))
    return (_ROW_STEP_US + _ROW_COLUMN_US * columns) * steps


def row_wise_features(rows: float, kept: float, head_dim: float) -> tuple[float, float]:
    """What the constants of `DeviceModel.row_wise` are multiplied with: rows and kept keys, weighted by the width."""
    width = head_dim / 64
    return rows * max(1.0, width), kept * width**_ROW_KEY_WIDTH


def kernel_key(choice: KernelChoice, call: CallSpec) -> str:
    """Which constants a block-wise or decode choice goes by."""
    layout, kernel = choice.layout, choice.kernel
    assert layout is not None
    assert kernel is not None
    gpu = gpu_of(choice)
    hopper = gpu.persistent
    # Tiles of compacted columns are contiguous to the kernel; in pairs, which copy half as much, slabs cost nothing.
    slab = None if hopper and (layout.compact_columns or kernel.paired) else layout.slab
    # Decoding is bound by memory: its time does not depend on the number of rows.
    rows = "" if gpu.few_rows else str(layout.block_m)
    parts = [
        choice.implementation,
        f"{'float32-' if call.dtype == torch.float32 else ''}{head_dim_class(call.head_dim, call.value_dim)}",
        f"{rows}x{layout.block_n}",
        "contiguous" if slab is None else f"slabs of {slab}" if hopper else "gathered",
        f"{kernel.num_warps}w{kernel.num_stages}s{kernel.max_registers}r",
        *(["paired"] if kernel.paired else []),
        # The Triton kernels read permuted rows one by one. TMA reads evenly spaced rows at full speed.
        *(["permuted"] if choice.row_order is not None and not hopper else []),
        *(["bias"] if call.has_bias else []),
    ]
    return "/".join(parts)


def _times(choice: KernelChoice, call: CallSpec, model: DeviceModel) -> KernelTimes | None:
    """Constants of a choice, None where neither it nor a similar one was measured.

    Where no measurement has the bias or the row order of a choice, one without them stands in.
    """
    gpu = gpu_of(choice)
    if gpu.measured_as is not None:
        like, factor = gpu.measured_as(choice)
        times = model.kernels.get(kernel_key(like, call))
        return times and _costlier(times, factor)
    times = model.kernels.get(kernel_key(choice, call))
    if times is None and choice.row_order is not None:
        in_order = replace(choice, row_order=None)
        if not call.has_bias:
            return _times(in_order, call, model)
        times = model.kernels.get(kernel_key(in_order, call))
    if times is None and call.has_bias:
        # The Hopper kernel has fewer stages where tiles of a bias take their place.
        plain = (_with_stages(choice, more) for more in range(3 if gpu.persistent else 1))
        estimates = (_times(like, replace(call, has_bias=False), model) for like in plain)
        times = next(filter(None, estimates), None)
        times = times and _costlier(times, _bias_cost(choice, call))
    return times


def _bias_cost(choice: KernelChoice, call: CallSpec) -> float:
    """Factor of a bias on a tile's time, for kernels not measured with one; 1 for decoding, which memory bounds."""
    gpu = gpu_of(choice)
    if gpu.few_rows:
        return 1.0
    if gpu.persistent:
        return _HOPPER_BIAS_COST
    return _NARROW_BIAS_COST if loads_bias_scalar(choice, call) else _BIAS_COST


def _with_scattered_bias(times: KernelTimes, choice: KernelChoice, call: CallSpec) -> KernelTimes:
    gpu = gpu_of(choice)
    scattered = call.bias_to_copy and not (gpu.persistent or gpu.few_rows)
    return _costlier(times, _SCATTERED_BIAS_COST) if scattered else times


def _costlier(times: KernelTimes, factor: float) -> KernelTimes:
    return replace(times, partial=times.partial * factor, full=times.full * factor)


def _with_stages(choice: KernelChoice, more: int) -> KernelChoice:
    assert choice.kernel is not None
    return replace(choice, kernel=replace(choice.kernel, num_stages=choice.kernel.num_stages + more))


def guessed_times(choice: KernelChoice, call: CallSpec) -> KernelTimes:
    """Constants for a kernel that was not measured: operations of a tile over the rate of similar ones on an H200."""
    assert choice.layout is not None
    flops = 2.0 * max(choice.layout.block_m, 64) * choice.layout.block_n * (call.head_dim + call.value_dim)
    tile = flops / _FLOPS_PER_US[call.dtype == torch.float32]
    return KernelTimes(item=6.0, partial=1.1 * tile, full=tile, merge=2.0, collect=0.2, solo=0.6)


def estimate_tiles(
    choice: KernelChoice, call: CallSpec, survey: Survey, model: DeviceModel, times: KernelTimes
) -> float:
    """`estimate` of a choice that works on tiles, with given constants."""
    load, filled, bytes_us = critical_load(choice, call, survey, model, times)
    busy = times.solo + (1 - times.solo) * filled
    work_us = overlapped(busy * float(load @ times.weights()), bytes_us)
    before_us = (
        compaction_us(choice, call, survey, model) + across_us(choice, call, model) + laying_out_us(choice, call, model)
    )
    return model.launch + times.start + work_us + before_us


def compaction_us(choice: KernelChoice, call: CallSpec, survey: Survey, model: DeviceModel) -> float:
    """Time until keys and values are copied side by side: another launch, and each of them read and written once."""
    if choice.layout is None or not gpu_of(choice).persistent:
        return 0.0
    counts = survey.counts[choice.layout]
    keys = counts.compacted_keys
    if choice.kernel is not None and choice.kernel.zero_unseen:
        # At most those of all partial tiles: a query sees every key of a full one.
        keys = min(call.kv_len, choice.layout.block_n * int(counts.partial.sum(1).max()))
    if not keys:
        return 0.0
    heads = call.heads if survey.mask_heads > 1 else call.kv_heads
    elements = call.batch * heads * keys * (call.head_dim + call.value_dim)
    return _COMPACTION_US + 2 * elements * call.dtype.itemsize / model.bytes_per_us


def across_us(choice: KernelChoice, call: CallSpec, model: DeviceModel) -> float:
    """Time to transpose 8-bit V: another launch, and each value read and written once."""
    if not gpu_of(choice).transposes_v:
        return 0.0
    return _COMPACTION_US + 2 * call.batch * call.kv_heads * call.kv_len * call.value_dim / model.bytes_per_us


def laying_out_us(choice: KernelChoice, call: CallSpec, model: DeviceModel) -> float:
    """Time until a bias lies in rows that TMA can copy tiles of: another launch, and each value read and written."""
    if not (call.bias_to_copy and gpu_of(choice).persistent):
        return 0.0
    return model.launch + _SCATTERED * 2 * call.bias_to_copy / model.bytes_per_us


def widening_us(call: CallSpec, model: DeviceModel) -> float:
    """Time until 8-bit tensors are widened: a launch for each, and each of them read and written in 16 bits."""
    elements = call.heads * call.q_len * call.head_dim + call.kv_heads * call.kv_len * (call.head_dim + call.value_dim)
    return 3 * model.launch + 3 * call.batch * elements / model.bytes_per_us


def overlapped(compute_us: float, bytes_us: float) -> float:
    """A smooth maximum of two times that overlap: above both where they are nearly equal."""
    return float((compute_us**8 + bytes_us**8) ** 0.125)


def critical_load(
    choice: KernelChoice, call: CallSpec, survey: Survey, model: DeviceModel, times: KernelTimes
) -> tuple[Tensor, float, float]:
    """Work of the slot that ends last, the share of slots in use, and the time of the memory traffic.

    Returns:
        `(load, filled, bytes_us)`: float64 `[5]` items, partial tiles, full tiles, chunks written, chunks read back;
        a share up to 1; microseconds.
    """
    assert choice.kernel is not None
    assert choice.layout is not None
    layout, kernel, gpu = choice.layout, choice.kernel, gpu_of(choice)
    counts = _per_job(survey.counts[layout], kernel.paired)
    tiles = counts.partial + counts.full
    masks = tiles.shape[0]
    parts = parts_of(tiles, kernel.split_tiles).flatten().double()
    partial, full = counts.partial.flatten().double(), counts.full.flatten().double()
    kinds = (torch.ones_like(parts), partial / parts, full / parts, (parts > 1).double(), torch.zeros_like(parts))
    loads = torch.stack(kinds, 1)
    groups = call.batch * (call.kv_heads if kernel.pack else call.heads)
    copies = parts * (groups / masks)
    slots = model.multiprocessors * gpu.occupancy(choice, call, model.shared_bytes)
    each = loads @ times.weights()
    average = (loads * copies[:, None]).sum(0) / slots
    # Thread blocks, rounded up to equally many on every multiprocessor: the one with most of them ends last.
    programs = math.ceil(float(copies.sum()) / model.multiprocessors) * model.multiprocessors
    filled = min(1.0, programs / slots)
    # Heads run in groups of `side`. Items are sorted longest first within a group only, so the longest item of the last
    # group starts after the others, unless there are slots for all thread blocks.
    rounds = math.ceil(groups / (kernel.side or groups))
    late = max(0.0, 1 - slots / float(copies.sum())) * (rounds - 1) / rounds
    if gpu.persistent and rounds > 1:
        load = _without_late_starts(loads, times.weights(), copies, average, late, rounds, slots)
    else:
        load = average * late + last_slot(loads, each, copies / rounds, slots)
    if not gpu.persistent:
        load = max((load, average), key=lambda one: float(one @ times.weights())).clone()
        # In the last wave of thread blocks many slots are idle.
        busy = float(average @ times.weights()) / float(load @ times.weights())
        filled = min(1.0, busy * programs / float(copies.sum()))
    most = float(parts.max())
    longest = float(torch.where(parts == 1, tiles.flatten(), 0).max())
    if gpu.persistent and not kernel.paired and may_split_tail(float(copies.sum()), slots, longest):
        # The last work tiles are split, and each chunk is written and read back. The first ones are not.
        even = average + torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64, device="cpu")
        ends = (load, max((even, loads[int(each.argmax())]), key=lambda one: float(one @ times.weights())))
        load = min(ends, key=lambda one: float(one @ times.weights())).clone()
    # With several warpgroups, the Hopper kernel merges chunks in a binary tree. Elsewhere the last reads all others.
    in_pairs = gpu.persistent and layout.block_m > 64
    load[4] += math.ceil(math.log2(most)) if in_pairs else most * (most > 1)
    touched = min(1.0, float(tiles.sum()) * layout.block_n / call.kv_len / masks)
    return load, filled, _bytes(call, touched) / model.bytes_per_us


def _without_late_starts(
    loads: Tensor, weights: Tensor, copies: Tensor, average: Tensor, late: float, rounds: int, slots: int
) -> Tensor:
    """The load of the thread block that ends last, with work tiles in the order of `tile_scheduler.work_list`."""
    each = loads @ weights
    share = float((each * copies).sum()) / slots
    early = (LATE * each > share / rounds) & (each > share / 8)
    load = average * late
    if bool(early.any()):
        load = load + (loads * copies[:, None])[early].sum(0) / slots * (1 - late)
    if not bool(early.all()):
        load = load + last_slot(loads[~early], each[~early], copies[~early] / rounds, slots)
    # No call ends before its longest work tile, nor before all slots have had their share.
    return max((load, loads[int(each.argmax())], average), key=lambda one: float(one @ weights)).clone()


def _per_job(counts: TileCounts, paired: bool) -> TileCounts:
    """Tiles of each row block; of paired row blocks, which run side by side, their average."""
    if not paired:
        return counts

    def shared(tiles: Tensor) -> Tensor:
        tiles = torch.nn.functional.pad(tiles, (0, tiles.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
        return torch.div(tiles + 1, 2, rounding_mode="floor")

    return TileCounts(shared(counts.partial), shared(counts.full), counts.compacted_keys)


def _bytes(call: CallSpec, touched: float) -> float:
    """Bytes read and written at least, with this share of the keys."""
    width = (call.head_dim + call.value_dim) * call.dtype.itemsize
    return width * call.batch * (call.heads * call.q_len + touched * call.kv_heads * call.kv_len)
