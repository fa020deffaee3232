"""Dropout: the same weights stay everywhere, and each implementation computes as the definition does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.kernels.config import KernelConfig
from stof.kernels.dropout import Dropout, dense_kept_weights, draw_seed, kept_weights, philox
from stof.kernels.implementation import Options, attend_once
from stof.kernels.torch.reference import reference_attention, reference_backward
from stof.kernels.triton import block_wise
from stof.kernels.triton.dropout_mask import kept_weights as kept_in_kernel
from stof.kernels.triton.work_list import prepare
from stof.layout import Layout
from stof.testing import make_inputs
from tests.examples import examples
from tests.kernels import test_backward, test_cpu_backward
from tests.kernels.gradients import WORDS, assert_gradients, autograd_gradients, backward_calls
from tests.strategies import configs, row_orders

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

pytestmark = test_backward.pytestmark


@triton.jit
def _words(out_ptr, seed_ptr, rows_ptr, columns_ptr, heads_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    head = tl.load(heads_ptr + i).to(tl.uint32)[:, None]
    row = tl.load(rows_ptr + i).to(tl.uint32)[:, None]
    column = tl.load(columns_ptr + j).to(tl.uint32)[None, :]
    word, _, _, _ = tl.philox(tl.load(seed_ptr), row, column, head, tl.load(seed_ptr + 1).to(tl.uint32))
    tl.store(out_ptr + i[:, None] * BLOCK_N + j[None, :], word.to(tl.int64))


@triton.jit
def _kept(out_ptr, seed_ptr, threshold, head, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    kept = kept_in_kernel(
        tl.load(seed_ptr), tl.load(seed_ptr + 1), threshold, head, i[:, None], j.to(tl.int64)[None, :]
    )
    tl.store(out_ptr + i[:, None] * BLOCK_N + j[None, :], kept.to(tl.int8))


# Known answers of the generator's authors (Random123, kat_vectors): counter, key, first word.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
]


@pytest.mark.parametrize(("counter", "key", "word"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], word: int) -> None:
    both = key[0] + (key[1] << 32)
    signed = both - 2**64 if both >= 2**63 else both
    assert int(philox(torch.tensor(signed), *map(torch.tensor, counter))) == word


@given(seed=WORDS, offset=WORDS, first=st.integers(0, 2**32 - 9), p=st.sampled_from([1e-9, 0.3, 0.7, 1 - 2**-40]))
@examples(10)
def test_equals_tritons_generator(seed: int, offset: int, first: int, p: float) -> None:
    """Bit for bit, also where indices take all 32 bits."""
    rows, columns, heads = first + torch.arange(8), torch.arange(16) * 268435399 % 2**32, torch.arange(8) * 536870909
    drawn = torch.tensor([seed, offset])
    word = philox(drawn[0], rows[:, None], columns, heads[:, None], drawn[1] & 0xFFFFFFFF)
    out = torch.empty(8, 16, dtype=torch.int64, device=DEVICE)
    _words[(1,)](out, *(x.to(DEVICE) for x in (drawn, rows, columns, heads)), 8, 16)
    assert torch.equal(out.cpu(), word)
    dropout = Dropout(p, drawn)
    kept = torch.empty(8, 16, dtype=torch.int8, device=DEVICE)
    _kept[(1,)](kept, drawn.to(DEVICE), dropout.threshold, 5, 8, 16)
    small = kept_weights(dropout, torch.tensor(5), torch.arange(8)[:, None], torch.arange(16))
    assert torch.equal(kept.bool().cpu(), small)


@pytest.mark.parametrize("at_once", [1, 100, 2**16])
def test_shapes_and_parts_change_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = Dropout(0.4, torch.tensor([1234567890123, 42]))
    monkeypatch.setattr("stof.kernels.dropout._AT_ONCE", at_once)
    dense = dense_kept_weights(dropout, 2, 3, 7, 9)
    b, h, i, j = torch.meshgrid(*map(torch.arange, dense.shape), indexing="ij")
    assert torch.equal(kept_weights(dropout, b * 3 + h, i, j), dense)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_how_many_weights_stay(p: float) -> None:
    """Within five standard deviations, of the whole and of each row, column and head; draws are not correlated."""
    torch.manual_seed(7)
    some, others = (
        dense_kept_weights(Dropout(p, draw_seed(torch.device("cpu"))), 2, 4, 128, 256).double() for _ in range(2)
    )
    deviation = math.sqrt(p * (1 - p))
    for dims in ((), (2, 3), (0, 1, 3), (0, 1, 2)):
        mean = some.mean(dims) if dims else some.mean()
        assert float((mean - (1 - p)).abs().max()) < 5 * deviation * math.sqrt(mean.numel() / some.numel())
    count = some.numel()
    for other in (others, some.roll(1, 0), some.roll(1, 1), some.roll(1, 2), some.roll(1, 3)):
        correlation = ((some - 1 + p) * (other - 1 + p)).mean() / deviation**2
        assert abs(float(correlation)) < 5 / math.sqrt(count)


@given(call=backward_calls(torch.float64, [1, 2, 17, 33], [1, 2, 17, 33], [1, 7, 16], dropout=True))
@examples(60)
def test_definition_equals_autograd(call: dict[str, Any]) -> None:
    actual = reference_backward(**call)
    clean = {n: x.nan_to_num() if n in ("q", "k", "v", "d_out") else x for n, x in call.items()}
    expected = autograd_gradients(**clean)
    for got, want in zip(actual, expected, strict=True):
        if got is None or want is None:
            assert got is want
        else:
            tolerance = 1e-6 if got.dtype != torch.float64 else 1e-11
            torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=1e-6)


def test_expectation_is_attention_without_dropout() -> None:
    """The mean over draws, of which each weight is kept in `1 - p`; the log-sum-exp never changes."""
    q, k, v = make_inputs(batch=1, heads=2, kv_heads=2, q_len=5, kv_len=12, head_dim=8, dtype=torch.float64).qkv
    out, lse = reference_attention(q, k, v, scale=0.3)
    mean = torch.zeros_like(out)
    for number in range(2000):
        dropped, same = reference_attention(q, k, v, scale=0.3, dropout=Dropout(0.3, torch.tensor([number, 0])))
        mean += dropped / 2000
        assert torch.equal(same, lse)
    torch.testing.assert_close(mean, out, atol=0.1, rtol=0.0)


@given(data=st.data(), config=configs, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@examples(80)
def test_cpu_gradients(data: st.DataObject, config: LayoutConfig, dtype: torch.dtype) -> None:
    """Random masks, shapes, strides, tilings and options."""
    call = data.draw(backward_calls(dtype, [1, 17, 65, 130], [1, 16, 65, 150], [1, 7, 16, 32], dropout=True))
    order = data.draw(row_orders(call["q"].shape[2]))
    schedule = test_cpu_backward.schedule_of(call["keep"], call["q"].shape[1], config, order)
    assert_gradients(test_cpu_backward.run(call, schedule), call, factor=4.0 if dtype == torch.float64 else 2.0)


@pytest.mark.parametrize("mask", [masks.causal() | masks.sliding_window(20, 20), masks.longformer(30, 5)])
def test_cpu_steps_that_merge_and_batches_of_steps(mask: masks.Mask) -> None:
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=300, head_dim=16, memory="bshd")
    keep = mask.to_dense(300, 300).view(1, 1, 300, 300)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": torch.randn(2, 4, 300, 16), "scale": 0.25}
    call |= {"keep": keep, "dropout": Dropout(0.2, torch.tensor([5, 6]))}
    for slab in (None, 1):
        schedule = test_cpu_backward.schedule_of(keep, 4, LayoutConfig(32, 32, slab))
        assert_gradients(test_cpu_backward.run(call, schedule), call)


def forward(call: dict[str, Any], layout: Layout, config: KernelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton forward kernel, for arguments of `reference_backward`."""
    moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    bias = moved.get("bias")
    bias = None if bias is None else bias[(None,) * (4 - bias.ndim)]
    p, seed = call["dropout"]
    options = Options(
        call["scale"], call.get("softcap", 0.0), bias, moved.get("sinks"), dropout_p=p, seed=seed.to(DEVICE)
    )
    bound = (moved["q"], moved["k"], moved["v"], prepare(layout, config), options)
    out, lse = attend_once(block_wise.bind, *bound)
    return out.cpu(), lse.cpu()


def assert_forward(out: torch.Tensor, lse: torch.Tensor, call: dict[str, Any]) -> None:
    """Within twice the error of the dense formula in the inputs' dtype, and some roundings."""
    names = [name for name in call if name not in ("d_out", "d_lse")]
    wide = {n: x.double() if isinstance(x := call[n], torch.Tensor) and x.is_floating_point() else x for n in names}
    expected, expected_lse = reference_attention(**wide)
    plain, _ = reference_attention(**{n: call[n] for n in names}, compute_dtype=call["q"].dtype)
    eps = torch.finfo(call["q"].dtype).eps
    allowed = 2 * (plain.double() - expected).abs().max() + 8 * eps * expected.abs().max().clamp(min=1.0)
    assert bool(((out.double() - expected).abs() <= allowed).all())
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-2 if eps > 1e-6 else 1e-4, rtol=1e-3)


@given(
    data=st.data(),
    rows=test_backward.geometries(),
    columns=test_backward.geometries(),
    dtype=st.sampled_from(test_backward.DTYPES),
)
@examples(200 if ON_GPU else 24)
def test_triton_kernels(data: st.DataObject, rows: LayoutConfig, columns: LayoutConfig, dtype: torch.dtype) -> None:
    """The forward, and gradients of everything: random masks, shapes, strides, tilings and options."""
    call = data.draw(backward_calls(dtype, [1, 17, 40], [1, 16, 33, 70], [16, 20], dropout=True))
    orders = (data.draw(row_orders(call[name].shape[2])) for name in ("q", "k"))
    layouts = test_backward.layouts_of(call["keep"], call["q"].shape[1], rows, columns, *orders)
    some, others = (data.draw(test_backward.kernel_configs(one.block_m)) for one in (rows, columns))
    if rows.block_m <= 64:
        pack = data.draw(st.booleans()) and call["keep"].shape[1] == 1
        config = KernelConfig(num_warps=4, num_stages=2, pack=pack, split_tiles=some.split_tiles)
        assert_forward(*forward(call, layouts[0], config), call)
    assert_gradients(test_backward.run(call, layouts, (some, others)), call)


@pytest.mark.slow
def test_tilings_drop_the_same_weights() -> None:
    """Values are an identity matrix, so that the output shows the weights."""
    keep = (masks.sliding_window(9, 9) | masks.global_tokens(2)).to_dense(40, 48)
    q, k, _ = make_inputs(batch=2, heads=2, kv_heads=2, q_len=40, kv_len=48, head_dim=16).qkv
    v = torch.eye(48).expand(2, 2, 48, 48)
    dropout = Dropout(0.4, torch.tensor([2**62 + 3, 2**33 + 1]))
    expected = dense_kept_weights(dropout, 2, 2, 40, 48) & keep
    call = {"q": q, "k": k, "v": v, "keep": keep, "scale": 0.25, "dropout": dropout}
    for config in (LayoutConfig(16, 16), LayoutConfig(32, 64, 1), LayoutConfig(1, 16, 8)):
        layout, _ = test_backward.layouts_of(keep, 2, config)
        out, _ = forward(call, layout, KernelConfig(num_warps=4, num_stages=2, split_tiles=1))
        assert torch.equal(out != 0, expected)
