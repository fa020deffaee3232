"""`python -m benchmarks build`: it checks before it times, and writes what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.attention import mask_build as build
from benchmarks.cli.attention import app
from stof import masks
from stof.errors import ArgumentError
from stof.testing.mask_grid import GRID

CPU = torch.device("cpu")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ROUNDS", 1)
    monkeypatch.setattr(build, "_AWAKE_MS", 0.0)
    path = tmp_path / "build.json"
    options = ["--device", "cpu", "--length", "256", "--heads", "2", "--head-dim", "16", "--budget", "0"]
    done = CliRunner().invoke(app, ["build", *options, "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert "Masks made at run time" in done.output
    found = json.loads(path.read_text())
    assert {row["mask"] for row in found["steps"]} == {"vertical-slash", "block top-k"}
    for row in found["steps"]:
        assert row["error"] < 1e-5
        assert row["overhead"] == pytest.approx(row["step_us"] / row["best_us"] - 1)
    growth, built = found["builds"][:4], found["builds"][4:]
    assert [row["how"].split(" by ")[0].split(" with ")[0] for row in growth] == ["extended", "rebuilt"] * 2
    assert [row["how"] for row in built] == ["stof 128x128"] * 11
    assert {row["mask"] for row in built} >= {*GRID, "documents", "dense", "function", "long-documents"}
    assert all(row["ms"] > 0 for row in found["builds"])


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.stof, "attention", lambda q, k, v, plan: torch.zeros_like(q))
    with pytest.raises(AssertionError, match="is off by"):
        list(build.step_rows(CPU, 256, 1, 16))


def test_wrong_layouts_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original = build.build_layout
    monkeypatch.setattr(build, "build_layout", lambda mask, *a, **options: original(masks.full(), *a, **options))
    with pytest.raises(AssertionError, match="keeps other scores"):
        list(build.known_rows(CPU, small=True, flex=False, deadline=0))


def test_masks_are_chosen_by_name() -> None:
    names = ["dense", "causal"]
    assert [known.name for known in build.known_masks(CPU, small=True, names=names)] == names
    with pytest.raises(ArgumentError, match="unknown masks nobody; there are full, causal"):
        list(build.known_masks(CPU, small=True, names=["causal", "nobody"]))
    options = ["--device", "cpu", "--parts", "known", "--no-flex", "--masks", "causal dense"]
    done = CliRunner().invoke(app, ["build", *options])
    assert done.exit_code == 0, done.output
    assert "causal" in done.output
    assert "Masks made at run time" not in done.output
    assert "extended" not in done.output


def test_what_fails_is_a_row() -> None:
    def broken() -> object:
        raise ValueError("no\nsuch thing")

    row = build.timed_build("mask", 8, "someone", broken, CPU)
    assert row.ms is None
    assert row.note == "ValueError: no"


def test_the_masks_are_the_same_for_all() -> None:
    for known in build.known_masks(CPU, small=True):
        length = known.q_len
        rows, columns = torch.arange(length)[::7, None], torch.arange(length)[None, ::5]
        zero = torch.zeros((), dtype=torch.int64)
        index = masks.Index.make(rows[:, 0], columns[0], q_len=length, kv_len=length)
        ours, theirs = known.mask.evaluate(index)[0, 0], known.mask_mod(zero, zero, rows, columns)
        assert torch.equal(*torch.broadcast_tensors(ours, theirs)), known.name
