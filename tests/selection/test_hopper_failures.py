"""Plans, layouts and machines that the Hopper kernel cannot serve: others do, and it is told why."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.errors import KernelError, UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.kernels.implementation import Options
from stof.layout import build_layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.plans import plan as plans
from stof.plans.plan import Plan
from stof.selection import IMPLEMENTATIONS, CallSpec, KernelChoice, MaskGeometry, failures, reads_unseen_too, select
from stof.testing import make_inputs, oracle_attention
from tests.examples import examples
from tests.selection.fakes import GPU, call_of, fake_gpu
from tests.strategies import dense_masks


@pytest.fixture(autouse=True)
def _no_failures() -> Iterator[None]:
    failures.clear()
    yield
    failures.clear()


class OnCpu:
    """A plan for a GPU whose layouts are built, and whose calls are answered, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.monkeypatch = monkeypatch
        fake_gpu(monkeypatch)
        monkeypatch.setattr(plans, "build_layout", lambda *a, **kw: build_layout(*a, **{**kw, "device": "cpu"}))
        for module in (plans, importlib.import_module("stof.dispatch")):
            monkeypatch.setattr(module, "made_for_calls", lambda device, make: make())
        monkeypatch.setattr(plans, "outside_graph_pool", lambda device, make: make())
        idle = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)
        for name in ("hopper", "block_wise", "row_wise"):
            monkeypatch.setitem(IMPLEMENTATIONS, name, replace(IMPLEMENTATIONS[name], bind=self.answer(name)))

    def answer(self, name: str) -> Any:
        real = IMPLEMENTATIONS[name].bind

        def bind(*args: Any) -> Any:
            if name == "hopper" and real is not None:
                real(*args)  # it may find tensors that do not fit
            self.ran.append(name)
            return lambda q, k, v, bias, sinks: (q, oracle_attention(q, k, v)[1].float())

        return bind

    def prefer(self, row_order: str | None, name: str = "hopper") -> None:
        """Estimates by which choices with this row order are fastest."""

        def estimate(choice: KernelChoice, *rest: Any) -> float:
            zeroed = choice.kernel is not None and choice.kernel.zero_unseen
            return 1.0 + 2.0 * (choice.implementation != name) + 1.0 * (choice.row_order != row_order) + 0.5 * zeroed

        self.monkeypatch.setattr(select, "estimate", estimate)

    def plan(self, mask: Mask, length: int) -> Plan:
        geometry = MaskGeometry(mask, length, length)
        return Plan(repr(mask), (length, length), (1, 1), GPU, call_sizes=(None, None), geometry=geometry)

    def run(self, plan: Plan, implementation: str | None, head_dim: int = 64) -> None:
        """`stof.attention` past the checks that tensors and plan are on one device."""
        call, module = spec(plan, head_dim), importlib.import_module("stof.dispatch")
        self.monkeypatch.setattr(module, "call_spec", lambda *args: call)
        q, k, v = make_inputs(q_len=plan.q_len, head_dim=head_dim, heads=1, dtype=torch.float16).qkv
        given = (q, k, v, None, None, 0.125, None, implementation)
        plan._calls.clear()  # every run chooses
        out, _ = module.run_call(q, k, v, plan, Options(0.125), implementation, given)
        assert out is q


def spec(plan: Plan, head_dim: int = 64) -> CallSpec:
    return call_of(heads=1, q_len=plan.q_len, kv_len=plan.kv_len, head_dim=head_dim)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    return OnCpu(monkeypatch)


DILATED = masks.dilated_window(500, dilation=16)
UNEVEN = DILATED | masks.global_tokens(3)


@pytest.mark.parametrize("implementation", [None, "hopper"])
def test_an_unfit_choice_is_left_out_for_its_plan_without_a_warning(on_cpu: OnCpu, implementation: str | None) -> None:
    """Warnings are errors here."""
    on_cpu.prefer("remainder 16")
    plan, other = on_cpu.plan(UNEVEN, 2048), on_cpu.plan(DILATED, 2048)
    assert plan.geometry.row_orders == other.geometry.row_orders == ("remainder 16",)
    call = spec(plan)
    first = plan.choice(call, implementation)
    assert (first.implementation, first.row_order) == ("hopper", "remainder 16")
    assert plan._layout_errors.get(first.layout_key) is None
    on_cpu.run(plan, implementation)
    assert on_cpu.ran == ["hopper"], "what could not be prepared was not run, and nothing else took over"
    second = plan.choice(call, implementation)
    assert (second.implementation, second.row_order) == ("hopper", None)
    reason = "columns gathered one by one are not evenly spaced"
    assert plan._layout_errors.get(first.layout_key) == reason
    refused = [c for c in plan.candidates(call) if c.name == "hopper" and c.refusals]
    # However its work is cut.
    assert {(c.choice.row_order, c.refusals) for c in refused if c.choice} == {("remainder 16", (reason,))}
    assert len(refused) > 1
    assert all(reason in str(c) for c in refused)
    # Nothing is known against the kernel itself.
    assert failures.reason(first, call, GPU) is None
    assert other._layout_errors.get(first.layout_key) is None
    assert other.choice(call, implementation).row_order == "remainder 16"
    on_cpu.run(other, implementation)
    assert other.choice(call, implementation).row_order == "remainder 16"
    on_cpu.run(plan, implementation)
    assert on_cpu.ran == ["hopper"] * 3


def test_keys_that_no_query_sees_are_zeroed(on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth key is seen by nobody: any slab would read some, and few are tried to learn that."""
    tried: list[Any] = []
    hopper = IMPLEMENTATIONS["hopper"]

    def prepare(layout: Any, kernel: Any) -> Any:
        tried.append(layout.config)
        return hopper.prepare(layout, kernel)

    monkeypatch.setitem(IMPLEMENTATIONS, "hopper", replace(hopper, prepare=prepare))
    keep = torch.ones(300, 300, dtype=torch.bool)
    keep[:, 3::8] = False
    plan = on_cpu.plan(as_mask(keep), 300)
    on_cpu.prefer(None)
    assert plan.choice(spec(plan)).implementation == "hopper"
    assert not any("unseen keys as zeros" in str(c) for c in plan.candidates(spec(plan)))
    on_cpu.run(plan, None)
    assert on_cpu.ran == ["hopper"]
    chosen = plan.choice(spec(plan))
    assert chosen.kernel is not None
    assert chosen.kernel.zero_unseen
    assert chosen.layout is not None
    assert chosen.layout.slab is None
    assert 2 <= len(tried) <= 5
    refused = [c for c in plan.candidates(spec(plan)) if c.name == "hopper" and c.refusals]
    assert {c.choice.layout for c in refused if c.choice} > set(tried)
    assert {c.choice.row_order for c in refused if c.choice} == {None}
    assert all("keys that no query sees" in str(c) for c in refused)
    # A bias is copied in whole tiles of the keys themselves.
    biased = replace(spec(plan), has_bias=True, tiled_bias=True)
    assert not any("unseen keys as zeros" in str(c) for c in plan.candidates(biased))


def test_what_reads_unseen_keys_because_another_does() -> None:
    def choice(block_m: int, block_n: int, slab: int | None, **more: Any) -> KernelChoice:
        return KernelChoice("hopper", LayoutConfig(block_m, block_n, slab), None, KernelConfig(4, 2, **more))

    slabs = choice(128, 128, 16)
    for too in (choice(128, 64, None), choice(64, 64, 16), choice(192, 128, 16, split_tiles=3), slabs):
        assert reads_unseen_too(too, slabs)
    for less in (choice(64, 64, 8), choice(64, 64, 1), choice(64, 64, None, zero_unseen=True)):
        assert not reads_unseen_too(less, slabs)
    assert not reads_unseen_too(choice(64, 64, None), choice(128, 128, None))
    assert not reads_unseen_too(replace(slabs, row_order="remainder 2"), slabs)
    assert not reads_unseen_too(KernelChoice("hopper"), slabs)


@given(data=st.data(), tile=st.sampled_from([(64, 64), (128, 128), (192, 128)]), slab=st.sampled_from([None, 16, 8]))
@examples(30)
def test_layouts_that_are_refused_with_another_one_do_read_unseen_keys(
    data: st.DataObject, tile: tuple[int, int], slab: int | None
) -> None:
    keep = data.draw(dense_masks(200, 300, 1, 2))

    def refused(config: LayoutConfig) -> bool:
        try:
            make_tile_lists(build_layout(as_mask(keep), 200, 300, config, heads=2))
        except UnfitLayoutError as error:
            return error.unseen_keys
        return False

    one = KernelChoice("hopper", LayoutConfig(*tile, slab))
    if refused(LayoutConfig(*tile, slab)):
        for other in itertools.product((64, 128, 192), (64, 128), (None, 16, 8)):
            choice = KernelChoice("hopper", LayoutConfig(*other))
            assert refused(LayoutConfig(*other)) or not reads_unseen_too(choice, one)


def test_slabs_where_whole_tiles_read_too_much(on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding: a tile of 128 holds keys that no query sees, slabs of 8 do not, though there are as many tiles."""
    monkeypatch.setattr("stof.plans.plan.structure_key", lambda *about: None)  # else lists are filled
    keep = torch.zeros(300, 300, dtype=torch.bool)
    keep[:, :200] = True
    plan = on_cpu.plan(as_mask(keep), 300)
    on_cpu.prefer(None)
    on_cpu.run(plan, "hopper")
    layout = plan.choice(spec(plan), "hopper").layout
    assert layout is not None
    assert layout.slab == 8
    assert on_cpu.ran == ["hopper"]


def test_a_failing_kernel_is_left_out_for_all_plans(on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so a kernel that does not compile: one warning, and no plan tries it again."""

    def broken(*args: Any) -> Any:
        raise KernelError("no such instruction")

    monkeypatch.setitem(IMPLEMENTATIONS, "hopper", replace(IMPLEMENTATIONS["hopper"], bind=broken))
    on_cpu.prefer(None)
    plan, other = (on_cpu.plan(mask, 256) for mask in (masks.causal(), masks.full()))
    first = plan.choice(spec(plan))
    with pytest.warns(RuntimeWarning, match="hopper .* is left out from now on: no such instruction"):
        on_cpu.run(plan, None)
    assert plan._layout_errors.get(first.layout_key) is None
    assert failures.reason(first, spec(plan), GPU) == "no such instruction"
    assert first not in {c.choice for c in other.candidates(spec(other)) if not c.refusals}
    assert on_cpu.ran == ["block_wise"]


def test_heads_too_narrow_for_a_choice_say_nothing_of_others(on_cpu: OnCpu) -> None:
    """Evenly spaced rows must fill what TMA copies; a plan serves calls of every head_dim."""
    on_cpu.prefer("remainder 16")
    plan = on_cpu.plan(DILATED, 2048)
    on_cpu.run(plan, "hopper", head_dim=80)
    assert plan.choice(spec(plan, 80), "hopper").row_order is None
    assert plan.choice(spec(plan, 64), "hopper").row_order == "remainder 16"
    on_cpu.run(plan, "hopper", head_dim=64)
    assert plan.choice(spec(plan, 64), "hopper").row_order == "remainder 16"


def test_a_triton_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a kernel that does not run here, so another takes over; not an import error in the user's face."""
    layout = build_layout(masks.causal(), 128, 128, LayoutConfig(128, 128))
    hopper = IMPLEMENTATIONS["hopper"]
    q, k, v = make_inputs(q_len=128, head_dim=64, heads=1, dtype=torch.float16).qkv
    monkeypatch.setitem(sys.modules, "stof.kernels.hopper.forward", None)
    with pytest.raises(KernelError, match="no Gluon"):
        hopper.bind(q, k, v, hopper.prepare(layout, None), Options(0.125))
