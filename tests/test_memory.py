"""The CPU implementation's memory stays at a few row blocks, far below S x S."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys, torch, stof
length = 16384
q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
warm = stof.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], stof.masks.parse(sys.argv[1]))
plan = stof.plan(sys.argv[1], length)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stof.attention(q, k, v, plan)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, plan.bytes())
"""


@pytest.mark.sampled(2)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.parametrize("mask", ["causal()", "bigbird(64, 64)", "strided(128, 128, 8)"])
def test_peak_memory_of_a_call(mask: str) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, mask], capture_output=True, text=True, check=True)
    grown_kib, plan_bytes = map(int, run.stdout.split())
    dense_mask_bytes = 16384**2  # one byte a score, no copy per head
    assert grown_kib * 1024 < dense_mask_bytes / 10
    assert plan_bytes < dense_mask_bytes / 10


BUILD = """
import resource, torch, stof
from stof import LayoutConfig, masks
from stof.layout import build_layout
torch.set_num_threads(1)
sees = lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 16))
build_layout(masks.from_function(sees), 512, 512, LayoutConfig(128, 128))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layout = build_layout(masks.from_function(sees), 65536, 65536, LayoutConfig(128, 128))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, layout.tiles)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="ru_maxrss is in kilobytes on Linux only")
def test_peak_memory_of_building_from_a_function() -> None:
    """4.3e9 scores within 256 MiB: of a function that runs on ranges, only tiles in between are evaluated."""
    run = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=True)
    grown_kib, tiles = map(int, run.stdout.split())
    assert grown_kib * 1024 < 2**28
    # Nine tiles of the window at most, and the one of the sinks, of 512 row blocks.
    assert tiles == sum(min(row, 8) + 1 + (row > 8) for row in range(512))
