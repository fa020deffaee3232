"""`python -m benchmarks search`: everything is measured once, in pieces if need be; all searches see the same times."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from benchmarks.cli.models import search
from benchmarks.fusion.repeated_layers import Repetition, find_layers
from benchmarks.fusion.search_ablation import (
    NAMES,
    PAPER,
    SHARES,
    Segment,
    Table,
    compare,
    measured,
    model_graph,
    read_table,
)
from stof.errors import ArgumentError
from stof.fusion.planner import match
from stof.fusion.planner.match import TemplateMatch
from stof.fusion.records.store import SegmentCandidate, Store
from stof.fusion.templates.registry import Template

ROOT = Path(__file__).parents[2]


class Timer:
    """Made-up times by template and configuration."""

    def __init__(self) -> None:
        self.failures: dict[SegmentCandidate, str] = {}
        self.asked: list[tuple[TemplateMatch, str | None]] = []

    def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
        self.asked += [(match, config) for config in configs]
        base = 10.0 * len(match.operators)
        times = [base if config is None else base * (1.1 - 0.01 * (len(config) * 7 % 31)) for config in configs]
        return [math.inf if config == "ccc" else us for config, us in zip(configs, times, strict=True)]


class ParallelCompiler:
    """Notes what it is told to compile."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, wanted: Sequence[tuple[TemplateMatch, Sequence[str]]]) -> None:
        for _, configs in wanted:
            self.compiled += configs


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    """The graph of a BERT of two layers; templates serve the CPU and have 40 configurations."""
    pytest.importorskip("transformers")
    from benchmarks.paper import models

    monkeypatch.setattr(match, "no_kernel", lambda device, dtype, serving: "")
    monkeypatch.setattr(Template, "configs", lambda self, problem, serving: ["c" * i for i in range(40)])
    monkeypatch.setitem(models.TINY, "bert-base", models._bert(2, 2) | {"vocab_size": 30000})
    models.subject_of.cache_clear()
    gm = model_graph("bert-base", 1, 64, torch.device("cpu"), torch.float32)
    models.subject_of.cache_clear()
    return gm


def test_everything_is_measured_once_and_in_pieces(tmp_path: Path, two_layers: fx.GraphModule) -> None:
    gm = two_layers
    idle = ParallelCompiler()
    assert measured(gm, Timer(), Store(tmp_path, {}), -1.0, idle) == (None, 0)
    assert idle.compiled == []
    first, compiler = Timer(), ParallelCompiler()
    table, taken = measured(gm, first, Store(tmp_path, {}), 100.0, compiler)
    assert table is not None
    assert taken == len(first.asked) == sum(len(segment.times) for segment in table.segments)
    assert compiler.compiled == [config for _, config in first.asked if config is not None]
    again, nothing = Timer(), ParallelCompiler()
    assert measured(gm, again, Store(tmp_path, {}), 100.0, nothing) == (table, 0)
    assert again.asked == []
    assert nothing.compiled == []
    written = json.loads(json.dumps(table.to_json()))
    assert Table.from_json(written) == table


def test_noisy_times_are_taken_again(tmp_path: Path, two_layers: fx.GraphModule) -> None:
    class Noisy(Timer):
        def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
            times = super().__call__(match, configs)
            return [math.nan if config == "c" * 7 else us for config, us in zip(configs, times, strict=True)]

    store = Store(tmp_path, {})
    table, taken = measured(two_layers, Noisy(), store, 100.0)
    assert table is None
    again = Timer()
    table, _ = measured(two_layers, again, store, 100.0)
    assert table is not None
    assert {config for _, config in again.asked} == {"c" * 7}
    assert len(again.asked) < taken


def test_a_whole_model_is_one_table_with_its_layers_alike(tmp_path: Path, two_layers: fx.GraphModule) -> None:
    table, _ = measured(two_layers, Timer(), Store(tmp_path, {}), 100.0)
    assert table is not None
    places = {segment.label: len(segment.places) for segment in table.segments}
    assert places["linear 128>512 + gelu"] == 2
    assert any("128>384" in label for label in places)  # query, key and value are one GEMM
    rows = {row.search: row for row in compare(table, seeds=2, shares=(1.0,))}
    assert rows["stage 1 alone"].saved_us <= rows["two stages"].saved_us <= rows["exhaustive"].saved_us


def test_searches_see_the_same_times() -> None:
    """Two segments contest an operator; one configuration in forty is the best of its segment."""

    def text(i: int) -> str:
        return f"64x64x64,4w,{i}s,tile"

    left, right = ({("linear", text(i)): 30.0 - 10 * math.cos(i) for i in range(40)} for _ in range(2))
    right |= {("linear", text(17)): 4.0, ("linear", text(3)): math.inf}
    segments = [
        Segment(name, (place,), {None: 25.0, **times}, dict.fromkeys(times, 0.0))
        for name, place, times in (("left", (0, 2), left), ("right", (1, 3), right))
    ]
    table = Table((True, False, True), ("0", "1", "2"), 3, tuple(segments))
    rows = compare(table, seeds=4, shares=(0.2, 1.0))
    names = [*NAMES.values(), PAPER, "random"]
    assert [row.search for row in rows] == ["exhaustive", *names * 2]
    best = rows[0]
    assert (best.saved_us, best.measurements) == (21.0, 82)
    for row in rows[1:]:
        assert row.measurements <= row.share * 82
        assert row.worst_us <= row.saved_us <= row.best_us == 21.0
    assert rows[1].saved_us >= rows[3].saved_us
    assert rows[2].saved_us >= rows[3].saved_us
    assert [row.search for row in compare(table, 1, (0.2,), ("reward",))] == [
        "exhaustive",
        "two stages, reward",
        PAPER,
        "random",
    ]
    assert compare(table, seeds=4, shares=(0.2, 1.0)) == rows


@pytest.mark.parametrize("model", ["bert-small", pytest.param("t5", marks=pytest.mark.slow)])
def test_measured_times_searched_again(tmp_path: Path, model: str) -> None:
    """The times of an H200 give the rows that stand beside them, and what docs/paper.md says of the stages."""
    results = ROOT / "benchmarks" / "results" / f"h200-search-{model}.json"
    search(replay=results, output=tmp_path / "again.json")
    content, table = read_table(tmp_path / "again.json")
    recorded, same = read_table(results)
    assert table == same
    assert content["rows"] == recorded["rows"]
    rows = {(row["search"], row["share"]): row for row in content["rows"]}
    best = rows["exhaustive", 1.0]
    for share in SHARES:
        even, reward, one, drawn = (rows[name, share] for name in (*NAMES.values(), "random"))
        assert max(even["measurements"], reward["measurements"]) <= share * best["measurements"]
        assert one["saved_us"] < min(even["saved_us"], reward["saved_us"]) <= best["saved_us"]
        assert drawn["saved_us"] < 0.8 * even["saved_us"]
    assert rows["two stages", 0.2]["saved_us"] > 0.9 * best["saved_us"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(2, 4), st.integers(0, 5), st.integers(0, 5))
def test_layers_are_found_between_other_operators(layer: list[int], count: int, before: int, after: int) -> None:
    numbers = [10 + i for i in range(before)] + layer * count + [20 + i for i in range(after)]
    found = find_layers(numbers)
    assert found.start <= before
    assert found.start + found.length >= before + count * len(layer)
    assert found.count >= 2
    classes: dict[tuple[str, int], set[int]] = {}
    for place, number in enumerate(numbers):
        classes.setdefault(found.place_class(place), set()).add(number)
    assert all(len(values) == 1 for values in classes.values())


def test_nothing_repeats() -> None:
    assert find_layers([1, 2, 3]) == Repetition()
    assert Repetition().count == 0


def test_files_that_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ArgumentError, match="no result of `python -m benchmarks search`"):
        read_table(path)
