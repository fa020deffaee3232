"""Locks and choices: written, read and applied elsewhere; what does not fit is told in one line and left to rules."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stof.errors import ArgumentError, LockFileError
from stof.fusion.pipeline import Search, fuse
from stof.fusion.planner.lock_replay import Replay
from stof.fusion.planner.match import TemplateMatch
from stof.fusion.records.choices import (
    ChoiceTable,
    GraphChoice,
    TunedConfig,
    choices_path,
    current_versions,
    known_choices,
    read_choices,
    read_lock,
    update_choices,
)
from stof.fusion.records.report import FusionReport
from stof.fusion.records.store import Store
from stof.fusion.templates.registry import Template
from stof.fusion.templates.row_buckets import format_table
from stof.integrations.torch.compile import CompileOptions
from stof.runtime.files import DEVICE_DATA, write_checked
from tests.fusion.graphs import RMSNorm, calls, capture
from tests.fusion.test_segment_timer import Model, Table
from tests.fusion.test_template_ops import GONE

LINEAR = Table(linear=0.5, linear_norm=0.9)
NORMS = Table(linear=0.9, linear_norm=0.5)


def graph(rows: int = 3) -> Any:
    return capture(Model().eval(), torch.randn(2, rows, 8))


def tuned(table: Table, store: Store | None = None) -> tuple[ChoiceTable, FusionReport, list[str]]:
    gm = graph()
    report = fuse(gm, Search(table, seconds=100, store=store), references=True)
    lock = ChoiceTable("here", current_versions())
    report.add_to(lock)
    return lock, report, calls(gm)


def apply(lock: ChoiceTable, rows: int = 3, **changes: Any) -> tuple[FusionReport, list[str]]:
    gm = graph(rows)
    replay = replace(Replay(lock, "here", lambda match, config: ""), **changes)
    report = fuse(gm, references=True, replay=replay)
    return report, calls(gm)


def by(config: str, locked: GraphChoice) -> GraphChoice:
    """The same segments by another configuration or table."""
    return GraphChoice(locked.fold, tuple((*segment, config) for *segment, _ in locked.segments))


@pytest.mark.parametrize("table", [LINEAR, NORMS])
def test_a_lock_gives_the_same_scheme_with_nothing_measured(table: Table, tmp_path: Path) -> None:
    lock, report, expected = tuned(table)
    lock.write_lock(tmp_path / "model.lock")
    again = read_lock(tmp_path / "model.lock")
    assert again == lock
    found, called = apply(again)
    assert called == expected
    assert (found.scheme, found.digest, found.measurements, found.notes) == (report.scheme, report.digest, 0, [])
    assert [(s.template, s.config) for s in found.segments] == [(s.template, s.config) for s in report.segments]
    assert {s.reason for s in found.segments if s.template} == {"by the lock"}


def test_a_lock_that_takes_all_back_fuses_nothing() -> None:
    _, report, _ = tuned(LINEAR)
    report.revert_to_inductor("slower")
    lock = ChoiceTable("here", current_versions())
    report.add_to(lock)
    found, called = apply(lock)
    assert (called, found.fused, found.notes) == ([], 0, [])


def test_a_lock_of_another_device_is_left_to_the_rules() -> None:
    found, called = apply(tuned(LINEAR)[0], device="there")
    (note,) = found.notes
    assert note.startswith("the lock is for here, this is there: rules decide; `stof tune MODEL --lock FILE`")
    gm = graph()
    fuse(gm, references=True)
    assert called == calls(gm)


def test_a_graph_that_is_not_in_a_lock_takes_its_choices() -> None:
    lock, _, expected = tuned(NORMS)
    found, called = apply(lock, rows=4)  # 8 rows instead of 6: the same power of two
    assert found.notes == ["the lock has no graph like this: rules decide, by its configurations where shapes agree"]
    assert called == expected
    far, _ = apply(lock, rows=400)
    assert "by the lock" not in {row.reason for row in far.segments}


def test_what_a_check_refuses_is_told_once_and_remembered(tmp_path: Path) -> None:
    lock, _, expected = tuned(LINEAR)
    asked: list[str] = []

    def check(match: TemplateMatch, config: str) -> str:
        asked.append(match.problem.text())
        return "wrong: off by 3" if match.problem.shape.activation == "gelu" else ""

    store = Store(tmp_path, {"device": "here"})
    for _ in range(2):  # the second time nothing is asked
        found, called = apply(lock, check=check, store=store)
        (note,) = found.notes
        assert note.endswith("by linear: (default): wrong: off by 3; (default): wrong: off by 3; Inductor computes it")
        assert "\n" not in note
        assert called == expected[1:]
        assert len([row for row in found.segments if row.reason == "by the lock"]) == len(expected) - 1
    assert len(asked) == len(set(asked)) == 3


def test_configurations_and_templates_that_are_gone_are_told() -> None:
    lock, _, _ = tuned(LINEAR)
    ((key, locked),) = lock.graphs.items()
    (*first, _, _), (*second, name, _), *rest = locked.segments
    gone = ((*first, "other", ""), (*second, name, "64x64x32,4w,3s,tile"), *rest)
    lock.graphs[key] = GraphChoice(False, gone)
    lock.versions |= {"torch": "1.0"}
    found, _ = apply(lock)
    versions, one, two = found.notes
    assert versions == f"the lock was made with torch 1.0; here: torch {current_versions()['torch']}"
    assert "by other: does not serve it here; Inductor computes it" in one
    assert "by linear: 64x64x32,4w,3s,tile: no kernel runs on cpu" in two
    assert "Inductor" not in two
    assert next(row.reason for row in found.segments if row.template) == "default, see the note below"


TILE, WIDE = "64x64x64,4w,4s,tile", "128x256x64,5s,cooperative"


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Templates believe that their tensors lie on a GPU; everything else runs the references."""
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in ("configs", "refusal"):
        plain = getattr(Template, name)
        monkeypatch.setattr(
            Template,
            name,
            lambda self, problem, *rest, plain=plain: plain(
                self, replace(problem, device=torch.device("cuda"), dtype=torch.float16), *rest
            ),
        )


def test_every_entry_of_a_table_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_graph() -> Any:
        return capture(Model().eval(), torch.randn(4, 64, 8), dynamic=True)

    report = fuse(open_graph(), Search(LINEAR, seconds=100), references=True)
    lock = ChoiceTable("here", current_versions())
    report.add_to(lock)
    ((key, locked),) = lock.graphs.items()
    table = format_table({16: TILE, 64: WIDE, 256: TILE, 1024: "24x64x64,4w,4s,tile", 2048: "fast"})
    lock.graphs[key] = by(table, locked)
    on_a_gpu(monkeypatch, (8, 0))
    asked: list[str] = []

    def check(match: TemplateMatch, config: str) -> str:
        asked.append(config)
        return ""

    found = fuse(open_graph(), references=True, replay=Replay(lock, "here", check))
    kept = format_table({16: TILE, 256: TILE})
    assert {row.config for row in found.segments if row.reason == "by the lock"} == {kept}
    assert set(asked) == {TILE}
    for configuration, reason in (
        (f"{WIDE} for 64 rows: ", "written for compute capability 9.0"),
        ("24x64x64,4w,4s,tile for 1024 rows: ", "tile sizes are powers of two"),
        ("fast for 2048 rows: ", "'fast' is no configuration"),
    ):
        said = [note for note in found.notes if configuration in note]
        assert len(said) == len(locked.segments)
        assert all(reason in note.partition(configuration)[2] and "Inductor" not in note for note in said)
    # The default takes the place of what is left out, also for the rows of the first call.
    table = format_table({16: TILE, 256: WIDE})
    lock.graphs[key] = by(table, locked)
    found = fuse(open_graph(), references=True, replay=Replay(lock, "here", check))
    assert "by the lock" not in {row.reason for row in found.segments}
    assert {row.config for row in found.segments if row.template} == {format_table({16: TILE})}
    assert sum(f"{WIDE} for 256 rows: needs" in note for note in found.notes) == 3
    # Text that is no table is told as well, and ends nothing.
    lock.graphs[key] = by("24=fast", locked)
    assert "names no configurations" in fuse(open_graph(), references=True, replay=Replay(lock, "here", check)).notes[0]


@pytest.mark.parametrize("gone", GONE)
def test_kinds_of_earlier_versions_are_told_and_replaced_by_the_default(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, _, expected = tuned(LINEAR)
    ((key, locked),) = lock.graphs.items()
    lock.choices = {text: replace(one, config=gone) for text, one in lock.choices.items()}
    for config in (gone, format_table({16: gone})):
        lock.graphs[key] = by(config, locked)
        with monkeypatch.context() as patched:
            on_a_gpu(patched)
            found, called = apply(lock)
        assert "by the lock" not in {row.reason for row in found.segments}
        assert called == expected
        assert len(found.notes) == len(locked.segments)
        assert all("is no configuration; expected" in note for note in found.notes)
    # Of a graph that the lock does not have, its choices are asked.
    found, _ = apply(lock, rows=4)
    assert gone not in {row.config for row in found.segments}


def test_a_lock_folds_where_it_was_made_so(tmp_path: Path) -> None:
    def normed(rows: int = 3) -> Any:
        model = nn.Sequential(RMSNorm(8), nn.Linear(8, 6), nn.GELU()).eval()
        return capture(model, torch.randn(2, rows, 8))

    for fold in (True, False):
        gm = normed()
        report = fuse(gm, Search(Table(rms_linear=0.5, norm_linear=0.6), seconds=100), references=True, fold=fold)
        assert calls(gm) == ["rms_linear" if fold else "norm_linear"]
        lock = ChoiceTable("here", current_versions())
        report.add_to(lock)
        lock.write_lock(tmp_path / "model.lock")
        lock = read_lock(tmp_path / "model.lock")
        for rows in (3, 4):  # its graph, and one that is not in the lock
            gm = normed(rows)
            found = fuse(gm, references=True, replay=Replay(lock, "here", lambda match, config: ""))
            assert calls(gm) == ["rms_linear" if fold else "norm_linear"]
            assert any("weights are folded into GEMMs" in note for note in found.notes) == fold
        gm = normed()
        fuse(gm, references=True, replay=Replay(lock, "there", lambda match, config: ""))
        assert "rms_linear" not in calls(gm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "JSONDecodeError"),
        ("[]", "not a JSON object with an entry 'stof_lock'"),
        ('{"device": "a"}', "not a JSON object with an entry 'stof_lock'"),
        ('{"stof_lock": 99}', "of version 99, this stof reads version 3"),
        ('{"stof_lock": 2, "device": "a"}', "of version 2, this stof reads version 3.* write it anew with"),
        ('{"stof_lock": 3, "device": "a"}', "does not match its checksum"),
    ],
)
def test_locks_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "model.lock"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(LockFileError, match=message):
        read_lock(path)
    with pytest.raises(LockFileError, match=message):  # before anything is compiled
        CompileOptions.parse({"lock": path})


@pytest.mark.parametrize("change", ["order", "empty", "choices"])
def test_locks_whose_parts_do_not_fit_are_broken(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.lock"
    tuned(LINEAR)[0].write_lock(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    (held,) = data["graphs"].values()
    if change == "order":
        held["segments"].reverse()
    elif change == "empty":
        held["segments"][0][1] = held["segments"][0][0]
    else:
        data["choices"]["broken"] = {"config": "", "template_us": -1, "inductor_us": 2}
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(LockFileError, match="does not match its checksum"):
        read_lock(path)
    del data["checksum"]
    write_checked(path, json.dumps(data))
    with pytest.raises(LockFileError, match="not a usable lock file"):
        read_lock(path)


def test_a_lock_and_a_search_contradict(tmp_path: Path) -> None:
    tuned(LINEAR)[0].write_lock(tmp_path / "a.lock")
    with pytest.raises(ArgumentError, match="give one of the two"):
        CompileOptions.parse({"lock": tmp_path / "a.lock", "effort": "quick"})


def test_choices_go_before_rules_and_lead_searches(tmp_path: Path) -> None:
    store = Store(tmp_path, {"device": "My GPU 3"})
    _, report, expected = tuned(NORMS, store)
    assert choices_path(tmp_path, "My GPU 3").name == "choices-my-gpu-3-v3.json"
    known = known_choices("My GPU 3", tmp_path)
    gm = graph()
    found = fuse(gm, references=True, known=known)
    assert calls(gm) == expected
    assert {row.reason for row in found.segments if row.template} == {"measured faster before"}
    assert (found.measurements, len(report.choices) > 3) == (0, True)
    slower = {key: TunedConfig(one.config, 9.0, 8.0) for key, one in report.choices.items()}
    gm = graph()
    found = fuse(gm, references=True, known=slower)
    assert {"linear", "linear_norm"}.isdisjoint(calls(gm))
    assert "us at best before" in found.segments[0].reason


def test_packaged_choices_come_after_the_users(tmp_path: Path) -> None:
    ours, theirs = TunedConfig("a", 1.0, 2.0), TunedConfig("b", 3.0, 4.0)
    update_choices(tmp_path / "packaged", "x", {"one": ours, "two": ours})
    update_choices(tmp_path / "user", "x", {"two": theirs})
    assert known_choices("x", tmp_path / "user", tmp_path / "packaged") == {"one": ours, "two": theirs}
    assert known_choices("x", None, tmp_path / "packaged")["two"] == ours


def test_choices_of_another_device_are_ignored_with_a_warning(tmp_path: Path) -> None:
    """Their file may have the same name: `X 1` and `x-1`."""
    update_choices(tmp_path, "X 1", {"one": TunedConfig("a", 1.0, 2.0)})
    assert choices_path(tmp_path, "X 1") == choices_path(tmp_path, "x-1")
    with pytest.warns(UserWarning, match="is ignored: it is of the device 'X 1', not 'x-1'"):
        assert read_choices(tmp_path, "x-1") == {}


@pytest.mark.parametrize(
    "value", [{}, 3, {"config": "", "template_us": -1.0, "inductor_us": 1.0}, {"config": "", "template_us": 10**400}]
)
def test_choices_of_wrong_values_are_ignored_with_a_warning(tmp_path: Path, value: Any) -> None:
    path = choices_path(tmp_path, "x")
    content = {"version": 3, "device": "x", "versions": {}, "choices": {"one": value}, "graphs": {}}
    write_checked(path, json.dumps(content))
    with pytest.warns(UserWarning, match="is ignored"):
        assert read_choices(tmp_path, "x") == {}


def test_packaged_files_are_whole() -> None:
    for path in DEVICE_DATA.glob("choices-*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        assert path == choices_path(DEVICE_DATA, data["device"])
        assert len(read_choices(DEVICE_DATA, data["device"])) == len(data["choices"]) > 0


def test_a_search_that_is_killed_has_kept_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(Table):
        def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return super().__call__(match, configs)

    monkeypatch.setattr("stof.fusion.pipeline._KEEP_EVERY", 0.0)
    store, dies = Store(tmp_path, {"device": "x"}), Dies(linear=0.5)
    dies.left = 3
    with pytest.raises(KeyboardInterrupt):
        fuse(graph(), Search(dies, seconds=100, store=store), references=True)
    assert len(store.load().segments) >= 2


def test_a_second_search_goes_the_same_way_without_measuring(tmp_path: Path) -> None:
    """Whatever the first one found out would lead another search elsewhere: its result is kept, too."""
    store = Store(tmp_path, {"device": "x"})
    _, first, expected = tuned(NORMS, store)
    gm = graph()
    again = fuse(gm, Search(Table(linear=0.1), seconds=100, store=store), references=True, known=first.choices)
    assert calls(gm) == expected
    assert (again.measurements, again.segments, again.digest) == (0, first.segments, first.digest)
    # A search that is more thorough starts from there, and goes on.
    more = fuse(graph(), Search(NORMS, seconds=100, store=store, per_segment=9), references=True)
    assert more.segments == first.segments
    data = store.load()
    assert set(data.searched.values()) == {9}


def test_times_that_could_not_be_told_are_not_kept(tmp_path: Path) -> None:
    class Busy(Table):
        def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
            times = super().__call__(match, configs)
            drowned = match.problem.shape.activation == "gelu"
            return [math.nan if drowned and config is None else us for config, us in zip(configs, times, strict=True)]

    store = Store(tmp_path, {"device": "x"})
    first = fuse(graph(), Search(Busy(linear=0.5), seconds=100, store=store), references=True)
    assert not any("gelu" in row.operators and row.template for row in first.segments)
    (note,) = first.notes
    assert note.startswith(f"1 of {first.measurements} times could not be told from other work on the device")
    kept = store.load()  # without a warning
    assert all(us > 0 for entry in kept.segments.values() for us in entry.values())
    assert set(kept.searched) < set(kept.segments), "the graph is not among them"
    # The device is idle again: what could not be told is measured, and what that leads to.
    again = fuse(graph(), Search(Table(linear=0.5), seconds=100, store=store), references=True)
    assert 0 < again.measurements < first.measurements
    assert any("gelu" in row.operators and row.template for row in again.segments)
    assert set(store.load().searched) - set(store.load().segments), "the graph"
