"""Segments measured on their own, wrong templates dropped, the whole model compared, and reports for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import stof
from stof import masks
from stof.fusion import pipeline
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.operators import in_words
from stof.fusion.measure import segment_timer
from stof.fusion.measure.model_comparison import PLAIN, RULED, SEARCHED, ModelComparison, differing, pick_winner
from stof.fusion.pipeline import Search
from stof.fusion.planner.graph_space import GraphSpace
from stof.fusion.planner.match import TemplateMatch, find_matches
from stof.fusion.records.choices import TunedConfig
from stof.fusion.records.report import FusionReport, SegmentReport
from stof.fusion.records.store import SegmentCandidate
from stof.fusion.templates.gemm_config import GemmShape
from stof.fusion.templates.registry import TEMPLATES, GemmProblem, KernelPolicy, Template
from stof.tuning.timing import Timing
from tests.fusion.graphs import RMSNorm, calls, capture, fuse


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 6), nn.Linear(6, 8), RMSNorm(8)
        self.stored = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x + self.down(F.gelu(self.up(x))))
        return F.relu((h.view(-1, 8) @ self.stored).view(*x.shape[:-1], 6))


def segment(where: slice, dynamic: bool = False) -> TemplateMatch:
    gm = capture(Model().eval(), torch.randn(2, 3, 8), dynamic=dynamic)
    ((match, *_), _) = find_matches(recognize_operators(gm.graph)[where], KernelPolicy.REFERENCE)
    return match


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("where", [slice(0, 2), slice(2, 5), slice(5, 7)])
def test_a_segment_alone_is_what_its_twin_computes(where: slice, dynamic: bool) -> None:
    match = segment(where, dynamic)
    inputs = segment_timer.random_inputs(match)
    assert next(iter(inputs.values())).shape == torch.Size([2, 3, match.problem.shape.k])
    with torch.no_grad():
        out = segment_timer.segment_graph(match, inputs)(*inputs.values())
    for got, expected in zip(out, segment_timer.exact(match, inputs), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_times_of_inductor_and_a_template() -> None:
    timer = segment_timer.SegmentTimer(rounds=1)
    times = timer(segment(slice(0, 2)), [None, ""])
    assert all(0 < t < math.inf for t in times)
    assert timer.failures == {}


def test_a_time_that_cannot_be_told_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"inductor": Timing(9.0, 5.0, True), "=": Timing(9.0, -3.0, True, clear=False)}
    monkeypatch.setattr(segment_timer, "time_calls", lambda calls, device, rounds: found)
    inductor, template = segment_timer.SegmentTimer(rounds=1)(segment(slice(0, 2)), [None, ""])
    assert inductor == 5.0
    assert math.isnan(template)


def test_templates_that_are_wrong_or_do_not_run_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    match = segment(slice(0, 2))
    right = match.template.operator

    def operator(*args: Any, config: str, **kwargs: Any) -> Tensor:
        if config == "breaks":
            raise RuntimeError("out of shared memory\nand a long story")
        out = right(*args, config="", **kwargs)
        return {"wrong": out * 1.001, "empty": out * math.nan}.get(config, out)

    monkeypatch.setattr(Template, "operator", property(lambda self: operator))
    timer = segment_timer.SegmentTimer(rounds=1)
    times = timer(match, ["", "wrong", "empty", "breaks"])
    assert times[0] < math.inf
    assert times[1:] == [math.inf] * 3
    assert timer.failures["linear", "breaks"] == "does not run: out of shared memory"
    assert timer.failures["linear", "wrong"].startswith("wrong: off by")
    assert timer.failures["linear", "empty"].startswith("wrong: off by nan")


class Table:
    """Stands for a timer: every template takes `factor` of Inductor's 10 us an operator."""

    def __init__(self, **factor: float) -> None:
        self.factor = factor
        self.failures: dict[SegmentCandidate, str] = {}

    def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
        inductor = 10.0 * len(match.operators)
        return [inductor * (1.0 if config is None else self.factor.get(match.template.name, 2.0)) for config in configs]


def test_the_search_decides_what_is_lowered() -> None:
    model, x = Model().eval(), torch.randn(2, 3, 8)
    for table, expected in (
        (Table(linear=0.5, linear_norm=0.9), ["linear", "linear", "linear"]),
        (Table(linear=0.9, linear_norm=0.5), ["linear", "linear_norm", "linear"]),
        (Table(linear=1.1, linear_norm=1.1), []),
    ):
        gm = capture(model, x)
        report = fuse(gm, Search(table, seconds=100))
        assert calls(gm) == expected
        assert report.fused == len(expected)
        assert report.measurements > 0
        assert [bool(row.template_us) for row in report.segments] == [bool(row.template) for row in report.segments]
    assert "us at best, Inductor" in report.segments[0].reason


def test_where_no_kernel_serves_nothing_is_measured() -> None:
    gm = capture(Model().eval(), torch.randn(2, 3, 8))
    report = pipeline.fuse(gm, Search(Table(linear=0.5, linear_norm=0.5), seconds=100))
    assert calls(gm) == []
    assert report.measurements == 0
    assert report.notes == ["no template kernel for cpu"]


def test_searches_do_not_try_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 has kernels to measure but none by default: the empty configuration would be the reference."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    shape = GemmShape("linear", 4096, 3072, 768, "gelu", bias=True)
    for dtype, has_default in ((torch.float16, True), (torch.float32, False)):
        problem = GemmProblem(shape, dtype, torch.device("cuda", 0))
        kernels = TEMPLATES[0].configs(problem, KernelPolicy.KERNELS)
        assert kernels
        assert ("" in kernels) == has_default
        assert TEMPLATES[0].configs(problem, KernelPolicy.REFERENCE) == ["", *(one for one in kernels if one)]


def test_times_of_references_are_kept_apart() -> None:
    gm = capture(Model().eval(), torch.randn(2, 3, 8))
    graphs = [
        GraphSpace(recognize_operators(gm.graph), GraphOrder(gm.graph), Table(), policy) for policy in KernelPolicy
    ]
    assert len({graph.key(0, 2) for graph in graphs}) == len(graphs)


def test_a_spent_budget_is_reported() -> None:
    gm = capture(Model().eval(), torch.randn(2, 3, 8))
    report = fuse(gm, Search(Table(linear=0.5, linear_norm=0.5), seconds=-1.0))
    assert calls(gm) == []
    assert report.notes == ["the budget of -1 s was spent after 0 measurements"]


def version(config: str, bucket: str = "linear 4x8x6") -> FusionReport:
    row = SegmentReport("linear + gelu", "linear", config, "measured faster", 2.0, 1.0)
    tuned = {bucket: TunedConfig(config, 1.0, 2.0), "linear 9x9x9": TunedConfig("", 3.0, 2.0)}
    return FusionReport([row], choices=tuned, used={bucket: config}, notes=[f"of {config}"])


@pytest.mark.parametrize(("times", "kept"), [((10.0, 20.0), True), ((20.0, 10.0), False), ((10.0, 10.0), False)])
def test_the_faster_of_two_models_stays(times: tuple[float, float], kept: bool) -> None:
    report, told = version("64x64x64,4w,4s,tile"), []

    def settle(taken: Mapping[str, float]) -> str:
        winner, final = pick_winner({SEARCHED: report}, taken)
        told.append(final)
        return winner

    race = ModelComparison(
        {SEARCHED: lambda x: ("fused", x), PLAIN: lambda x: ("plain", x)},
        settle,
        lambda calls, device: dict(zip(calls, times, strict=True)),
    )
    for _ in range(2):
        assert race(3) == ("fused" if kept else "plain", 3)
    assert told == [report]
    assert report.fused == kept
    assert report.whole_us == times
    assert ("templates kept" if kept else "templates taken back") in report.notes[-1]


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({SEARCHED: 10.0, RULED: 9.0, PLAIN: 20.0}, RULED),
        ({SEARCHED: 9.0, RULED: 9.0, PLAIN: 20.0}, SEARCHED),
        ({SEARCHED: 10.0, RULED: 9.0, PLAIN: 8.0}, PLAIN),
    ],
)
def test_a_search_makes_nothing_slower_than_the_rules(times: dict[str, float], winner: str) -> None:
    searched, ruled = version("64x64x64,4w,4s,tile"), version("")
    searched.measurements = 7
    assert differing(searched, ruled) == {"linear 4x8x6"}
    found, report = pick_winner({SEARCHED: searched, RULED: ruled}, times)
    assert found == winner
    assert "9 us with those by rule" in report.notes[-1]
    assert report.whole_us == (9.0, times[PLAIN])
    assert report.measurements == 7
    assert "of 64x64x64,4w,4s,tile" in report.notes
    if winner == RULED:
        assert report is ruled
        assert list(report.choices) == ["linear 9x9x9"]  # what lost is not told to others
        assert report.notes[-1].endswith("templates by rule kept")
    else:
        assert report is searched
        assert report.fused == (winner == SEARCHED)


def test_reports_print_a_row_for_alike_segments() -> None:
    row = SegmentReport("linear 8>6 + gelu", "linear", "64x64x32,4w,3s,tile", "measured faster", 12.34, 10.0)
    left = SegmentReport("[bold]attention", "", "", "", rest="stof attention")
    long = SegmentReport("layer_norm", "", "", "norm_linear: 37.4 us at best, Inductor 34.5 us")
    buckets = SegmentReport("linear 8>9", "linear", "16=;64=64x64x32,4w,3s,tile", "by the lock")
    report = FusionReport([row, left, row, long, buckets], "001", "abcd", ["a note [in brackets]"])
    for width in (160, 80):
        stream = StringIO()
        Console(width=width, file=stream).print(report)
        text = stream.getvalue()
        assert "3 of 5 segments computed by templates" in text
        assert "scheme abcd" in text
        assert text.count("linear 8>6") == 1
        assert "12.3" in text
        assert "- linear 8>9 by linear, by rows: 16: (default); 64: 64x64x32,4w,3s,tile" in " ".join(text.split())
        assert "[bold]attention" in text
        assert "stof attention" in text
        assert "a note [in brackets]" in text
        assert "- layer_norm: norm_linear: 37.4 us at best" in text
        assert "\N{HORIZONTAL ELLIPSIS}" not in text  # nothing is cut
        assert max(map(len, text.splitlines())) <= width


def test_what_computes_a_segment_in_words() -> None:
    def by(template: str, config: str) -> str:
        return SegmentReport("", template, config, "", rest="stof attention").by

    assert by("", "") == "stof attention"
    assert by("linear", "") == by("linear", "16=;32=") == "linear (default)"
    tile = "16x32x128,4w,3s,tile"
    assert by("linear", tile) == by("linear", f"16={tile}") == f"linear {tile}"
    assert by("linear", f"16={tile};32=;64=64x64x32,4w,3s,tile") == "linear, 3 configurations by rows"


def test_attention_of_ours_is_not_inductors() -> None:
    q = torch.randn(1, 2, 8, 4)
    gm = capture(lambda q: stof.attention(q, q, q, masks.causal()).relu(), q)
    report = fuse(gm)
    assert [(row.operators, row.rest) for row in report.segments] == [("attention + relu", "Inductor, stof attention")]
    gm = capture(lambda q: stof.attention(q, q, q, masks.causal()), q)
    assert [row.by for row in fuse(gm).segments] == ["stof attention"]
    gm = capture(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    assert [row.by for row in fuse(gm).segments] == ["Inductor"]


def test_many_operators_in_few_words() -> None:
    def words(function: Callable[[Tensor], Tensor]) -> str:
        return in_words(recognize_operators(capture(function, torch.randn(3, 8)).graph))

    assert words(lambda x: x.sin()) == "sin"
    assert words(lambda x: F.relu(x) + x) == "relu + residual"
    assert words(lambda x: F.relu(x.sin()) + x) == "3 operators: relu, residual"
    assert words(lambda x: F.relu(F.relu(F.relu(F.gelu(F.gelu(x)))))) == "5 operators: gelu x 2, relu x 3"
    assert words(lambda x: x.sin().cos()) == "2 operators: sin, cos"
    assert words(lambda x: x.sin().cos().tan().exp().log()) == "5 operators: sin, cos, tan, exp, ..."


def test_every_template_takes_its_references_arguments() -> None:
    for template in TEMPLATES:
        names = [argument.name for argument in template.operator._schema.arguments]
        twin = template.reference.__code__.co_varnames[: template.reference.__code__.co_argcount]
        assert [name for name in names if name != "config"] == list(twin)
        assert template.configs(segment(slice(0, 2)).problem, KernelPolicy.REFERENCE) == [""]
        assert template.configs(segment(slice(0, 2)).problem, KernelPolicy.KERNELS) == []
