"""What PyTorch's flop counter counts of attention."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import stof
from stof import masks
from stof.testing import make_inputs

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 24, "kv_len": 40, "head_dim": 16, "value_dim": 8}
Q, K, V = make_inputs(**SIZES).qkv  # type: ignore[arg-type]
BAND = torch.ones(24, 40, dtype=torch.bool).tril(3)


def counted(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        stof.attention(q, k, v, mask)
    return int(counter.get_total_flops())


def scores(keep: Tensor) -> int:
    return int(keep.expand(2, 4, 24, 40).sum())


@pytest.mark.parametrize(
    ("mask", "keep"),
    [
        (None, torch.ones(1, dtype=torch.bool)),
        ("sliding_window(5)", masks.sliding_window(5).to_dense(24, 40)),
        (stof.plan(masks.strided(4, 4), 24, 40), masks.strided(4, 4).to_dense(24, 40)),
        (masks.padding([7, 40]), masks.padding([7, 40]).to_dense(24, 40, batch=2)),
        (BAND, BAND),
        (
            lambda b, h, q, kv: (q + h) > kv,
            torch.arange(24)[:, None] + torch.arange(4)[:, None, None] > torch.arange(40),
        ),
        (masks.from_dense(BAND) & masks.padding([7, 40]), BAND & masks.padding([7, 40]).to_dense(24, 40, batch=2)),
    ],
    ids=["full", "text", "plan", "padding", "tensor", "function", "both"],
)
def test_kept_scores_are_counted(mask: Any, keep: Tensor) -> None:
    """Two products, of head dimensions 16 and 8, two operations for each term."""
    assert counted(Q, K, V, mask) == 2 * (16 + 8) * scores(keep)


def test_backward_passes_are_counted() -> None:
    """Five products: scores, the gradients of weights, and those of v, q and k."""
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    with FlopCounterMode(display=False) as counter:
        stof.attention(q, k, v, BAND).sum().backward()
    assert counter.get_total_flops() == (2 * (16 + 8) + 2 * (3 * 16 + 2 * 8)) * scores(BAND)


def test_all_scores_are_counted_where_the_kept_ones_are_unknown() -> None:
    every = 2 * (16 + 8) * 2 * 4 * 24 * 40
    with FakeTensorMode() as mode:
        assert counted(mode.from_tensor(Q), mode.from_tensor(K), mode.from_tensor(V), masks.causal()) == every
    assert counted(Q.to("meta"), K.to("meta"), V.to("meta"), masks.causal()) == every


def test_compiled_and_exported_calls_are_counted() -> None:
    class Attention(torch.nn.Module):
        """Attention under a named mask."""

        def forward(self, q: Tensor) -> Tensor:
            return stof.attention(q, K, V, masks.causal())

    wanted = 2 * (16 + 8) * scores(masks.causal().to_dense(24, 40))
    compiled = torch.compile(lambda q: stof.attention(q, K, V, masks.causal()), backend="aot_eager")
    for function in (compiled, torch.export.export(Attention(), (Q,)).module()):
        function(Q)
        with FlopCounterMode(display=False) as counter:
            function(Q)
        assert counter.get_total_flops() == wanted


def test_counters_that_were_made_before_the_first_call_and_imports_of_stof() -> None:
    """`import stof` loads neither the counter nor Triton, which the counter imports."""
    program = """
import sys, torch, stof
assert "triton" not in sys.modules and "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 1, 8, 4)
with FlopCounterMode(display=False) as counter:
    stof.attention(x, x, x, "causal")
assert counter.get_total_flops() == 2 * 36 * 8
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
