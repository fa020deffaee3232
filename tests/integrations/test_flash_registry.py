"""STOF as PyTorch's flash attention: the operators' kernels against attention in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls, restore_flash_attention_impl

from stof.errors import UnsupportedError
from stof.integrations.torch.flash_registry import _KERNELS


def test_pytorch_lists_it_and_restores_its_kernels() -> None:
    assert "stof" in list_flash_attention_impls()
    activate_flash_attention_impl("stof")
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "stof"
    finally:
        restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("name", [name for name in _KERNELS if hasattr(torch.ops.aten, name)])
def test_kernels_take_what_the_operators_take(name: str) -> None:
    kernel = _KERNELS[name]
    arguments = [one.name for one in getattr(torch.ops.aten, name).default._schema.arguments]
    if "inplace" in name:
        kernel, arguments = _KERNELS["_flash_attention_forward"], arguments[1:]
    assert list(inspect.signature(kernel).parameters)[: len(arguments)] == arguments


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dense(is_causal: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = (random(2, 70, 3, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    d_out = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), d_out)
    out, lse, *rest = _KERNELS["_scaled_dot_product_flash_attention"](q, k, v, 0.0, is_causal, scale=scale)
    torch.testing.assert_close(out, expected)
    assert out.stride() == q.stride()
    assert not out.requires_grad
    assert rest[:4] == [None, None, 70, 70]
    backward = _KERNELS["_scaled_dot_product_flash_attention_backward"]
    arguments = (d_out, q, k, v, out, lse, None, None, 70, 70, 0.0, is_causal, *rest[4:6])
    for mine, theirs in zip(backward(*arguments, scale=scale), gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("is_causal", "left", "right"), [(False, None, None), (True, -1, -1), (True, 5, 0), (False, 3, 4)]
)
def test_sequences(is_causal: bool, left: int | None, right: int | None) -> None:
    torch.manual_seed(0)
    q_lengths, kv_lengths = [3, 40, 1, 20], [9, 40, 30, 20]
    q, k, v = (random(sum(n), 2, 16).requires_grad_() for n in (q_lengths, kv_lengths, kv_lengths))
    rows = []
    for i, j, x in zip(q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), strict=True):
        distance = torch.arange(len(i))[:, None] + len(j) - len(i) - torch.arange(len(j))
        keep = torch.ones_like(distance, dtype=torch.bool)
        if is_causal:
            keep &= distance >= 0
        if left is not None and left >= 0:
            keep &= distance <= left
        if right is not None and right >= 0:
            keep &= -distance <= right
        one = F.scaled_dot_product_attention(*(y.transpose(0, 1)[None] for y in (i, j, x)), attn_mask=keep)
        rows.append(one[0].transpose(0, 1))
    expected = torch.cat(rows)
    d_out = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), d_out)
    ends = [F.pad(torch.tensor(n).cumsum(0), (1, 0)).int() for n in (q_lengths, kv_lengths)]
    windows = {"window_size_left": left, "window_size_right": right}
    out, lse, *state = _KERNELS["_flash_attention_forward"](q, k, v, *ends, 40, 40, 0.0, is_causal, False, **windows)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, len(q))
    arguments = (d_out, q, k, v, out, lse, *ends, 40, 40, 0.0, is_causal, *state[:2])
    for mine, theirs in zip(_KERNELS["_flash_attention_backward"](*arguments, **windows), gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    given = torch.full_like(q, torch.nan)
    name = "_flash_attention_forward_no_dropout_inplace"
    again = _KERNELS[name](given.detach(), q, k, v, *ends, 40, 40, 0.0, is_causal, False, **windows)
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(again, lse)


def test_refusals() -> None:
    x = random(1, 2, 8, 16)
    with pytest.raises(UnsupportedError, match=r"has no dropout; call stof\.attention"):
        _KERNELS["_scaled_dot_product_flash_attention"](x, x, x, 0.1)
    with pytest.raises(UnsupportedError, match="has no alibi_slopes"):
        _KERNELS["_flash_attention_forward"](x[0], x[0], x[0], None, None, 8, 8, 0.0, False, False, alibi_slopes=x)


def test_empty() -> None:
    q, k = random(1, 2, 0, 16), random(1, 2, 5, 16)
    out, lse, *rest = _KERNELS["_scaled_dot_product_flash_attention"](q, k, k)
    assert out.shape == q.shape
    arguments = (out, q, k, k, out, lse, None, None, 0, 5, 0.0, False, *rest[4:6])
    dq, dk, dv = _KERNELS["_scaled_dot_product_flash_attention_backward"](*arguments)
    assert (dq.shape, dk.shape) == (q.shape, k.shape)
    assert not dk.any()
    assert not dv.any()
