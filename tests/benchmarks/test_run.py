"""The benchmark checks before it times, names what is missing, and writes the agreed JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention.run import NotRun, Row, run_attention
from benchmarks.peers import PEERS, Peer, peer
from benchmarks.peers.mask_formats import mask_mod
from benchmarks.results_io import provenance, write_results
from stof.errors import ArgumentError
from stof.testing import oracle_attention
from stof.testing.attention_check import AttentionProblem, Expected, relative_error
from stof.testing.mask_grid import GRID, Shape, grid_mask, window_of
from stof.tuning.timing import time_calls

CPU = torch.device("cpu")
ROW_KEYS = [
    "mask", "batch", "heads", "kv_heads", "head_dim", "q_len", "kv_len", "dtype", "density", "impl",
    "gpu_us", "call_us", "build_us", "max_rel_err",
]  # fmt: skip


def run(
    peers: list[Peer], masks: str = "window512", shape: str = "1,2,16,640", **settings: Any
) -> tuple[list[Row], list[str]]:
    said: list[str] = []
    rows = run_attention(
        [grid_mask(name) for name in masks.split()],
        [Shape.parse(shape)],
        peers,
        device=CPU,
        dtype=torch.float32,
        rounds=1,
        report=said.append,
        **settings,
    )
    return rows, said


@pytest.mark.parametrize("name", GRID)
def test_mask_mod_is_the_same_mask(name: str) -> None:
    """FlexAttention must be timed on the very mask everyone else gets."""
    length = 384
    grid = grid_mask(name)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    zero = torch.zeros((), dtype=torch.int64)
    got = mask_mod(grid, length, length, CPU)(zero, zero, rows, columns).expand(length, length)
    assert torch.equal(got, grid.mask(length).to_dense(length)[0, 0])


@pytest.mark.parametrize("name", ["stof", "sdpa", "sdpa-native"])
def test_peers_agree_with_float64(name: str) -> None:
    rows, said = run([peer(name)], masks="causal", shape="2,4,2,16,200,200")
    assert len(rows) == 1, said
    assert rows[0].max_rel_err < 1e-5
    assert rows[0].call_us > 0
    assert rows[0].gpu_us is None


def test_a_wrong_result_has_no_time() -> None:
    def off_by_one(problem: AttentionProblem) -> Callable[[], Tensor]:
        good = PEERS["sdpa"].prepare(problem)
        return lambda: good().roll(1, dims=2)

    liar = Peer("liar", "shifts its output", lambda problem: None, off_by_one)
    rows, said = run([liar, peer("stof")])
    by_name = {row.impl: row for row in rows}
    assert by_name["liar"].call_us is None
    assert by_name["liar"].max_rel_err > 0.1
    assert by_name["stof"].call_us > 0
    assert any("WRONG" in line for line in said)


def test_nan_is_wrong() -> None:
    good = torch.ones(2, 2)
    assert relative_error(torch.full((2, 2), float("nan")), good) == float("inf")
    assert relative_error(good, good) == 0


def test_missing_peers_are_named() -> None:
    rows, said = run([peer("sdpa-native")])
    assert rows == []
    assert any("sdpa-native: not run (serves only" in line for line in said)


def test_a_peer_that_fails_does_not_end_the_race() -> None:
    def broken(problem: AttentionProblem) -> Callable[[], Tensor]:
        raise RuntimeError("out of luck")

    rows, said = run([Peer("broken", "", lambda problem: None, broken), peer("stof")])
    assert [row.impl for row in rows] == ["stof"]
    assert any("out of luck" in line for line in said)


def test_a_peer_may_raise_anything() -> None:
    def broken(problem: AttentionProblem) -> Callable[[], Tensor]:
        raise AssertionError

    cells: list[tuple[list[Row], list[NotRun]]] = []
    settings = {"on_cell": lambda rows, not_run: cells.append((rows, not_run))}
    run([Peer("broken", "", lambda problem: None, broken), peer("stof")], **settings)
    ((rows, not_run),) = cells
    assert [row.impl for row in rows] == ["stof"]
    assert [(entry.impl, entry.reason, entry.mask, entry.q_len) for entry in not_run] == [
        ("broken", "AssertionError", "window512", 640)
    ]


def test_budget_stops_between_cells_and_says_what_is_left_out() -> None:
    rows, said = run([peer("stof")], masks="causal strided dilated", budget=0.0)
    assert [row.mask for row in rows] == ["causal"]
    assert "left out: strided B1 H2/2 D16 S640x640, dilated" in said[-1]


def test_check_only_times_nothing() -> None:
    rows, said = run([peer("stof")], timed=False)
    assert [(row.call_us, row.max_rel_err < 1e-5) for row in rows] == [(None, True)]
    assert any("stof: relative error" in line for line in said)


def test_the_check_samples_rows_of_every_head() -> None:
    problem = AttentionProblem.draw(grid_mask("longformer"), Shape.parse("2,4,2,16,300,300"), CPU, torch.float32)
    everything, some = Expected.of(problem, 1024), Expected.of(problem, 64)
    assert torch.equal(everything.rows, torch.arange(300))
    assert len(some.rows) == 64
    assert len(some.rows.unique()) == 64
    assert {0, 15, 284, 299} <= set(some.rows.tolist())
    assert torch.equal(some.out, everything.out[:, :, some.rows])
    out = everything.out.float()
    assert some.error(out) < 1e-6
    spoiled = out.clone()
    spoiled[1, 3, 150, 0] = float("nan")  # anywhere, checked row or not
    assert some.error(spoiled) == float("inf")
    assert some.error(out.roll(1, 2)) > 0.1


def test_oracle_is_dense_attention() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    keep = torch.rand(1, 1, 30, 40) < 0.5
    keep[..., 0] = True
    wide = [t.double().repeat_interleave(2, 1) for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), *wide, attn_mask=keep)
    torch.testing.assert_close(oracle_attention(q, k, v, keep)[0], expected)


def test_json_has_the_agreed_keys(tmp_path: Path) -> None:
    rows, _ = run([peer("stof"), peer("sdpa")], masks="longformer strided", shape="1,1,16,256")
    path = tmp_path / "results" / "cpu.json"
    write_results(path, provenance(CPU), rows)
    written = json.loads(path.read_text())
    assert set(written["meta"]) == {"device", "torch", "triton", "stof", "commit", "date"}
    assert len(written["rows"]) == 4
    assert all(list(row) == ROW_KEYS for row in written["rows"])
    assert all(row["gpu_us"] is None and row["call_us"] > 0 for row in written["rows"])


def test_committed_results_have_the_agreed_keys() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*attention*.json"):
        written = json.loads(path.read_text())
        assert written["rows"]
        assert all(list(row) == ROW_KEYS for row in written["rows"]), path


def test_timing_is_interleaved() -> None:
    order: list[str] = []
    timings = time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=2, warmup=1)
    assert order == ["a", "a", "b", "b"] * 3  # the first of each pair is not timed
    assert set(timings) == {"a", "b"}


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,x", "0,1,16,64", "1,2,3,4,5"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(ArgumentError, match="B,H,D,S"):
        Shape.parse(text)


def test_unknown_names() -> None:
    with pytest.raises(ArgumentError, match="longformer"):
        grid_mask("longfromer")
    with pytest.raises(ArgumentError, match="sdpa"):
        peer("flash")


def test_window_follows_the_grid_definition() -> None:
    assert [window_of(s) for s in (64, 512, 1024, 4096, 8192)] == [16, 16, 32, 64, 80]
