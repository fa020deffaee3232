"""Attention of 8-bit tensors with scales: what they stand for, widened for all kernels but one, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import ArgumentError, DeviceError, DtypeError, KernelError, ShapeError, UnsupportedError
from stof.kernels.implementation import BoundCall, Options
from stof.kernels.quantization import FP8, Scales
from stof.operators import masked_attention_op
from stof.selection import IMPLEMENTATIONS, Candidate, KernelChoice, candidates, choose, failures
from stof.selection.device_model import load_model
from stof.testing import MEMORY_LAYOUTS, make_inputs, oracle_attention
from stof.testing.inputs import spread
from stof.testing.mask_grid import grid_mask
from tests.selection.fakes import GPU, Geometry, call_of

ON_CPU = [name for name, impl in IMPLEMENTATIONS.items() if impl.capabilities.devices != ("cuda",)]
MASK = masks.sliding_window(20, 5) & ~masks.global_tokens(3)


def narrow_inputs(seed: int = 0, **sizes: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Scales]:
    plain: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 70, "head_dim": 32, "seed": seed}
    (q, q_scale), (k, k_scale), (v, v_scale) = (
        stof.quantise_heads(x * (1 + h)) for h, x in enumerate(make_inputs(**plain | sizes).qkv)
    )
    return (q, k, v), (q_scale, k_scale, v_scale)


def check(given: tuple[Tensor, Tensor, Tensor], scales: Scales, **options: Any) -> None:
    out, lse = stof.attention(*given, MASK, scales=scales, return_lse=True, **options)
    options.pop("implementation", None)
    q, k, v = (x.double() * s.double()[:, :, None, None] for x, s in zip(given, scales, strict=True))
    expected, expected_lse = oracle_attention(q, k, v, MASK.to_dense(70, 70), **options)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_heads_are_rounded_to_their_own_scale(dtype: torch.dtype) -> None:
    x = make_inputs(batch=2, heads=3, q_len=50, dtype=dtype).q * torch.tensor([1e-3, 1.0, 200.0]).view(3, 1, 1).to(
        dtype
    )
    values, scale = stof.quantise_heads(x)
    assert (values.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (2, 3))
    assert values.stride() == x.stride()
    assert bool((values.float().abs().amax((2, 3)) == 448).all())
    unit = scale.double()[:, :, None, None]
    error = (values.double() * unit - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() / 16, unit * 2**-10) * 1.01).all())


def test_heads_of_next_to_nothing() -> None:
    values, scale = stof.quantise_heads(torch.zeros(1, 2, 5, 4) + torch.tensor([0.0, 1e-44]).view(2, 1, 1))
    assert not bool(values.float().any())
    assert bool((scale > 0).all())
    # 600 times the smallest number: a unit of 1.34 of them would be 1, and the head 600 of 448.
    values, scale = stof.quantise_heads(torch.full((1, 1, 5, 4), 600 * 2.0**-149))
    assert bool((values.float() * scale).abs().max() <= 2.0**-10)


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.zeros(1, 2, 3, 0)])
def test_only_heads_are_quantised(x: Tensor) -> None:
    with pytest.raises(ShapeError, match="batch, heads, length, head_dim"):
        stof.quantise_heads(x)
    with pytest.raises(DtypeError, match="floating-point"):
        stof.quantise_heads(torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    with pytest.raises(DtypeError, match="16 bits or more"):
        stof.quantise_heads(torch.zeros(1, 1, 1, 1, dtype=FP8))


@pytest.mark.parametrize("implementation", [None, *ON_CPU])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": -0.2}, {"softcap": 2.0, "sinks": torch.randn(4)}, {"bias": torch.randn(4, 70, 70)}],
    ids=("plain", "scale", "sinks", "bias"),
)
def test_widened(implementation: str | None, options: dict[str, Any]) -> None:
    check(*narrow_inputs(), implementation=implementation, **options)


@pytest.mark.parametrize("implementation", [None, *ON_CPU])
def test_autocast(implementation: str | None) -> None:
    """It has nothing to cast, inside as little as outside."""
    given, scales = narrow_inputs()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            check(given, scales, implementation=implementation)


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_memory(memory: str) -> None:
    (q, k, v), scales = narrow_inputs()
    check((spread(q, memory), spread(k, memory), spread(v, memory)), scales)


def test_scales_that_batch_entries_share() -> None:
    given, (q_scale, k_scale, v_scale) = narrow_inputs()
    check(given, (q_scale[:1], k_scale[1:], v_scale[:1]))


@pytest.mark.parametrize("extra", [{}, {"bias": torch.randn(70, 70)}], ids=["plain", "bias"])
def test_like_calls_are_bound_once(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scales are."""
    name, bound = ON_CPU[0], []
    original = IMPLEMENTATIONS[name]

    def counting(*given: Any) -> BoundCall:
        bound.append(None)
        return original.bind(*given)

    monkeypatch.setitem(IMPLEMENTATIONS, name, replace(original, bind=counting))
    stof.plan_cache.clear()
    for seed in range(3):
        check(*narrow_inputs(seed=seed), **extra)
    assert len(bound) == 1


def test_scales_are_part_of_what_calls_have_in_common() -> None:
    """A kept call for 8-bit tensors is not one for tensors without scales, and the other way round."""
    plan = stof.plan(MASK, 70)
    (q, k, v), scales = narrow_inputs()
    stof.attention(q, k, v, plan, scales=scales)
    with pytest.raises(ArgumentError, match="need scales"):
        stof.attention(q, k, v, plan)
    wide = q.float(), k.float(), v.float()
    stof.attention(*wide, plan)
    with pytest.raises(DtypeError, match="scales belong to float8_e4m3fn"):
        stof.attention(*wide, plan, scales=scales)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled() -> None:
    (q, k, v), scales = narrow_inputs()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> Tensor:
        return stof.attention(q, k, v, MASK, scales=(scales[0], scales[1], scales[2]))

    assert torch.equal(compiled(q, k, v, *scales), stof.attention(q, k, v, MASK, scales=scales))


def test_operator() -> None:
    (q, k, v), scales = narrow_inputs()
    # PyTorch cannot compare 8-bit arguments before and after, as the check of the schema does.
    able = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    given = (q, k, v, MASK.key, None, None, 0.25, 0.0, "", *scales)
    torch.library.opcheck(masked_attention_op, given, test_utils=able)


def test_no_backward() -> None:
    (q, k, v), (q_scale, k_scale, v_scale) = narrow_inputs()
    with pytest.raises(UnsupportedError, match="8-bit tensors and their scales"):
        stof.attention(q, k, v, MASK, scales=(q_scale.requires_grad_(), k_scale, v_scale))


def test_dynamic_plan() -> None:
    (q, k, v), scales = narrow_inputs()
    keep = MASK.to_dense(70, 70)
    plan = stof.dynamic_plan(~keep, 70)
    plan.update(keep)
    assert torch.equal(stof.attention(q, k, v, plan, scales=scales), stof.attention(q, k, v, MASK, scales=scales))


def test_what_is_wrong_with_scales() -> None:
    (q, k, v), (q_scale, k_scale, v_scale) = narrow_inputs()
    wrong: list[tuple[Any, type[Exception], str]] = [
        (None, ArgumentError, "need scales"),
        (q_scale, ArgumentError, "q_scale, k_scale, v_scale.*got Tensor"),
        ((q_scale, k_scale), ArgumentError, "got 2 of them"),
        ((q_scale, k_scale, 1.0), DtypeError, "scale of v is a float32 tensor, got float"),
        ((q_scale.half(), k_scale, v_scale), DtypeError, "scale of q is a float32 tensor, got torch.float16"),
        ((q_scale, q_scale, v_scale), ShapeError, r"scale of k is \[1 or 2, 2\]"),
        ((q_scale[0], k_scale, v_scale), ShapeError, "one for each head"),
        ((q_scale, k_scale.to("meta"), v_scale), DeviceError, "scale of k is on meta"),
    ]
    for scales, error, text in wrong:
        with pytest.raises(error, match=text):
            stof.attention(q, k, v, MASK, scales=scales)
    with pytest.raises(DtypeError, match="share one dtype"):
        stof.attention(q.float(), k, v, MASK, scales=(q_scale, k_scale, v_scale))


def test_forced_where_it_cannot_run() -> None:
    given, scales = narrow_inputs()
    with pytest.raises(ArgumentError, match="'hopper_fp8' cannot run this call: runs on cuda, not cpu; head_dim 32"):
        stof.attention(*given, MASK, scales=scales, implementation="hopper_fp8")


def on_a_gpu(name: str, length: int = 4096, **changes: Any) -> list[Candidate]:
    call = call_of(dtype=FP8, heads=16, head_dim=128, q_len=length, kv_len=length, **changes)
    return candidates(call, GPU, Geometry(grid_mask(name).mask(length), length, length), load_model("NVIDIA H200"))


@pytest.mark.parametrize("name", ["full", "causal", "window512", "longformer", "strided"])
def test_eight_bits_are_faster(name: str) -> None:
    first, *others = on_a_gpu(name)
    assert first.name == "hopper_fp8"
    assert first.choice is not None
    assert first.choice.layout is not None
    assert first.choice.layout.compact_columns == (name == "strided")
    assert {c.name for c in others if c.choice is not None and c.choice.widened} >= {"hopper", "block_wise"}
    assert any("(widened; " in str(c) for c in others)


def test_where_widened_tensors_are_faster() -> None:
    """Rows sixteen apart: only the kernels for 16 bits take them in another order."""
    first = on_a_gpu("dilated")[0]
    assert first.name == "hopper"
    assert first.choice is not None
    assert first.choice.widened


def test_refusals_on_a_gpu() -> None:
    for changes, reason in (
        ({"has_bias": True}, "no bias"),
        ({"compute_capability": (8, 0)}, "needs compute capability 9.0"),
        ({"compute_capability": (10, 0)}, "runs on compute capability 9.0 alone"),
    ):
        weighed = on_a_gpu("causal", 512, **changes)
        assert weighed[0].choice is not None
        assert weighed[0].choice.widened
        assert [reason in c.refusals[0] for c in weighed if c.name == "hopper_fp8"] == [True]


def test_choices_without_a_device() -> None:
    call = call_of(head_dim=128, dtype=FP8)
    assert choose(call) == KernelChoice("hopper", widened=True)
    assert choose(call, implementation="hopper_fp8") == KernelChoice("hopper_fp8")


def test_other_layouts_than_its_own() -> None:
    """A plan with a layout of its own: whole tiles of 128 x 128 or none."""
    call = call_of(dtype=FP8, heads=16, head_dim=128)
    for config, fits in ((stof.LayoutConfig(128, 128), True), (stof.LayoutConfig(128, 128, 16), False)):
        weighed = candidates(call, GPU, Geometry(masks.causal(), 512, 512, config), load_model("NVIDIA H200"))
        assert ("hopper_fp8" in {c.name for c in weighed if not c.refusals}) == fits


def test_a_widened_choice_that_fails_is_left_out() -> None:
    call, device = call_of(device="cpu", dtype=FP8), torch.device("cpu")
    first = choose(call, device)
    assert first == KernelChoice("row_block", widened=True)
    wide = call.widened()
    assert wide is not None
    try:
        with pytest.warns(RuntimeWarning, match="left out"):
            failures.add(first, wide, device, "no such instruction")
        assert choose(call, device).implementation == "batched"
        assert choose(wide, device).implementation == "batched"
    finally:
        failures.clear()


def test_the_next_serves_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> BoundCall:
        raise KernelError("no such instruction")

    monkeypatch.setitem(IMPLEMENTATIONS, "row_block", replace(IMPLEMENTATIONS["row_block"], bind=fails))
    try:
        with pytest.warns(RuntimeWarning, match="row_block .widened. failed"):
            check(*narrow_inputs())
    finally:
        failures.clear()


def test_a_triton_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    implemented = IMPLEMENTATIONS["hopper_fp8"]
    given, scales = narrow_inputs(head_dim=128, q_len=128)
    layout = stof.plan(masks.causal(), 128, config=stof.LayoutConfig(128, 128)).layout
    monkeypatch.setitem(__import__("sys").modules, "stof.kernels.hopper.fp8.forward", None)
    with pytest.raises(KernelError, match="no Gluon"):
        implemented.bind(*given, implemented.prepare(layout, None), Options(0.1, scales=scales))


def test_values_that_are_not_finite_stay_alone() -> None:
    x = make_inputs(heads=2, q_len=30).q
    x[0, 1, 3, 2], x[0, 1, 7, 0] = torch.nan, torch.inf
    values, scale = stof.quantise_heads(x)
    finite = x.isfinite()
    expected, expected_scale = stof.quantise_heads(x.where(finite, torch.zeros_like(x)))
    assert torch.equal(scale, expected_scale)
    assert bool(values.float()[~finite].isnan().all())
    assert torch.equal(values.float()[finite], expected.float()[finite])
