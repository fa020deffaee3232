"""`stof tune MODEL` on a CPU, where the templates' references serve: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import stof
from stof.cli.main import app
from stof.cli.model_loading import load
from stof.cli.tune_model import View
from stof.errors import ArgumentError
from stof.fusion.measure.model_comparison import SEARCHED
from stof.fusion.planner.search_space import Progress
from stof.fusion.records.choices import read_lock
from stof.fusion.records.report import FusionReport
from stof.integrations.torch import compile as torch_compile
from stof.integrations.torch import compile_options
from stof.integrations.torch.compile import CompileOptions
from tests.fusion.test_segment_timer import Table

MODULE = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x, scale=1.0):
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x)))) * scale

def small():
    return Small(), torch.zeros(4, 16)

def named():
    return Small(), {"x": torch.zeros(4, 16), "scale": 2.0}

def wrong():
    return 3

constant = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "own_small_models.py").write_text(MODULE, encoding="utf-8")
    __import__("sys").modules.pop("own_small_models", None)
    return "own_small_models"


def run(*words: str) -> Any:
    torch.compiler.reset()
    return CliRunner().invoke(app, ["tune", *words])


@pytest.mark.slow
def test_a_model_of_ones_own_is_tuned_and_its_lock_reused(
    own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(compile_options, "SegmentTimer", lambda: Table(linear=0.5))
    monkeypatch.setattr(torch_compile, "wall_us", lambda calls, device: dict.fromkeys(calls, 2.0) | {SEARCHED: 1.0})
    common = ["--dtype", "float32", "--references", "--store", "store", "--budget", "60"]
    done = run(f"{own_module}:small", *common, "--lock", "small.lock", "--png", "out/a.svg")
    assert done.exit_code == 0, done.output
    assert "segments computed by templates" in done.output
    lock = read_lock(tmp_path / "small.lock")
    ((key, graph),) = lock.graphs.items()
    assert (0, 2, "linear", "") in graph.segments
    assert "2.00x" in done.output
    assert f"torch {torch.__version__}" in done.output
    assert "dtype float32" in done.output
    assert "linear" in (tmp_path / "out" / "a.svg").read_text(encoding="utf-8")
    assert not graph.fold
    # Once more: nothing is measured, and the lock keeps what it has.
    again = run(f"{own_module}:named", *common, "--lock", "small.lock")
    assert again.exit_code == 0, again.output
    assert key in read_lock(tmp_path / "small.lock").graphs
    folded = run(f"{own_module}:small", *common, "--fold", "--lock", "folded.lock")
    assert folded.exit_code == 0, folded.output
    assert read_lock(tmp_path / "folded.lock").graphs[key].fold
    # The lock alone gives the same scheme.
    loaded = load(f"{own_module}:small", 1, 1, "full", torch.device("cpu"), torch.float32)
    reports: list[FusionReport] = []
    torch.compiler.reset()
    fast = stof.optimize(
        loaded.model, lock="small.lock", references=True, dynamic=False, store=False, report=reports.append
    )
    with torch.inference_mode():
        torch.testing.assert_close(fast(*loaded.args), loaded.model(*loaded.args))
    (report,) = reports
    assert (report.measurements, report.notes, report.graph) == (0, [], key)
    assert [(row.template, row.config) for row in report.segments if row.template] == [
        (template, config) for _, _, template, config in graph.segments
    ]


def test_a_chart_of_nothing_does_not_lose_the_lock(own_module: str, tmp_path: Path) -> None:
    """Without references no template serves a CPU, so no segment has two times."""
    files = ("--store", "store", "--lock", "small.lock", "--png", "a.svg")
    done = run(f"{own_module}:small", "--dtype", "float32", *files)
    assert done.exit_code == 0, done.output
    assert "no a.svg: no segment has a time" in done.output.replace("\n", " ")
    assert (tmp_path / "small.lock").exists()
    assert not (tmp_path / "a.svg").exists()


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_in_a_terminal_and_in_a_file(terminal: bool) -> None:
    stream = Screen() if terminal else StringIO()
    segment = "linear 3072>768 + residual + layer_norm"
    steps = [
        Progress(0, 3, segment, 1, None, 34.5, 34.5, 50.0),
        Progress(0, 3, segment, 4, None, 34.5, 34.5, 40.0),
        Progress(0, 3, segment, 9, ("linear_norm", "128x256x64,8w,3s,persistent,halves"), 31.2, 34.5, 30.0),
    ]
    with View("bert", Console(file=stream, width=80, force_terminal=terminal)) as view:
        view.say("capturing the model")
        for step in steps:
            view.update(step)
        view.say("done")
    lines = stream.getvalue().splitlines()
    if terminal:
        assert any("bert: done" in line for line in lines)
        return
    first, one, three, last = lines  # nothing is drawn twice, nothing was new the second time
    assert first.startswith("bert: capturing the model, ")
    assert one == f"{segment}: 1 tried, best Inductor 34.5 us, Inductor 34.5 us, 50 s left"
    assert three.startswith(f"{segment}: 9 tried, best linear_norm 128x256x64,8w,3s,persistent,halves 31.2 us")
    assert last.startswith("bert: done, ")
    drawn = StringIO()
    Console(file=drawn, width=80).print(view.table("title"))
    assert max(map(len, drawn.getvalue().splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in drawn.getvalue()  # nothing is cut


def test_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from stof.drawing.tuning import draw_tuning
    from stof.fusion.records.report import SegmentReport

    fused = SegmentReport("linear 8>6 + <gelu>", "linear", "64x64x32", "measured faster", 2.0, 1.0)
    report = FusionReport([fused, fused, SegmentReport("attention", "", "", "")], "001", "ab", ["a <note>"])
    report.whole_us = (10.0, 15.0)
    draw_tuning(tmp_path / "a.png", "title", [report])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    rejected = SegmentReport("linear 8>8", "", "", "measured: Inductor is faster", 2.0, 76.0)
    report.segments.append(rejected)
    draw_tuning(tmp_path / "c.svg", "title", [report])
    drawn = (tmp_path / "c.svg").read_text()
    assert drawn.count("template rejected") == 1
    assert drawn.count("2.00x") == 1
    assert "0.03x" not in drawn
    with pytest.raises(ArgumentError, match="nothing to draw"):
        draw_tuning(tmp_path / "b.png", "title", [FusionReport()])
    with pytest.raises(ArgumentError, match=r"got b\.gif"):
        draw_tuning(tmp_path / "b.gif", "title", [report])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-model"], "no model 'no-such-model'"),
        (["no_such_module:f"], "cannot load no_such_module:f"),
        (["own_small_models:none"], "cannot load own_small_models:none"),
        (["own_small_models:constant"], "is no function"),
        (["own_small_models:wrong"], "must return (model, example inputs), it returned a int"),
        (["own_small_models:small", "--mask", "no_mask(3)"], "no_mask"),
        (["bert", "--dtype", "int8"], "dtype is float16"),
        (["bert", "--effort", "none"], "effort is quick or full"),
        (["bert", "--png", "a.gif"], "got a.gif"),
        (["bert", "--html", "a.html"], "--html is removed: `stof tune MODEL > FILE` writes the same tables"),
        (["bert", "--device"], "not for the model 'bert'"),
        (["--lock", "a.lock"], "--lock is for a model"),
        (["--fold"], "--fold is for a model"),
        ([], "give a MODEL to tune"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_what_cannot_be_tuned(words: list[str], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_broken_lock_is_not_written_over(own_module: str, tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text("{", encoding="utf-8")
    done = run(f"{own_module}:small", "--dtype", "float32", "--lock", "a.lock", "--store", "store")
    assert done.exit_code == 2
    assert "is not a usable lock file" in " ".join(done.output.split())
    assert (tmp_path / "a.lock").read_text(encoding="utf-8") == "{"


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.integrations import models

    models.bert().save_pretrained(tmp_path / "mine")
    loaded = load(str(tmp_path / "mine"), 2, 5, "causal()", torch.device("cpu"), torch.float32)
    assert loaded.kwargs["input_ids"].shape == (2, 5)
    assert loaded.mask == stof.masks.causal()
    with torch.no_grad():
        assert loaded.model(**loaded.kwargs)[0].shape[:2] == (2, 5)
    models.vit().save_pretrained(tmp_path / "seen")
    images = load(str(tmp_path / "seen"), 2, 5, "full", torch.device("cpu"), torch.float32).kwargs["pixel_values"]
    assert images.shape == (2, 3, 24, 24)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    with pytest.raises(ArgumentError, match="does not hold a model"):
        load(str(tmp_path / "empty"), 2, 5, "full", torch.device("cpu"), torch.float32)


def test_floating_inputs_take_the_dtype(own_module: str) -> None:
    loaded = load(f"{own_module}:named", 1, 1, "full", torch.device("cpu"), torch.float64)
    x: Tensor = loaded.kwargs["x"]
    assert (x.dtype, loaded.kwargs["scale"]) == (torch.float64, 2.0)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float64}
    assert isinstance(loaded.model, nn.Module)
    assert not loaded.model.training


def test_the_option_takes_a_path() -> None:
    assert CompileOptions.parse({"lock": None}).lock is None


@pytest.mark.parametrize("option", ["--lock", "--png"])
def test_files_that_cannot_be_written_are_refused_before_the_search(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "file" / "x.png", tmp_path / "folder.png"):
        done = run("nothing_is_loaded", option, str(path))
        assert done.exit_code == 2
        assert f"cannot write {path}" in done.output.replace("\n", "")
