"""Result files: merging, the report's arithmetic, what it shows, and the command line around it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.attention.report import cells_of, draw_speedups, line, markdown, reasons, summaries, summary_line
from benchmarks.attention.run import KEY, NotRun, Row
from benchmarks.cli.attention import app
from benchmarks.results_io import RowFile, provenance, read_results, write_results
from benchmarks.timing import host_us
from stof.errors import ArgumentError

CPU = torch.device("cpu")


def row(impl: str, us: float | None, mask: str = "strided", length: int = 1024, density: float = 0.25) -> Row:
    return Row(mask, 1, 2, 2, 64, length, length, "float16", density, impl, us, 9.0, 1.0, 1e-4 if us else 0.5)


def untimed(impl: str, mask: str = "strided") -> Row:
    return replace(row(impl, None, mask), call_us=None)


def missing(impl: str, reason: str, mask: str = "strided", length: int = 1024) -> NotRun:
    return NotRun(mask, 1, 2, 2, 64, length, length, "float16", impl, reason)


SYNTHETIC = [
    row("stof", 10.0),
    row("flex", 40.0),
    row("sdpa", 30.0),
    untimed("flash-4"),
    row("stof", 20.0, length=2048),
    row("flex", 10.0, length=2048),
    row("stof", 50.0, "causal", density=0.5),
    row("flash-2", 40.0, "causal", density=0.5),
    untimed("stof", "dilated"),
    row("flex", 10.0, "dilated"),
]
NOT_RUN = [
    missing("cudnn-flex", "nvidia-cudnn-frontend is not usable here: ModuleNotFoundError: no"),
    missing("sdpa-native", "serves only full and causal masks"),
    missing("sdpa-native", "serves only full and causal masks", length=2048),
]


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "220"}).invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_cells_rate_stof_against_its_best_peer() -> None:
    cells = {(cell.mask, cell.sizes[4]): cell for cell in cells_of(SYNTHETIC, NOT_RUN)}
    cell = cells["strided", 1024]
    assert cell.best == ("sdpa", 30.0)
    assert cell.speedup == pytest.approx(3.0)
    assert cell.tflops == pytest.approx(4 * 2 * 64 * 0.25 * 1024**2 / 10e-6 * 1e-12)
    assert cell.wrong == ["flash-4"]
    assert cell.shape == "B1 H2 D64 S1024"
    assert cells["strided", 2048].speedup == pytest.approx(0.5)
    assert cells["dilated", 1024].speedup is None
    assert [cell.kind for cell in cells_of(SYNTHETIC)] == ["dense-like", "sparse", "sparse", "sparse"]


def test_means_by_class() -> None:
    dense, sparse = summaries(cells_of(SYNTHETIC))
    assert (dense.kind, dense.cells, dense.minimum) == ("dense-like", 1, pytest.approx(0.8))
    assert (sparse.kind, sparse.cells, sparse.minimum) == ("sparse", 2, pytest.approx(0.5))
    assert sparse.geometric_mean == pytest.approx(math.sqrt(3.0 * 0.5))
    assert summary_line(sparse).endswith("lowest 0.50x (strided B1 H2 D64 S2048)")


def test_wrong_and_missing_are_visible() -> None:
    cells = cells_of(SYNTHETIC, NOT_RUN)
    lines = {(cell.mask, cell.sizes[4]): " ".join(line(cell)) for cell in cells}
    assert "WRONG: flash-4" in lines["strided", 1024]
    assert "missing: cudnn-flex" in lines["strided", 1024]
    assert "sdpa-native" not in lines["strided", 1024]
    assert "WRONG: stof" in lines["dilated", 1024]
    assert "sdpa-native: serves only full and causal masks (2 cells)" in reasons(cells)
    assert "| sparse | strided | B1 H2 D64 S1024 |" in markdown(cells)
    assert "- sparse: 1.22x" in markdown(cells)


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, provenance(CPU), SYNTHETIC, NOT_RUN)
    found = read_results(path, Row)
    assert (found.rows, found.not_run) == (SYNTHETIC, NOT_RUN)
    write_results(path, provenance(CPU), SYNTHETIC)
    assert set(json.loads(path.read_text())) == {"meta", "rows"}
    assert list(tmp_path.iterdir()) == [path]


def test_merging_replaces_what_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = RowFile(path, CPU, Row, KEY, mixed=True)
    first.add([row("stof", 10.0), row("flex", 40.0)], [missing("flash-4", "no")])
    first.add([row("stof", 20.0, length=2048)], [])
    assert len(read_results(path, Row).rows) == 3  # after every cell
    second = RowFile(path, CPU, Row, KEY, mixed=True)
    second.add([row("stof", 5.0), row("flash-4", 7.0)], [missing("flex", "broke")])
    found = read_results(path, Row)
    assert {(r.impl, r.q_len): r.gpu_us for r in found.rows} == {
        ("stof", 2048): 20.0,
        ("stof", 1024): 5.0,
        ("flash-4", 1024): 7.0,
    }
    assert [entry.impl for entry in found.not_run] == ["flex"]


def test_merging_refuses_other_devices_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, provenance(CPU), SYNTHETIC)
    path.write_text(path.read_text().replace('"device": "', '"device": "another '))
    with pytest.raises(ArgumentError, match="another"):
        RowFile(path, CPU, Row, KEY, mixed=True)
    path.write_text("[]")
    with pytest.raises(ArgumentError, match="no result"):
        RowFile(path, CPU, Row, KEY, mixed=True)
    with pytest.raises(ArgumentError, match=r"cannot read .*nothing\.json: No such file"):
        read_results(tmp_path / "nothing.json", Row)


def test_report_command_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "results.json", tmp_path / "pictures" / "speedup.png"
    write_results(path, provenance(CPU), SYNTHETIC, NOT_RUN)
    shown = run("report", str(path), "--png", str(picture))
    assert "3.00x" in shown
    assert "sparse: 1.22x over the best peer (geometric mean of 2 cells)" in shown
    assert "not run: cudnn-flex: nvidia-cudnn-frontend is not usable here" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("report", str(path), "--markdown").startswith("| class | mask |")


def test_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match="nothing to draw"):
        draw_speedups(cells_of([row("stof", 1.0)]), tmp_path / "x.png", "")


def test_attention_command_writes_and_merges(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    common = ["--device", "cpu", "--shapes", "1,2,2,16,96,96", "--rounds", "1", "--output", str(path)]
    run("attention", "--masks", "causal dilated", "--impls", "stof sdpa", *common)
    shown = run("attention", "--masks", "causal", "--impls", "sdpa-native flash-4", *common, "--merge")
    found = read_results(path, Row)
    assert {(r.mask, r.impl) for r in found.rows} == {
        ("causal", "stof"), ("causal", "sdpa"), ("dilated", "stof"), ("dilated", "sdpa"), ("causal", "sdpa-native"),
    }  # fmt: skip
    assert [(e.impl, e.reason) for e in found.not_run] == [("flash-4", "runs on CUDA devices only")]
    assert "sdpa-native" in shown
    run("attention", "--masks", "causal", "--impls", "sdpa", *common)
    assert [r.impl for r in read_results(path, Row).rows] == ["sdpa"]


def test_resume_leaves_out_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    common = ["--device", "cpu", "--shapes", "1,1,16,64", "--rounds", "1", "--output", str(path)]
    run("attention", "--masks", "causal", "--impls", "stof flash-4", *common)
    first = read_results(path, Row).rows[0]
    shown = run("attention", "--masks", "causal strided", "--impls", "stof flash-4", *common, "--resume")
    assert "strided" in shown
    assert "causal" not in shown
    found = read_results(path, Row)
    assert [row.mask for row in found.rows] == ["causal", "strided"]
    assert found.rows[0] == first
    run("attention", "--masks", "causal", "--impls", "stof sdpa", *common, "--resume")
    assert {row.impl for row in read_results(path, Row).rows if row.mask == "causal"} == {"stof", "sdpa"}


def test_check_only_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    options = ["--device", "cpu", "--shapes", "1,1,16,64", "--masks", "strided", "--impls", "stof"]
    run("attention", *options, "--check-only", "--output", str(path))
    assert not path.exists()


def test_decode_command(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    options = ["--device", "cpu", "--kv", "256", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    shown = run(
        "decode", *options, "--window", "64", "--impls", "stof sdpa-sliced", "--output", str(path), "--rounds", "1"
    )
    assert "decode-window64" in shown
    assert "decode-dense" in shown
    cells = cells_of(read_results(path, Row).rows)
    assert [cell.kind for cell in cells] == ["decode", "decode"]
    assert {cell.density for cell in cells} == {0.25, 1.0}
    assert cells[0].shape == "B2 H4/2 D16 S1x256"


def test_launch_and_peers_commands() -> None:
    shown = run("launch", "--device", "cpu", "--calls", "50")
    assert "stof.attention, plan of causal" in shown
    assert "flash-4-64" in run("peers")


def test_host_time_counts_every_call() -> None:
    count = []
    found = host_us({"a": lambda: count.append(1), "b": lambda: time.sleep(1e-3)}, CPU, calls=100, batch=10)
    assert 0 < found["a"] < 1000 < found["b"]
    assert len(count) == 120  # two untimed batches
