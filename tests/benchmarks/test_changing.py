"""`python -m benchmarks changing`: every step is of another mask and checked, and wrong results have no time."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

import stof
from benchmarks import step_times
from benchmarks.attention import changing
from benchmarks.attention.changing import changing_rows
from benchmarks.attention.changing_masks import KINDS, drawn_ends
from benchmarks.attention.changing_ways import Prepared, Way, _stof
from benchmarks.attention.float64_check import errors_of
from benchmarks.cli.attention import app
from benchmarks.step_times import StepRow
from stof.testing.mask_grid import Shape
from stof.testing.oracle import oracle_attention

CPU, SHAPE = torch.device("cpu"), Shape.parse("1,4,2,16,64,64")


def rows_of(kinds: list[str], impls: list[str], **options: Any) -> list[StepRow]:
    return list(changing_rows([SHAPE], kinds, impls, ["both"], CPU, 1, dtype=torch.float32, **options))


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "REPEATS", 1)


def test_command_checks_and_times_every_kind(tmp_path: Path) -> None:
    kinds, impls, output = list(KINDS), ["stof", "varlen", "sdpa"], tmp_path / "changing.json"
    words = ["--sizes", "1,4,2,16,64,64", "--steps", "1", "--impls", " ".join(impls), "--passes", "both"]
    done = CliRunner().invoke(app, ["changing", "--device", "cpu", "--output", str(output), *words])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [StepRow(**row) for row in json.loads(output.read_text())["rows"]]
    assert {(row.kind, row.impl, row.passes) for row in rows} == set(product(kinds, impls, ["both"]))
    assert len(rows) == len(kinds) * len(impls)
    for row in rows:
        assert bool(row.new_ms and row.repeated_ms and row.worst_ms) == (row.impl != "varlen"), row
        assert len(row.first_ms) == (0 if row.impl == "varlen" else 3), row
        assert row.impl == "varlen" or (row.error is not None and row.error < 1e-4), row


@pytest.mark.parametrize("kind", ["documents", "patterns", "bool"])
def test_the_last_mask_again_is_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an implementation whose cache takes every mask for the first one."""

    def prepare(*about: Any) -> Prepared:
        prepared, kept = _stof(*about), list[Any]()

        def make(source: Any) -> Any:
            kept.append(kept[0] if kept else prepared.make(source))
            return kept[-1]

        return Prepared(make, prepared.attend)

    monkeypatch.setitem(changing.WAYS, "stof", Way(prepare))
    (row,) = rows_of([kind], ["stof"])
    assert row.repeated_ms is None
    assert row.new_ms is None
    assert row.note.startswith("wrong: the output is off")


def test_wrong_gradients_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return stof.attention(q, k.detach() + 0 * k, v, mask)

    monkeypatch.setitem(changing.WAYS, "sdpa", Way(lambda *about: Prepared(_stof(*about).make, attend)))
    (row,) = rows_of(["window"], ["sdpa"])
    assert row.note.startswith("wrong: a gradient is off")


def test_failures_and_tensors_with_the_sequence_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*about: Any) -> Prepared:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            return stof.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)

        return Prepared(_stof(*about).make, attend)

    def refuse(*about: Any) -> Prepared:
        raise RuntimeError("not here")

    monkeypatch.setitem(changing.WAYS, "varlen", Way(prepare, sequence_major=True))
    monkeypatch.setitem(changing.WAYS, "sdpa", Way(refuse))
    rows = rows_of(["documents-device"], ["varlen", "sdpa"])
    assert rows[0].adds_ms is not None
    assert rows[1].note == "failed: RuntimeError: not here"


@pytest.mark.parametrize("kind", ["documents", "documents-host", "documents-device"])
def test_varlen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of PyTorch's function, which runs on GPUs alone."""
    pytest.importorskip("torch.nn.attention.varlen")

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        assert window_size == (-1, 0)
        assert cu_seq_q.dtype == torch.int32
        assert int(cu_seq_q.diff().max()) == max_q == max_k
        parts = zip(*(x.split(cu_seq_k.diff().tolist()) for x in (q, k, v)), strict=True)
        out = [
            scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=True, enable_gqa=enable_gqa)
            for part in parts
        ]
        return torch.cat(out, 1).transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setitem(changing.WAYS, "varlen", replace(changing.WAYS["varlen"], missing=lambda *about: None))
    (row,) = rows_of([kind], ["varlen"])
    assert row.new_ms is not None, row.note


def test_time_budget() -> None:
    assert [row.note for row in rows_of(["documents"], ["stof", "sdpa"], seconds=0.0)] == ["no time left"] * 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("sampled", [False, True])
def test_check_finds_every_error(kind: Any, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the oracle's own gradients; a sampled row or key that is off is found."""
    if sampled:
        monkeypatch.setattr("benchmarks.attention.float64_check._ALL_ROWS", {"cpu": 16})
        monkeypatch.setattr("benchmarks.attention.float64_check._ROWS", 16)
        monkeypatch.setattr("benchmarks.attention.float64_check._CLUSTER", 4)
    shape = kind.shape(Shape.parse("1,4,2,8,96,96"))
    generator = torch.Generator().manual_seed(3)
    sizes = [(shape.batch, heads, shape.q_len, 8) for heads in (4, 2, 2, 4)]
    q, k, v, d_out = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    source = kind.draw(shape, CPU, generator)
    mod, inputs = kind.mod(source, shape, CPU), [x.requires_grad_() for x in (q, k, v)]
    out, _ = oracle_attention(*inputs, kind.dense(source, shape, CPU))
    result = [out, *torch.autograd.grad(out, inputs, d_out)]
    with torch.no_grad():
        assert max(errors_of(mod, shape, inputs, d_out, result, 5)) < 1e-12
        assert max(errors_of(mod, shape, inputs, d_out, result[:1], 5)) < 1e-12
        for place in range(4):
            wrong = [x.clone() for x in result]
            wrong[place] += 0.01 * wrong[place].abs().max()
            assert max(errors_of(mod, shape, inputs, d_out, wrong, 5)) > 1e-3
            wrong[place].view(-1)[7] = torch.nan
            assert max(errors_of(mod, shape, inputs, d_out, wrong, 5)) == torch.inf


def test_documents_fill_the_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 7, 64, 5000):
        ends = drawn_ends(length, generator)
        assert (ends[0], ends[-1]) == (0, length)
        assert all(a < b for a, b in pairwise(ends))
    assert drawn_ends(5000, generator) != drawn_ends(5000, generator)
