"""`activate_flash_attention_impl("stof")`: PyTorch's own functions on STOF's kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from stof.integrations.torch import flash_registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the operators that ran on STOF."""
    names: list[str] = []

    def noted(name: str) -> object:
        kernel = flash_registry._KERNELS[name]

        def call(*args: object, **kwargs: object) -> object:
            names.append(name)
            return kernel(*args, **kwargs)

        return call

    monkeypatch.setattr(flash_registry, "_KERNELS", {name: noted(name) for name in flash_registry._KERNELS})
    activate_flash_attention_impl("stof")
    yield names
    restore_flash_attention_impl()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(compiled: bool, is_causal: bool, calls: list[str]) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(2, 300, 4, 72, device="cuda").transpose(1, 2).requires_grad_() for _ in range(3)]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = (torch.compile(attend) if compiled else attend)(*half)
        out.float().square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(*exact)
        expected.square().sum().backward()
    name = "_scaled_dot_product_flash_attention"
    assert calls == [name, f"{name}_backward"]
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
    for x, y in zip(half, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert float((x.grad.float() - y.grad).norm() / y.grad.norm()) < 0.02


def test_varlen(calls: list[str]) -> None:
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    torch.manual_seed(0)
    lengths = [100, 17, 260]
    exact = [torch.randn(sum(lengths), 4, 64, device="cuda", requires_grad=True) for _ in range(3)]
    half = [x.detach().half().requires_grad_() for x in exact]
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    out = varlen_attn(*half, ends, ends, max(lengths), max(lengths))
    out.float().square().sum().backward()
    each = zip(*(x.split(lengths) for x in exact), strict=True)
    rows = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in one))[0].transpose(0, 1) for one in each]
    expected = torch.cat(rows)
    expected.square().sum().backward()
    assert calls == ["_flash_attention_forward", "_flash_attention_backward"]
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.01)
    for x, y in zip(half, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert float((x.grad.float() - y.grad).norm() / y.grad.norm()) < 0.01


def test_restored() -> None:
    activate_flash_attention_impl("stof")
    restore_flash_attention_impl()
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.half)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)  # STOF would refuse it
