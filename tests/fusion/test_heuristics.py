"""What is matched where nothing was measured: by the memory traffic it saves, and by the size of its GEMM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.planner.heuristics import heuristic_choices, is_profitable
from stof.fusion.planner.match import TemplateMatch, find_matches
from stof.fusion.records.choices import TunedConfig
from stof.fusion.templates.registry import KernelPolicy, Template
from tests.fusion.graphs import capture


def bert_claim(tokens: int, last: int, width: int) -> TemplateMatch:
    """BERT-base's GEMM into the residual stream and its LayerNorm, up to the `last` of three operators, float16."""
    sizes = ((tokens, width), (768, width), (tokens, 768))
    x, w, r = (torch.empty(size, dtype=torch.float16, device="meta") for size in sizes)
    gm = capture(lambda x, w, r: F.layer_norm(F.linear(x, w) + r, (768,)), x, w, r)
    (match,) = find_matches(recognize_operators(gm.graph)[: last + 1], KernelPolicy.REFERENCE)[0]
    return match


def test_a_residual_before_a_norm_saves_one_pass_less() -> None:
    """As for BERT, 4096 tokens, H200: 38.6 us down-projection and residual, and then the norm; Inductor 35.5 in all."""
    sizes = ((4096, 3072), (768, 3072), (4096, 768))
    x, w, r = (torch.empty(size, dtype=torch.float16, device="meta") for size in sizes)
    gm = capture(lambda x, w, r: F.layer_norm(F.linear(x, w) + r, (768,)), x, w, r)
    operators = recognize_operators(gm.graph)
    (match,) = find_matches(operators[:2], KernelPolicy.REFERENCE)[0]
    assert is_profitable(match)
    assert not is_profitable(match, operators[2])
    assert 0 not in heuristic_choices(operators, GraphOrder(gm.graph), KernelPolicy.REFERENCE)


def test_a_residual_before_anything_bound_by_memory_saves_one_pass_less() -> None:
    """T5 under float16 clamps each sum, if it is infinite anywhere, before the norm reads it."""
    x, w, r = (
        torch.empty(size, dtype=torch.float16, device="meta") for size in ((4096, 3072), (768, 3072), (4096, 768))
    )

    def clamped(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        h = F.linear(x, w) + r
        most = torch.where(torch.isinf(h).any(), 64_504.0, 65_504.0)
        return F.rms_norm(torch.clamp(h, min=-most, max=most), (768,))

    def multiplied(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return F.linear(F.linear(x, w) + r, w.t().contiguous())

    for function, expected in ((clamped, []), (multiplied, [0])):
        gm = capture(function, x, w, r)
        assert (
            list(heuristic_choices(recognize_operators(gm.graph), GraphOrder(gm.graph), KernelPolicy.REFERENCE))
            == expected
        )


@pytest.mark.parametrize(("saved_us", "normed"), [(1.4, False), (1.6, True), (-0.1, False)])
def test_what_was_measured_before_a_norm_saves_one_pass_less(saved_us: float, normed: bool) -> None:
    """6.3 MB, 1.5 us on an H200, which Inductor saves where it adds the residual in the norm's kernel."""
    sizes = ((4096, 3072), (768, 3072), (4096, 768))
    x, w, r = (torch.empty(size, dtype=torch.float16, device="meta") for size in sizes)

    def chosen(function: Callable[..., Tensor]) -> list[int]:
        gm = capture(function, x, w, r)
        known = {"linear 4096x768x3072 residual float16 references": TunedConfig("", 30.0, 30.0 + saved_us)}
        return list(
            heuristic_choices(recognize_operators(gm.graph), GraphOrder(gm.graph), KernelPolicy.REFERENCE, known)
        )

    assert chosen(lambda x, w, r: F.layer_norm(F.linear(x, w) + r, (768,))) == [0] * normed
    assert chosen(lambda x, w, r: F.linear(x, w) + r) == [0] * (saved_us > 0)


def test_a_record_that_names_the_default_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files name configurations; lists of candidates have the default as ""."""
    x, w, r = (
        torch.empty(size, dtype=torch.float16, device="meta") for size in ((4096, 3072), (768, 3072), (4096, 768))
    )
    gm = capture(lambda x, w, r: F.linear(x, w) + r, x, w, r)
    known = {"linear 4096x768x3072 residual float16 references": TunedConfig("128x128x64,6s,pingpong", 30.0, 31.0)}

    def chosen() -> list[str]:
        found = heuristic_choices(recognize_operators(gm.graph), GraphOrder(gm.graph), KernelPolicy.REFERENCE, known)
        return [choice.config for choice in found.values()]

    assert chosen() == [""]  # by rule, not by the record
    monkeypatch.setattr(Template, "as_candidate", lambda self, problem, config: "")
    assert chosen() == ["128x128x64,6s,pingpong"]


@pytest.mark.parametrize(("alone_us", "expected"), [(2.0, [0]), (5.0, [1])])
def test_what_saves_most_is_chosen_wherever_it_begins(alone_us: float, expected: list[int]) -> None:
    """As in GPT-2, where the activation saves more in a GEMM without the norm before it than in one with it."""
    x, w = (torch.empty(size, dtype=torch.float16, device="meta") for size in ((8192, 768), (3072, 768)))
    gm = capture(lambda x, w: F.gelu(F.linear(F.layer_norm(x, (768,)), w)), x, w)
    known = {
        "norm_linear 8192x3072x768 activation=gelu norm=layer float16 references": TunedConfig("", 60.0, 63.0),
        "linear 8192x3072x768 activation=gelu float16 references": TunedConfig("", 50.0, 50.0 + alone_us),
    }
    assert (
        list(heuristic_choices(recognize_operators(gm.graph), GraphOrder(gm.graph), KernelPolicy.REFERENCE, known))
        == expected
    )


@pytest.mark.parametrize(("tokens", "width", "expected"), [(128, 3072, True), (512, 768, True), (65536, 3072, False)])
def test_small_products_are_claimed_by_shape_alone(tokens: int, width: int, expected: bool) -> None:
    """With an epilogue and without; a large GEMM by itself is never better off with us."""
    assert is_profitable(bert_claim(tokens, 2, width)) == expected
    assert is_profitable(bert_claim(tokens, 0, width)) == expected
