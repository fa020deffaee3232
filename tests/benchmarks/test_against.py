"""`python -m benchmarks against` on a machine without a GPU: whose stof a process has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stof
from benchmarks.attention.against import ROOT, changes
from benchmarks.attention.checkout_worker import TOLERANCE, gradient_error
from stof.errors import ArgumentError


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is not a checkout of stof"):
        changes(tmp_path, "forward", [("causal", "1,1,64,128")], tmp_path, 1, print)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_gradients_are_checked(wrong: int | None) -> None:
    q, d_out = (torch.randn(2, 4, 40, 16) for _ in range(2))
    k, v = (torch.randn(2, 2, 50, 16) for _ in range(2))
    mask = stof.masks.sliding_window(6)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    gradients = list(torch.autograd.grad(stof.attention(q, k, v, mask), inputs, d_out))
    if wrong is not None:
        gradients[wrong] = gradients[wrong].clone()
        gradients[wrong][0, 0, 3] *= 2
    error = gradient_error(gradients, inputs, d_out, mask.to_dense(40, 50))
    assert (error <= TOLERANCE) == (wrong is None)


@pytest.mark.slow
def test_another_checkouts_stof_is_not_timed(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "attention" / "checkout_worker.py"
    for checkout, wrong in ((ROOT, False), (tmp_path, True)):
        command = [sys.executable, "-P", str(script), str(checkout)]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120)
        assert bool(done.returncode) == wrong, done.stderr
        assert ("not the stof of" in done.stderr) == wrong
