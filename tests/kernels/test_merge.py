"""`stof.merge`, and the share of sinks, against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof.errors import DeviceError, DtypeError, ShapeError
from stof.kernels.merge import merge_results, share_of_keys
from stof.testing import oracle_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def random_results(dtype: torch.dtype = torch.float32, seed: int = 0) -> Results:
    """Outputs and log-sum-exps of two parts: seen by both, by one, by none; what was not seen holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [torch.randn(2, 3, 8, 5, generator=generator).to(dtype) for _ in range(2)]
    lses = [(20 * torch.randn(2, 3, 8, generator=generator)).to(lse_dtype) for _ in range(2)]
    for part, rows in enumerate(([1, 2], [2, 3])):
        lses[part][:, :, rows] = -torch.inf
        outs[part][:, :, rows] = torch.nan
    return outs[0], lses[0], outs[1], lses[1]


def defined(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64."""
    lse = torch.stack([lse_1, lse_2]).double()
    out = torch.stack([out_1, out_2]).double()
    top = lse.amax(0).nan_to_num(neginf=0.0)
    sums = (lse - top).exp()
    seen = torch.where(sums[..., None] > 0, sums[..., None] * out, 0.0).sum(0)
    return seen / sums.sum(0).clamp(min=1e-300)[..., None], sums.sum(0).log() + top


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_the_definition(dtype: torch.dtype) -> None:
    given_results = random_results(dtype)
    out, lse = stof.merge(*given_results)
    want, want_lse = defined(*given_results)
    assert out.dtype == dtype
    assert lse.dtype == given_results[1].dtype
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(lse.double(), want_lse, rtol=2 * unit, atol=2 * unit)
    # Weights are as exact as the difference of log-sum-exps of up to 100.
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=100 * unit)
    assert bool((out[:, :, 2] == 0).all())
    assert bool((lse[:, :, 2] == -torch.inf).all())
    assert torch.equal(out[:, :, 1], given_results[2][:, :, 1])
    assert torch.equal(lse[:, :, 1], given_results[3][:, :, 1])


def test_float64_log_sum_exps_of_float32_outputs_are_merged_in_float64() -> None:
    out_1, lse_1, out_2, lse_2 = random_results()
    exact = out_1, lse_1.double() + 1e-12, out_2, lse_2.double()
    out, lse = stof.merge(*exact)
    want, want_lse = defined(*exact)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float64)
    assert torch.equal(out, want.float())
    torch.testing.assert_close(lse, want_lse, rtol=1e-15, atol=1e-15)


def test_far_apart_parts_keep_the_greater_and_infinite_values_stay() -> None:
    out_1, out_2 = torch.full((1, 1, 1, 2), 3.0), torch.tensor([[[[5.0, torch.inf]]]])
    lse = torch.zeros(1, 1, 1)
    out, merged_lse = stof.merge(out_1, lse + 1e5, out_2[..., :1].expand(-1, -1, -1, 2), lse - 1e5)
    assert torch.equal(out, out_1)
    assert torch.equal(merged_lse, lse + 1e5)
    assert torch.equal(stof.merge(out_1, lse, out_2, lse)[0], torch.tensor([[[[4.0, torch.inf]]]]))


@given(seed=st.integers(0, 2**31), parts=st.integers(1, 4))
def test_parts_of_the_keys_merge_to_attention_over_all(seed: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, n, d, generator=generator) for n, d in ((9, 8), (23, 8), (23, 4)))
    keep = torch.rand(9, 23, generator=generator) < 0.2
    part_of = torch.randint(parts, (23,), generator=generator)
    out, lse = torch.full((2, 2, 9, 4), torch.nan), torch.full((2, 2, 9), -torch.inf)
    for part in range(parts):
        mask = stof.masks.from_dense(keep & (part_of == part))
        out, lse = stof.merge(out, lse, *stof.attention(q, k, v, mask, return_lse=True))
    want, want_lse = oracle_attention(q, k, v, keep)
    torch.testing.assert_close(out.double(), want, atol=5e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=5e-6, rtol=0)


def test_gradients_are_those_of_attention_over_all_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64) for n in (6, 10, 10)]
    d_out = torch.randn(1, 2, 6, 8, generator=generator, dtype=torch.float64)
    keep = torch.rand(6, 10, generator=generator) < 0.5
    keep[0] = False
    keep[1, :4], keep[2, 4:] = False, False
    first = torch.arange(10) < 4

    def gradients(merged: bool) -> tuple[Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        masks = [keep & first, keep & ~first] if merged else [keep]
        results = [stof.attention(q, k, v, stof.masks.from_dense(mask), return_lse=True) for mask in masks]
        out, lse = stof.merge(*results[0], *results[1]) if merged else results[0]
        return torch.autograd.grad(((out * d_out).sum() + lse[:, :, 1:].sum()), (q, k, v))

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_gradients_of_what_saw_no_key_are_zero() -> None:
    given_results = [x.requires_grad_() for x in random_results(torch.float64)]
    out, lse = stof.merge(*given_results)
    seen = torch.ones(8, dtype=torch.bool)
    seen[2] = False
    d_out_1, d_lse_1, d_out_2, d_lse_2 = torch.autograd.grad(out.sum() + lse[:, :, seen].sum(), given_results)
    assert all(bool(d.isfinite().all()) for d in (d_out_1, d_lse_1, d_out_2, d_lse_2))
    assert not d_out_1[:, :, 1:3].any()
    assert not d_lse_1[:, :, 1:3].any()
    assert not d_out_2[:, :, 2:4].any()
    assert not d_lse_2[:, :, 2:4].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_merge_as_the_public_function_does(dtype: torch.dtype) -> None:
    """Outputs of rows that see no key are 0 in kernels."""
    out_1, lse_1, out_2, lse_2 = random_results(dtype)
    out_1, out_2 = out_1.nan_to_num(0.0), out_2.nan_to_num(0.0)
    out, lse = merge_results(out_1, lse_1, out_2, lse_2)
    want, want_lse = stof.merge(out_1, lse_1, out_2, lse_2)
    torch.testing.assert_close(out, want, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_share_of_keys_is_one_minus_the_sink(dtype: torch.dtype) -> None:
    lse = torch.tensor([0.0, 50.0, -50.0, -torch.inf, 3.0], dtype=dtype).expand(2, 3, 5)
    sinks = torch.tensor([0.0, 2.0, -torch.inf], dtype=torch.bfloat16)
    want = lse.double().exp() / (lse.double().exp() + sinks.double().exp()[:, None])
    share = share_of_keys(lse, sinks)
    assert share.dtype == dtype
    torch.testing.assert_close(share.double(), want.nan_to_num(0.0), rtol=1e-6, atol=0)


def test_sinks_scale_the_merged_result() -> None:
    """As the docstring says."""
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
    sinks = torch.tensor([0.5, -1.0])
    halves = [stof.attention(q, k[:, :, half], v[:, :, half], return_lse=True) for half in (slice(7), slice(7, None))]
    out, lse = stof.merge(*halves[0], *halves[1])
    out = out * torch.sigmoid(lse - sinks[:, None])[..., None]
    torch.testing.assert_close(out, stof.attention(q, k, v, sinks=sinks))


def test_what_does_not_fit_is_refused() -> None:
    out_1, lse_1, out_2, lse_2 = random_results()
    for arguments, error, text in (
        ((out_1, lse_1, out_2[..., :4], lse_2), ShapeError, r"one shape, got \[2, 3, 8, 5\] and \[2, 3, 8, 4\]"),
        ((out_1[0], lse_1[0], out_2[0], lse_2[0]), ShapeError, "batch, heads, q_len, head_dim"),
        ((out_1, lse_1[:1], out_2, lse_2), ShapeError, r"\[2, 3, 8\], got \[1, 3, 8\]"),
        ((out_1, lse_1, out_2, lse_2[..., None]), ShapeError, r"got \[2, 3, 8\] and \[2, 3, 8, 1\]"),
        ((out_1.half(), lse_1, out_2, lse_2), DtypeError, "share one dtype"),
        ((out_1.int(), lse_1, out_2.int(), lse_2), DtypeError, "share one dtype"),
        ((out_1, lse_1.half(), out_2, lse_2.half()), DtypeError, "both float32 or both float64"),
        ((out_1, lse_1.double(), out_2, lse_2), DtypeError, "both float32 or both float64"),
        ((out_1, None, out_2, lse_2), DtypeError, "lse_1 is a torch.Tensor, got NoneType"),
        ((out_1, lse_1, out_2.to_sparse(), lse_2), DtypeError, "out_2 is a strided tensor"),
        ((out_1, lse_1, out_2.to("meta"), lse_2.to("meta")), DeviceError, "cpu, cpu, meta, meta"),
    ):
        with pytest.raises(error, match=text):
            stof.merge(*arguments)  # type: ignore[arg-type]


def test_empty_tensors_merge() -> None:
    out, lse = stof.merge(*(x[:, :, :0] for x in random_results()))
    assert out.shape == (2, 3, 0, 5)
    assert lse.shape == (2, 3, 0)


def test_compiled_code_merges() -> None:
    given_results = random_results()
    compiled = torch.compile(stof.merge, backend="eager", fullgraph=True)
    for got, want in zip(compiled(*given_results), stof.merge(*given_results), strict=True):
        assert torch.equal(got, want)
