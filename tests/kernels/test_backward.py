"""The Triton backward kernels against float64: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.dropout import Dropout
from stof.kernels.implementation import Gradients, NeedsGrad, Options
from stof.kernels.torch.reference import reference_attention, reference_backward
from stof.kernels.triton import arguments, backward
from stof.kernels.triton.backward_tiles import PreparedBackward, prepare_backward
from stof.layout import Layout, build_layout
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS
from stof.testing import MEMORY_LAYOUTS, make_inputs, spread
from tests.examples import examples
from tests.kernels.gradients import assert_gradients, backward_calls, expected_gradients
from tests.strategies import row_orders

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEFAULT = KernelConfig()
TILES = LayoutConfig(16, 32)

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # NumPy warns of lanes whose result is dropped, and of a tanh that saturates; wrong results fail anyway.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


def layouts_of(
    keep: Tensor,
    heads: int,
    rows: LayoutConfig = TILES,
    columns: LayoutConfig = TILES,
    row_order: Tensor | None = None,
    column_order: Tensor | None = None,
) -> tuple[Layout, Layout]:
    """The layout of a dense mask `[B, H, Sq, Skv]`, and that of the transposed mask."""
    batch, _, q_len, kv_len = keep.shape
    sizes = {"batch": batch, "heads": heads, "device": DEVICE}
    mask, transposed = (as_mask(x.to(DEVICE)) for x in (keep, keep.transpose(-1, -2)))
    return (
        build_layout(mask, q_len, kv_len, rows, row_order=row_order, **sizes),
        build_layout(transposed, kv_len, q_len, columns, row_order=column_order, **sizes),
    )


def run(
    call: dict[str, Any],
    layouts: tuple[Layout, Layout] | PreparedBackward,
    configs: tuple[KernelConfig, KernelConfig] = (DEFAULT, DEFAULT),
    needs: NeedsGrad | None = None,
) -> Gradients:
    """The kernels' gradients for arguments of `reference_backward`; out and lse are the reference's."""
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.items()}
    p, seed = call.get("dropout", (0.0, None))
    if seed is not None:
        seed = seed.to(DEVICE)
        moved["dropout"] = Dropout(p, seed)
    out, lse = reference_attention(**{name: x for name, x in moved.items() if name not in ("d_out", "d_lse")})
    q, k, v, d_out, d_lse, bias, sinks = (moved.get(n) for n in ("q", "k", "v", "d_out", "d_lse", "bias", "sinks"))
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    needs = needs or NeedsGrad(bias=bias is not None, sinks=sinks is not None)
    options = Options(call["scale"], call.get("softcap", 0.0), bias, sinks, dropout_p=p, seed=seed)
    prepared = layouts if isinstance(layouts, PreparedBackward) else prepare_backward(*layouts, *configs)
    bound = backward.bind_backward(q, k, v, out, d_out, d_lse, prepared, options, needs)
    gradients = bound(q, k, v, out, lse, d_out, d_lse, bias, sinks, seed)
    if ON_GPU:  # the interpreter runs programs one after the other
        again = bound(q, k, v, out, lse, d_out, d_lse, bias, sinks, seed)
        assert equal(gradients, again), "two equal calls give equal bits"
    return Gradients(*[x if x is None else x.cpu() for x in gradients])


def equal(some: Gradients, others: Gradients) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(some, others, strict=True))


def a_call(keep: Tensor, heads: int = 2, kv_heads: int = 1, head_dim: int = 16, **changes: Any) -> dict[str, Any]:
    """Arguments of `reference_backward` for a dense mask `[B, H | 1, Sq, Skv]`."""
    batch, _, q_len, kv_len = keep.shape
    sizes = {"dtype": torch.float32, "memory": "bhsd", "value_dim": head_dim}
    sizes |= {name: changes.pop(name) for name in list(changes) if name in sizes}
    inputs = make_inputs(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, **sizes
    )
    d_out = torch.randn(batch, heads, q_len, sizes["value_dim"], dtype=torch.float64).to(sizes["dtype"])
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": d_out, "keep": keep, "scale": head_dim**-0.5}
    return call | changes


@st.composite
def geometries(draw: st.DrawFn) -> LayoutConfig:
    return LayoutConfig(
        block_m=draw(st.sampled_from([1, 8, 16, 32, 64, 128])),
        block_n=draw(st.sampled_from([16, 32, 64, 128])),
        slab=draw(st.sampled_from([None, 1, 8, 16])),
    )


@st.composite
def kernel_configs(draw: st.DrawFn, rows: int) -> KernelConfig:
    return KernelConfig(
        num_warps=draw(st.sampled_from([4, 8] if ON_GPU and rows != 64 else [4])),
        num_stages=2,
        split_tiles=draw(st.sampled_from([0, 0, 1, 2])),
        side=draw(st.sampled_from([0, 1, 2, 100])),
    )


@given(data=st.data(), rows=geometries(), columns=geometries(), dtype=st.sampled_from(DTYPES))
@examples(300 if ON_GPU else 24)
def test_against_float64(data: st.DataObject, rows: LayoutConfig, columns: LayoutConfig, dtype: torch.dtype) -> None:
    """Random masks, shapes, strides and options; NaN where nobody looks."""
    call = data.draw(backward_calls(dtype, [1, 17, 40], [1, 16, 33, 70], [16, 20]))
    orders = (data.draw(row_orders(call[name].shape[2])) for name in ("q", "k"))
    layouts = layouts_of(call["keep"], call["q"].shape[1], rows, columns, *orders)
    configs = (data.draw(kernel_configs(rows.block_m)), data.draw(kernel_configs(columns.block_m)))
    found = run(call, layouts, configs)
    assert_gradients(found, call)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 16, 20, 64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    keep = (masks.causal() | masks.sink_tokens(3)).to_dense(20, 50)
    for value_dim in (head_dim, 5):
        call = a_call(keep, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
        assert_gradients(run(call, layouts_of(keep, 2)), call)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(b, h, q, kv) for b in (1, 2) for h in (1, 4) for q in (1, 30) for kv in (1, 50)])
def test_biases_of_every_broadcast(shape: tuple[int, ...]) -> None:
    """Summed over batch entries, heads, rows and columns; masks differ by batch entry and head."""
    torch.manual_seed(sum(shape))
    keep = torch.rand(2, 4, 30, 50) < 0.4
    keep[:, :, 16:32, :16] = True
    bias = torch.randn(shape)
    call = a_call(keep, heads=4, kv_heads=2, bias=bias, sinks=torch.randn(4), d_lse=torch.randn(2, 4, 30), softcap=3.0)
    layouts = layouts_of(keep, 4, columns=LayoutConfig(16, 16, 1), column_order=torch.randperm(50))
    assert_gradients(run(call, layouts, (DEFAULT, KernelConfig(split_tiles=1))), call)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_memory_orders(memory: str, dtype: torch.dtype) -> None:
    keep = (torch.arange(33) <= torch.arange(17)[:, None] + 16).expand(2, 1, 17, 33)
    call = a_call(keep, memory=memory, dtype=dtype)
    for d_out in (spread(call["d_out"], memory), torch.ones((), dtype=dtype).expand(call["d_out"].shape)):
        changed = call | {"d_out": d_out, "bias": spread(torch.randn(2, 2, 17, 33), memory)}
        assert_gradients(run(changed, layouts_of(keep, 2)), changed)


@pytest.mark.parametrize("split_tiles", [0, 1, 3])
def test_heavy_row_blocks(split_tiles: int) -> None:
    """Global tokens: some rows see all keys, some keys are seen by all rows."""
    keep = (masks.sliding_window(5, 5) | masks.global_tokens(2)).to_dense(70, 70)
    call = a_call(keep, sinks=torch.randn(2))
    config = KernelConfig(split_tiles=split_tiles)
    layouts = layouts_of(keep, 2, LayoutConfig(16, 16), LayoutConfig(16, 16, 8), row_order=torch.randperm(70))
    assert_gradients(run(call, layouts, (config, config)), call)


def test_heads_of_a_key_head_have_masks_of_their_own() -> None:
    """Different numbers of tiles, of chunks, and none at all."""
    keep = torch.stack([torch.rand(40, 60) < density for density in (0.02, 0.9, 0.0, 0.3)])[None]
    call = a_call(keep, heads=4, kv_heads=1)
    for split_tiles in (0, 1):
        config = KernelConfig(split_tiles=split_tiles)
        layouts = layouts_of(keep, 4, LayoutConfig(16, 16), LayoutConfig(16, 16))
        assert_gradients(run(call, layouts, (config, config)), call)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("slab", [None, 1])
def test_what_nobody_sees_has_no_gradient(bad: float, slab: int | None) -> None:
    """Among rows and keys of the same tiles that others see."""
    keep = torch.rand(1, 1, 40, 60) < 0.3
    keep[..., 16:32, 32:48] = True
    keep[:, :, 5] = keep[:, :, 39] = False
    keep[..., 7] = keep[..., 50:52] = False
    call = a_call(keep, softcap=2.0, bias=torch.randn(1, 2, 40, 60), sinks=torch.randn(2), d_lse=torch.randn(1, 2, 40))
    layouts = layouts_of(keep, 2, LayoutConfig(16, 16, slab), LayoutConfig(16, 16, slab))
    clean = run(call, layouts)
    assert equal(clean, run(call, layouts))
    for name, where in (("q", (5, 39)), ("d_out", (5, 39)), ("d_lse", (5, 39)), ("k", (7, 50, 51)), ("v", (7, 50, 51))):
        call[name] = call[name].clone()
        call[name][:, :, list(where)] = bad
    call["bias"] = call["bias"].masked_fill(~keep, bad)
    assert equal(clean, run(call, layouts))


def test_only_what_is_asked_for() -> None:
    keep = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    call = a_call(keep, bias=torch.randn(1, 1, 16, 16), sinks=torch.randn(2))
    layouts = layouts_of(keep, 2)
    every = run(call, layouts)
    for n, names in enumerate((("q",), ("k", "v"), ("bias",), ("sinks",))):
        found = run(call, layouts, needs=NeedsGrad(*[m == n for m in range(4)]))
        for name, one, other in zip(Gradients._fields, found, every, strict=True):
            assert (one is None) != (name in names)
            assert one is None or torch.equal(one, other)


def test_wide_offsets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = (masks.sliding_window(9, 9) | masks.global_tokens(2)).to_dense(50, 50)
    call = a_call(keep, bias=torch.randn(1, 2, 50, 50), head_dim=20)
    layouts = layouts_of(keep, 2, LayoutConfig(16, 16), LayoutConfig(16, 16, 1))
    narrow = run(call, layouts)
    monkeypatch.setattr(arguments, "needs_int64_offsets", lambda *tensors: True)
    assert equal(narrow, run(call, layouts))


def test_large_scores() -> None:
    """Scores of hundreds: what is lost is the rounding of the scores and of the log-sum-exp that was saved."""
    keep = torch.rand(1, 1, 30, 40) < 0.5
    for softcap in (0.0, 30.0):
        call = a_call(keep, scale=40.0, softcap=softcap)
        largest = float((call["q"] @ call["k"].mT).abs().max()) * 40.0
        found, expected = run(call, layouts_of(keep, 2)), expected_gradients(call)
        for one, other in zip(found[:3], expected[:3], strict=True):
            allowed = 4 * largest * torch.finfo(torch.float32).eps * float(other.abs().max())
            torch.testing.assert_close(one.double(), other, rtol=0, atol=allowed)


def test_layouts_that_do_not_fit() -> None:
    keep = torch.ones(1, 1, 16, 48, dtype=torch.bool)
    forward, transposed = layouts_of(keep, 2)
    with pytest.raises(UnfitLayoutError, match="transposed mask"):
        prepare_backward(forward, forward)
    with pytest.raises(UnfitLayoutError, match="powers of two"):
        prepare_backward(forward, layouts_of(keep, 2, columns=LayoutConfig(192, 64))[1])
    with pytest.raises(UnfitLayoutError, match="a warp for 16 rows"):
        prepare_backward(layouts_of(keep, 2, rows=LayoutConfig(64, 64))[0], transposed, KernelConfig(num_warps=8))
    with pytest.raises(UnfitLayoutError, match="do not serve"):
        run(a_call(torch.ones(1, 1, 17, 48, dtype=torch.bool)), (forward, transposed))


MASK = masks.sliding_window(5, 9) | masks.sink_tokens(2)
INPUTS = make_inputs(batch=2, heads=4, kv_heads=2, q_len=40, kv_len=56, head_dim=16, dtype=torch.bfloat16)


@pytest.mark.skipif(ON_GPU, reason="tests/gpu has the kernels on a GPU")
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "bias": True, "sinks": True}], ids=["plain", "options"])
@pytest.mark.parametrize("tiling", range(3))
def test_triton_kernels_of_plans(tiling: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile size that plans may choose on a GPU, in the interpreter."""
    triton = IMPLEMENTATIONS["block_wise"].backward
    assert triton is not None
    capabilities = replace(triton.capabilities, devices=())
    chosen = replace(triton, capabilities=capabilities, tilings=lambda *about: triton.tilings(*about)[tiling:])
    monkeypatch.setitem(
        IMPLEMENTATIONS, "row_block", replace(IMPLEMENTATIONS["row_block"], backward=chosen)
    )  # fmt: skip
    q, k, v = (x.clone().requires_grad_() for x in INPUTS.qkv)
    more: dict[str, Any] = {"softcap": options.get("softcap")}
    if options:
        more |= {"bias": torch.randn(1, 4, 1, 56).bfloat16(), "sinks": torch.randn(4)}
    stof.plan_cache.clear()
    out = stof.attention(q, k, v, MASK, **more)
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    call = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "d_out": d_out, "scale": 0.25}
    call |= {name: x for name, x in more.items() if x is not None} | {"keep": MASK.to_dense(40, 56)}
    full = reference_backward(**call)
    assert_gradients(Gradients(*gradients, full.bias, full.sinks), call)
    stof.plan_cache.clear()
