"""The least time of a configuration: below every time ever measured, and near the best of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stof.fusion.templates.gemm_config import KINDS, GemmConfig, GemmShape, kind_in
from stof.fusion.templates.registry import GemmProblem
from stof.fusion.templates.roofline import floor_us

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-gemm.json"
H200 = ((9, 0), 132)


def shape_of(row: dict[str, object]) -> GemmShape:
    return GemmShape(str(row["template"]), int(str(row["tokens"])), int(str(row["n"])), int(str(row["k"])))


def test_no_measured_time_is_below_its_floor() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    ratios = []
    for row in rows:
        if row["us"] is None or kind_in(row["impl"]) not in KINDS:
            continue
        config = GemmConfig.parse(row["impl"])
        ratios.append(row["us"] / floor_us(config, shape_of(row), getattr(torch, row["dtype"]), *H200))
    assert len(ratios) > 20
    assert 1.0 < min(ratios) < 1.7


def test_floors_exclude_something_and_never_what_is_unknown() -> None:
    shape = GemmShape("linear", 4096, 3072, 768, "gelu", bias=True)

    def floor(text: str, capability: tuple[int, int] = (9, 0)) -> float:
        return floor_us(GemmConfig.parse(text), shape, torch.float16, capability, 132)

    best_measured = 33.4
    assert floor("128x128x64,5s,pingpong") < best_measured < floor("64x64x32,4w,3s,tile")
    # GPUs that are not listed have no floors that a faster one could pass.
    assert 0 < floor("64x64x64,4w,3s,tile", (12, 0)) < floor("64x64x64,4w,3s,tile")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "linear 4096x3072x768 float16"),
        ({"activation": "gelu", "bias": True}, "linear 4096x3072x768 activation=gelu bias float16"),
        ({"aligned": False, "m": 4000}, "linear 4000x3072x768 aligned=False float16"),
    ],
)
def test_problems_as_text(change: dict[str, object], text: str) -> None:
    shape = GemmShape(**{"template": "linear", "m": 4096, "n": 3072, "k": 768, **change})
    problem = GemmProblem(shape, torch.float16, torch.device("cuda", 1))
    assert problem.text() == text
    assert problem.bucket == text.replace("4000", "4096")
    assert GemmProblem(GemmShape("linear", 3, 8, 8), torch.float16, problem.device).bucket == "linear 16x8x8 float16"
