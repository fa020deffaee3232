"""Sparse masks of tensors and functions on models that are compiled: one graph, and the mask of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from stof import masks
from stof.masks import Mask
from stof.operators import FULL, Intersection, _numbered, intersection
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

LENGTH = 24


def _dense(seed: int) -> Mask:
    return masks.from_dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.5)


SPARSE: dict[str, Callable[[], Mask]] = {
    "tensor": lambda: _dense(0),
    "function": lambda: masks.from_function(lambda b, h, q, kv: (q - kv).abs() % 3 < 2),
    "composed": lambda: masks.sliding_window(2) | _dense(1),
    "named": lambda: masks.sliding_window(4),
}


def _outputs(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs)[0]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("build", [models.bert, models.gpt2, models.mistral, models.t5])
def test_one_graph(build: Callable[[], Any], name: str) -> None:
    torch.compiler.reset()
    model = hf.enable(build())
    ids = torch.randint(1, models.VOCABULARY, (2, LENGTH))
    inputs: dict[str, Any] = {"input_ids": ids}
    if build is models.t5:  # transformers 5.17 makes caches that PyTorch 2.11 cannot trace
        inputs |= {"decoder_input_ids": ids.flip(1), "use_cache": False}
    plain = _outputs(model, inputs)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    first, second = SPARSE[name](), _dense(5)
    for mask in (first, second, first):
        with hf.sparsify(model, mask):
            want = _outputs(model, inputs)
            torch.testing.assert_close(_outputs(compiled, inputs), want)
            assert not torch.allclose(want, plain)
    torch.testing.assert_close(_outputs(compiled, inputs), plain)
    assert counter.frame_count <= 4


def test_a_tensor_that_changes() -> None:
    torch.compiler.reset()
    model = hf.enable(models.gpt2())
    inputs = {"input_ids": torch.randint(1, models.VOCABULARY, (1, LENGTH))}
    keep = torch.rand(LENGTH, LENGTH) < 0.5
    compiled = torch.compile(model, backend=CompileCounter(), fullgraph=True)
    with hf.sparsify(model, masks.from_dense(keep)):
        before = _outputs(compiled, inputs)
        keep.copy_(torch.rand(LENGTH, LENGTH) < 0.3)
        after = _outputs(compiled, inputs)
        torch.testing.assert_close(after, _outputs(model, inputs))
    assert not torch.allclose(before, after)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [None, *SPARSE])
@pytest.mark.parametrize("build", [models.bert, models.gpt2])
def test_packed_batches(build: Callable[[], Any], name: str | None) -> None:
    """The documents of a batch change from call to call; they are intersected with the masks of model and layers."""
    torch.compiler.reset()
    model = hf.enable(build())
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with hf.sparsify(model, SPARSE[name]() if name else None):
        for lengths in ((9, 15), (13, 7, 4), (20, 4), (2, 22)):
            inputs = hf.pack(**models.batch(lengths=lengths)).model_inputs()
            torch.testing.assert_close(_outputs(compiled, inputs), _outputs(model, inputs))
    assert counter.frame_count <= 2


def test_later_queries() -> None:
    """With a cache, rows of the sparse mask count from the start of the sequence."""
    torch.compiler.reset()
    model = hf.enable(models.llama())
    ids = torch.randint(1, models.VOCABULARY, (1, LENGTH))
    with hf.sparsify(model, SPARSE["function"]()):
        want = _outputs(model, {"input_ids": ids})
        with torch.no_grad():
            cache = model(input_ids=ids[:, :15], use_cache=True).past_key_values
            compiled = torch.compile(model, backend="eager")
            got = compiled(input_ids=ids[:, 15:], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(got, want[:, 15:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own", [FULL, masks.causal(), masks.padding([9, 5])])
@pytest.mark.parametrize("q_offset", [0, 3])
def test_operators_find_both_masks(own: Mask, q_offset: int) -> None:
    for sparse in (_dense(3), masks.padding([7, 8]), masks.sliding_window(2)):
        if not own.number and not sparse.number:
            continue
        both = Intersection(((own, 0), (sparse, q_offset)))
        found = _numbered(both.number, both.handle)
        assert found == intersection(own, sparse, q_offset)
        rows = LENGTH - q_offset
        want = sparse.to_dense(LENGTH, batch=2)[:, :, q_offset:] & own.to_dense(rows, LENGTH, batch=2)
        assert torch.equal(found.to_dense(rows, LENGTH, batch=2).expand_as(want), want)
        assert _numbered(both.number, both.handle) is found


def test_few_intersections_are_kept() -> None:
    sparse = _dense(4)
    for q_offset in range(40):
        both = Intersection(((masks.causal(), 0), (sparse, q_offset)))
        assert _numbered(both.number, both.handle) == masks.causal() & sparse.with_query_offset(q_offset)
    assert len(sparse.__dict__["_intersections"]) <= 32
