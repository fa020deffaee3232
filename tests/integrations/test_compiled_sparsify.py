"""Sparse masks of tensors and functions on models that are compiled: one graph, and the mask of each call."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import stof
from stof import masks
from stof.errors import MaskError
from stof.handles import FULL, Intersection, _numbered, mask_of
from stof.masks import Mask
from stof.masks.parse import mask_by_number
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

from stof.integrations.transformers.model_mask import ModelMask  # noqa: E402

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


@pytest.mark.sampled(11)
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
    scores = torch.randn(LENGTH, LENGTH)
    compiled = torch.compile(model, backend=CompileCounter(), fullgraph=True)
    with hf.sparsify(model, masks.from_function(lambda b, h, q, kv: scores[q, kv] > 0)):
        before = _outputs(compiled, inputs)
        scores.data.copy_(torch.randn(LENGTH, LENGTH))
        after = _outputs(compiled, inputs)
        torch.testing.assert_close(after, _outputs(model, inputs))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("name", [None, "named"])
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


@pytest.mark.sampled(2)
@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_for_all_masks(packed: bool) -> None:
    """With numbers on modules as inputs of the graph; a packed batch has one more mask, a constant."""
    torch.compiler.reset()
    model = hf.enable(models.gpt2())
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed in range(5):
        inputs: dict[str, Any] = {"input_ids": torch.randint(1, models.VOCABULARY, (1, LENGTH))}
        if packed:
            inputs = hf.pack(**models.batch(lengths=(9 + seed, 15 - seed))).model_inputs()
        with hf.sparsify(model, masks.sliding_window(2 + seed) if packed else _dense(seed)):
            torch.testing.assert_close(_outputs(compiled, inputs), _outputs(model, inputs))
    assert packed or counter.frame_count <= 2


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


def test_operators_intersect_masks() -> None:
    numbered = [_dense(3), masks.padding([7, 8]), masks.from_bits(torch.randint(99, (LENGTH, 1)).int(), LENGTH)]
    named = [masks.causal(), masks.sliding_window(2) | masks.global_tokens(1)]
    for parts in itertools.permutations([*numbered, *named], 3):
        if not any(part.number for part in parts):
            continue
        both = Intersection(parts)
        found = _numbered(both.number, both.handle)
        assert found == mask_of(both) == parts[0] & parts[1] & parts[2]
        want = functools.reduce(torch.logical_and, [part.to_dense(LENGTH, batch=2) for part in parts])
        assert torch.equal(found.to_dense(LENGTH, batch=2), want)
        assert both.may_change == any(part is numbered[2] for part in parts)
        assert _numbered(both.number, both.handle) is found
        assert both.handle.isprintable()  # Inductor writes arguments into comments


def test_code_that_is_not_compiled_takes_intersections() -> None:
    """Where another thread compiles, `torch.compiler.is_compiling()` may change within a call."""
    mask = _dense(4)
    for q in (torch.randn(1, 2, LENGTH, 8), torch.randn(0, 2, LENGTH, 8)):
        both = Intersection((masks.causal(), mask))
        assert torch.equal(stof.attention(q, q, q, both), stof.attention(q, q, q, masks.causal() & mask))


def test_intersections_of_calls_before_are_found() -> None:
    q, mask = torch.randn(1, 2, LENGTH, 8), _dense(6)
    stof.attention(q, q, q, mask & masks.sliding_window(3))  # its plan keeps a mask that is equal
    both = Intersection((mask, masks.sliding_window(3)))
    mask = _numbered(both.number, both.handle)
    assert mask is mask_by_number(mask.number)


def test_intersections_keep_no_tensor_alive() -> None:
    gc.disable()
    try:
        keep = torch.rand(LENGTH, LENGTH) < 0.5
        seen, both = weakref.ref(keep), Intersection((masks.causal(), masks.from_dense(keep)))
        number, handle = both.number, both.handle
        assert _numbered(number, handle) == mask_of(both)
        del keep, both
        assert seen() is None
        with pytest.raises(MaskError, match="no longer exists"):
            _numbered(number, handle)
    finally:
        gc.enable()


def test_a_mask_that_leaves_compiled_code() -> None:
    """A graph break between making the mask and the first layer."""
    sparse, q = _dense(4), torch.randn(1, 2, LENGTH, 8)
    mask = ModelMask(Intersection((masks.causal(), sparse)), (1, 1, LENGTH, LENGTH))
    for other in (None, masks.sliding_window(5)):
        want = stof.attention(q, q, q, masks.causal() & sparse & (FULL if other is None else other))
        assert torch.equal(stof.attention(q, q, q, mask.plan(other, q, q)), want)
