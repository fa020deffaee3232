"""Rotary embeddings as part of the GEMM whose columns they rotate: what is matched, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import stof
from stof.errors import ArgumentError
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.measure import segment_timer
from stof.fusion.planner.match import find_matches
from stof.fusion.records.report import FusionReport
from stof.fusion.templates import reference
from stof.fusion.templates.operators import rotary_linear
from stof.fusion.templates.registry import KernelPolicy
from tests.fusion.graphs import RMSNorm, calls, capture, fuse

WIDTH, HEADS, KV_HEADS, D = 48, 4, 4, 32


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin


class Attention(nn.Module):
    """LLaMA's, up to the scores; `change` spoils it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.norm, self.change = RMSNorm(WIDTH), change
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * D, bias=change != "no bias")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        both = self.qkv(x if self.change == "no norm" else self.norm(x))
        q, k, v = (
            part.view(*x.shape[:2], -1, D).transpose(1, 2)
            for part in both.split((HEADS * D, KV_HEADS * D, KV_HEADS * D), -1)
        )
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        other = sin if self.change == "angles" else cos
        turned = turn(q, cos, sin), turn(k, other, sin)
        # Not returned as they are: results of a graph keep their strides.
        out = turned[0].sin(), turned[1].sin(), v
        if self.change == "as it was":
            return *out, q.sin()
        if self.change == "columns as they were":
            return *out, both[..., 5:9].sin()
        return (*out, both[..., (HEADS + KV_HEADS) * D :].sin()) if self.change == "values" else out


def angles(batch: int, length: int) -> tuple[Tensor, Tensor]:
    t = torch.randn(batch, length, D)
    return t.cos(), t.sin()


def compiled(model: nn.Module, called: list[str], **options: Any) -> Callable[..., Any]:
    """The model with its graph rewritten, not compiled further."""

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        assert fuse(gm, fold=options.get("fold", False)).notes == []
        called.extend(calls(gm))
        return gm.forward

    torch._dynamo.reset()
    done: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=options.get("dynamic", False))
    return done


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("change", ["", "no bias", "values", "no norm"])
def test_rotations_move_into_the_product(change: str, dynamic: bool) -> None:
    model, called = Attention(change).eval(), list[str]()
    run = compiled(model, called, fold=True, dynamic=dynamic)
    with torch.no_grad():
        for batch, length, tables in ((2, 7, 1), (3, 9, 3)) if not dynamic else ((2, 7, 1), (2, 9, 1), (4, 5, 1)):
            called_before = len(called)
            given = (torch.randn(batch, length, WIDTH), *angles(tables, length))
            for out, expected in zip(run(*given), model(*given), strict=True):
                torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            assert called[called_before:] in (["rotary_linear"], [])
    assert called


def test_rotations_whose_strides_are_returned_stay_apart() -> None:
    class Returned(Attention):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            q, k, _ = (
                part.view(*x.shape[:2], -1, D).transpose(1, 2)
                for part in self.qkv(x).split((HEADS * D, KV_HEADS * D, KV_HEADS * D), -1)
            )
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            return turn(q, cos, sin), turn(k, cos, sin).sin()

    given = (torch.randn(2, 7, WIDTH), *angles(1, 7))
    gm = capture(Returned().eval(), *given)
    before = [node.meta["example_value"].stride() for node in gm.graph.output_node().all_input_nodes]
    (note,) = fuse(gm).notes
    assert "strides" in note
    assert "rotary_linear" not in calls(gm)
    assert [node.meta["example_value"].stride() for node in gm.graph.output_node().all_input_nodes] == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("angles", "different angles"),
        ("as it was", "used without rotation"),
        ("columns as they were", "used without rotation"),
    ],
)
def test_what_is_left_alone_says_why(change: str, reason: str) -> None:
    model, called = Attention(change).eval(), list[str]()
    model.norm = nn.Identity()  # type: ignore[assignment]
    given = (torch.randn(2, 7, WIDTH), *angles(1, 7))
    with torch.no_grad():
        for out, expected in zip(compiled(model, called)(*given), model(*given), strict=True):
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    # Query alone may still be rotated where only key has other angles.
    assert ("rotary_linear" in called) == (change == "angles")
    operators = recognize_operators(capture(model, *given).graph)
    refused = [
        str(r) for i in range(len(operators)) for r in find_matches(operators[i : i + 3], KernelPolicy.REFERENCE)[1]
    ]
    assert any(reason in one for one in refused)


def test_heads_that_no_kernel_rotates_are_left() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, 2 * 24)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q = self.q(x).view(*x.shape[:2], -1, 24).transpose(1, 2)
            return q * cos[:, None] + torch.cat((-q[..., 12:], q[..., :12]), -1) * sin[:, None]

    operators = recognize_operators(capture(Small().eval(), torch.randn(2, 5, WIDTH), *torch.randn(2, 1, 5, 24)).graph)
    assert [str(o.kind) for o in operators] == ["linear", "rotary"]
    served, refused = find_matches(operators, KernelPolicy.REFERENCE)
    assert served == []
    assert refused == ["rotary_linear: heads of 24 in 48 columns are not rotated by a kernel"]


def test_the_segment_alone() -> None:
    gm = capture(Attention("values").eval(), torch.randn(2, 7, WIDTH), *angles(1, 7))
    served, _ = find_matches(recognize_operators(gm.graph)[1:4], KernelPolicy.REFERENCE)
    match = next(one for one in served if one.template.name == "rotary_linear")
    inputs = segment_timer.random_inputs(match)
    with torch.no_grad():
        outs = segment_timer.segment_graph(match, inputs)(*inputs.values())
        (whole,) = segment_timer.exact(match, inputs)
    heads = whole.unflatten(-1, (-1, D)).transpose(1, 2)
    for got, expected in zip(outs[:2], heads.split((HEADS, KV_HEADS, KV_HEADS), 1), strict=False):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    # What else is read of the GEMM: the values, twice.
    assert sorted(tuple(out.shape) for out in outs[2:]) == [(2, 7, KV_HEADS * D)] * 2
    timer = segment_timer.SegmentTimer(rounds=1)
    (taken,) = timer(match, [""])
    assert taken < math.inf
    assert timer.failures == {}


@pytest.mark.parametrize("normed", [False, True])
def test_operator(normed: bool) -> None:
    """Schema, fake, meaning; positions repeat over the batch."""
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, 5, 12), (3 * 8, 12), (3 * 8,)))
    cos, sin = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    scale = torch.rand(12, dtype=torch.float64) if normed else None
    rstd = reference.row_factors(x, 1e-6) if normed else None
    given = (x, rstd, scale, weight, bias, cos, sin, 16, 8, "")
    torch.library.opcheck(rotary_linear, given, test_utils=("test_schema", "test_faketensor"))
    plain = F.linear(F.rms_norm(x, (12,), scale, 1e-6) if normed else x, weight, bias)
    q = plain[..., :16].unflatten(-1, (2, 8))
    q = q * cos[0, :, None] + torch.cat((-q[..., 4:], q[..., :4]), -1) * sin[0, :, None]
    torch.testing.assert_close(rotary_linear(*given), torch.cat((q.flatten(-2), plain[..., 16:]), -1))
    for wrong in ((12, 8), (32, 8), (9, 3)):
        with pytest.raises(ArgumentError, match="cannot be heads of"):
            rotary_linear(x, rstd, scale, weight, bias, cos, sin, *wrong, "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fold", [False, True])
def test_a_whole_model(fold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from stof.integrations.torch import compile as torch_compile
    from tests.integrations import models

    monkeypatch.setattr(torch_compile, "_inductor", lambda gm, inputs, options, digest: gm.forward)
    model = models.llama(head_dim=32, num_attention_heads=2, num_key_value_heads=2, hidden_size=64)
    model.config.use_cache = False
    inputs = models.batch()
    with torch.inference_mode():
        expected = model(**inputs)[0]
        reports: list[FusionReport] = []
        torch._dynamo.reset()
        out = stof.optimize(model, fold=fold, references=True, report=reports.append)(**inputs)[0]
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(out[valid], expected[valid], atol=5e-5, rtol=1e-4)
    assert [row.template for row in reports[-1].segments].count(
        "rotary_linear"
    ) == 1 + fold  # unfolded, the first norm goes with it
    assert reports[-1].notes == []
