"""Another mask of one structure in every step: choices are kept, lists filled on the GPU. `pytest -m gpu`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.kernels.implementation import Gradients
from stof.masks import Mask
from stof.plans.kept_choices import kept_by_structure
from stof.runtime import launch
from stof.runtime.launch import Launch
from stof.selection import MaskGeometry
from stof.testing import assert_attention, make_inputs
from tests.kernels.gradients import assert_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, HEADS = 2, 4
Draw = random.Random


def ends(draw: Draw, length: int) -> list[int]:
    return [0, *sorted(draw.sample(range(1, length), draw.randint(1, 6))), length]


def boolean(draw: Draw, length: int, *leading: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(draw.randrange(2**31))
    keep = torch.rand(*leading, length, length, generator=generator, device="cuda") < draw.choice([0.01, 0.3, 0.9])
    return keep | torch.eye(length, dtype=torch.bool, device="cuda")


# Masks of one structure each.
DRAWN: dict[str, Callable[[Draw, int], Mask | Tensor]] = {
    "documents": lambda draw, n: masks.documents(cu_seqlens=ends(draw, n)) & masks.causal(),
    "rows of documents": lambda draw, n: masks.documents(cu_seqlens=[ends(draw, n) for _ in range(BATCH)]),
    "padding": lambda draw, n: masks.padding([draw.randint(1, n) for _ in range(BATCH)]),
    "padded windows": lambda draw, n: (
        masks.padding([draw.randint(0, n) for _ in range(BATCH)]) & masks.sliding_window(draw.randint(1, 60), 30)
    ),
    "window": lambda draw, n: masks.sliding_window(draw.randint(1, n // 4)),
    "prefix": lambda draw, n: masks.prefix_lm([draw.randint(1, n) for _ in range(BATCH)]),
    "longformer": lambda draw, n: masks.longformer(draw.randint(8, 60), draw.randint(1, 20)),
    "heads": lambda draw, n: masks.per_head([masks.sliding_window(draw.randint(1, n)) for _ in range(HEADS)]),
    "bool": lambda draw, n: boolean(draw, n),
    "bool of heads": lambda draw, n: boolean(draw, n, 1, HEADS),
    "bool and window": lambda draw, n: masks.from_dense(boolean(draw, n)) & masks.sliding_window(draw.randint(1, n)),
    "function": lambda draw, n: function(draw, n, 1, 1),
    "function of heads": lambda draw, n: function(draw, n, BATCH, HEADS),
}


def function(draw: Draw, length: int, batch: int, heads: int) -> Mask:
    """Documents of batch entries and heads by a table; a function made anew each time."""
    generator = torch.Generator("cuda").manual_seed(draw.randrange(2**31))
    starts = torch.rand(batch, heads, length, generator=generator, device="cuda") < 0.02
    table = starts.cumsum(-1)

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (table[b % batch, h % heads, i] == table[b % batch, h % heads, j])

    return masks.from_function(keep)


def problem(draw: Draw, mask: Mask | Tensor, length: int, head_dim: int, options: dict[str, Any]) -> dict[str, Any]:
    """A call on the CPU, with NaN in keys and values that no query sees."""
    torch.manual_seed(draw.randrange(2**31))
    inputs = make_inputs(batch=BATCH, heads=HEADS, kv_heads=2, q_len=length, head_dim=head_dim, dtype=torch.bfloat16)
    keep = mask.cpu().expand(1, HEADS, -1, -1) if isinstance(mask, Tensor) else None
    if keep is None:
        keep = mask.to_dense(length, length, batch=BATCH, heads=HEADS, device="cuda").cpu()  # type: ignore[union-attr]
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": torch.randn_like(inputs.q), "keep": keep}
    return call | {"scale": head_dim**-0.5} | options


def forward(call: dict[str, Any], mask: Mask | Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    seen = call["keep"].any(-2).expand(BATCH, HEADS, -1).unflatten(1, (2, -1)).any(2).cuda()[..., None]
    leaves = {name: call[name].cuda() for name in ("q", "k", "v", "sinks") if name in call}
    for name in "kv":
        leaves[name] = leaves[name].masked_fill(~seen, torch.nan)
    for leaf in leaves.values():
        leaf.requires_grad_()
    options = {name: call[name] for name in ("scale", "softcap") if name in call}
    out, lse = stof.attention(*(leaves[n] for n in "qkv"), mask, sinks=leaves.get("sinks"), return_lse=True, **options)
    return out, lse, leaves


def check(call: dict[str, Any], out: Tensor, lse: Tensor, leaves: dict[str, Tensor]) -> None:
    gradients = torch.autograd.grad(out, list(leaves.values()), call["d_out"].cuda())
    options = {name: call[name] for name in ("scale", "softcap", "sinks") if name in call}
    assert_attention(out.detach().cpu(), lse.detach().cpu(), *(call[n] for n in "qkv"), call["keep"], **options)
    named = {name: gradient.cpu() for name, gradient in zip(leaves, gradients, strict=True)}
    assert_gradients(Gradients(**dict.fromkeys(Gradients._fields) | named), call)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("seed", range(4))
def test_another_mask_in_every_step(name: str, seed: int) -> None:
    """Forward A, forward B, backward A, backward B, on one stream or two."""
    draw = random.Random(f"{name} {seed}")
    length, head_dim = draw.choice([256, 300, 512, 700]), draw.choice([64, 128])
    options: dict[str, Any] = draw.choice([{}, {}, {"softcap": 20.0}, {"sinks": torch.randn(HEADS)}])
    other = torch.cuda.Stream() if draw.random() < 0.3 else None
    for _ in range(4):
        drawn = [DRAWN[name](draw, length) for _ in range(2)]
        calls = [problem(draw, mask, length, head_dim, options) for mask in drawn]
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            results = [forward(call, mask) for call, mask in zip(calls, drawn, strict=True)]
        torch.cuda.synchronize()
        for call, result in zip(calls, results, strict=True):
            check(call, *result)


def test_later_masks_are_filled() -> None:
    kept_by_structure.clear()
    q, k, v = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for window in (100, 101, 102):
        mask = masks.sliding_window(window)
        stof.attention(q, k, v, mask)
    plan = stof.plan(mask, 1024, 1024, device="cuda")
    assert any(isinstance(prepared.lists, FilledTileLists) for prepared in plan._prepared.values())
    assert "chosen for sliding_window(left=100" in str(stof.explain(q, k, v, mask))


def test_bool_tensors_written_between_calls() -> None:
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    keep = boolean(random.Random(0), 512)
    for step in range(6):
        out = stof.attention(q, k, v, keep)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        keep.copy_(boolean(random.Random(step + 1), 512))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiled_kernels_serve_other_masks(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """Masks unlike those before are not surveyed, and nothing is compiled if a compiled kernel is about as fast."""
    kept_by_structure.clear()
    monkeypatch.setattr("stof.selection.compiled._ALLOWED_SLOWDOWN", 1e9)
    q, k, v = (torch.randn(1, 8, 4096, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step(size: int) -> None:
        torch.autograd.grad(stof.attention(*leaves, masks.sliding_window(size)).sum(), leaves)

    for size in (300, 310, 40):  # surveyed, filled, counted
        step(size)
    monkeypatch.setattr(launch, "_launch_jit", None)
    monkeypatch.setattr(Launch, "_launch_jit", None)
    monkeypatch.setattr(MaskGeometry, "survey", None)
    for size in (5, 100, 1000, 2000, 4095):
        step(size)
