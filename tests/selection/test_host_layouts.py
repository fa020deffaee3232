"""Layouts of plans on the CPU: block sizes and row orders chosen once for masks of one structure."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stof
from stof import masks
from stof.layout import LayoutConfig, build_layout, in_columns
from stof.plans import host_layout
from stof.plans.kept_choices import kept_by_structure
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.strategies import mask_trees

LENGTH = 400


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept_by_structure.clear()
    yield
    kept_by_structure.clear()


def of_documents(*ends: int) -> masks.Mask:
    return masks.documents(cu_seqlens=[0, *ends, LENGTH]) & masks.causal()


@pytest.mark.parametrize(
    "alike",
    [
        [of_documents(70, 200, 330), of_documents(90, 180, 310), of_documents(60, 190, 320)],
        [masks.sliding_window(40), masks.sliding_window(44), masks.sliding_window(50)],
        [masks.dilated_window(120, dilation=8), masks.dilated_window(136, dilation=8)],
        [masks.from_dense(torch.rand(LENGTH, LENGTH) < share) for share in (0.3, 0.28)],
    ],
    ids=["documents", "window", "dilated", "dense"],
)
def test_later_masks_of_a_structure_take_the_choice_of_the_first(alike: list[masks.Mask]) -> None:
    """Of the same block sizes and row order; results are those of each mask."""
    inputs = make_inputs(heads=2, q_len=LENGTH, kv_len=LENGTH, head_dim=8).qkv
    with mock.patch.object(host_layout, "best_layout", wraps=host_layout.best_layout) as own:
        plans = [stof.plan(mask, LENGTH) for mask in alike]
    assert own.call_count == 1
    assert len({(plan.layout.config, plan.permuted_rows) for plan in plans}) == 1
    for plan, mask in zip(plans, alike, strict=True):
        assert_attention(stof.attention(*inputs, plan), None, *inputs, mask.to_dense(LENGTH))


def test_slow_planning_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stof.plan(masks.causal(), 90)
    assert not caplog.records
    monkeypatch.setattr("stof.plans.make._SLOW", 0.0)
    stof.plan(masks.causal(), 91)
    (record,) = caplog.records
    assert "planning causal() for 91 queries and 91 keys took" in record.getMessage()


@given(mask=mask_trees(150, 2), rows=st.sampled_from([32, 64]))
@examples(60)
def test_gathered_columns_of_whole_tiles(mask: masks.Mask, rows: int) -> None:
    """Layouts that plans show are made of whole tiles, and equal those that are built at once."""
    sizes = {"batch": 2, "heads": 1}
    whole = build_layout(mask, 150, 150, LayoutConfig(rows, 64), **sizes)
    at_once = build_layout(mask, 150, 150, LayoutConfig(rows, 64, 1), **sizes)
    assert in_columns(whole).equals(at_once)
    in_columns(whole).validate()
