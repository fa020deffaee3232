"""`benchmarks/models/merge_models.py`: files of one state become one, a time is never lost to a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.compare import Row
from benchmarks.models.merge_models import main, merged, summary
from benchmarks.results_io import read_results, write_results
from stof.errors import ArgumentError

META = {"device": "My GPU", "torch": "2.11", "triton": "3.6", "stof": "0.1", "commit": "abc", "date": "2026-01-01"}


def timed(impl: str, ms: float | None, model: str = "bert") -> Row:
    return Row(model, 1, 128, "full", "float16", impl, ms, 1.0, 1.0, "" if ms else "failed")


def file(path: Path, *rows: Row, **meta: Any) -> Path:
    write_results(path, META | meta, rows)
    return path


def test_files_of_one_state_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = file(tmp_path / "0.json", timed("stof-whole", 2.0), timed("default-sdpa", 5.0), commit="abc+changes")
    two = file(
        tmp_path / "1.json", timed("stof", 1.0, "gpt2"), timed("default-sdpa", None), commit="of another checkout"
    )
    three = file(tmp_path / "2.json", timed("stof-whole", 1.5), timed("max-autotune-flex", None), date="2026-01-02")
    meta, rows = merged([one, two, three], "abc")
    assert meta == META | {"date": "2026-01-02"}
    assert {(row.model, row.impl): row.ms for row in rows} == {
        ("bert", "stof-whole"): 1.5,
        ("bert", "default-sdpa"): 5.0,
        ("bert", "max-autotune-flex"): None,
        ("gpt2", "stof"): 1.0,
    }
    target = tmp_path / "all.json"
    monkeypatch.setattr("sys.argv", ["merge_models.py", str(one), str(three), "--to", str(target)])
    main()
    assert len(read_results(target, Row).rows) == 3


@pytest.mark.parametrize("other", [{"commit": "abd"}, {"device": "Another"}, {"torch": "2.13"}, {"commit": None}])
def test_files_of_two_states_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    files = [file(tmp_path / "0.json", timed("stof", 2.0)), file(tmp_path / "1.json", timed("stof", 1.0), **other)]
    with pytest.raises(ArgumentError, match="rows of one file are of one state"):
        merged(files)


def test_the_best_of_ours_against_the_best_peer() -> None:
    rows = [
        timed("stof-attention", 3.0), timed("stof-folded", 2.5), timed("stof-whole", 2.0), timed("default-sdpa", 5.0),
        timed("max-autotune-flex", 4.0), timed("reduce-overhead-sdpa", None), timed("eager-sdpa", 0.1),
        timed("stof-whole", 2.0, "gpt2"), timed("default-sdpa", 1.0, "gpt2"), timed("stof", 1.0, "vit"),
    ]  # fmt: skip
    assert summary(rows) == [
        "bert 1 128 full float16: 2.00x (stof-whole 2.000 ms, max-autotune-flex 4.000 ms); not timed: default-flex, "
        "reduce-overhead-sdpa, reduce-overhead-flex, max-autotune-sdpa",
        "  over stof-attention: stof-folded 1.20x, stof-whole 1.50x",
        "gpt2 1 128 full float16: 0.50x (stof-whole 2.000 ms, default-sdpa 1.000 ms); not timed: default-flex, "
        "reduce-overhead-sdpa, reduce-overhead-flex, max-autotune-sdpa, max-autotune-flex",
        "vit 1 128 full float16: nothing to compare",
        "geometric mean of 2: 1.00x, least 0.50x",
    ]
