"""Sparse masks on models: every sequence has the outputs that it has alone, wherever it begins in its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stof import masks
from stof.errors import ShapeError, UnsupportedError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

MASKS = {
    "global": masks.sliding_window(2, 2) | masks.global_tokens(2),
    "sinks": masks.sliding_window(2, 2) | masks.sink_tokens(1),
    "strided": masks.strided(1, 4, causal=False) & ~masks.global_tokens([3]),
    "function": masks.from_function(lambda b, h, q, kv: (q // 4 == kv // 4) | (kv < 1)),
    "heads": masks.per_head([masks.sliding_window(3, 3), masks.prefix_lm(3)] * 2),
}
LENGTHS = (5, 16, 11)


def _hidden(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs)[0]
    return out


def _alone(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return [_hidden(model, input_ids=ids[valid][None])[0] for ids, valid in rows]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("build", [models.bert, models.llama])
def test_packed_and_padded(build: Any, name: str) -> None:
    model = hf.enable(build())
    for side in ("left", "right"):
        inputs = models.batch(side, LENGTHS)
        valid = inputs["attention_mask"]
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        with hf.sparsify(model, MASKS[name]):
            alone = _alone(model, inputs)
            padded = _hidden(model, **inputs, position_ids=positions)
            packed = hf.pack(**inputs)
            unpacked = packed.unpack(_hidden(model, **packed.model_inputs()))
        for row, want in enumerate(alone):
            torch.testing.assert_close(padded[row][valid[row].bool()], want, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(unpacked[row][valid[row].bool()], want, atol=2e-5, rtol=1e-5)


def test_positions_that_begin_anew() -> None:
    model = hf.enable(models.llama())
    inputs = models.batch("right", LENGTHS)
    with hf.sparsify(model, MASKS["sinks"]):
        alone = torch.cat(_alone(model, inputs))
        ids = inputs["input_ids"][inputs["attention_mask"].bool()][None]
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        torch.testing.assert_close(
            _hidden(model, input_ids=ids, position_ids=positions)[0], alone, atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_of_rows_padded_on_the_left(cache: str) -> None:
    model, inputs = hf.enable(models.llama()), models.batch("left", (12, 7))
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    with hf.sparsify(model, masks.sliding_window(2) | masks.sink_tokens(2)), torch.no_grad():
        together = model.generate(**inputs, **options)
        for row, valid in enumerate(inputs["attention_mask"].bool()):
            one = {name: x[row : row + 1][:, valid] for name, x in inputs.items()}
            assert torch.equal(model.generate(**one, **options)[0, int(valid.sum()) :], together[row, 12:])


def test_refused() -> None:
    model, inputs = hf.enable(models.bert()), models.batch("left", LENGTHS)
    with (
        hf.sparsify(model, masks.random_blocks(1, block_size=4)),
        pytest.raises(UnsupportedError, match="length of a row"),
    ):
        _hidden(model, **inputs)
    with hf.sparsify(model, masks.from_dense(torch.rand(16, 16) < 0.5)), pytest.raises(ShapeError):
        _hidden(model, **inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with (
        hf.sparsify(model, MASKS["global"]),
        pytest.raises(
            (UnsupportedError, torch._dynamo.exc.Unsupported), match="where the sequences of a packed row begin"
        ),
    ):
        _hidden(compiled, **hf.pack(**inputs).model_inputs())
