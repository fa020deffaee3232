"""`python -m benchmarks changing --models`: every step has other documents or lengths, and wrong ones have no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from benchmarks import step_times
from benchmarks.cli.attention import app
from benchmarks.models import changing
from benchmarks.models.changing import ModelCase, model_rows
from stof.errors import ArgumentError

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "vocab_size": 300, "initializer_range": 0.2,
}  # fmt: skip
_SPECIAL = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ["sliding_attention", "full_attention"]
    monkeypatch.setitem(changing.CONFIGS, "llama", _SIZES)
    monkeypatch.setitem(changing.CONFIGS, "gemma3", _SIZES | {"sliding_window": 16, "layer_types": layers})
    bert = {name: value for name, value in _SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    small = {"local_attention": 16, "global_attn_every_n_layers": 2}
    monkeypatch.setitem(changing.CONFIGS, "modernbert", bert | small | _SPECIAL)
    monkeypatch.setattr(step_times, "REPEATS", 1)


def test_command(tmp_path: Path) -> None:
    output = tmp_path / "models.json"
    words = ["--models", "--cases", "llama,1,128 gemma3,1,128 modernbert,4,64", "--steps", "1", "--output", str(output)]
    done = CliRunner().invoke(app, ["changing", "--device", "cpu", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = json.loads(output.read_text())["rows"]
    expected = [(model, way) for model in ("llama", "gemma3") for way in ("stof", "sdpa")]
    expected += [("modernbert", way) for way in ("stof", "stof-unpad", "sdpa")]
    assert [(row["kind"], row["impl"]) for row in rows] == expected
    assert all(row["new_ms"] and row["repeated_ms"] and row["error"] < 1e-4 and not row["note"] for row in rows), rows
    assert "stof-unpad" in done.stdout


@pytest.mark.parametrize("text", ["llama,1,128", "gemma3,1,128"])
def test_other_documents_are_wrong(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = changing._Training.step

    def of_one_document(self: changing._Training) -> Any:
        inputs = self.inputs
        self.inputs = inputs | {"position_ids": torch.arange(128)[None]}
        try:
            return step(self)
        finally:
            self.inputs = inputs

    monkeypatch.setattr(changing._Training, "step", of_one_document)
    monkeypatch.setattr(changing, "_TRAINING_WAYS", ("sdpa",))
    (row,) = model_rows([ModelCase.parse(text)], torch.device("cpu"), 1)
    assert row.new_ms is None
    assert row.note.startswith("wrong")


def test_wrong_gradients_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    step = changing._Training.step

    def without_some(self: changing._Training) -> Any:
        result = step(self)
        for parameter in list(self.model.parameters())[3:]:
            parameter.grad = torch.zeros_like(parameter)
        return result

    monkeypatch.setattr(changing._Training, "step", without_some)
    (row, *_) = model_rows([ModelCase.parse("llama,1,128")], torch.device("cpu"), 1)
    assert "gradients of step 0" in row.note


@pytest.mark.parametrize("text", ["llama", "bert,1,2", "llama,0,5", "llama,1,x"])
def test_cases_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="a case is model,batch,tokens"):
        ModelCase.parse(text)
