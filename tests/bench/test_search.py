"""`stof bench search`: everything is measured once, in pieces if need be, and all searches see the same times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stof.bench.layer import LayerShape
from stof.bench.search import compare, layer_graph
from stof.fusion import claims
from stof.fusion.claims import Claim
from stof.fusion.search import Candidate
from stof.fusion.store import Store
from stof.fusion.templates.registry import Template

SHAPE = LayerShape("bert", 1, 8, 32, 64, 4, 4)


class Timer:
    """Made-up times by template and configuration."""

    def __init__(self) -> None:
        self.failures: dict[Candidate, str] = {}
        self.asked: list[tuple[Claim, str | None]] = []

    def __call__(self, claim: Claim, configs: Sequence[str | None]) -> list[float]:
        self.asked += [(claim, config) for config in configs]
        base = 10.0 * len(claim.operators)
        return [base if config is None else base * (1.1 - 0.01 * (len(config) * 7 % 31)) for config in configs]


def test_searches_are_compared_when_everything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "no_kernel", lambda device, dtype, serving: "")
    monkeypatch.setattr(Template, "configs", lambda self, problem, serving: ["c" * i for i in range(40)])
    gm = layer_graph(SHAPE, torch.device("cpu"), torch.float32)
    assert compare(gm, Timer(), Store(tmp_path, {}), seconds=-1.0) == []
    first = Timer()
    rows = compare(gm, first, Store(tmp_path, {}), seconds=100.0, seeds=2)
    assert [row.search for row in rows] == ["exhaustive", "two stages", "stage 1 alone", "random"]
    best = rows[0]
    assert best.saved_us > 0
    assert best.measurements == len(first.asked)
    for row in rows[1:]:
        assert row.saved_us <= best.saved_us
        assert row.measurements <= 0.2 * best.measurements
    assert rows[1].saved_us >= rows[2].saved_us
    again = Timer()
    assert compare(gm, again, Store(tmp_path, {}), seconds=100.0, seeds=2) == rows
    assert again.asked == []
