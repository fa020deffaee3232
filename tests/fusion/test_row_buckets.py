"""Graphs that leave their number of rows open: buckets, configurations by bucket, and no compilation for a new size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stof.errors import ArgumentError
from stof.fusion import pipeline
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.measure import segment_timer
from stof.fusion.pipeline import Search
from stof.fusion.planner.match import TemplateMatch, find_matches
from stof.fusion.planner.row_bucket_search import buckets_around
from stof.fusion.planner.search_space import Budget
from stof.fusion.records.store import Store
from stof.fusion.templates import launch
from stof.fusion.templates.gemm_config import default
from stof.fusion.templates.registry import KernelPolicy, Template
from stof.fusion.templates.row_buckets import bucket_of, format_table, in_bucket
from tests.fusion.graphs import calls, capture, fuse

WIDTH = 8
OTHER = "64x64x32,4w,3s,tile"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@given(st.integers(1, 1 << 20))
def test_a_bucket_is_a_power_of_two_less_than_twice_its_rows(rows: int) -> None:
    bucket = bucket_of(rows)
    assert bucket & (bucket - 1) == 0
    assert rows <= bucket < max(2 * rows, 17)
    assert bucket_of(bucket) == bucket
    around = buckets_around(rows)
    assert sorted([*around, bucket]) == [1 << i for i in range(4, bucket.bit_length() + 3)]


def test_text_of_several_configurations() -> None:
    text = format_table({4096: OTHER, 16: "16x32x128,4w,3s,tile", 64: ""})
    assert text == "16=16x32x128,4w,3s,tile;64=;4096=64x64x32,4w,3s,tile"
    found = [in_bucket(text, rows) for rows in (1, 16, 17, 64, 2049, 4096, 4097)]
    assert found == ["16x32x128,4w,3s,tile"] * 2 + ["", "", OTHER, OTHER, ""]
    assert in_bucket(OTHER, 5) == OTHER
    for wrong in (f"24={OTHER}", f"8={OTHER}", f"16={OTHER};", f"x={OTHER}", f"16=;16={OTHER}"):
        with pytest.raises(ArgumentError, match="names no configurations of buckets"):
            in_bucket(wrong, 16)
    with pytest.raises(ArgumentError, match="is no configuration"):
        torch.ops.stof.linear(torch.ones(2, 3), torch.ones(4, 3), None, None, "none", "16=fast")


@pytest.mark.parametrize(("n", "k"), [(768, 768), (3072, 768), (16384, 2048)])
def test_one_configuration_for_all_rows_of_a_bucket(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this a kernel would be compiled for many a length: how often to split, for example, depends on rows."""
    monkeypatch.setattr(launch, "device_limits", lambda index: ((9, 0), 132))
    monkeypatch.setattr(launch, "_agree", lambda call: True)
    weight = torch.empty(n, k, dtype=torch.float16)

    def chosen(rows: int, text: str = "", dtype: torch.dtype = torch.float16) -> str:
        call = launch.gemm_call("linear", torch.empty(rows, k, dtype=torch.float16), weight, None, None, "none")
        gpu = SimpleNamespace(type="cuda", index=0)
        x = SimpleNamespace(device=gpu, dtype=dtype, numel=lambda: rows * k)
        return str(launch.resolve_config(call._replace(x=x), text))  # type: ignore[arg-type]

    for bucket in (16, 32, 128, 1024):
        rows = {bucket, bucket // 2 + 1, bucket * 3 // 4}
        call = launch.gemm_call("linear", torch.empty(bucket, k, dtype=torch.float16), weight, None, None, "none")
        assert {chosen(m) for m in rows} == {str(default(call.shape, torch.float16, (9, 0), 132))}
        text = format_table({bucket: "64x64x64,4w,4s,tile", 4096: OTHER})
        assert {chosen(m, text) for m in rows} == {"64x64x64,4w,4s,tile"}
        assert chosen(2 * bucket, text) == chosen(2 * bucket)
    # float32 has no default: the nearest bucket's configuration that serves, rather than the reference.
    tile = "64x64x64,4w,3s,tile"
    text = format_table({16: "64x128x64,5s,pingpong", 32: "", 64: tile, 1024: OTHER})
    found = [chosen(rows, text, torch.float32) for rows in (10, 32, 64, 128, 256, 300, 1024, 4096)]
    assert found == [tile] * 4 + [OTHER] * 4
    assert chosen(64, "", torch.float32) == chosen(64, "64x128x64,5s,pingpong", torch.float32) == "None"


def segment(*sizes: int) -> TemplateMatch:
    gm = capture(Model().eval(), torch.randn(*sizes, WIDTH), dynamic=True)
    ((match, *_), _) = find_matches(recognize_operators(gm.graph)[:2], KernelPolicy.REFERENCE)
    return match


def test_a_claim_at_other_sizes() -> None:
    match = segment(2, 9)
    assert match.has_dynamic_rows
    assert match.problem.shape.m == 18
    for bucket in (16, 64, 1024):
        other = match.in_bucket(bucket)
        assert other is not None
        inputs = segment_timer.random_inputs(other)
        x = inputs[match.arguments["x"]]
        assert x.shape[0] == 2
        assert x.shape[0] * x.shape[1] == other.problem.shape.m == bucket
        with torch.no_grad():
            (out,) = segment_timer.segment_graph(other, inputs)(*inputs.values())
        torch.testing.assert_close(out.double(), segment_timer.exact(other, inputs)[0], atol=1e-5, rtol=1e-5)
    # A bucket that only a smaller batch reaches, and one that no call has.
    many = segment(40, 5).in_bucket(16)
    assert many is not None
    assert 8 < many.problem.shape.m <= 16
    assert segment(40, 5).in_bucket(2) is None
    x = torch.randn(2, 9, WIDTH)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=3)
    torch._dynamo.mark_dynamic(x, 1, min=8, max=20)
    bounded = find_matches(
        recognize_operators(capture(Model().eval(), x, dynamic=True).graph)[:2], KernelPolicy.REFERENCE
    )[0][0]
    assert [bucket for bucket in (16, 32, 64, 128) if bounded.in_bucket(bucket) is not None] == [16, 32, 64]
    gm = capture(Model().eval(), torch.randn(2, 9, WIDTH))
    fixed = find_matches(recognize_operators(gm.graph)[:2], KernelPolicy.REFERENCE)[0][0]
    assert not fixed.has_dynamic_rows
    assert fixed.in_bucket(16) is None


class Timer:
    """Few rows want tiles, many want cuBLAS; Inductor is slow, by the operator."""

    def __init__(self) -> None:
        self.failures: dict[Any, str] = {}
        self.rows: list[int] = []

    def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
        rows = match.problem.shape.m
        self.rows.append(rows)
        times = {None: 9.0 * len(match.operators), "": 5.0, OTHER: 400 / rows, "64x64x64,4w,4s,tile": rows / 100}
        return [times[config] for config in configs]


def test_each_bucket_gets_its_fastest_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["", OTHER, "64x64x64,4w,4s,tile"]
    monkeypatch.setattr(Template, "configs", lambda self, problem, policy: listed)
    model = Model().eval()
    text = format_table(
        dict.fromkeys((16, 32, 64, 128), "64x64x64,4w,4s,tile") | dict.fromkeys((256, 512, 1024, 2048), OTHER)
    )
    for timer in (Timer(), Timer()):  # the second search finds everything in the store
        search = Search(timer, 600, 3, store=Store(tmp_path, {"device": "x"}))
        gm = capture(model, torch.randn(4, 64, WIDTH), dynamic=True)
        report = fuse(gm, search)
        assert calls(gm) == ["linear", "linear"]
        claimed = [row for row in report.segments if row.template]
        assert [(row.config, row.template_us) for row in claimed] == [(text, 400 / 256)] * 2
        assert sorted(set(timer.rows)) == ([16 << i for i in range(8)] if report.measurements else [])
    assert report.measurements == 0
    # A graph of fixed size asks for its own bucket alone, and finds what was measured for it.
    search = Search(timer, 600, 3, store=Store(tmp_path, {"device": "x"}))
    report = fuse(capture(model, torch.randn(4, 64, WIDTH)), search)
    assert [row.config for row in report.segments if row.template] == [OTHER] * 2
    assert timer.rows == []


def test_a_spent_budget_leaves_buckets_to_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Template, "configs", lambda self, problem, policy: ["", OTHER, "64x64x64,4w,4s,tile"])
    timer = Timer()
    gm = capture(Model().eval(), torch.randn(4, 64, WIDTH), dynamic=True)
    monkeypatch.setattr(pipeline, "Budget", lambda seconds: Budget(seconds, measurements=16))
    report = fuse(gm, Search(timer, 600, 3))
    tables = [[entry.split("=")[0] for entry in row.config.split(";")] for row in report.segments if row.template]
    assert tables
    assert all(1 <= len(buckets) < 8 and "256" in buckets for buckets in tables)
    assert any(len(buckets) > 1 for buckets in tables)
    assert any("budget of 600 s was spent" in note for note in report.notes)
