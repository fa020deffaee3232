"""Plans for block top-k made at run time, as on an H200: which kernel they choose, what keeps its lists up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.dynamic.block_topk.buffers import BlockBuffers
from stof.dynamic.mask_buffers import make_buffers
from stof.dynamic.plan import DynamicPlan
from stof.errors import KernelError, UnfitLayoutError, UnsupportedError
from stof.kernels.quantization import FP8, widened
from stof.masks.dynamic import BlockTopK
from stof.selection import IMPLEMENTATIONS, failures
from stof.testing import assert_attention, make_inputs
from tests.kernels.test_hopper_launch import Twin, twin, unaligned
from tests.selection.fakes import H200_SHARED, call_of, fake_gpu, one_stream

__all__ = ["twin"]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU; tests/gpu has the real one"),
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

LENGTH = 300
CALL = call_of(head_dim=128, heads=2, q_len=LENGTH, kv_len=LENGTH, mask_heads=2)


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An H200 that is not there; what the list holds says whether a graph is being captured."""
    fake_gpu(monkeypatch)
    failures.clear()
    for name in ("hopper", "block_wise"):
        own = IMPLEMENTATIONS[name]
        devices = ("cpu", "cuda")
        monkeypatch.setitem(
            IMPLEMENTATIONS, name, replace(own, capabilities=replace(own.capabilities, devices=devices))
        )
    state = [False]
    monkeypatch.setattr("stof.dynamic.plan.shared_memory_limit", lambda device: H200_SHARED)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    one_stream(monkeypatch)
    return state


def topk(seed: int, size: int = 64, *, causal: bool = True) -> BlockTopK:
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-LENGTH // size)
    mask = masks.block_topk(torch.randn(2, blocks, blocks, generator=generator), 2, block_size=size, causal=causal)
    assert isinstance(mask, BlockTopK)
    return mask


def plan_of(mask: BlockTopK) -> DynamicPlan:
    plan = stof.dynamic_plan(mask, LENGTH, heads=2)
    plan._buffers = make_buffers(mask, (LENGTH, LENGTH), (1, 2), torch.device("cpu"), None)
    assert isinstance(plan._buffers, BlockBuffers)
    plan._buffers.filled.clear()  # as where the Hopper kernel may run
    plan.update(mask)
    return plan


def test_candidates_are_weighed() -> None:
    plan = plan_of(topk(0))
    found = plan.candidates(CALL)
    assert {candidate.name for candidate in found} == {"hopper", "block_wise"}
    times = [candidate.estimate_us for candidate in found]
    assert all(us is not None for us in times)
    assert times == sorted(times, key=lambda us: us or 0.0)
    assert plan.choice(CALL) == found[0].choice
    for name in ("hopper", "block_wise"):
        assert plan.choice(CALL, name).implementation == name
    # Row blocks are whole, or split where they are longer than that.
    kernels = [c.choice.kernel for c in found if c.choice is not None and c.name == "hopper"]
    assert {kernel.split_tiles for kernel in kernels if kernel is not None} == {0}
    # Pairs of blocks, where a tile may have 128 columns at this head_dim.
    narrow = plan.candidates(replace(CALL, head_dim=64, value_dim=64))
    layouts = {str(c.choice).split(";")[0] for c in narrow if c.name == "hopper"}
    assert layouts == {"hopper (64x64 tiles, contiguous columns", "hopper (64x128 tiles, columns gathered by 16"}


def test_candidates_of_other_calls() -> None:
    """Both kernels, though they are taken to compute as many tiles; for a few rows, without estimates."""
    some = torch.arange(8)
    for q_len in (256, 64):
        mask = masks.vertical_slash(some, some).with_query_offset(512 - q_len)
        plan = stof.dynamic_plan(mask, q_len, 512)
        plan._buffers = make_buffers(mask, (q_len, 512), (1, 1), torch.device("cpu"), None)
        found = plan.candidates(replace(CALL, q_len=q_len, kv_len=512, mask_heads=1))
        assert {candidate.name for candidate in found} == {"hopper", "block_wise"}
        assert all(candidate.estimate_us is not None for candidate in found)
    blocks = masks.block_topk(torch.zeros(1, 8), 2)
    plan = stof.dynamic_plan(blocks, 7, 512)
    plan._buffers = make_buffers(blocks, (7, 512), (1, 1), torch.device("cpu"), None)
    found = plan.candidates(replace(CALL, q_len=7, kv_len=512, mask_heads=1))
    assert [candidate.estimate_us for candidate in found] == [None] * len(found)
    assert found[0].name == "block_wise"


def test_what_hopper_refuses() -> None:
    plan = plan_of(topk(0))

    def refusals(plan: DynamicPlan, **changes: object) -> tuple[str, ...]:
        (found,) = [c for c in plan.candidates(replace(CALL, **changes)) if c.name == "hopper"]  # type: ignore[arg-type]
        return found.refusals

    assert any("torch.float32" in reason for reason in refusals(plan, dtype=torch.float32))
    assert refusals(plan, has_bias=True) == ("no bias where tiles are made at run time",)
    assert refusals(plan, compute_capability=(10, 0))
    assert refusals(plan_of(topk(0, 32))) == ("takes blocks of 64 or 128 made at run time, not 32",)
    with pytest.raises(UnsupportedError, match="no bias where tiles are made at run time"):
        plan.choice(replace(CALL, has_bias=True), "hopper")
    assert plan.choice(replace(CALL, has_bias=True)).implementation == "block_wise"
    slash = masks.vertical_slash(torch.arange(3), torch.arange(3))
    for mask, reason in (
        (slash, f"of vertical_slash, takes lengths of whole row blocks of 64, not {LENGTH}"),
        (masks.from_dense(slash.to_dense(LENGTH)), "of masks made at run time, takes block_topk and vertical_slash"),
    ):
        other = stof.dynamic_plan(mask, LENGTH)
        other._buffers = make_buffers(mask, (LENGTH, LENGTH), (1, 1), torch.device("cpu"), None)
        assert refusals(other) == (reason,)


def test_the_next_choice_serves(capturing: list[bool]) -> None:
    """When one fails, or when a graph is being captured, which the first Hopper call cannot be part of."""
    plan = plan_of(topk(0))
    first = plan.choice(CALL, "hopper")
    with pytest.warns(RuntimeWarning, match="left out from now on: no"):
        plan.reject(first, CALL, KernelError("no"))
    plan.reject(plan.choice(replace(CALL, head_dim=64, value_dim=64), "hopper"), CALL, UnfitLayoutError("narrow"))
    assert plan.choice(CALL).implementation == "block_wise"
    with pytest.raises(UnsupportedError, match="no"):
        plan.choice(CALL, "hopper")
    with pytest.raises(KernelError, match="worse"):
        plan.reject(plan.choice(CALL), CALL, KernelError("worse"))
    failures.clear()
    plan = plan_of(topk(0))
    capturing[0] = True
    assert plan.choice(CALL).implementation == "block_wise"
    with pytest.raises(UnsupportedError, match="make one before the capture"):
        plan.choice(CALL, "hopper")
    capturing[0] = False
    assert plan.choice(CALL) == plan.candidates(CALL)[0].choice


def test_eight_bits_are_widened() -> None:
    """Tiles made at run time are for 16 bits and more."""
    mask = topk(0)
    plan = plan_of(mask)
    narrow = replace(CALL, dtype=FP8)
    choice = plan.choice(narrow)
    assert choice == replace(plan.choice(replace(CALL, dtype=torch.bfloat16)), widened=True)
    assert plan.prepared(choice) is plan.prepared(replace(choice, widened=False))
    with pytest.raises(UnsupportedError, match="not on hopper_fp8"):
        plan.choice(narrow, "hopper_fp8")
    (q, q_scale), (k, k_scale), (v, v_scale) = (
        stof.quantise_heads(x) for x in make_inputs(heads=2, q_len=LENGTH, kv_len=LENGTH, head_dim=64).qkv
    )
    scales = (q_scale, k_scale, v_scale)
    out, lse = stof.attention(q, k, v, plan, scales=scales, return_lse=True, implementation="block_wise")
    wide = [widened(x, scale, torch.float32) for x, scale in zip((q, k, v), scales, strict=True)]
    expected, expected_lse = stof.attention(
        wide[0], wide[1], wide[2], plan, return_lse=True, implementation="block_wise"
    )
    assert torch.equal(out, expected.bfloat16())
    assert torch.equal(lse, expected_lse)


def attend(plan: DynamicPlan, implementation: str) -> Callable[[BlockTopK], None]:
    q, k, v = make_inputs(heads=2, q_len=LENGTH, kv_len=LENGTH, head_dim=64, dtype=torch.float16).qkv

    def check(mask: BlockTopK) -> None:
        out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation=implementation)
        assert_attention(out, lse, q, k, v, mask.to_dense(LENGTH))

    return check


def test_calls_see_the_last_update(twin: Twin, capturing: list[bool]) -> None:
    """Lists are filled from when a call first reads them: by updates, or by calls where those are in a graph."""
    plan = plan_of(topk(0))
    hopper, block_wise = attend(plan, "hopper"), attend(plan, "block_wise")
    hopper(topk(0))
    assert twin.constants["DYNAMIC"]
    plan.update(topk(1))
    hopper(topk(1))
    assert len(plan._calls) == 1
    capturing[0] = True
    plan.update(topk(2))
    capturing[0] = False
    hopper(topk(2))
    block_wise(topk(2))
    assert isinstance(plan._buffers, BlockBuffers)
    assert [*plan._buffers.captured_fills] == ["block_wise"]
    # A replay of the update: what it launched is launched again, whatever was used since.
    buffers, before = plan._buffers, dict(plan._buffers.filled)
    assert "block_wise" not in before
    buffers.filled.clear()
    buffers.filled.update(before)
    plan.update(topk(3))
    hopper(topk(3))
    block_wise(topk(3))
    plan.check()


def test_calls_do_not_rely_on_a_graph_being_replayed(capturing: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists first used within a capture are filled in replays of that graph: other graphs and calls fill them first."""
    plan = plan_of(topk(0))
    buffers = plan._buffers
    assert isinstance(buffers, BlockBuffers)
    launches = buffers.work_launches
    captured = 0

    def launched() -> tuple[Callable[[], None], ...]:
        def launch() -> None:
            nonlocal captured
            captured += capturing[0]
            if not capturing[0]:
                for each in launches():
                    each()

        return (launch,)

    monkeypatch.setattr(BlockBuffers, "work_launches", lambda buffers: launched())
    q, k, v = make_inputs(heads=2, q_len=LENGTH, kv_len=LENGTH, head_dim=64, dtype=torch.float16).qkv
    for number in (1, 2):
        capturing[0] = True
        stof.attention(q, k, v, plan)  # what it computes has no meaning before a replay
        assert captured == number
    capturing[0] = False
    attend(plan, "block_wise")(topk(0))
    assert not buffers.pending_fills
    assert [*buffers.filled] == ["block_wise"]
    plan.update(topk(1))
    attend(plan, "block_wise")(topk(1))
    assert captured == 2


def test_rows_of_keys_nobody_sees() -> None:
    """TMA would read the keys behind the last query: such plans keep to the block-wise kernel."""
    scores = torch.randn(2, 4, 5)
    mask = masks.block_topk(scores, 2, causal=True)
    plan = stof.dynamic_plan(mask, 200, 300, heads=2)
    plan._buffers = make_buffers(mask, (200, 300), (1, 2), torch.device("cpu"), None)
    plan.update(mask)
    (refused,) = [c for c in plan.candidates(replace(CALL, q_len=200)) if c.name == "hopper"]
    assert refused.refusals == ("the last block holds keys past query 199, which no query sees",)
    q, k, v = make_inputs(heads=2, q_len=200, kv_len=300, head_dim=16).qkv
    unseen: Tensor = ~mask.to_dense(200, 300).any(2)
    stale = (x.masked_fill(unseen[..., None], torch.nan) for x in (k, v))
    out, lse = stof.attention(q, *stale, plan, return_lse=True)
    assert_attention(out, lse, q, k, v, mask.to_dense(200, 300))


def test_tensors_at_odd_addresses_see_updates(twin: Twin) -> None:
    """Their copies have jobs of their own, which every call brings up to date as well."""
    plan = plan_of(topk(0))
    q, k, v = (unaligned(x) for x in make_inputs(heads=2, q_len=LENGTH, head_dim=64, dtype=torch.float16).qkv)
    for seed in range(3):
        plan.update(topk(seed))
        out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation="hopper")
        assert_attention(out, lse, q, k, v, topk(seed).to_dense(LENGTH))
    assert twin.constants["DYNAMIC"]
