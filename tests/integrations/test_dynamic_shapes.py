"""Models compiled once for any batch and length: no recompilation, plans per length, the same outputs as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

pytest.importorskip("transformers")

import stof
from stof import masks
from stof.fusion.templates.row_buckets import bucket_of
from stof.integrations.torch import compile as torch_compile
from stof.integrations.torch.compile import FusionReport
from tests.integrations import models

SIZES = ((2, 9), (3, 5), (4, 16), (5, 33), (2, 9))


class Compilations:
    """Counts what Dynamo hands to the backend; runs it as it is, or by Inductor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, inductor: bool) -> None:
        self.count = 0
        compile_rest = torch_compile._inductor

        def counted(gm: fx.GraphModule, *rest: Any) -> Callable[..., Any]:
            self.count += 1
            return compile_rest(gm, *rest) if inductor else gm.forward

        monkeypatch.setattr(torch_compile, "_inductor", counted)


def request(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    """Sequences of random lengths, one of them as long as given."""
    ids = torch.randint(1, models.VOCABULARY, (batch, length))
    if not padded:
        return {"input_ids": ids}
    counts = torch.randint(1, length + 1, (batch, 1))
    counts[0] = length
    valid = torch.arange(length) < counts
    return {"input_ids": ids * valid, "attention_mask": valid.long()}


def pair(family: str, mask: masks.Mask, layers: int = 2, **options: Any) -> tuple[nn.Module, nn.Module]:
    """An eager model with stof's attention, and a compiled copy."""
    model = getattr(models, family)(num_hidden_layers=layers)
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    stof.integrations.transformers.enable(plain)
    stof.integrations.transformers.sparsify(plain, mask)
    torch._dynamo.reset()
    return plain, stof.optimize(model, mask=mask, references=True, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "dynamic"), [("bert", None), ("llama", True)])
def test_one_compilation_for_all_sizes(family: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dynamic=None the second size makes sizes symbolic."""
    compilations = Compilations(monkeypatch, inductor=False)
    mask = masks.sliding_window(5) if family == "bert" else masks.causal() & masks.sliding_window(6)
    reports: list[FusionReport] = []
    plain, compiled = pair(family, mask, dynamic=dynamic, report=reports.append)
    used = 1 if dynamic else 2
    with torch.inference_mode():
        for place, (batch, length) in enumerate(SIZES):
            inputs = request(batch, length)
            with torch._dynamo.config.patch(error_on_recompile=place >= used):
                out = compiled(**inputs)[0]
            valid = inputs["attention_mask"].bool()
            torch.testing.assert_close(out[valid], plain(**inputs)[0][valid], atol=3e-5, rtol=1e-4)
    assert compilations.count == len(reports) == used
    # Segments are claimed all the same.
    assert reports[-1].fused == reports[0].fused > 0
    assert reports[-1].notes == []


@pytest.mark.slow
def test_lengths_of_several_buckets_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor adds guards of its own when it generates code."""
    compilations, first = Compilations(monkeypatch, inductor=True), 0
    plain, compiled = pair("llama", masks.causal() & masks.sliding_window(6), layers=1, dynamic=True)
    with torch.inference_mode():
        for place, (batch, length) in enumerate(SIZES):
            inputs = request(batch, length, padded=False)
            with torch._dynamo.config.patch(error_on_recompile=place > 0):
                out = compiled(**inputs)[0]
            # Dynamo may start over within the first call, to specialise on a module's numbers.
            first = compilations.count if place == 0 else first
            torch.testing.assert_close(out, plain(**inputs)[0], atol=3e-5, rtol=1e-4)
    assert compilations.count == first
    assert len({bucket_of(batch * length) for batch, length in SIZES}) > 2


def test_masks_in_dynamic_graphs_are_planned_once_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q, k, v, masks.sliding_window(3) | masks.global_tokens(2))

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", dynamic=True, fullgraph=True)
    made: list[tuple[int, int]] = []
    build = stof.plans.plan.Plan.__init__

    def counted(self: Any, mask: Any, lengths: tuple[int, int], *args: Any, **named: Any) -> None:
        made.append(lengths)
        build(self, mask, lengths, *args, **named)

    monkeypatch.setattr(stof.plans.plan.Plan, "__init__", counted)
    stof.plan_cache.clear()
    for place, length in enumerate((7, 12, 7, 31, 12, 7)):
        q, k, v = (torch.randn(2, 3, length, 8) for _ in range(3))
        with torch._dynamo.config.patch(error_on_recompile=place > 0):
            out = compiled(q, k, v)
        torch.testing.assert_close(out, attend(q, k, v))
    assert made == [(7, 7), (12, 12), (31, 31)]
