"""`python -m benchmarks backward`: every pass is timed after a check, and wrong gradients have no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.attention import backward
from benchmarks.attention.backward import backward_rows
from benchmarks.peers.wheels import Attend
from stof.testing.attention_check import AttentionProblem
from stof.testing.mask_grid import Shape, grid_mask

SHAPE, DEVICE = Shape.parse("1,4,2,16,64,64"), torch.device("cpu")


def test_rows() -> None:
    grid = [grid_mask("causal"), grid_mask("window512")]
    rows = list(backward_rows(grid, [SHAPE], ["stof", "sdpa"], DEVICE, torch.float32, 1))
    assert [(row.mask, row.impl, row.passes) for row in rows] == [
        (mask.name, impl, passes)
        for mask in grid for impl in ("stof", "sdpa") for passes in ("forward", "backward", "both")
    ]  # fmt: skip
    assert all(row.us and row.deterministic for row in rows)


def test_sampled_check_where_lengths_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.attention.float64_check._ALL_ROWS", {"cpu": 16})
    shape, sdpa = Shape.parse("1,4,2,16,40,96"), backward.WAYS["sdpa"]
    rows = list(backward_rows([grid_mask("causal")], [shape], ["stof", "sdpa"], DEVICE, torch.float32, 1))
    assert all(row.us for row in rows)

    def full(problem: AttentionProblem) -> Attend:
        return sdpa.prepare(replace(problem, grid_mask=grid_mask("full")))

    monkeypatch.setitem(backward.WAYS, "sdpa", replace(sdpa, prepare=full))
    rows = list(backward_rows([grid_mask("causal")], [shape], ["sdpa"], DEVICE, torch.float32, 1))
    assert [row.us for row in rows] == [None]


def test_wrong_gradients_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * k.mean() * v.mean()

    monkeypatch.setitem(backward.WAYS, "sdpa", backward.Way(lambda problem: wrong))
    rows = list(backward_rows([grid_mask("causal")], [SHAPE], ["sdpa"], DEVICE, torch.float32, 1))
    assert [(row.us, row.note[:17]) for row in rows] == [(None, "ValueError: wrong")]


def test_tensors_with_the_sequence_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(problem: AttentionProblem) -> Attend:
        attend = backward.WAYS["stof"].prepare(problem)
        return lambda *tensors: attend(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)

    monkeypatch.setitem(backward.WAYS, "flash-4", backward.Way(prepare, sequence_major=True))
    rows = list(backward_rows([grid_mask("causal")], [SHAPE], ["flash-4", "cudnn-flex"], DEVICE, torch.float32, 1))
    assert [bool(row.us) for row in rows] == [False, True, True, True]
    assert rows[0].note.startswith("ModuleNotFoundError")
