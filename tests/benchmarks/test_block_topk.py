"""`python -m benchmarks block-topk`: every pass is timed after a check, and wrong results have no time."""

from __future__ import annotations

import pytest
import torch

import stof
from benchmarks.attention import block_topk
from benchmarks.attention.block_topk import topk_rows
from stof import masks
from stof.testing.mask_grid import Shape

SHAPE, DEVICE = Shape.parse("1,4,2,16,200,200"), torch.device("cpu")


def test_rows() -> None:
    rows = list(topk_rows([SHAPE], [32], 0.3, ["stof"], DEVICE, torch.float32, 1))
    assert [row.passes for row in rows] == ["forward", "backward", "update"]
    assert all(row.us for row in rows)
    assert [bool(row.tflops) for row in rows] == [True, True, False]
    assert rows[1].deterministic


def test_kept_scores() -> None:
    scores = torch.randn(2, 3, 7, 7)
    mask = masks.block_topk(scores, 2, block_size=32, causal=True)
    assert block_topk._kept_scores(mask, 200, 32) == int(mask.to_dense(200).sum())


def test_wrong_results_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(mask: masks.Mask, shape: Shape) -> tuple[block_topk._Attend, None]:
        del mask
        return lambda q, k, v: stof.attention(q, k, v, masks.causal()), None

    monkeypatch.setitem(block_topk.WAYS, "flex", other)
    (row,) = topk_rows([SHAPE], [32], 0.3, ["flex"], DEVICE, torch.float32, 1)
    assert row.us is None
    assert row.note.startswith("WrongResultError: wrong: off by")
