"""Plans and the batch and heads of calls: a plan never computes a sequence or head under another one's mask."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import stof
from stof import masks
from stof.errors import ArgumentError, MaskError, PlanFileError, PlanMismatchError, ShapeError
from stof.layout.io import save_layout
from stof.plans.plan import Plan
from stof.plans.unsized import UnsizedPlan
from stof.testing import assert_attention, make_inputs

LENGTH = 64


def by_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q - kv < 8 * (h + 1))


def by_batch(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q - kv < 5 * (b + 1))


def expected(fn: object, batch: int, heads: int) -> torch.Tensor:
    """Bool `[batch, heads, LENGTH, LENGTH]` by the definitions above, in plain arithmetic."""
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(1, -1, 1, 1)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    width = 8 * (h + 1) + 0 * b if fn is by_head else 5 * (b + 1) + 0 * h
    return (distance >= 0) & (distance < width)


@pytest.mark.parametrize("fn", [by_head, by_batch])
def test_a_plan_without_sizes_serves_any_call(fn: object) -> None:
    plan = stof.plan(masks.from_function(fn), LENGTH)
    for batch, heads in ((1, 1), (2, 4), (3, 2), (2, 4)):
        q, k, v = make_inputs(batch=batch, heads=heads, q_len=LENGTH, kv_len=LENGTH).qkv
        for _ in range(2):  # the second call is a kept one
            out, lse = stof.attention(q, k, v, plan, return_lse=True)
            assert_attention(out, lse, q, k, v, expected(fn, batch, heads))


@pytest.mark.parametrize(("fn", "name"), [(by_head, "heads"), (by_batch, "batch")])
@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_with_sizes_refuses_other_calls(fn: object, name: str, size: int, tmp_path: Path) -> None:
    mask = masks.from_function(fn)
    sizes = {"batch": 1, "heads": 1} | {name: size}
    plan = stof.plan(mask, LENGTH, **sizes)
    plan.save(tmp_path / "plan.safetensors")
    grown = stof.plan(mask, LENGTH - 1, **sizes).extended(1)
    plans = {
        "plan": plan,
        "loaded": stof.Plan.load(tmp_path / "plan.safetensors"),
        "copied": copy.deepcopy(plan),
        "moved": plan.to("cpu"),
        "extended": grown,
    }
    for kind, own in plans.items():
        fitting = make_inputs(batch=sizes["batch"], heads=sizes["heads"], q_len=LENGTH, kv_len=LENGTH).qkv
        out, lse = stof.attention(*fitting, own, return_lse=True)
        assert_attention(out, lse, *fitting, expected(fn, sizes["batch"], sizes["heads"]))
        other = {"batch": 2, "heads": 2} | {name: 4}
        q, k, v = make_inputs(q_len=LENGTH, kv_len=LENGTH, **other).qkv
        with pytest.raises(PlanMismatchError, match=f"made for {name}={size}; the inputs have 4"):
            stof.attention(q, k, v, own)
        assert getattr(own, name) == size, kind


def test_sizes_come_from_the_mask() -> None:
    lengths = [9, 3, 64, 1, 5, 5, 2, 40]
    plan = stof.plan(masks.padding(lengths), LENGTH)
    assert (plan.batch, plan.heads) == (8, None)
    plan = stof.plan(masks.per_head([masks.causal(), masks.sliding_window(2), masks.full()]), LENGTH)
    assert (plan.batch, plan.heads) == (None, 3)
    assert (stof.plan(torch.ones(2, 1, LENGTH, LENGTH).bool(), LENGTH).batch) == 2
    plan = stof.plan(masks.causal(), LENGTH, batch=7, heads=3)
    assert (plan.batch, plan.heads) == (None, None)  # serves any
    with pytest.raises(ShapeError, match="bound to a batch size of 8, the inputs have 3"):
        stof.plan(masks.padding(lengths), LENGTH, batch=3)


def test_functions_combined_with_masks_of_a_batch() -> None:
    mask = masks.from_function(by_head) & masks.padding([50, 20])
    plan = stof.plan(mask, LENGTH)
    assert isinstance(plan, UnsizedPlan)
    q, k, v = make_inputs(batch=2, heads=3, q_len=LENGTH, kv_len=LENGTH).qkv
    keep = expected(by_head, 2, 3) & (torch.arange(LENGTH) < torch.tensor([50, 20]).view(2, 1, 1, 1))
    out, lse = stof.attention(q, k, v, plan, return_lse=True)
    assert_attention(out, lse, q, k, v, keep)
    with pytest.raises(PlanMismatchError, match="made for batch=2"):
        stof.attention(q[:1], k[:1], v[:1], plan)


def test_per_head_of_one_function_is_that_function() -> None:
    mask = masks.per_head([masks.from_function(by_head)])
    q, k, v = make_inputs(heads=2, q_len=LENGTH, kv_len=LENGTH).qkv
    for given in (mask, stof.plan(mask, LENGTH)):
        out, lse = stof.attention(q, k, v, given, return_lse=True)
        assert_attention(out, lse, q, k, v, expected(by_head, 1, 2))


def test_an_unsized_plan_keeps_the_values_of_tensors_without_versions() -> None:
    q, k, v = make_inputs(heads=3, q_len=LENGTH, kv_len=LENGTH).qkv
    with torch.inference_mode():
        keep = torch.rand(LENGTH, LENGTH) < 0.5
        before = keep.clone()
        plan = stof.plan(masks.from_dense(keep) & masks.from_function(by_head), LENGTH)
        keep.fill_(True)
        for heads in (3, 2):
            x = q[:, :heads], k[:, :heads], v[:, :heads]
            out, lse = stof.attention(*x, plan, return_lse=True)
            assert_attention(out, lse, *x, before & expected(by_head, 1, heads))


def test_functions_are_not_copied_with_the_tensors_of_a_mask() -> None:
    class Near:
        def __deepcopy__(self, memo: object) -> object:
            raise TypeError("cannot be copied")

        def __call__(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return (q - kv).abs() <= h

    fn = Near()
    with torch.inference_mode():
        keep = torch.rand(LENGTH, LENGTH) < 0.5
        mask = ~(masks.from_dense(keep) & masks.from_function(fn)).with_query_offset(0)
        frozen = mask.frozen()
        want = mask.to_dense(LENGTH, heads=2)
        keep.fill_(True)
        assert torch.equal(frozen.to_dense(LENGTH, heads=2), want)


def test_an_extended_plan_keeps_the_values_of_tensors_without_versions() -> None:
    q, k, v = make_inputs(heads=3, q_len=LENGTH, kv_len=LENGTH).qkv
    with torch.inference_mode():
        for first, full in ((masks.from_function(by_head), False), (masks.causal(), True)):
            keep = torch.rand(LENGTH, LENGTH) < 0.5
            before = keep & (full | expected(by_head, 1, 3))
            mask = masks.from_dense(keep)
            plan = stof.plan(first, LENGTH - 8).extended(8, mask if full else mask & first)
            keep.fill_(True)
            out, lse = stof.attention(q, k, v, plan, return_lse=True)
            assert_attention(out, lse, q, k, v, before)


def test_an_unsized_plan_is_not_extended_after_its_tensors_changed() -> None:
    columns, width = torch.tensor([0, 9]), torch.tensor(3)
    by_width = masks.from_function(lambda b, h, q, kv: by_head(b, h, q, kv) & (q - kv < width))
    plan = stof.plan(masks.vertical_slash(columns, torch.tensor([0])) | by_width, LENGTH)
    columns += 1  # copied
    assert plan.extended(8).q_len == LENGTH + 8
    width += 1
    with pytest.raises(MaskError, match="was changed after"):
        plan.extended(8)


def test_an_unsized_plan_has_no_layout(tmp_path: Path) -> None:
    plan = stof.plan(masks.from_function(by_head), LENGTH)
    for use in (plan.statistics, plan.to_dense, lambda: plan.save(tmp_path / "p"), lambda: plan.to("cpu")):
        with pytest.raises(ArgumentError, match="give batch= and heads="):
            use()
    with pytest.raises(PlanMismatchError, match="q_len 64"):
        stof.attention(*make_inputs(q_len=5).qkv, plan)
    assert "not built" in repr(plan)
    other = pickle.loads(pickle.dumps(plan))
    q, k, v = make_inputs(heads=2, q_len=LENGTH, kv_len=LENGTH).qkv
    out, lse = stof.attention(q, k, v, other, return_lse=True)
    assert_attention(out, lse, q, k, v, expected(by_head, 1, 2))
    longer = plan.extended(LENGTH)
    assert longer.q_len == 2 * LENGTH
    q, k, v = make_inputs(heads=2, q_len=2 * LENGTH, kv_len=2 * LENGTH).qkv
    distance = torch.arange(2 * LENGTH)[:, None] - torch.arange(2 * LENGTH)
    keep = (distance >= 0) & (distance < torch.tensor([8, 16]).view(1, 2, 1, 1))
    out, lse = stof.attention(q, k, v, longer, return_lse=True)
    assert_attention(out, lse, q, k, v, keep)


def test_plan_files_without_sizes_are_refused(tmp_path: Path) -> None:
    """One of an earlier version may hold the mask of head 0 alone."""
    path = tmp_path / "old.safetensors"
    save_layout(stof.plan(masks.causal(), LENGTH).layout, path, {"mask": "causal()"})
    with pytest.raises(PlanFileError, match="make it again"):
        Plan.load(path)


def test_plans_are_compared_by_value(tmp_path: Path) -> None:
    plan = stof.plan(masks.sliding_window(9), LENGTH)
    plan.save(tmp_path / "plan.safetensors")
    loaded = Plan.load(tmp_path / "plan.safetensors")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    others = [
        stof.plan(masks.sliding_window(8), LENGTH),
        stof.plan(masks.sliding_window(9), LENGTH + 1),
        stof.plan(masks.sliding_window(9), LENGTH, config=stof.LayoutConfig(16, 16)),
        stof.plan(masks.from_function(by_head), LENGTH),
        "plan",
    ]
    assert all(other != plan for other in others)


def test_compiled_code_with_an_unsized_plan() -> None:
    torch._dynamo.reset()
    plan = stof.plan(masks.from_function(by_head), LENGTH)
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, plan), backend="eager", fullgraph=True)
    for heads in (2, 3):
        q, k, v = make_inputs(heads=heads, q_len=LENGTH, kv_len=LENGTH).qkv
        keep = expected(by_head, 1, heads)
        reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        torch.testing.assert_close(compiled(q, k, v), reference)


def test_extending_under_another_mask_is_a_new_plan() -> None:
    """Old rows' tiles are of the plan's own mask."""
    plan = stof.plan(masks.causal(), 100)
    other = masks.sliding_window(5)
    assert torch.equal(plan.extended(30, other).to_dense(), other.to_dense(130))


def test_tensors_changed_after_planning() -> None:
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    plan = stof.plan(keep, LENGTH)
    before = plan.to_dense()
    keep.fill_(True)
    for each in (plan, plan.extended(0)):
        assert torch.equal(each.to_dense(), before)
