"""8-bit weights and chains on an NVIDIA GPU, from the graph to the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from stof.fusion.records.report import FusionReport
from stof.fusion.templates import chain_linear
from stof.fusion.templates.reference import chain_linear as plain_chain
from stof.testing.oracle import error_budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


class Quantised(nn.Module):
    """A product as weight-only quantising writes it."""

    def __init__(self, n: int, k: int, *, early: bool) -> None:
        super().__init__()
        weight = torch.randn(n, k) * k**-0.5
        scale = weight.abs().amax(1) / 127
        self.early = early
        self.register_buffer("values", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            return F.linear(x, self.values.to(x.dtype) * self.scale[:, None])
        return F.linear(x, self.values.to(x.dtype)) * self.scale


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_quantised_model_by_rule(dtype: torch.dtype, cuda_graphs: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = Quantised(1024, 512, early=True), nn.GELU(), Quantised(512, 1024, early=False)
    module = nn.Sequential(*layers).eval().cuda()
    x = torch.randn(5, 512, device="cuda")
    reports: list[FusionReport] = []
    with torch.no_grad():
        expected = module.double()(x.double())
        module.to(dtype)
        plain = module(x.to(dtype))
        fast = stof.optimize(module, dynamic=False, cuda_graphs=cuda_graphs, report=reports.append)
        for _ in range(3):
            out = fast(x.to(dtype))
    assert [row.template for row in reports[-1].segments if row.template] == ["scaled_linear"] * 2
    # Factors were rounded to the dtype: both sides are off by that.
    assert (out.double() - expected).norm() <= 1.5 * (plain.double() - expected).norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 128, 1000])
def test_chains(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, 768), (64, 768), (64,), (700, 64), (700,), (rows, 700)
    x, down, s, up, t, residual = (torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes)
    given = (x, down * 768**-0.5, s, up / 8, t, residual)
    expected = plain_chain(*(one.double() for one in given), "gelu")
    budget = error_budget(plain_chain(*given, "gelu"), expected, dtype)
    for config in ("", "16x64x128,4w,3s,tile,split4", "64x128x64,4w,3s,tile,split2"):
        out = chain_linear(*given, "gelu", config)
        assert float((out.double() - expected).abs().nan_to_num(torch.inf).max()) <= budget.allowed


def test_a_search_that_may_chain(tmp_path: Path) -> None:
    """Whatever it finds faster is right, and chains were among what it tried."""
    torch.compiler.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(768, 64), nn.GELU(), nn.Linear(64, 768)).eval().cuda().half()
    x = torch.randn(128, 768, device="cuda", dtype=torch.float16)
    tried: list[str] = []
    with torch.no_grad():
        fast = stof.optimize(
            module, dynamic=False, experimental=True, effort="quick", budget_s=15, store=tmp_path,
            progress=lambda step: tried.append(step.segment),
        )  # fmt: skip
        torch.testing.assert_close(fast(x), module(x), atol=4e-3, rtol=4e-3)
    assert any(segment.count("linear") == 2 for segment in tried)
