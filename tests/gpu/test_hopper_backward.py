"""The one-pass backward kernel on a Hopper GPU: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.hopper.backward_lists import LAYOUTS, make_backward_lists
from stof.kernels.implementation import BackwardCall, Gradients, NeedsGrad, Options
from stof.layout import build_layout
from stof.masks.tensors import as_mask
from stof.plans.backward import gradients_of
from stof.selection import IMPLEMENTATIONS
from stof.selection.backward_tilings import BackwardTiling
from stof.testing import MEMORY_LAYOUTS, make_inputs
from tests.kernels.gradients import assert_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.usefixtures("poisoned_memory"),
]
SHAPES = {  # batch, heads, kv_heads, q_len, kv_len
    "one tile": (1, 1, 1, 128, 128),
    "ragged": (2, 4, 2, 333, 517),
    "few queries": (1, 2, 1, 5, 700),
    "few keys": (1, 2, 2, 700, 3),
    "groups": (2, 8, 2, 640, 640),
    "many thread blocks": (1, 24, 24, 700, 700),
    # A work item has all query heads of its key head.
    "short items": (16, 9, 3, 300, 300),
    "short items of one key head": (32, 5, 1, 150, 280),
}
BOTH = NeedsGrad()
TEXTURES = ("full", "causal", "random", "sparse", "window", "per head", "empty blocks")


def dense(texture: str, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)
    generator = torch.Generator().manual_seed(q_len + kv_len)
    noise = torch.rand(batch, heads, q_len, kv_len, generator=generator)
    keep: Tensor = {
        "full": torch.ones(1, 1, q_len, kv_len, dtype=torch.bool),
        "causal": (columns <= rows)[None, None],
        "random": noise[:1, :1] < 0.5,
        "sparse": (noise[:1, :1] < 0.004) | (rows % kv_len == columns) | (columns % q_len == rows),
        "window": ((rows - columns).abs() < 70)[None, None],
        "per head": noise < 0.3,
        "empty blocks": ((columns // 128 % 2 == 0) & (rows // 128 % 3 > 0))[None, None],
    }[texture]
    return keep


def bound(call: dict[str, Any], queries: int, needs: NeedsGrad = BOTH) -> tuple[BackwardCall, list[Any]]:
    """The kernel bound to a call, and the arguments that it takes."""
    from stof.kernels.hopper.backward import bind_backward
    from stof.kernels.torch.reference import reference_attention

    q, k, v, d_out, keep = (call[name].cuda() for name in ("q", "k", "v", "d_out", "keep"))
    batch, heads, q_len, _ = q.shape
    transposed = as_mask(keep.transpose(2, 3).contiguous())
    sizes = {"batch": batch, "heads": heads, "device": torch.device("cuda", 0)}
    layout = build_layout(transposed, k.shape[2], q_len, LayoutConfig(128, queries), **sizes)
    sinks = call["sinks"].cuda() if "sinks" in call else None
    softcap = call.get("softcap", 0.0)
    exact = (x.double() for x in (q, k, v))
    out, lse = reference_attention(*exact, keep, scale=call["scale"], sinks=sinks, softcap=softcap)
    d_lse = call["d_lse"].cuda() if "d_lse" in call else None
    arguments = [q, k, v, out.to(q.dtype), lse.float(), d_out, d_lse, None, sinks]
    options = Options(call["scale"], softcap, sinks=sinks)
    return bind_backward(q, k, v, arguments[3], d_out, d_lse, make_backward_lists(layout), options, needs), arguments


def random_call(shape: str, texture: str, head_dim: int, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    batch, heads, kv_heads, q_len, kv_len = SHAPES[shape]
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    inputs = make_inputs(**sizes, head_dim=head_dim, dtype=dtype, **options)
    q, k, v = inputs.qkv
    return {
        "q": q, "k": k, "v": v, "d_out": torch.randn(q.shape).to(dtype), "scale": head_dim**-0.5,
        "keep": dense(texture, batch, heads, q_len, kv_len),
    }  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("texture", TEXTURES)
@pytest.mark.parametrize(("head_dim", "queries"), [(128, 64), (64, 128), (72, 64), (8, 128)])
def test_against_float64(shape: str, texture: str, head_dim: int, queries: int) -> None:
    dtype = torch.bfloat16 if head_dim % 16 else torch.float16
    call = random_call(shape, texture, head_dim, dtype)
    try:
        attend, arguments = bound(call, queries)
    except UnfitLayoutError:  # heads that share a key head, and do not see the same keys
        assert call["q"].shape[1] > call["k"].shape[1]
        assert texture == "per head"
        assert not bool(call["keep"].any(2).all())
        return
    gradients = attend(*arguments)
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in gradients]), call)
    again = attend(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(gradients[:3], again[:3], strict=True))


@pytest.mark.parametrize("texture", ["random", "causal", "per head"])
@pytest.mark.parametrize(("head_dim", "queries"), [(128, 64), (64, 128)])
def test_nan_of_what_nothing_sees_does_not_spread(head_dim: int, queries: int, texture: str) -> None:
    call = random_call("few keys" if texture == "causal" else "many thread blocks", texture, head_dim, torch.float16)
    heads = call["q"].shape[1]
    unseen_queries = torch.rand(1, heads, call["q"].shape[2]) < 0.1
    unseen_keys = torch.rand(1, heads, call["k"].shape[2]) < 0.1
    unseen_keys[..., 0] = False
    call["keep"] = call["keep"] & ~unseen_queries[..., None] & ~unseen_keys[:, :, None]
    attend, arguments = bound(call, queries)
    q, k, v, out, lse, d_out, *rest = arguments
    for x, unseen in ((q, ~call["keep"].any(3)), (d_out, ~call["keep"].any(3)), (k, ~call["keep"].any(2)),
                      (v, ~call["keep"].any(2))):  # fmt: skip
        x.masked_fill_(unseen[..., None].cuda(), torch.nan)
    gradients = attend(q, k, v, out, lse, d_out, *rest)
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in gradients]), call)


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "blocks"), [(1, 2, 1, 132), (1, 2, 2, 132), (2, 6, 2, 16)])
@pytest.mark.parametrize(("head_dim", "queries"), [(128, 64), (64, 128)])
def test_global_tokens(
    head_dim: int, queries: int, batch: int, heads: int, kv_heads: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of keys that all queries see are several items; with few thread blocks, others have all query heads."""
    monkeypatch.setattr("stof.kernels.hopper.backward.multiprocessors", lambda device: blocks)
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": 4100, "kv_len": 2050}
    rows, columns = torch.arange(4100)[:, None], torch.arange(2050)
    keep = ((rows // 2 - columns).abs() < 50) | (columns % 1000 < 9) | (rows % 1700 < 5)
    inputs = make_inputs(**sizes, head_dim=head_dim, dtype=torch.bfloat16)
    q, k, v = inputs.qkv
    call = {"q": q, "k": k, "v": v, "d_out": torch.randn(q.shape).bfloat16(), "scale": head_dim**-0.5}
    call["keep"] = keep[None, None]
    attend, arguments = bound(call, queries)
    gradients = attend(*arguments)
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in gradients]), call)
    for _ in range(20):
        again = attend(*arguments)
        assert all(torch.equal(one, other) for one, other in zip(gradients[:3], again[:3], strict=True))


@pytest.mark.parametrize("texture", ["causal", "holes", "per head"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "tokens", "head_dim", "queries"),
    [(1, 2, 2, 3333, 128, 64), (1, 6, 3, 3300, 72, 64), (2, 4, 1, 3200, 128, 64), (1, 2, 1, 6500, 64, 128)],
)
def test_long_last_items(
    batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, queries: int, texture: str
) -> None:
    """The last items are split, where blocks of keys are long and differ in length."""
    q, k, v = make_inputs(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=tokens, kv_len=tokens, head_dim=head_dim,
        dtype=torch.bfloat16,
    ).qkv  # fmt: skip
    rows, columns = torch.arange(tokens)[:, None], torch.arange(tokens)
    keep = (columns <= rows)[None, None]
    if texture == "holes":
        keep = keep & (rows // 128 % 3 != columns // 128 % 5) | (columns >= tokens - 200) | (columns < 100)
    elif texture == "per head":
        keep = torch.cat([columns <= rows + 300 * head for head in range(heads)]).view(1, heads, tokens, tokens)
    call = {"q": q, "k": k, "v": v, "d_out": torch.randn_like(q), "scale": head_dim**-0.5, "keep": keep}
    attend, arguments = bound(call, queries)
    gradients = attend(*arguments)
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in gradients]), call)
    again = attend(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(gradients[:3], again[:3], strict=True))


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_strides_addresses_and_gradients_of_lse(memory: str) -> None:
    call = random_call("ragged", "random", 64, torch.bfloat16, memory=memory) | {"d_lse": torch.randn(2, 4, 333)}
    attend, arguments = bound(call, 128)
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in attend(*arguments)]), call)
    moved = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x) for x in arguments[:3]]
    attend, _ = bound({**call, **dict(zip("qkv", moved, strict=True))}, 128)
    of_moved = attend(*moved, *arguments[3:])
    threes = [x.transpose(1, 2)[..., None].expand(*(-1,) * 4, 3).contiguous() for x in moved]
    spread = [x[..., 1].transpose(1, 2) for x in threes]
    attend, _ = bound({**call, **dict(zip("qkv", spread, strict=True))}, 128)
    of_spread = attend(*spread, *arguments[3:])
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in of_spread]), call)
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in of_moved]), call)


@pytest.mark.parametrize(("head_dim", "queries"), [(128, 64), (64, 128)])
def test_sinks(head_dim: int, queries: int) -> None:
    call = random_call("groups", "window", head_dim, torch.bfloat16) | {"sinks": torch.randn(8) * 3}
    attend, arguments = bound(call, queries, NeedsGrad(sinks=True))
    assert_gradients(Gradients(*[x if x is None else x.cpu() for x in attend(*arguments)]), call)
    with pytest.raises(UnfitLayoutError, match="both the log-sum-exp and sinks"):
        bound(call | {"d_lse": torch.randn(2, 8, 640)}, queries)


@pytest.mark.parametrize("texture", ["full", "random"])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize(("head_dim", "queries"), [(128, 64), (64, 128), (80, 64)])
def test_softcap(head_dim: int, queries: int, softcap: float, texture: str) -> None:
    for option in ({}, {"sinks": torch.randn(8)}, {"d_lse": torch.randn(2, 8, 640)}):
        call = random_call("groups", texture, head_dim, torch.bfloat16) | {"softcap": softcap} | option
        attend, arguments = bound(call, queries, NeedsGrad(sinks="sinks" in option))
        gradients = attend(*arguments)
        assert_gradients(Gradients(*[x if x is None else x.cpu() for x in gradients]), call)
        assert all(map(torch.equal, gradients[:3], attend(*arguments)[:3]))


def test_gradients_that_are_not_wanted() -> None:
    call = random_call("groups", "causal", 128, torch.bfloat16)
    for needs in (NeedsGrad(q=True, kv=False), NeedsGrad(q=False, kv=True)):
        attend, arguments = bound(call, 64, needs)
        dq, dk, dv, *_ = attend(*arguments)
        assert ((dq is not None), (dk is not None), (dv is not None)) == (needs.q, needs.kv, needs.kv)


@pytest.mark.parametrize(("head_dim", "queries"), [(128, 64), (64, 128)])
def test_equal_calls_give_equal_bits_whatever_runs_beside(head_dim: int, queries: int) -> None:
    call = random_call("many thread blocks", "full", head_dim, torch.bfloat16)
    attend, arguments = bound(call, queries)
    first = attend(*arguments)
    beside = torch.cuda.Stream()
    x = torch.randn(2048, 2048, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        with torch.cuda.stream(beside):
            x = x @ x * 1e-3
        again = attend(*arguments)
        for one, other in zip(first[:3], again[:3], strict=True):
            different += (one != other).sum()
    assert int(different) == 0


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_training(name: str, head_dim: int) -> None:
    """Through autograd, eagerly and in a CUDA graph."""
    mask = getattr(masks, name)()
    q, k, v = (torch.randn(4, 16, 2048, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    d_out, leaves = torch.randn_like(q), [x.requires_grad_() for x in (q, k, v)]
    plan = stof.plan(mask, 2048, device="cuda")

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(stof.attention(*leaves, plan), leaves, d_out)

    made = step()
    assert head_dim == 64 or {name for name, _ in gradients_of(plan)._prepared} == {"hopper"}
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    expected = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in leaves), is_causal=name == "causal"),
        leaves, d_out.float(),
    )  # fmt: skip
    for one, other, want in zip(made, captured, expected, strict=True):
        assert torch.equal(one, other)
        assert float((one.float() - want.float()).norm() / want.float().norm()) < 0.01


@pytest.mark.parametrize("tokens", [2048, 2000])
def test_new_documents_in_every_step(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second mask on the device makes the lists; gradients are those of Triton's kernels."""
    registered = IMPLEMENTATIONS["hopper"].backward
    assert registered is not None
    one_pass = replace(registered, tilings=lambda call, geometry_of: (BackwardTiling(dkv_layout=(LAYOUTS[128], None)),))
    q, k, v, d_out = (torch.randn(1, 8, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for step in range(4):
        ends = [0, *torch.randint(1, tokens, (5 + step,)).sort().values.tolist(), tokens]
        mask = masks.documents(cu_seqlens=ends) & masks.causal()
        made = []
        for backward in (one_pass, None):
            monkeypatch.setitem(IMPLEMENTATIONS, "hopper", replace(IMPLEMENTATIONS["hopper"], backward=backward))
            plan = stof.plan(mask, tokens, device="cuda")
            plan.gradients = None
            made.append(torch.autograd.grad(stof.attention(*leaves, plan), leaves, d_out))
        for one, other in zip(*made, strict=True):
            assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.01
