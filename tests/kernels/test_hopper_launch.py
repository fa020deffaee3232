"""What the Hopper kernel is launched with, worked through in plain PyTorch: it is attention, whatever the memory."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import RUN
from stof.kernels.hopper.forward_kernel import forward_kernel
from stof.kernels.hopper.split_kv_merge import MAX_AND_SUM_SIZE
from stof.kernels.hopper.tile_scheduler import WORK, work_list
from stof.kernels.implementation import Options, attend_once
from stof.kernels.packed_integers import compacted_position, is_compacted, run_column
from stof.layout import Layout, build_layout
from stof.layout.orders.named import named_order
from stof.runtime.launch import Launch, TensorMap, _descriptors
from stof.selection import IMPLEMENTATIONS
from stof.selection.gpu_choices import gpu_choices
from stof.testing import MEMORY_LAYOUTS, assert_attention, make_inputs
from tests.kernels.test_hopper_jobs import TILES, even_layout, keep_of, layout_of
from tests.kernels.test_hopper_pairs import walk
from tests.selection.fakes import Geometry, call_of

LONG = masks.longformer(20, 30) | masks.strided(8, 64, 8)


class Twin:
    """The kernel in plain PyTorch, one job after the other; stands in for `Launch.__call__`. Others run as they do."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self.plain = Launch.__call__

    def __call__(self, launch: Launch, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> None:
        if launch.kernel is not forward_kernel:
            self.plain(launch, *tensors, bases=bases)
            return
        self.run(launch, self.arguments(launch, *tensors, bases=bases))

    def arguments(self, launch: Launch, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> SimpleNamespace:
        """By name."""
        maps = launch.maps(bases)
        _descriptors(maps)  # Triton's own checks of strides, sizes and alignment
        given = dict(zip(launch.kernel.arg_names, (*maps, *tensors, *launch.tensors, *launch.rest), strict=True))
        config = given.pop("CONFIG")
        self.constants = {name.upper(): value for name, value in vars(config).items()}
        given |= self.constants | {"D": config.width}
        return SimpleNamespace(**given)

    def run(self, launch: Launch, a: SimpleNamespace) -> None:
        """All jobs, dealt out as the kernel's thread blocks do."""
        a.copied = {}
        written = torch.zeros(a.lse_ptr.shape, dtype=torch.int32)
        jobs = a.work_list_ptr[: launch.grid].tolist()
        queued, count = jobs[0][WORK.work_count] > launch.grid, jobs[0][WORK.work_count]
        assert queued == a.PERSISTENT
        while jobs:
            # Who is done first is not known: now one, now another takes the next.
            job = jobs.pop(7 * len(jobs) // 11)
            for group in range(a.GROUPS):
                _job(a, job, group, written)
            if queued:
                claimed = int(a.counters_ptr[0])
                a.counters_ptr[0] = 0 if claimed == count - 1 else claimed + 1
                if launch.grid + claimed < count:
                    jobs.append(a.work_list_ptr[launch.grid + claimed].tolist())
        assert bool((written == 1).all())
        assert not (a.SPLIT or queued) or not bool(a.counters_ptr.any())


def _job(a: SimpleNamespace, job: list[int], group: int, written: Tensor) -> None:
    """64 rows of a job, which comes with the columns of its first tile."""
    row_block, b, h, begin, partial_end, end, parts, slot, chunk, pattern, bitmap, nan_bits = job[: WORK.work_count]
    if a.PAIRED:
        bitmap, nan_bits, skipped = job[WORK.pair_bitmap + group], 0, job[WORK.pair_skipped + group]
        computed = walk(a.tile_bitmap_ptr, begin, end, skipped, group)
        partial_end -= skipped
    else:
        computed = [(tile, int(a.tile_bitmap_ptr[tile])) for tile in range(begin, end)]
    slabs = a.BLOCK_N // a.SLAB if a.SLAB else 1
    tiles = memory(a.tiles_ptr).view(-1, slabs)
    position = (row_block * a.GROUPS + group) * 64
    residue, row = divmod(position, a.rows_per_residue)
    q = box(a.q_desc, [b, h, row, residue * a.q_residue_stride])
    scores, values = [], []
    for number, (tile, its_bitmap) in enumerate(computed, begin):
        record = tiles[tile].tolist() if tile > begin else job[WORK.columns :][:slabs]
        k, v = (
            _tile(a, desc, slab, record, b, h // a.heads_per_group, h // a.heads_per_slab, stride)
            for desc, slab, stride in (
                (a.k_desc, a.k_slab_desc, a.k_residue_stride),
                (a.v_desc, a.v_slab_desc, a.v_residue_stride),
            )
        )
        s = q @ k.T * a.scale * (1 if a.HAS_SCORE_MOD else math.log(2))
        if a.HAS_SOFTCAP:
            s = a.softcap * torch.tanh(s / a.softcap)
        if a.HAS_BIAS:
            assert a.HAS_SCORE_MOD
            assert (a.SLAB, a.kv_step) == (0, 1)
            s = s + box(a.bias_desc, [b * a.bias_batch, h * a.bias_heads, position, record[0]])
        if number < partial_end:
            words = a.bitmaps_ptr[bitmap if tile == begin else its_bitmap]
            kept = keep_of(words, a.BLOCK_N)
            s = s.masked_fill(~(kept if a.PAIRED else kept[group * 64 : group * 64 + 64]), -torch.inf)
        else:
            assert a.HAS_FULL
        scores.append(s)
        values.append(v)
    s = torch.cat(scores, 1)
    m = s.amax(1)
    p = torch.exp(s - torch.where(m == -torch.inf, 0.0, m)[:, None])
    total, acc = p.sum(1), p @ torch.cat(values)
    if a.SPLIT and parts > 1:
        meet = _meet_at_once if a.GROUPS == 1 else _meet_in_pairs
        met = meet(a, acc, m, total, (slot * a.GROUPS + group, chunk, parts))
        if met is None:
            return
        acc, m, total = met
    rows = torch.arange(position, position + 64)
    rows = rows[rows < a.q_len]
    lse = torch.where(total > 0, m + torch.log(total), -torch.inf)
    if a.HAS_SINKS:
        total = total * (1 + torch.exp(float(memory(a.sinks_ptr)[h]) - lse))
    acc = acc * torch.where(lse == -torch.inf, 0.0, 1 / total)[:, None]
    at = rows if not a.PERMUTED else memory(a.row_order_ptr)[pattern * a.q_len + rows].long()
    if a.DYNAMIC:
        added = torch.tensor(nan_bits, dtype=torch.int32).view(torch.float32)
        lse, acc = lse + added, acc + added
    else:
        assert nan_bits == 0
    written.view(-1)[(b * a.heads + h) * a.q_len + at] += 1
    memory(a.lse_ptr)[(b * a.heads + h) * a.q_len + at] = lse[: len(rows)].float()
    width = a.out_desc.block_shape[3]
    assert width == (a.D if a.Q_STAGES > 1 else max(64, a.D // 2))
    for column in range(0, a.D, width):
        values = acc[:, column : column + width]
        box(a.out_desc, [b, h, row, residue * a.out_residue_stride + column], values)


Chunk = tuple[int, int, int]
"""Slot of the row block's first chunk, which chunk, of how many."""


def _meet_at_once(
    a: SimpleNamespace, acc: Tensor, m: Tensor, total: Tensor, place: Chunk
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What all chunks have, if this is the last of them."""
    slot, chunk, parts = place
    out, maxima = memory(a.chunk_out_ptr), memory(a.chunk_ml_ptr)
    # In what order a chunk's values lie is the kernel's own matter.
    out[(slot + chunk) * 64 * a.D :][: 64 * a.D].copy_(acc.flatten())
    maxima[(slot + chunk) * MAX_AND_SUM_SIZE :][:MAX_AND_SUM_SIZE].copy_(torch.cat([m, total]).repeat(4))
    tickets, warps = memory(a.counters_ptr)[1 + slot :][:2].split(1)
    ticket = int(tickets)
    tickets += 1
    if ticket < parts - 1:
        warps += 4
        return None
    assert int(warps) == 4 * (parts - 1)
    tickets.zero_()
    warps.zero_()
    m, total, acc = torch.full_like(m, -torch.inf), torch.zeros_like(total), torch.zeros_like(acc)
    for other in range(slot, slot + parts):
        m_c, total_c = maxima[other * MAX_AND_SUM_SIZE :][:128].double().view(2, 64)
        m, total, acc = _added(m, total, acc, m_c, total_c, out[other * 64 * a.D :][: 64 * a.D].double().view(64, a.D))
    return acc, m, total


def _meet_in_pairs(
    a: SimpleNamespace, acc: Tensor, m: Tensor, total: Tensor, place: Chunk
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What all chunks have, if this is the second of the last pair to meet."""
    slot, chunk, parts = place
    out, maxima = memory(a.chunk_out_ptr), memory(a.chunk_ml_ptr)
    span = 1
    while span < parts:
        left = chunk // (2 * span) * 2 * span
        right = left + span
        if right < parts:
            # The second of two to come adds what the first has left to its own.
            mine, other = (left, right) if chunk < right else (right, left)
            kept, its = (slot + one * a.GROUPS for one in (mine, other))
            out[kept * 64 * a.D :][: 64 * a.D].copy_(acc.flatten())
            maxima[kept * 128 :][:128].copy_(torch.cat([m, total]))
            count = memory(a.counters_ptr)[1 + slot + right * a.GROUPS :][:1]
            count += 1
            if int(count) == 1:
                return None
            assert int(count) == 2
            count.zero_()
            m_c, total_c = maxima[its * 128 :][:128].double().view(2, 64)
            acc_c = out[its * 64 * a.D :][: 64 * a.D].double().view(64, a.D)
            m, total, acc = _added(m, total, acc, m_c, total_c, acc_c)
        span *= 2
    return acc, m, total


def _added(
    m: Tensor, total: Tensor, acc: Tensor, m_c: Tensor, total_c: Tensor, acc_c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, sums and output of two parts of the keys as of one."""
    m_new = torch.maximum(m, m_c)
    m_use = torch.where(m_new == -torch.inf, 0.0, m_new)
    old, new = torch.exp(m - m_use), torch.exp(m_c - m_use)
    return m_new, total * old + total_c * new, acc * old[:, None] + acc_c * new[:, None]


def _tile(
    a: SimpleNamespace, desc: TensorMap, slab_desc: TensorMap | None, record: list[int], b: int, h: int, slab_h: int,
    stride: int,
) -> Tensor:  # fmt: skip
    """K or V of a tile; row blocks, warpgroups and heads that read the same share a copy."""
    key = (id(desc), b, h, slab_h, *record)
    if key not in a.copied:
        a.copied[key] = _copy(a, desc, slab_desc, record, b, h, slab_h, stride)
    return a.copied[key]


def _copy(
    a: SimpleNamespace, desc: TensorMap, slab_desc: TensorMap | None, record: list[int], b: int, h: int, slab_h: int,
    stride: int,
) -> Tensor:  # fmt: skip
    if a.SLAB == a.BLOCK_N:
        assert slab_desc is not None
        if is_compacted(record[0]):
            return box(slab_desc, [b, slab_h, compacted_position(record[0]), 0])
        return box(desc, [b, h, record[0], 0])
    if not a.SLAB:
        return box(desc, [b, h, record[0] // a.kv_step, record[0] % a.kv_step * stride])
    assert slab_desc is not None
    pieces = []
    for start in range(0, len(record), RUN // a.SLAB):
        columns = record[start : start + RUN // a.SLAB]
        copies = [(desc, run_column(columns[0]))] if columns[0] < 0 else [(slab_desc, column) for column in columns]
        for source, first in copies:
            pieces.append(torch.cat([box(source, [b, h, first, chunk]) for chunk in range(0, a.D, 64)], 1))
    return torch.cat(pieces)


def memory(tensor: Tensor) -> Tensor:
    """What a pointer to a tensor reaches, up to the end of its storage."""
    offset = tensor.storage_offset()
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size() - offset,), (1,), offset)


def box(source: TensorMap, at: list[int], values: Tensor | None = None) -> Tensor:
    """What TMA reads into a box in float64, zeros past the ends of the tensor; or writes, nothing past the ends."""
    base, shape, strides, sizes = source[:4]
    assert at[-1] * base.element_size() % 16 == 0, "an illegal instruction"
    places = torch.zeros(1, dtype=torch.int64)
    inside = torch.ones(1, dtype=torch.bool)
    for first, length, stride, size in zip(at, shape, strides, sizes, strict=True):
        place = first + torch.arange(size)
        places = places[..., None] + place * stride
        inside = inside[..., None] & (place >= 0) & (place < length)
    places, inside = places.view(sizes[-2:]), inside.view(sizes[-2:])
    if values is not None:
        memory(base)[places[inside]] = values[inside].to(base.dtype)
        return values
    out = torch.zeros(sizes[-2:], dtype=torch.float64)
    out[inside] = memory(base)[places[inside]].double()
    return out


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Twin:
    stands_in = Twin()
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors, bases=(): stands_in(launch, *tensors, bases=bases))
    return stands_in


def check_call(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, split_tiles: int = 0, paired: bool = False, **options: Any
) -> None:
    hopper = IMPLEMENTATIONS["hopper"]
    prepared = hopper.prepare(layout, KernelConfig(4, 2, split_tiles=split_tiles, paired=paired))
    given = {"scale": q.shape[-1] ** -0.5, "softcap": None, "bias": None, "sinks": None, **options}
    scalars = Options(given["scale"], given["softcap"] or 0.0, given["bias"], given["sinks"])
    out, lse = attend_once(hopper.bind, q, k, v, prepared, scalars)
    assert out.stride() == torch.empty_like(q).stride()
    assert_attention(out, lse, q, k, v, layout.to_dense(), **given)


def inputs(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    plain: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 200, "kv_len": 333, "head_dim": 64}
    return make_inputs(**plain | {"dtype": torch.float16} | sizes).qkv


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("memory_layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [
        (64, (128, 128)), (72, (128, 128)), (128, (64, 64)), (40, (192, 128)), (64, (192, 128)), (40, (64, 128)),
        (192, (128, 64)), (256, (128, 64)), (136, (64, 64)),
    ],
)  # fmt: skip
def test_memory(twin: Twin, memory_layout: str, head_dim: int, tile: tuple[int, int]) -> None:
    for slab in (None, 8):
        layout = build_layout(LONG, 200, 333, LayoutConfig(*tile, slab))
        check_call(layout, *inputs(head_dim=head_dim, memory=memory_layout))
    assert (twin.constants["SLAB"], twin.constants["GROUPS"]) == (8, tile[0] // 64)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [96, 128])
def test_pairs(twin: Twin, head_dim: int) -> None:
    for slab in (None, 16):
        layout = build_layout(LONG, 200, 333, LayoutConfig(64, 64, slab))
        check_call(layout, *inputs(head_dim=head_dim), paired=True)
        assert twin.constants["PAIRED"]
        assert (twin.constants["GROUPS"], twin.constants["Q_STAGES"]) == (2, 2)
    sinks = torch.randn(4)
    check_call(layout, *inputs(head_dim=head_dim, memory="packed"), paired=True, sinks=sinks)
    with pytest.raises(UnfitLayoutError, match="scores as they are"):
        check_call(layout, *inputs(head_dim=head_dim), paired=True, softcap=20.0)


def unaligned(x: Tensor) -> Tensor:
    """A slice of a fused projection that does not start at a multiple of 16 bytes."""
    batch, heads, length, width = x.shape
    buffer = x.new_full((batch * length * 3 * heads * width + 3,), torch.nan)
    packed = buffer[3:].view(batch, length, 3, heads, width)[:, :, 1]
    return packed.copy_(x.transpose(1, 2)).transpose(1, 2)


def wide_rows(x: Tensor) -> Tensor:
    """Rows 65 elements or so apart: no multiple of 16 bytes."""
    return torch.nn.functional.pad(x, (0, 1), value=torch.nan)[..., :-1]


@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("change", [unaligned, wide_rows])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_memory_that_must_be_copied(change: Any, which: tuple[int, ...]) -> None:
    given = list(inputs())
    for number in which:
        given[number] = change(given[number])
    check_call(build_layout(LONG, 200, 333, LayoutConfig(128, 128, 16)), given[0], given[1], given[2])


@pytest.mark.usefixtures("poisoned_memory", "twin")
def test_jobs_are_dealt_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for tensors that do not begin where TMA wants them to: every call copies these, and no more."""
    dealt = 0

    def counted(*given: Any) -> Any:
        nonlocal dealt
        dealt += 1
        return work_list(*given)

    monkeypatch.setattr("stof.kernels.hopper.binding.work_list", counted)
    layout = build_layout(LONG, 200, 333, LayoutConfig(64, 64))
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, KernelConfig(4, 2))
    q, k, v = inputs()
    call = IMPLEMENTATIONS["hopper"].bind(unaligned(q), k, v, prepared, Options(0.125))
    for seed in range(3):
        q, k, v = inputs(seed=seed)
        out, lse = call(unaligned(q), k, v, None, None)
        assert_attention(out, lse, q, k, v, layout.to_dense())
    assert dealt == 2


@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("stride", [0, 8, 65])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 4)])
def test_one_row_of_any_stride(batch: int, heads: int, stride: int) -> None:
    """The strides of dimensions of size 1 mean nothing."""
    q, k, v = inputs(batch=batch, heads=heads, kv_heads=heads, q_len=1, kv_len=1)
    q, k, v = (x.as_strided(x.shape, (heads * 64, 64, stride, 1)) for x in (q, k, v))
    check_call(build_layout(masks.full(), 1, 1, LayoutConfig(128, 128)), q, k, v)


@pytest.mark.usefixtures("poisoned_memory", "twin")
def test_aligned_and_unaligned_tensors_by_turns() -> None:
    """A bound call serves all tensors of the same strides."""
    hopper, layout = IMPLEMENTATIONS["hopper"], build_layout(LONG, 200, 333, LayoutConfig(128, 128))
    prepared = hopper.prepare(layout, None)
    aligned = inputs(memory="packed")
    call = hopper.bind(*aligned, prepared, Options(0.125))
    for q, k, v in (aligned, tuple(unaligned(x) for x in inputs(seed=1)), aligned):
        out, lse = call(q, k, v, None, None)
        assert_attention(out, lse, q, k, v, layout.to_dense())


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.0},
        {"scale": -0.3},
        {"softcap": 5.0},
        {"sinks": torch.randn(4)},
        {"softcap": 5.0, "sinks": torch.randn(4).half(), "scale": 0.5},
    ],
    ids=("plain", "no scale", "negative scale", "softcap", "sinks", "all"),
)
@pytest.mark.parametrize("tile", [(128, 128), (192, 128)])
def test_options(twin: Twin, tile: tuple[int, int], options: dict[str, Any]) -> None:
    keep = LONG.to_dense(200, 333).clone()
    keep[..., 100:110, :] = False
    check_call(layout_of(keep, 8, tile), *inputs(), split_tiles=1, **options)
    assert twin.constants["SPLIT"]
    assert twin.constants["HAS_SCORE_MOD"] == ("scale" in options or "softcap" in options)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize("split_tiles", [0, 1])
@pytest.mark.parametrize("slab", [None, 16])
@pytest.mark.parametrize("tile", TILES)
def test_patterns(tile: tuple[int, int], slab: int | None, split_tiles: int) -> None:
    """A mask of its own for each batch entry and head, one of them empty, rows and keys of odd numbers."""
    generator, q_len = torch.Generator().manual_seed(0), tile[0] + 13
    keep = torch.rand(2, 4, q_len, 333, generator=generator) < torch.tensor([0.0, 0.003, 0.3, 1.0]).view(1, 4, 1, 1)
    keep[:, 1:, 60] = True  # each key is seen
    for kept in (keep, keep[:, :1], keep[:1, 1:2]):
        check_call(layout_of(kept, slab, tile), *inputs(q_len=q_len), split_tiles=split_tiles)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("memory_layout", ["bhsd", "bshd", "packed", "transposed"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_evenly_spaced_calls(twin: Twin, head_dim: int, memory_layout: str) -> None:
    """Boxes of evenly spaced rows are as wide as the kernel's tiles; heads that are narrower are refused."""
    layout = even_layout(640, 5, (128, 64) if head_dim > 128 else (128, 128))
    geometry = Geometry(masks.full(), 640, 640, row_orders=("remainder 5",))
    offered = gpu_choices(call_of(head_dim=head_dim, q_len=640, kv_len=640), geometry, "hopper")
    given = inputs(q_len=640, kv_len=640, batch=1, heads=2, kv_heads=1, head_dim=head_dim, memory=memory_layout)
    if any(choice.row_order for choice in offered):
        with contextlib.suppress(UnfitLayoutError) if head_dim in (80, 192) else contextlib.nullcontext():
            check_call(layout, *given, split_tiles=1)
            assert twin.constants["PERMUTED"]
    else:
        assert head_dim in (80, 192)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("split_tiles", [0, 1])
@pytest.mark.parametrize("memory_layout", ["bhsd", "packed"])
def test_evenly_spaced_rows_of_three_warpgroups(twin: Twin, memory_layout: str, split_tiles: int) -> None:
    """Row blocks of one remainder, and of two, the last one not full, for which the mask has to be the same."""
    same = build_layout(masks.full(), 640, 640, LayoutConfig(192, 128, 1), row_order=named_order("remainder 2", 640))
    for layout in (even_layout(384, 2, (192, 128)), same):
        sizes = {"q_len": layout.q_len, "kv_len": layout.kv_len, "batch": 1, "heads": 2, "kv_heads": 1}
        check_call(layout, *inputs(**sizes, memory=memory_layout), split_tiles=split_tiles)
        assert twin.constants["PERMUTED"]
        assert twin.constants["GROUPS"] == 3
    with pytest.raises(UnfitLayoutError, match="rows of 40 elements do not fill the 64"):
        check_call(layout, *inputs(**sizes, head_dim=40))


@pytest.mark.usefixtures("poisoned_memory", "twin")
@pytest.mark.parametrize(("slab", "lengths"), [(None, [320, 0, 256]), (8, [320, 0, 64])])
def test_keys_that_no_query_sees(slab: int | None, lengths: list[int]) -> None:
    """They may hold anything, as the unused end of a cache does: no NaN among them comes through."""
    layout = build_layout(masks.padding(lengths), 320, 320, LayoutConfig(128, 128, slab), batch=3)
    q, k, v = inputs(batch=3, q_len=320, kv_len=320)
    unseen = ~layout.to_dense().any(2)[:, :, :, None]
    assert bool(unseen[1].all())
    prepared = IMPLEMENTATIONS["hopper"].prepare(layout, None)
    stale_k, stale_v = (x.masked_fill(unseen, torch.nan) for x in (k, v))
    out, lse = attend_once(IMPLEMENTATIONS["hopper"].bind, q, stale_k, stale_v, prepared, Options(0.125))
    assert_attention(out, lse, q, k, v, layout.to_dense())
