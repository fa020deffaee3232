"""Masks made at run time: what the device writes is the mask, bit for bit, or NaN and a flag."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.dynamic.block_topk.buffers import block_buffers
from stof.dynamic.buffers import OVERFLOW, WorkBuffers
from stof.dynamic.dense.buffers import dense_buffers
from stof.dynamic.mask_buffers import core_of, fill_buffers
from stof.dynamic.sizes import DynamicSizes
from stof.dynamic.vertical_slash.buffers import vertical_slash_buffers
from stof.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    MaskError,
    PlanMismatchError,
    ShapeError,
    UnsupportedError,
)
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import Options, attend_once, tensors_of
from stof.kernels.torch.reference import reference_attention
from stof.kernels.triton.block_wise import bind
from stof.kernels.triton.work_list import PreparedWork
from stof.layout import bitmaps as bits
from stof.masks import Mask
from stof.masks.dynamic import OUT_OF_RANGE, BlockTopK, VerticalSlash
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.kernels.test_work import DEVICE, counted
from tests.selection.fakes import one_stream
from tests.strategies import dense_masks

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

BLOCK = 16


def ascending(draw: st.DrawFn, leading: tuple[int, ...], most: int, limit: int) -> Tensor:
    """Lists of distinct indices below `limit`, ascending, filled up with -1."""
    size = draw(st.integers(1, most))
    count = 1
    for n in leading:
        count *= n
    lists = []
    for _ in range(count):
        chosen = sorted(draw(st.sets(st.integers(0, limit - 1), max_size=size)))
        if draw(st.booleans()):  # neighbours, which make full tiles
            first = draw(st.integers(0, limit - 1))
            chosen = list(range(first, min(limit, first + size)))
        lists.append(chosen + [-1] * (size - len(chosen)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(lists, dtype=dtype).view(*leading, size).to(DEVICE)


def buffers_of(mask: Mask, q_len: int, kv_len: int, density: float | None = None, block: int = BLOCK) -> WorkBuffers:
    """As `stof.dynamic.mask_buffers.make_buffers`, with small tiles."""
    core, offset = core_of(mask)
    problem = DynamicSizes(q_len, kv_len, block, block, mask.batch, mask.heads)
    if isinstance(core, VerticalSlash):
        vertical, slash = core.tensors()
        buffers = vertical_slash_buffers(problem, vertical.shape[-1], slash.shape[-1], offset, DEVICE)
        buffers.use_work(captured=False)
        return buffers
    if isinstance(core, BlockTopK):
        chosen = block_buffers(problem, core.k, core.block_size, core.causal, DEVICE)
        chosen.use_work(captured=False)
        return chosen
    return dense_buffers(problem, density, DEVICE)


def assert_exact(mask: Mask, q_len: int, kv_len: int, buffers: WorkBuffers) -> None:
    fill_buffers(buffers, mask)
    assert not bool(buffers.flags.any())
    dense = mask.to_dense(q_len, kv_len, device=DEVICE)
    assert torch.equal(counted(buffers.work), dense.int())


@given(data=st.data())
@examples(30)
def test_vertical_slash(data: st.DataObject) -> None:
    q_len = data.draw(st.sampled_from([1, 15, 16, 40, 64, 90]))
    offset = data.draw(st.sampled_from([0, 0, 5, 32]))
    kv_len = data.draw(st.sampled_from([q_len + offset, q_len + offset, max(1, q_len - 7), q_len + 21]))
    leading = data.draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    mask = masks.vertical_slash(
        ascending(data.draw, data.draw(st.sampled_from([leading, ()])), 20, kv_len),
        ascending(data.draw, leading, 40, q_len + offset),
    ).with_query_offset(offset)
    buffers = buffers_of(mask, q_len, kv_len)
    assert_exact(mask, q_len, kv_len, buffers)


@pytest.mark.parametrize(("q_len", "offset"), [(200, 0), (192, 0), (70, 130)])
def test_vertical_slash_in_tiles_of_64(q_len: int, offset: int) -> None:
    """The tiles that GPUs get: rows of both words of a window, whole and cut tiles, columns for full tiles."""
    kv_len = q_len + offset
    generator = torch.Generator().manual_seed(1)
    scattered = torch.randperm(kv_len, generator=generator)
    slash = torch.zeros(3, 150, dtype=torch.int32)
    slash[0] = torch.arange(150)
    slash[1] = scattered[:150].sort().values
    slash[2] = torch.where(torch.arange(150) < 3, torch.arange(150), -1)
    vertical = scattered[:150].sort().values.int()
    mask = masks.vertical_slash(vertical.to(DEVICE), slash.to(DEVICE)).with_query_offset(offset)
    buffers = buffers_of(mask, q_len, kv_len, block=64)
    assert_exact(mask, q_len, kv_len, buffers)
    full = buffers.work.items[..., 4] - buffers.work.items[..., 3]
    # The band fills full tiles, and so do columns far from every distance.
    assert bool((full[0] > 0).any())
    assert bool((full[2] > 0).any())


@given(data=st.data())
@examples(25)
def test_block_topk(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([16, 32]))
    q_len, kv_len = (data.draw(st.sampled_from([1, 16, 33, 64, 90])) for _ in range(2))
    rows, columns = -(-q_len // block_size), -(-kv_len // block_size)
    leading = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randn(*leading, rows, columns, generator=generator)
    if data.draw(st.booleans()):  # ties, zeros of both signs, blocks that are never taken
        scores = (scores * 1.5).round()
        scores = scores.masked_fill(scores.abs() > 2, -torch.inf)
    scores = scores.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]))).to(DEVICE)
    k = data.draw(st.integers(1, columns))
    mask = masks.block_topk(scores, k, block_size=block_size, causal=data.draw(st.booleans()))
    assert_exact(mask, q_len, kv_len, buffers_of(mask, q_len, kv_len))


@given(data=st.data(), packed=st.booleans())
@examples(25)
def test_dense(data: st.DataObject, packed: bool) -> None:
    q_len, kv_len = (data.draw(st.sampled_from([1, 15, 33, 64, 150])) for _ in range(2))
    batch, heads = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 2)]))
    keep = data.draw(dense_masks(q_len if packed else data.draw(st.sampled_from([q_len, 1])), kv_len, batch, heads))
    mask = masks.from_bits(bits.pack(keep).to(DEVICE), kv_len) if packed else masks.from_dense(keep.to(DEVICE))
    buffers = buffers_of(mask, q_len, kv_len)
    assert_exact(mask, q_len, kv_len, buffers)


def example(kind: str, seed: int = 0, heads: int = 2) -> Mask:
    """A mask of each kind for 90 queries and keys; other seeds give others of the same shapes."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(count: int, limit: int) -> Tensor:
        rows = [torch.randperm(limit, generator=generator)[:count].sort().values for _ in range(heads)]
        return torch.stack(rows).to(DEVICE)

    match kind:
        case "vertical_slash":
            return masks.vertical_slash(chosen(9, 90), chosen(5, 90))
        case "offset":
            return masks.vertical_slash(chosen(9, 90), chosen(5, 100)).with_query_offset(10)
        case "band":  # shared tiles of both kinds
            band = torch.arange(40, device=DEVICE).expand(heads, -1)
            return masks.vertical_slash(chosen(9, 90), torch.cat([band, 40 + chosen(3, 50)], 1))
        case "block_topk":
            scores = torch.randn(heads, 6, 6, generator=generator)
            return masks.block_topk(scores.to(DEVICE), 2, block_size=16, causal=True)
    keep = (torch.rand(heads, 90, 90, generator=generator) < 0.1).to(DEVICE)
    return masks.from_bits(bits.pack(keep), 90) if kind == "bits" else masks.from_dense(keep)


KINDS = ("vertical_slash", "band", "offset", "block_topk", "dense", "bits")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_room_serves_every_mask(kind: str) -> None:
    """Nothing of an earlier mask is left over."""
    buffers = buffers_of(example(kind), 90, 90)
    pointers = [t.data_ptr() for t in tensors_of(buffers.work)]
    for seed in range(3):
        assert_exact(example(kind, seed), 90, 90, buffers)
    assert [t.data_ptr() for t in tensors_of(buffers.work)] == pointers


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str) -> None:
    mask = example(kind)
    buffers = buffers_of(mask, 90, 90)
    fill_buffers(buffers, mask)
    q, k, v = (x.to(DEVICE) for x in make_inputs(heads=2, q_len=90, kv_len=90, head_dim=16).qkv)
    keep = mask.to_dense(90, device=DEVICE)
    # Keys that nobody sees may hold anything.
    unseen = ~keep.any(2)
    k, v = (x.masked_fill(unseen[..., None], torch.nan) for x in (k, v))
    out, lse = run(buffers, q, k, v)
    assert_attention(out, lse, q, k.nan_to_num(), v.nan_to_num(), keep)


def run(buffers: WorkBuffers, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    return attend_once(bind, q, k, v, PreparedWork(buffers.work, KernelConfig()), Options(scale, bias=bias))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "length"), [*((kind, 90) for kind in KINDS), ("block_topk", 96)])
def test_biases(kind: str, length: int) -> None:
    """Rows among NaN, where tiles of columns that follow each other are read in vectors."""
    mask = example(kind)
    buffers = buffers_of(mask, length, length)
    fill_buffers(buffers, mask)
    assert buffers.work.bias_vectors == (kind == "block_topk")
    q, k, v = (x.to(DEVICE) for x in make_inputs(heads=2, q_len=length, kv_len=length, head_dim=16).qkv)
    bias = torch.full((1, 2, length, 104), torch.nan, device=DEVICE)[..., :length].copy_(torch.randn(2, length, length))
    out, lse = run(buffers, q, k, v, bias)
    assert_attention(out, lse, q, k, v, mask.to_dense(length, device=DEVICE), bias=bias)


@pytest.mark.parametrize("kind", ["bits", "dense"])
def test_rows_without_room_are_nan_and_flagged(kind: str) -> None:
    mask = example(kind)
    buffers = buffers_of(mask, 90, 90, density=0.3)
    fill_buffers(buffers, mask)
    assert bool((buffers.flags & OVERFLOW).any())
    q, k, v = (x.to(DEVICE) for x in make_inputs(heads=2, q_len=90, kv_len=90, head_dim=16).qkv)
    out, lse = run(buffers, q, k, v)
    lost = out.isnan().all(-1)
    assert torch.equal(lost, lse.isnan())
    assert bool(lost.any())
    assert torch.equal(lost, out.isnan().any(-1))
    # Whole row blocks are lost; the others are right.
    enough = buffers_of(mask, 90, 90)
    fill_buffers(enough, mask)
    expected, _ = run(enough, q, k, v)
    assert torch.equal(out[~lost], expected[~lost])
    assert not bool(lost.all())


def bad_masks() -> dict[str, tuple[Mask, str]]:
    good = torch.tensor([[1, 5, 9], [0, 3, -1]])

    def one(*row: int) -> Tensor:
        return torch.tensor([[1, 5, 9], list(row)])

    scores = torch.zeros(2, 6, 6)
    scores[1, 2, 3] = torch.nan
    return {
        "column past the end": (masks.vertical_slash(one(0, 3, 90), good), "out of range"),
        "below -1": (masks.vertical_slash(one(0, 3, -2), good), "out of range"),
        "distance past the end": (masks.vertical_slash(good, one(0, 3, 90)), "out of range"),
        "unsorted": (masks.vertical_slash(one(0, 7, 3), good), "unsorted or duplicate"),
        "duplicate": (masks.vertical_slash(good, one(0, 3, 3)), "unsorted or duplicate"),
        "hole": (masks.vertical_slash(one(0, -1, 3), good), "follow a -1"),
        "nan": (masks.block_topk(scores, 2, block_size=16), "NaN"),
    }


@IN_INTERPRETER
@pytest.mark.parametrize("name", bad_masks())
def test_bad_numbers_raise_or_flag(name: str) -> None:
    mask, message = bad_masks()[name]
    with pytest.raises(MaskError, match=f"{message}.*head 1"):
        stof.plan(mask, 90, heads=2)
    buffers = buffers_of(mask, 90, 90)
    fill_buffers(buffers, mask)
    assert buffers.flags.tolist()[0] == 0
    assert buffers.flags.tolist()[1] != 0
    q, k, v = (x.to(DEVICE) for x in make_inputs(heads=2, q_len=90, kv_len=90, head_dim=16).qkv)
    out, lse = run(buffers, q, k, v)
    assert bool(out[:, 1].isnan().all())
    assert bool(lse[:, 1].isnan().all())
    keep = first_head(mask).to_dense(90)
    assert_attention(out[:, :1], lse[:, :1], q[:, :1], k[:, :1], v[:, :1], keep)


def first_head(mask: Mask) -> Mask:
    if isinstance(mask, VerticalSlash):
        return masks.vertical_slash(mask.vertical[:1], mask.slash[:1])
    assert isinstance(mask, BlockTopK)
    return masks.block_topk(mask.scores[:1], mask.k, block_size=mask.block_size)


@pytest.mark.parametrize("kind", KINDS)
def test_plans(kind: str) -> None:
    """The public way, on whatever device this is: update, attend, check."""
    plan = stof.dynamic_plan(example(kind), 90, heads=2)
    q, k, v = (x.to(DEVICE) for x in make_inputs(heads=2, q_len=90, kv_len=90, head_dim=16).qkv)
    for seed in range(2):
        mask = example(kind, seed)
        plan.update(mask)
        out, lse = stof.attention(q, k, v, plan, return_lse=True)
        assert_attention(out, lse, q, k, v, mask.to_dense(90, device=DEVICE))
        assert torch.equal(plan.to_dense(), mask.to_dense(90, device=DEVICE))
    plan.check()
    assert plan.bytes() > 0
    assert repr(plan).startswith("DynamicPlan(")


@IN_INTERPRETER
@pytest.mark.parametrize("kind", ["vertical_slash", "block_topk", "dense"])
def test_memory_is_freed_with_its_last_reference(kind: str) -> None:
    """Lists take most of a GPU's memory that a plan has: no cycle keeps them until Python collects it."""
    mask = example(kind)
    buffers = buffers_of(mask, 90, 90)
    if kind != "vertical_slash":
        buffers.backward["block_wise", LayoutConfig(BLOCK, BLOCK)] = buffers.backward_lists(BLOCK)
    fill_buffers(buffers, mask)
    columns = weakref.ref(buffers.work.partial_columns)
    gc.disable()
    try:
        del buffers
        assert columns() is None
    finally:
        gc.enable()


def test_a_refused_update_leaves_the_plan_as_it_was() -> None:
    distances = torch.arange(4)[None]
    q, k, v = make_inputs(heads=1, q_len=90, dtype=torch.float32).qkv
    good = masks.vertical_slash(torch.tensor([[0, 1, 30]]), distances)
    plan = stof.dynamic_plan(good, 90)
    text = repr(plan)
    before = stof.attention(q, k, v, plan)
    with pytest.raises(MaskError):
        plan.update(masks.vertical_slash(torch.tensor([[0, 1, 300]]), distances))
    assert repr(plan) == text
    assert torch.equal(stof.attention(q, k, v, plan), before)
    assert torch.equal(stof.attention(q, k, v, good), before)


def test_plans_take_one_kind_of_mask() -> None:
    plan = stof.dynamic_plan(example("vertical_slash"), 90, heads=2)
    with pytest.raises(PlanMismatchError, match="takes masks like"):
        plan.update(example("block_topk"))
    words = torch.full((40, 2), -1, dtype=torch.int32)
    bit_plan = stof.dynamic_plan(masks.from_bits(words, 64), 40, 64)
    with pytest.raises(PlanMismatchError, match="takes masks like"):
        bit_plan.update(masks.from_bits(words, 40))  # other bits count
    with pytest.raises(MaskError, match="a dynamic plan takes"):
        stof.dynamic_plan(masks.causal(), 90)
    with pytest.raises(ArgumentError, match="density"):
        stof.dynamic_plan(example("dense"), 90, heads=2, density=0.0)


def run_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans whose lists are set run Triton's kernels, and find one stream and no capture."""
    block_wise = IMPLEMENTATIONS["block_wise"]
    assert block_wise.backward is not None
    anywhere = replace(block_wise.capabilities, devices=())
    backward = replace(block_wise.backward, capabilities=replace(block_wise.backward.capabilities, devices=()))
    monkeypatch.setitem(IMPLEMENTATIONS, "block_wise", replace(block_wise, capabilities=anywhere, backward=backward))
    monkeypatch.setattr("stof.dynamic.plan.shared_memory_limit", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one_stream(monkeypatch)


@pytest.mark.sampled(5)
@IN_INTERPRETER
@pytest.mark.parametrize("kind", KINDS)
def test_plans_as_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed lists, one kept call, updates in place, and what `check` says; the kernels in Triton's interpreter."""
    run_as_on_a_gpu(monkeypatch)
    plan = stof.dynamic_plan(example(kind), 90, heads=2)
    plan._buffers = buffers_of(example(kind), 90, 90)
    q, k, v = make_inputs(heads=2, q_len=90, kv_len=90, head_dim=16).qkv
    for seed in range(2):
        mask = example(kind, seed)
        plan.update(mask)
        out = stof.attention(q, k, v, plan)
        expected, _ = reference_attention(q.double(), k.double(), v.double(), mask.to_dense(90), scale=0.25)
        assert float((out - expected).abs().max()) < 1e-5
    assert len(plan._calls) == 1
    plan.check()
    assert plan.bytes() == plan._buffers.bytes()
    assert [candidate.name for candidate in stof.explain(q, k, v, plan)] == ["block_wise", "hopper"]
    with pytest.raises(ArgumentError, match="fixed lengths"):
        plan.extended(1)
    with pytest.raises(UnsupportedError, match="dynamic plans run on hopper and block_wise, not on reference"):
        stof.attention(q, k, v, plan, implementation="reference")
    with pytest.raises(UnsupportedError, match="float64"):
        stof.attention(q.double(), k.double(), v.double(), plan)
    plan._buffers.flags[1] = OVERFLOW | OUT_OF_RANGE
    with pytest.raises(MaskError, match=r"larger `density`(.|\n)*head 1: indices out of range and more tiles than"):
        plan.check()
    plan.check()


@dataclass
class FakeStream:
    """A stream, or an event recorded on it, that writes down what it is asked."""

    name: str
    log: list[str]
    cuda_stream: int

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} is recorded")
        return f"what {self.name} did"


@IN_INTERPRETER
def test_update_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for whom, of streams that there are none of here."""
    log: list[str] = []
    main, side, third = (FakeStream(name, log, number) for number, name in enumerate(("main", "side", "third")))
    current = [main]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: FakeStream("default", log, 0))
    monkeypatch.setattr("stof.runtime.streams.stream_id", lambda: current[-1].cuda_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: log.append(f"held for {stream.name}"))
    monkeypatch.setattr("stof.dynamic.plan.fill_buffers", lambda *given: log.append(f"built on {current[-1].name}"))
    mask = example("block_topk")
    plan = stof.dynamic_plan(mask, 90, heads=2)
    plan._buffers = buffers_of(mask, 90, 90)
    call = (*make_inputs(heads=2, q_len=90, kv_len=90, head_dim=16).qkv, None, None, None, None, None)

    def logged() -> list[str]:
        found = [line for line in log if not line.endswith("waits for default")]  # see `record_streams`
        log.clear()
        return found

    plan.update(mask)
    plan.find_call(*call)
    assert logged() == ["built on main", "main is recorded"]
    # A call on a stream that nobody ordered waits for the update, the next update for that call.
    with on(third):
        plan.find_call(*call)
        plan.find_call(*call)
    assert logged() == ["third waits for what main did"]
    plan.update(mask)
    assert logged() == ["main waits for third", "built on main", "main is recorded"]
    with on(third):
        plan.update(mask)
    assert logged() == ["third waits for what main did", "third waits for main", "built on third", "third is recorded"]
    plan.update(mask)
    assert logged() == ["main waits for what third did", "main waits for third", "built on main", "main is recorded"]
    plan.update(mask, stream=side)
    assert logged() == [
        "side waits for main", "side waits for what main did", "built on side", "side is recorded", "held for side"
    ]  # fmt: skip
    for stream in (main, main, third):
        with on(stream):
            plan.find_call(*call)
    assert logged() == ["main waits for what side did", "third waits for what side did"]
    plan.update(mask, stream=side)
    assert logged() == [
        "side waits for main", "side waits for third", "built on side", "side is recorded", "held for side"
    ]  # fmt: skip
    # Two updates with no call between them write the same lists.
    plan.update(mask, stream=side)
    logged()
    plan.update(mask, stream=third)
    assert logged()[:4] == [
        "third waits for main", "third waits for what side did", "third waits for side", "built on third"
    ]  # fmt: skip
    plan.update(mask)
    assert logged() == ["main waits for what third did", "main waits for third", "built on main", "main is recorded"]
    plan.update(mask, stream=side)
    logged()
    capturing[0] = True
    plan.find_call(*call)  # in a capture, which begins when all is done
    assert logged() == []
    plan.update(mask, stream=side)
    logged()
    plan.check()
    assert logged() == ["main waits for what side did"]
    plan.update(mask)
    plan.find_call(*call)
    assert logged() == ["built on main"], "one stream orders a graph, in which nothing is recorded"
    capturing[0] = False
    plan.find_call(*call)
    assert logged() == ["main waits for what side did"], "the last update that is not part of a graph"
    # Replays of attention will not ask whether an update has ended.
    plan.update(mask, stream=side)
    assert logged()[-3:] == ["side is recorded", "held for side", "main waits for what side did"]
    # Calls that fill lists themselves wait for calls that read them.
    plan._buffers.captured_fills["lists"] = (lambda: log.append(f"filled on {current[-1].name}"),)
    plan.find_call(*call)
    assert logged() == ["main waits for side", "filled on main", "main is recorded"]
    with on(third):
        plan.find_call(*call)
    assert logged() == ["third waits for what main did", "third waits for main", "filled on third", "third is recorded"]
    plan.find_call(*call)
    assert logged() == ["main waits for what third did", "main waits for third", "filled on main", "main is recorded"]


def test_messages_of_masks() -> None:
    """Sizes, dtypes and places that mean nothing are named before anything is built."""
    some = torch.tensor([0, 1])
    for make, error, message in (
        (lambda: masks.vertical_slash(some.float(), some), DtypeError, "vertical_idx is an int32 or int64 tensor"),
        (lambda: masks.vertical_slash(some, some[:0]), MaskError, "slash_idx is .n., .H, n."),
        (lambda: masks.vertical_slash(some.expand(2, 2), some.expand(3, 2)), ShapeError, r"number of head.*\[2, 3\]"),
        (lambda: masks.vertical_slash(some, some.to("meta")), DeviceError, "share one device"),
        (lambda: masks.block_topk(some, 1), DtypeError, "block_scores is a float16"),
        (lambda: masks.block_topk(torch.zeros(3), 1), MaskError, "rows, columns"),
        (lambda: masks.block_topk(torch.zeros(3, 3), 4), MaskError, "between 1 and 3, got 4"),
        (lambda: masks.block_topk(torch.zeros(3, 3), 0), MaskError, "is between 1 and 3, got 0"),
        (lambda: masks.block_topk(torch.zeros(3, 3), 1, block_size=48), MaskError, "block_size is 16, 32, 64 or 128"),
        (lambda: masks.block_topk(torch.zeros(3, 3), 1).to_dense(64), ShapeError, r"has \[3, 3\] blocks"),
        (lambda: masks.from_bits(some, 40), DtypeError, "words is an int32 tensor"),
        (lambda: masks.from_bits(some.int()[None], 40 * 32), MaskError, r"words is \[Sq, 40\]"),
        (lambda: masks.from_bits(some.int()[None], 40).to_dense(2, 40), ShapeError, "1 queries and 40 keys"),
    ):
        with pytest.raises(error, match=message):
            make()


def test_masks_are_known_by_their_tensors() -> None:
    vertical, slash = torch.tensor([1, 5]), torch.tensor([0, 2])
    mask = masks.vertical_slash(vertical, slash)
    assert mask == masks.vertical_slash(vertical, slash)
    assert mask != masks.vertical_slash(vertical.clone(), slash)
    plan = stof.plan(mask, 20)
    assert stof.plan(masks.vertical_slash(vertical, slash), 20) is plan
    vertical[0] = 2
    assert stof.plan(mask, 20) is not plan
