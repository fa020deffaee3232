"""The product benchmark: what it computes, that it refuses wrong results, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cli.fusion import gemm_table
from benchmarks.fusion import gemm as bench
from benchmarks.fusion.gemm import GEMMS, INDUCTOR, KEY, Check, Gemm, Inputs, Row, calls_of, run_gemm, summaries
from benchmarks.fusion.layer import COSINE, FUSED, LayerShape, configs_from, run_layer
from benchmarks.results_io import RowFile
from stof.fusion.templates.gemm_config import GemmConfig

CPU = torch.device("cpu")
TILE = "64x64x64,4w,4s,tile"
OPTIONS: dict[str, Any] = {"only": None, "autotuned": False, "rounds": 1, "report": lambda text: None}


def small(gemm: Gemm) -> Gemm:
    return replace(gemm, n=48, k=64)


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: f"{g.model} {g.name}")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
def test_every_product_is_checked(gemm: Gemm) -> None:
    gemm = small(gemm)
    given = Inputs.of(gemm, 20, CPU, torch.float16)
    check = Check(gemm, given)
    (right,) = calls_of(gemm, [given], "32x32x32,4w,2s,tile")
    assert check(right, poisoned=True)[1] == ""

    def wrong() -> Any:
        result = right()
        broken = result[-1] if isinstance(result, tuple) else result
        broken[13, 7] += 1.0
        return result

    assert check(wrong, poisoned=True)[1].startswith("WRONG")
    unwritten = torch.full_like(check.usual, torch.nan)
    assert check(lambda: unwritten, poisoned=False)[1].startswith("WRONG")


def test_failures_and_wrong_results_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(bench, "configs", lambda *_: [GemmConfig.parse(TILE), GemmConfig.parse("32x32x32,2s,tile")])
    monkeypatch.setitem(bench._MODES, INDUCTOR, "no such mode")
    rows = run_gemm(small(GEMMS[1]), 9, CPU, torch.float16, **OPTIONS, chain=0, sustained=0.0)
    problems = {row.impl: row.problem for row in rows}
    assert problems[INDUCTOR]
    assert problems[TILE] == problems["32x32x32,4w,2s,tile"] == ""
    assert all(row.us is None for row in rows)


def test_chains_have_weights_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(bench, "configs", lambda *_: [GemmConfig.parse(TILE)])
    monkeypatch.setattr(bench, "_MODES", {INDUCTOR: "default"})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    weights: set[int] = set()

    def chain_us(chains: dict[str, list[Any]], device: torch.device, rounds: int) -> dict[str, float]:
        assert {len(calls) for calls in chains.values()} == {3}
        weights.update(call.args[1].data_ptr() for call in chains[bench.BARE])
        outs = [chains[name][2]() for name in (bench.BARE, INDUCTOR, TILE)]
        assert all(torch.allclose(out, outs[0], atol=1e-2) for out in outs)
        return dict.fromkeys(chains, 2.0)

    monkeypatch.setattr(bench, "chain_us", chain_us)
    gemm = replace(small(GEMMS[0]), bias=False)
    rows = run_gemm(gemm, 9, CPU, torch.float16, **OPTIONS, chain=3, sustained=0.0)
    assert len(weights) == 3
    assert [(row.impl, row.us, row.chain) for row in rows] == [(n, 2.0, 3) for n in (bench.BARE, INDUCTOR, TILE)]


def test_sustained_runs_repeat_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(bench, "configs", lambda *_: [GemmConfig.parse(TILE)])
    monkeypatch.setattr(bench, "_MODES", {INDUCTOR: "default"})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    asked: list[float] = []

    def sustained_us(calls: dict[str, Any], device: torch.device, seconds: float, rounds: int) -> dict[str, float]:
        asked.append(seconds)
        return dict.fromkeys(calls, 3.0)

    monkeypatch.setattr(bench, "sustained_us", sustained_us)
    gemm = replace(small(GEMMS[0]), bias=False)
    rows = run_gemm(gemm, 9, CPU, torch.float16, **OPTIONS, chain=0, sustained=0.2)
    assert asked == [0.2]
    assert [(row.us, row.sustained) for row in rows] == [(3.0, 0.2)] * 3


def row(impl: str, us: float | None, tokens: int = 512, gemm: str = "qkv", chain: int = 0) -> Row:
    return Row("bert", gemm, "linear", tokens, 2304, 768, "float16", impl, us, None, 1e-4, 1e-4, 1.0, chain=chain)


def test_summary_and_configurations() -> None:
    rows = [row(bench.BARE, 10.0), row(INDUCTOR, 15.0), row(TILE, 12.0), row("64x64x32,4w,3s,tile", None)]
    rows += [row(bench.BARE, 10.0, gemm="out"), row(INDUCTOR, 11.0, gemm="out"), row(TILE, 12.0, gemm="out")]
    first, second = summaries(rows)
    # What was measured in chains is not mixed with single calls.
    assert summaries([*rows, row(TILE, 3.0, chain=24)]) == [first, second]
    assert summaries([*rows, replace(row(TILE, 3.0), sustained=0.2)]) == [first, second]
    assert (first.best, first.best_us) == (TILE, 12.0)
    assert (first.needed, first.reached, first.speedup) == pytest.approx((10 / 15, 10 / 12, 15 / 12))
    assert first.by_kind == {"tile": 12.0}
    assert second.speedup < 1
    shown = gemm_table([first, second], CPU, "float16")
    assert shown.row_count == 2
    assert configs_from(rows, "bert", 512) == {"qkv": TILE, "out": None, "ffn in": "", "ffn out": ""}
    assert configs_from(rows, "bert", 128)["qkv"] == ""


def test_file_keeps_what_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gemm.json"
    RowFile(path, CPU, Row, KEY).add([row(TILE, 5.0), row(INDUCTOR, 6.0)])
    again = RowFile(path, CPU, Row, KEY)
    again.add([row(TILE, 4.0)])
    assert [(r.impl, r.us) for r in RowFile(path, CPU, Row, KEY).rows] == [(INDUCTOR, 6.0), (TILE, 4.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_fused_layer_is_the_layer(model: str) -> None:
    """On a CPU operators run their references: the fused layer's structure, packing and folding are right."""
    torch.compiler.reset()
    shape = LayerShape(model, 2, 24, 64, 96, 8, 8 if model == "bert" else 2)
    configs = configs_from([], model, 48)
    rows = run_layer(shape, configs, CPU, torch.float32, 1, [])
    left = run_layer(shape, dict.fromkeys(configs), CPU, torch.float32, 1, [])
    for one in (*rows, *left):
        assert one.impl == FUSED
        assert one.problem == ""
        assert one.cosine is not None
        assert one.cosine > 1 - 1e-6 > COSINE
