"""`python -m benchmarks first-call`: both processes answer every call, and wrong results have no time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.attention import first_call
from benchmarks.attention.first_call import problems, run_processes


def test_worker_reports_every_call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    device = torch.device("cpu")
    first_call._main("stof", device)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [call for call, *_ in rows] == [problem.call for problem in problems(device)]
    assert all(seconds > 0 and not note for _, seconds, note in rows)
    monkeypatch.setattr(first_call, "_stof", lambda device: lambda problem, q, k, v: torch.zeros_like(q))
    first_call._main("stof", device)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(seconds is None and note.startswith("wrong") for _, seconds, note in rows)


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    rows = list(run_processes(torch.device("cpu"), ("stof",), tmp_path))
    assert {row.caches for row in rows} == {"empty", "on disk"}
    assert all(row.seconds for row in rows)
