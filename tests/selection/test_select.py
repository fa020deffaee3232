"""Weighing candidates, leaving out those that failed, and falling back while a call runs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stof
from stof import LayoutConfig, masks
from stof.errors import KernelError, UnsupportedError
from stof.kernels.config import KernelConfig
from stof.layout import Layout, in_columns, statistics
from stof.layout.orders.named import by_remainder
from stof.layout.orders.search import CLUSTERED
from stof.selection import IMPLEMENTATIONS, CallSpec, KernelChoice, best_layout, candidates, choose, failures, select
from stof.testing import assert_attention, make_inputs
from tests.selection.fakes import GPU, H200_SHARED, Geometry, call_of, fake_gpu


@pytest.fixture(autouse=True)
def _no_failures() -> Iterator[None]:
    failures.clear()
    yield
    failures.clear()


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)


MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "longformer": masks.longformer(40, 40),
    "dilated": masks.dilated_window(500, dilation=16),
    "empty": ~masks.full(),
}
CALLS = (call_of(), call_of(dtype=torch.float32), call_of(q_len=4, heads=8, kv_heads=2), call_of(head_dim=256))


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("call", CALLS, ids=["fp16", "fp32", "decode", "D 256"])
def test_order(mask: str, call: CallSpec) -> None:
    """Estimated ones by time, then the others in order of preference, then refusals; the first one runs."""
    geometry = Geometry(
        MASKS[mask], call.q_len, call.kv_len, row_orders=MASKS[mask].row_orders(call.q_len, call.kv_len)
    )
    weighed = candidates(call, GPU, geometry)
    kinds = [2 if c.refusals else 1 if c.estimate_us is None else 0 for c in weighed]
    assert kinds == sorted(kinds)
    times = [c.estimate_us for c in weighed if c.estimate_us is not None]
    assert times == sorted(times)
    assert all(time > 0 for time in times)
    ranks = list(IMPLEMENTATIONS)
    rest = [ranks.index(c.name) for c, kind in zip(weighed, kinds, strict=True) if kind == 1]
    assert rest == sorted(rest)
    assert {c.name for c in weighed} == set(IMPLEMENTATIONS)
    assert weighed[0].choice == choose(call, GPU, geometry)
    for name in {c.name for c in weighed if not c.refusals}:
        chosen = choose(call, GPU, geometry, name)
        assert chosen == next(c.choice for c in weighed if c.name == name and not c.refusals)
    assert all(str(c) for c in weighed)


@pytest.mark.usefixtures("_a_gpu")
def test_what_is_picked_makes_sense() -> None:
    long = call_of(q_len=4096, kv_len=4096)

    def picked(mask: Any, call: CallSpec = long) -> KernelChoice:
        return choose(
            call, GPU, Geometry(mask, call.q_len, call.kv_len, row_orders=mask.row_orders(call.q_len, call.kv_len))
        )

    assert picked(masks.full()).implementation in ("hopper", "block_wise")
    assert picked(masks.full(), replace(long, compute_capability=(8, 0))).implementation == "block_wise"
    dilated = picked(masks.dilated_window(2047, dilation=16))
    assert dilated.row_order == "remainder 16" or dilated.implementation == "row_wise"
    few = picked(masks.longformer(16, 1) & masks.longformer(2, 0))
    assert few.implementation in ("hopper", "row_wise", "block_wise")
    decode = picked(masks.full(), call_of(q_len=1, kv_len=65536, heads=32, kv_heads=8, head_dim=128))
    assert decode.implementation == "decode"
    assert decode.kernel is not None
    assert decode.kernel.split_tiles > 0
    assert decode.kernel.pack


@pytest.mark.usefixtures("_a_gpu")
def test_dense_float32_is_not_row_wise() -> None:
    """A kernel without tensor cores has no business with 4096 keys a row."""
    call = call_of(q_len=4096, kv_len=4096, dtype=torch.float32)
    assert choose(call, GPU, Geometry(masks.full(), 4096, 4096)).implementation == "block_wise"


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, shared=101_376)
    call = call_of(head_dim=128)
    weighed = candidates(call, GPU, Geometry(masks.causal(), 512, 512))
    refused = [c for c in weighed if c.choice is not None and c.refusals]
    assert refused
    assert all("needs more shared memory than the 101376 bytes of this device" in str(c) for c in refused)
    assert weighed[0].name in ("block_wise", "row_wise")
    fake_gpu(monkeypatch, shared=1000)
    # Columns one by one, which row lists are made of.
    assert choose(call, GPU, Geometry(masks.causal(), 512, 512)) == KernelChoice("row_wise", LayoutConfig(64, 64, 1))
    with pytest.raises(UnsupportedError, match="needs more shared memory"):
        choose(call, GPU, Geometry(masks.causal(), 512, 512), "block_wise")


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize(
    ("changes", "names", "reason"),
    [
        ({"compute_capability": (7, 5)}, {"block_wise", "decode", "row_wise"}, "needs compute capability 8.0, not 7.5"),
        (
            {"dtype": torch.float64},
            {"block_wise", "decode", "hopper", "hopper_fp8", "row_wise"},
            "not torch.float64",
        ),
        ({"head_dim": 257}, {"block_wise", "decode", "row_wise"}, "head_dim 257 is outside 1..256"),
        ({"q_len": 17}, {"decode"}, "takes 16 query rows at most, not 17"),
        ({"q_len": 2, "kv_heads": 4, "mask_heads": 12}, {"decode"}, "share a key head have masks of their own"),
    ],
)
def test_refusals(changes: dict[str, Any], names: set[str], reason: str) -> None:
    call = call_of(**changes)
    weighed = candidates(call, GPU, Geometry(masks.causal(), call.q_len, call.kv_len))
    refusing = {c.name for c in weighed if any(reason in why for why in c.refusals)}
    assert refusing == names
    assert {c.name for c in weighed if not c.refusals}.isdisjoint(names)
    assert choose(call, GPU, Geometry(masks.causal(), call.q_len, call.kv_len)).implementation not in names


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize(
    ("fixed", "serves"),
    [
        (LayoutConfig(64, 256), "row_wise"),
        (LayoutConfig(192, 128), "hopper row_wise"),
        (LayoutConfig(192, 128, 16), "hopper row_wise"),
        (LayoutConfig(192, 128, 1), "row_wise"),
        (LayoutConfig(192, 64), "row_wise"),
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [4, 512])
def test_tiles_it_does_not_take(fixed: LayoutConfig, serves: str, q_len: int) -> None:
    """A plan made for other devices: the kernels that cannot read its tiles say so."""
    call, geometry = call_of(q_len=q_len), Geometry(masks.causal(), q_len, 512, fixed)
    weighed = candidates(call, GPU, geometry)
    assert {c.name for c in weighed if "tiles it does not take" in str(c)} == (
        {"block_wise", "hopper"} - set(serves.split()) | ({"decode"} if q_len == 4 else set())
    )
    assert {c.name for c in weighed if c.choice and c.choice.layout and not c.refusals} == set(serves.split())
    assert choose(call, GPU, geometry).implementation in serves.split()
    older = choose(replace(call, compute_capability=(8, 0)), GPU, geometry)
    assert (older.implementation, older.layout) == ("row_wise", fixed)
    with pytest.raises(UnsupportedError, match="tiles it does not take"):
        choose(call, GPU, geometry, "block_wise")


@pytest.mark.usefixtures("_a_gpu")
def test_a_failed_choice_is_left_out_and_the_next_serves() -> None:
    call, geometry = call_of(), Geometry(masks.longformer(40, 40), 512, 512)
    first = choose(call, GPU, geometry)
    with pytest.warns(RuntimeWarning, match="failed and is left out from now on: ptxas died") as warned:
        failures.add(first, call, GPU, "ptxas died")
    assert len(warned) == 1
    failures.add(first, call, GPU, "ptxas died")  # warnings are errors: a second one would raise
    assert str(first) in str(warned[0].message)
    second = choose(call, GPU, geometry)
    assert second != first
    weighed = candidates(call, GPU, geometry)
    assert [c.refusals for c in weighed if c.choice == first] == [("ptxas died",)]
    # Another device, dtype or option compiles another kernel.
    assert choose(call, torch.device("cuda", 1), geometry) == first
    assert choose(replace(call, dtype=torch.bfloat16), GPU, geometry) == first
    assert failures.reason(first, replace(call, has_bias=True), GPU) is None
    failures.clear()
    assert choose(call, GPU, geometry) == first


@pytest.mark.usefixtures("_a_gpu")
def test_the_same_kernel_is_not_tried_with_another_cut() -> None:
    """How work is cut is not compiled in: what failed at one length of chunks fails at all."""
    call, geometry = call_of(q_len=2048, kv_len=2048), Geometry(masks.full(), 2048, 2048)
    kernel = KernelConfig(4, 3, 128, split_tiles=8)
    with pytest.warns(RuntimeWarning, match="failed"):
        failures.add(KernelChoice("block_wise", LayoutConfig(64, 64), None, kernel), call, GPU, "no room")
    for candidate in candidates(call, GPU, geometry):
        choice = candidate.choice
        if choice is not None and choice.layout == LayoutConfig(64, 64) and choice.kernel is not None:
            settings = (choice.kernel.num_warps, choice.kernel.num_stages, choice.kernel.max_registers)
            if settings == (4, 3, 128) and choice.kernel.split_tiles:
                assert candidate.refusals == ("no room",)


@pytest.mark.usefixtures("_a_gpu")
def test_everything_fails_down_to_plain_pytorch() -> None:
    call, geometry = call_of(q_len=3, kv_len=64), Geometry(masks.causal(), 3, 64)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(1000):
            choice = choose(call, GPU, geometry)
            if choice.implementation == "batched":
                break
            failures.add(choice, call, GPU, "broken")
    assert choose(call, GPU, geometry).implementation == "batched"
    assert len(warned) == len({str(warning.message) for warning in warned})
    with pytest.raises(UnsupportedError, match="broken"):
        choose(call, GPU, geometry, "block_wise")


def test_threads_warn_once() -> None:
    choice, call = KernelChoice("block_wise", LayoutConfig(), None, KernelConfig()), call_of()
    barrier = threading.Barrier(8)

    def fail() -> None:
        barrier.wait()
        failures.add(choice, call, GPU, "broken")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=fail) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(warned) == 1


def test_a_call_falls_back_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the first implementation fails: the next one answers, and one warning says why."""
    tried: list[str] = []

    def broken(*args: Any) -> Any:
        tried.append("row_block")
        assert len(tried) == 1, "tried again"
        raise KernelError("no such instruction")

    monkeypatch.setitem(IMPLEMENTATIONS, "row_block", replace(IMPLEMENTATIONS["row_block"], bind=broken))
    inputs = make_inputs(heads=2, q_len=50)
    keep = masks.causal().to_dense(50)
    with pytest.warns(RuntimeWarning, match="row_block failed and is left out from now on: no such instruct") as warned:
        out, lse = stof.attention(*inputs.qkv, masks.causal(), return_lse=True)
    assert_attention(out, lse, *inputs.qkv, keep)
    assert len(warned) == 1
    assert_attention(stof.attention(*inputs.qkv, masks.causal()), None, *inputs.qkv, keep)
    found = stof.explain(*inputs.qkv, masks.causal())
    assert found[0].name == "batched"
    assert any("no such instruction" in str(candidate) for candidate in found)
    with pytest.raises(UnsupportedError, match="no such instruction"):
        stof.attention(*inputs.qkv, masks.causal(), implementation="row_block")


def shuffled_window(length: int) -> masks.Mask:
    rows = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    return masks.from_dense(masks.sliding_window(63).to_dense(length)[0, 0][rows][:, rows].contiguous())


def test_a_found_row_order_is_one_more_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    geometry = Geometry(shuffled_window(1024), 1024, 1024)
    weighed = candidates(call_of(q_len=1024, kv_len=1024, batch=4), GPU, geometry)
    assert weighed[0].choice is not None
    assert weighed[0].choice.row_order == CLUSTERED
    assert "rows by clustered" in str(weighed[0])
    own = [c for c in weighed if c.choice is not None and c.choice.row_order is None and c.estimate_us is not None]
    assert own
    assert weighed[0].estimate_us is not None
    assert weighed[0].estimate_us < 0.5 * min(c.estimate_us or 0.0 for c in own if c.name == "block_wise")


@pytest.mark.parametrize(
    ("mask", "fixed", "row_orders"),
    [
        (masks.causal(), None, ()),
        (masks.longformer(64, 64), None, ()),
        (masks.dilated_window(511, dilation=16), None, ("remainder 16",)),
    ],
    ids=str,
)
def test_good_masks_pay_for_no_search(
    monkeypatch: pytest.MonkeyPatch, mask: masks.Mask, fixed: LayoutConfig | None, row_orders: tuple[str, ...]
) -> None:
    fake_gpu(monkeypatch)
    geometry = Geometry(mask, 2048, 2048, fixed, row_orders)
    assert candidates(call_of(q_len=2048, kv_len=2048), GPU, geometry)
    assert geometry.searches == 0


def test_best_layouts_on_a_cpu_take_the_best_order() -> None:
    """Named orders first; one found by looking where those do not help; the rows' own where nothing does."""
    device = torch.device("cpu")

    def own(mask: masks.Mask, **options: Any) -> Layout:
        return in_columns(best_layout(mask, 512, 512, batch=1, heads=1, device=device, **options).layout)

    dilated = own(masks.dilated_window(511, dilation=8))
    assert dilated.row_order is not None
    assert torch.equal(dilated.row_order[0].long(), by_remainder(512, 8))
    found = own(shuffled_window(512))
    assert found.row_order is not None
    assert statistics(found).computed_over_needed < 2.5
    random = masks.from_dense(torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.05)
    assert own(random).row_order is None
    assert own(masks.causal()).row_order is None
    given = own(shuffled_window(512), row_order=by_remainder(512, 8))
    assert given.row_order is not None
    assert torch.equal(given.row_order[0].long(), by_remainder(512, 8))


def test_a_gpu_that_was_never_tuned_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log, and with each estimate; not on a GPU that was."""
    properties = SimpleNamespace(
        name="NVIDIA Imaginary 9000", multi_processor_count=100, shared_memory_per_multiprocessor=200_000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(select, "shared_memory_limit", lambda device: H200_SHARED)
    select._log_once.cache_clear()
    geometry = Geometry(masks.causal(), 512, 512)
    for _ in range(2):
        found = candidates(call_of(), GPU, geometry)
    (record,) = [record for record in caplog.records if record.name == "stof"]
    assert "NVIDIA Imaginary 9000 was never tuned" in record.getMessage()
    assert "stof tune --device --output" in record.getMessage()
    estimated = [candidate for candidate in found if candidate.estimate_us is not None]
    assert estimated
    assert all("with the constants of NVIDIA H200 (stof tune --device" in str(candidate) for candidate in estimated)
    assert not any("constants" in str(candidate) for candidate in found if candidate.estimate_us is None)
    caplog.clear()
    properties.name = "NVIDIA H200"
    assert not any("constants" in str(candidate) for candidate in candidates(call_of(), GPU, geometry))
    assert not caplog.records
