"""The template kernels that are written for Hopper, and the largest of the others, against float64 on a real GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stof.fusion.templates import launch, reference
from stof.fusion.templates.gemm_config import GemmConfig
from stof.fusion.templates.norms import Norm
from tests.fusion.test_templates import (
    HALVES,
    check_folded,
    check_gated,
    check_linear,
    check_normed,
    check_rotary,
    tensors,
)
from tests.gpu.test_hopper import HOPPER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

GLUON = (
    "128x128x64,5s,pingpong",
    "128x128x64,2s,pingpong",
    "64x256x64,4s,pingpong",
    "64x64x64,3s,pingpong",
    "128x128x64,6s,pingpong",
    "128x256x64,5s,cooperative",
    "256x128x64,6s,cooperative",
    "256x128x64,3s,cooperative,group1",
    "128x64x64,2s,cooperative",
    "128x192x64,5s,cooperative",
    "128x192x64,3s,cooperative,group2",
    "192x128x64,5s,cooperative",
    "192x128x64,2s,cooperative,group2",
)


@pytest.mark.parametrize("text", GLUON)
@pytest.mark.parametrize("dtype", HALVES)
def test_hopper(text: str, dtype: torch.dtype) -> None:
    for m, n, k in ((1, 8, 8), (300, 328, 520), (4096, 3072, 768), (513, 768, 3072)):
        for transposed in (False, True):
            t = tensors(m, n, k, dtype, transposed=transposed)
            check_linear(text, t, "gelu", residual=True)
            check_linear(text, t, "gelu_tanh", bias=False)
            check_normed(text, t, "rms", False, "silu")
            check_normed(text, t, "layer", True)
            check_folded(text, t, False, "none")
            if text.endswith("pingpong") and n > 256:
                for head_dim in (32, 64, 128)[: GemmConfig.parse(text).block_n // 64 + 1]:
                    check_rotary(text, t, head_dim, 256, 512, normed=head_dim == 64)
        if GemmConfig.parse(text).block_n in (128, 256):
            check_gated(text, tensors(m, n, k, dtype, gated=True), bias=True)
            check_folded(text, tensors(m, n, k, dtype, gated=True), True)


def test_chains_of_kernels_that_take_turns() -> None:
    """Each kernel is set up while others still run; what it reads is what the one before it wrote, call after call."""
    t = tensors(128, 768, 768, torch.float16)
    norm = Norm("layer", t["scale"], t["shift"], 1e-5)

    def chain(x: Tensor, texts: tuple[str, ...]) -> Tensor:
        for text in texts * 8:
            product = launch.gemm_call("linear_norm", x, t["weight"], t["bias"], t["residual"], "none")
            x = launch.compute_normed(product, GemmConfig.parse(text), norm)[1]
        return x

    plain = t["x"]
    for _ in range(8):
        vectors = (t["residual"], t["scale"], t["shift"])
        plain = reference.linear_norm(plain, t["weight"], t["bias"], *vectors, "layer", 1e-5)[1]
    for texts in (
        ("64x32x128,4w,4s,tile,split2",),
        ("64x64x128,4w,3s,tile",),
        ("64x64x64,4w,4s,tile,split3", GLUON[0]),
    ):
        out = chain(t["x"], texts)
        # Roundings of up to 16 layers one after the other; a value read too early would be off by its size, about 1.
        torch.testing.assert_close(out, plain, atol=0.15, rtol=0.0)
        assert all(torch.equal(chain(t["x"], texts), out) for _ in range(20))
