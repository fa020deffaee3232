"""Positions that begin anew within a row keep sequences apart, whatever the attention mask says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stof.errors import UnsupportedError
from tests.integrations import models
from tests.integrations.test_packing_check import REFUSED, _out

hf = pytest.importorskip("stof.integrations.transformers")
sequence_numbers = pytest.importorskip("stof.integrations.transformers.packed_calls").sequence_numbers

WIDTH = 24
BUILDS: dict[str, Callable[[], Any]] = {
    "bert": models.bert,
    "gpt2": models.gpt2,
    "llama": models.llama,
    "mistral": models.mistral,
    "gemma2": models.gemma2,
}


def _lengths() -> list[int]:
    """Random lengths of two sequences or more that fill a row."""
    cuts = sorted(random.sample(range(1, WIDTH), random.randint(1, 4)))
    return [b - a for a, b in itertools.pairwise([0, *cuts, WIDTH])]


def _call(rows: list[list[int]], mask: str) -> dict[str, Any]:
    """A batch of packed rows; with "padding", the last sequence of each row is padding."""
    ids = torch.randint(1, models.VOCABULARY, (len(rows), WIDTH))
    call = {"input_ids": ids, "position_ids": torch.tensor([[p for n in row for p in range(n)] for row in rows])}
    if mask == "ones":
        call["attention_mask"] = torch.ones_like(ids)
    if mask == "padding":
        call["attention_mask"] = torch.tensor([[1] * (WIDTH - row[-1]) + [0] * row[-1] for row in rows])
    return call


def _alone(model: Any, call: dict[str, Any], rows: list[list[int]]) -> Tensor:
    """Outputs of each sequence alone."""
    tokens = [ids.split(row) for ids, row in zip(call["input_ids"], rows, strict=True)]
    return torch.stack([torch.cat([_out(model, {"input_ids": part[None]})[0] for part in row]) for row in tokens])


@pytest.mark.parametrize("mask", ["none", "ones", "padding"])
@pytest.mark.parametrize("name", BUILDS)
def test_sequences_are_kept_apart(name: str, mask: str) -> None:
    model = hf.enable(BUILDS[name]())
    rows = [_lengths() for _ in range(random.randint(1, 3))]
    call = _call(rows, mask)
    want = _alone(model, call, rows)
    valid = call.get("attention_mask", torch.ones(len(rows), WIDTH)).bool()
    for more in ({}, {"use_cache": False}):
        torch.testing.assert_close(_out(model, call | more)[valid], want[valid], atol=2e-5, rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mask", ["none", "ones", "padding"])
@pytest.mark.parametrize("name", BUILDS)
def test_compiled_code_keeps_them_apart(name: str, mask: str) -> None:
    """It cannot look at positions, so one graph serves packed rows and others."""
    torch.compiler.reset()
    model = hf.enable(BUILDS[name]())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for rows in ([_lengths()], [_lengths()], [[WIDTH - 5, 5]]):
        call = _call(rows, mask)
        want = _alone(model, call, rows)
        valid = call.get("attention_mask", torch.ones(1, WIDTH)).bool()
        torch.testing.assert_close(_out(compiled, call)[valid], want[valid], atol=2e-5, rtol=1e-5)


def test_positions_of_padded_batches_begin_no_sequence() -> None:
    """They stand still at padding, wherever it is."""
    for model in (hf.enable(models.bert()), hf.enable(models.llama())):
        for valid in (models.batch("left")["attention_mask"], (torch.rand(3, WIDTH) < 0.6).long()):
            ids = torch.randint(1, models.VOCABULARY, valid.shape)
            positions = (valid.cumsum(1) - 1).clamp(min=0)
            assert not sequence_numbers(positions, valid.bool()).any()
            assert not sequence_numbers(positions.masked_fill(valid == 0, 1), valid.bool()).any()
            call = {"input_ids": ids, "attention_mask": valid, "position_ids": positions}
            want = hf.disable(model)(**call)[0]
            kept = valid.bool()
            torch.testing.assert_close(_out(hf.enable(model), call)[kept], want[kept], atol=2e-5, rtol=1e-5)


def test_generation_goes_on_from_a_cache() -> None:
    model, inputs = hf.enable(models.llama()), models.batch("left", (12, 7))
    got = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    want = hf.disable(model).generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want)


def test_packed_positions_and_a_cache_are_refused() -> None:
    model, call = hf.enable(models.llama()), _call([[10, WIDTH - 10]], "ones")
    with torch.no_grad():
        cache = model(call["input_ids"]).past_key_values
    del call["attention_mask"]
    with pytest.raises(UnsupportedError, match="leave the cache out"):
        _out(model, call | {"past_key_values": cache})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["LFM2", "Qwen3-Next"])
@pytest.mark.parametrize("mask", ["none", "ones"])
def test_other_layers_over_tokens_are_refused(name: str, mask: str) -> None:
    model = hf.enable(REFUSED[name]())
    packed, plain = _call([[10, WIDTH - 10]], mask), _call([[WIDTH]], mask)
    with pytest.raises(UnsupportedError, match="no position_ids that begin anew"):
        _out(model, packed)
    want = _out(model, plain)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(_out(compiled, plain), want)
    with pytest.raises(UnsupportedError, match="no position_ids that begin anew"):
        _out(compiled, packed)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave position_ids out, or do not compile"):
        _out(torch.compile(model, backend="eager", fullgraph=True), plain)
