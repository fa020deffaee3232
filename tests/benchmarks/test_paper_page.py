"""`docs/paper.md` agrees with the recorded result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import paper as command
from benchmarks.cli.attention import app
from benchmarks.paper import charts, page
from benchmarks.paper.experiment import Row
from benchmarks.results_io import read_results, write_results
from stof.errors import ArgumentError

RESULTS = Path(command.__file__).parents[1] / "results"
META = {"device": "NVIDIA H200"}


def lines(tmp_path: Path, rows: list[Row]) -> dict[str, list[str]]:
    write_results(tmp_path / "h200-paper.json", META, rows)
    return page.tables(tmp_path)


def test_page_has_the_tables_of_the_result_files() -> None:
    """Where this fails: `python -m benchmarks paper --charts-only --output benchmarks/results/FILE`."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text, RESULTS) == text


def test_each_table_is_of_the_gpu_with_most_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(figure: str, batch: int, impl: str = "stof") -> Row:
        return Row(figure, "bigbird", "", batch, 128, impl, us=1.0)

    parts = ("stof-attention", "stof-fusion")
    first = [row("9", 1), row("9", 8), *(row("12", 1, part) for part in parts), row("12", 8, parts[1])]
    second = [row("9", 1), *(row("12", batch, part) for part in parts for batch in (1, 8))]
    write_results(tmp_path / "a-paper.json", {"device": "NVIDIA B 80GB"}, second)
    write_results(tmp_path / "b-paper.json", {"device": "NVIDIA A"}, first)
    found = page.tables(tmp_path)
    assert found["measured"][2:] == [
        "| B | 1/108 | 0/21 | 2/21 | 0/18 | 0/3 | 0/6 | 0/248 | 0/248 |",
        "| A | 2/108 | 0/21 | 1/21 | 0/18 | 0/3 | 0/6 | 0/248 | 0/248 |",
    ]
    assert found["attention"][0] == "| STOF over | 4090 | A100 | A |"
    assert found["masks"][0].startswith("| A, native = 1 | ")
    assert found["ablation"][0] == "| speed-up | A100 | B |"
    assert [line.split()[1] for line in found["file"]] == ["`a-paper.json`", "`b-paper.json`"]
    monkeypatch.setattr(page, "_planned", lambda: {"9": 1, "table4": 1})
    assert page.tables(tmp_path)["attention"][0] == "| STOF over | 4090 | A100 | B |"  # which has all
    with pytest.raises(ArgumentError, match="has no"):
        page.tables(RESULTS.parent)


def test_tables_follow_the_rows(tmp_path: Path) -> None:
    def both(figure: str, model: str, batch: int, impls: dict[str, float], **field: str) -> list[Row]:
        mask = field.get("mask", "bigbird")
        return [Row(figure, mask, model, batch, 4096, impl, us=us) for impl, us in impls.items()]

    rows = [
        *both("9", "", 16, {"native": 80.0, "flex": 20.0, "stof": 10.0}),
        *both("9", "", 1, {"native": 80.0, "flex": 80.0, "stof": 10.0}),
        *both("9", "", 16, {"native": 90.0, "flex": 90.0, "stof": 1.0}, mask="dilated"),
        *both("9", "", 16, {"native": 90.0, "flex": 90.0, "stof": 1.0}, mask="neighborhood 13"),
        *both("11", "t5", 16, {"native-compiled": 3.0, "default-flex": 4.0, "max-autotune-sdpa": 5.0, "stof": 2.0}),
        *both("12", "t5", 1, {"stof-attention": 3.0, "stof-fusion": 2.0}),
        *both("13", "t5", 1, {"stof analytical model": 1.0, "stof reward": 2.0, "stof compiling": 97.0}),
        *both("table4", "t5", 1, {"stof": 41.0}),
        *both("table4", "gpt2", 1, {"stof": 20.5}),
        *both("4", "bias + LayerNorm", 1, {"native": 3.0, "stof": 2.0}),
        *both("selector", "", 1, {"best measured": 2.0, "stof": 3.0}),
        *both("unseen", "", 1, {"flex": 5.0, "sdpa": 4.0, "stof": 2.0}),
        *both("unseen", "", 2, {"flex": 1.0, "stof": 2.0}),
    ]
    found = lines(tmp_path, rows)
    assert found["measured"][2] == "| H200 | 3/108 | 1/21 | 1/21 | 2/18 | 0/3 | 1/6 | 1/248 | 2/248 |"
    assert found["selector"][2:] == [
        "| STOF | 1 | 50.0% | 50% |",
        "| the paper's rules | 0 | - | - |",
    ]
    assert found["unseen"][2] == "| STOF over the fastest | 2 | 1.00x | 0.5x |"
    assert "| FlexAttention, 4 masks | 1.8x | 1.6x | 4.00x |" in found["attention"]
    assert "| FlexAttention, 4 masks, 16x4096 |  | 4.9x | 2.00x |" in found["attention"]
    assert "| FlashAttention-2, 4 masks, 16x4096 |  | 4.8x | - |" in found["attention"]
    assert "| bigbird | - | - | - | 2.00 | 8.00 |" in found["masks"]
    assert "| t5 | 1.1x |  | 1.50x |" in found["models"]
    assert "| best of 3 ways |  |  | 1.50x (1/21), lowest 1.5x |" in found["models"]
    assert "| fusion alone over attention alone, batch 1 | 1.195x | 1.50x (1/7) |" in found["ablation"]
    assert found["overhead"][2:] == ["| all overhead | <3% | 3.0% |", "| analytical model | 0.5% | 1.0% |"]
    assert "| STOF | 22.6-412.8 | 20.5-41.0 (2/18) |" in found["tuning"]
    assert "| bias + LayerNorm |  |  | 1.50-1.50x |" in found["operators"]


def test_searches_are_compared_over_their_models(tmp_path: Path) -> None:
    table = {"intensive": [True], "classes": ["0"], "longest": 1, "segments": []}
    for model, saved, best in (("a", 8.0, 10.0), ("b", 1.0, 2.0), ("nothing to save", 0.0, 0.0)):
        rows = [
            {"search": name, "share": share, "saved_us": us, "best_us": best}
            for name, share, us in (("exhaustive", 1.0, best), ("two stages", 0.1, saved))
        ]
        (tmp_path / f"h200-search-{model}.json").write_text(json.dumps({"case": model, "table": table, "rows": rows}))
    (tmp_path / "h200-search-interrupted.json").write_text(json.dumps({"case": "", "table": table}))
    assert lines(tmp_path, [])["search"] == [
        "| 2 models | 10% of measurements | 20% of measurements |",
        "|---|---|---|",
        "| two stages | 65% (50%) | - |",
    ]


def test_cells_that_the_command_has_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.paper import attention, models, selector

    monkeypatch.setattr(attention, "SIZES", ((1, 128),))
    monkeypatch.setattr(models, "SIZES", ((1, 128),))
    monkeypatch.setattr(selector, "SHAPES", selector.SHAPES[:1])
    found = page._planned()
    assert found.pop("selector") == found.pop("unseen") == len(selector.mask_makers())
    assert found == {"9": 6, "11": 7, "12": 7, "table4": 6, "3": 1, "4": 2}


def test_charts_only_writes_the_page_of_a_recorded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    copy = tmp_path / "paper.md"
    copy.write_text(page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    rows = [Row("9", "causal", "", 1, 128, impl, us=us) for impl, us in (("native", 2.0), ("stof", 1.0))]
    write_results(tmp_path / "x-paper.json", META, rows)
    drawn: list[Path] = []
    monkeypatch.setattr(charts, "draw", lambda path: drawn)
    monkeypatch.setattr(page, "write_page", lambda folder: copy.write_text(page.with_tables(copy.read_text(), folder)))
    words = ["paper", "--charts-only", "--output", str(tmp_path / "x-paper.json")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "`x-paper.json`" not in copy.read_text(encoding="utf-8")
    monkeypatch.setattr(command, "_RESULTS", tmp_path)
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "| causal | - | - | - | - | 2.00 |" in copy.read_text(encoding="utf-8")


def test_a_page_without_a_table_is_refused(tmp_path: Path) -> None:
    write_results(tmp_path / "x-paper.json", META, list[Row]())
    with pytest.raises(ArgumentError, match="the page has tables"):
        page.with_tables("<!--file-->\n\n", tmp_path)
    assert read_results(tmp_path / "x-paper.json", Row).rows == []
