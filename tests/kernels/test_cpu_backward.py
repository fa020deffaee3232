"""Gradients of the CPU's attention against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.kernels.cpu import backward
from stof.kernels.cpu.attention import row_block_attention
from stof.kernels.cpu.backward import row_block_backward
from stof.kernels.cpu.schedule import MERGE, Schedule, make_schedule
from stof.kernels.implementation import Gradients, NeedsGrad
from stof.layout import build_layout
from stof.testing import make_inputs
from tests.examples import examples
from tests.kernels.gradients import assert_gradients, backward_calls
from tests.strategies import configs, row_orders

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def schedule_of(keep: Tensor, heads: int, config: LayoutConfig, row_order: Tensor | None = None) -> Schedule:
    sizes = {"batch": keep.shape[0], "heads": heads, "device": "cpu", "row_order": row_order}
    return make_schedule(build_layout(masks.from_dense(keep), *keep.shape[2:], config, **sizes))


def run(call: dict[str, Any], schedule: Schedule, needs: NeedsGrad | None = None) -> Gradients:
    """Gradients for arguments of `reference_backward`, from the forward's results."""
    rest = {name: x for name, x in call.items() if name not in ("q", "k", "v", "d_out", "keep")}
    forward = {name: x for name, x in rest.items() if name != "d_lse"}
    q, k, v = call["q"], call["k"], call["v"]
    out, lse = row_block_attention(q, k, v, schedule, **forward)
    return row_block_backward(q, k, v, out, lse, call["d_out"], schedule, **rest, needs=needs)


@given(data=st.data(), config=configs, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@examples(200)
def test_against_float64(data: st.DataObject, config: LayoutConfig, dtype: torch.dtype) -> None:
    """Random masks, shapes, strides and options; NaN where nobody looks."""
    call = data.draw(backward_calls(dtype, [1, 17, 65, 130], [1, 16, 65, 150], [1, 7, 16, 32]))
    schedule = schedule_of(call["keep"], call["q"].shape[1], config, data.draw(row_orders(call["q"].shape[2])))
    assert_gradients(run(call, schedule), call, factor=4.0 if dtype == torch.float64 else 2.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_that_merge(dtype: torch.dtype, group: int) -> None:
    """Columns that many row blocks share are a step of their own, and row blocks with windows are one batch."""
    mask = masks.causal() | masks.sliding_window(20, 20)
    inputs = make_inputs(batch=2, heads=2, kv_heads=2 // group, q_len=1500, head_dim=16, dtype=dtype)
    layout = build_layout(mask, 1500, 1500, LayoutConfig(64, 64), device="cpu")
    schedule = make_schedule(layout)
    assert bool((schedule.steps[:, MERGE] == 1).any())
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": torch.randn_like(inputs.q), "scale": 0.25}
    call |= {"keep": layout.to_dense(), "sinks": torch.randn(2)}
    assert_gradients(run(call, schedule), call)


@pytest.mark.parametrize(
    "mask", [masks.sliding_window(70), masks.longformer(30, 5), masks.dilated_window(60, dilation=3)]
)
def test_batches_of_steps(mask: Any) -> None:
    """Overlapping windows, gathered columns, and what they add to one key, by either way."""
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=300, head_dim=16, memory="bshd")
    keep = mask.to_dense(300, 300)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": torch.randn(2, 4, 300, 16), "scale": 0.25}
    call["keep"] = keep.view(1, 1, 300, 300)
    for slab in (None, 1):
        schedule = schedule_of(call["keep"], 4, LayoutConfig(32, 32, slab))
        assert_gradients(run(call, schedule), call)
        for option in ({"softcap": 3.0}, {"bias": torch.randn(1, 4, 300, 300)}, {"d_lse": torch.randn(2, 4, 300)}):
            assert_gradients(run(call | option, schedule), call | option)


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(q_len=40)
    keep = torch.rand(1, 1, 40, 40) < 0.5
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": torch.randn(1, 2, 40, 16), "scale": 0.25}
    call |= {"keep": keep, "bias": torch.randn(1, 1, 40, 40), "sinks": torch.randn(2)}
    schedule = schedule_of(keep, 2, LayoutConfig(16, 16))
    every = run(call, schedule)
    for n, names in enumerate((("q",), ("k", "v"), ("bias",), ("sinks",))):
        if names == ("sinks",):
            monkeypatch.setattr(backward, "_run", None)  # nothing of the scores' size is computed
        found = run(call, schedule, NeedsGrad(*[m == n for m in range(4)]))
        for name, one, other in zip(Gradients._fields, found, every, strict=True):
            assert (one is None) != (name in names)
            if one is not None:
                torch.testing.assert_close(one, other)
