"""Schemes as bits, and layers that repeat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stof.errors import ArgumentError
from stof.fusion.graph.scheme import Scheme
from tests.fusion.graphs import operators


@given(st.text("01", max_size=40))
def test_bits_round_trip(bits: str) -> None:
    scheme = Scheme.from_bits(bits)
    flipped = bits.translate(str.maketrans("01", "10"))
    assert scheme.bits in (bits, flipped)
    assert Scheme.from_bits(flipped) == Scheme.from_bits(scheme.bits) == scheme
    assert [i for segment in scheme.segments for i in segment] == list(range(len(bits)))
    for segment in scheme.segments:
        assert len({bits[i] for i in segment}) == 1
    edges = [segment.start for segment in scheme.segments[1:]]
    assert all(bits[i] != bits[i - 1] for i in edges)
    assert Scheme.of(len(bits), reversed(edges)) == scheme


@pytest.mark.parametrize(("size", "starts"), [(3, (3,)), (3, (0,)), (3, (2, 1)), (0, (1,)), (-1, ())])
def test_impossible_starts_are_refused(size: int, starts: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="segments of"):
        Scheme(size, starts)


def test_other_characters_are_refused() -> None:
    with pytest.raises(ArgumentError, match="written in 0 and 1"):
        Scheme.from_bits("012")


def test_digests_tell_schemes_and_shapes_apart() -> None:
    def ops(width: int) -> list:
        return operators(nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.LayerNorm(width)), torch.randn(2, 4))

    narrow, again, wide = ops(8), ops(8), ops(16)
    a, b = Scheme.from_bits("001"), Scheme.from_bits("011")
    assert a.digest(narrow) == a.digest(again)
    assert len({a.digest(narrow), b.digest(narrow), a.digest(wide)}) == 3


@pytest.mark.slow
def test_keys_are_equal_in_every_process() -> None:
    """Caches and locks go by them: no address, no seed of hashes, nothing of one process may be in them."""
    code = """
import torch
from torch import nn
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.scheme import Scheme
from stof.fusion.records.store import segment_key
from stof.fusion.templates.registry import KernelPolicy
from stof.fusion.planner.graph_space import GraphSpace
from tests.fusion.graphs import capture
embed, layer = nn.Embedding(7, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
gm = capture(lambda i: torch.cumsum(layer(embed(i)) + torch.arange(8.0), 0).tril(), torch.arange(3))
operators = recognize_operators(gm.graph)
space = GraphSpace(operators, GraphOrder(gm.graph), None, KernelPolicy.REFERENCE)
print(Scheme(len(operators)).digest(operators), *sorted(map(segment_key, space.matched_keys())))
"""
    root = Path(__file__).parents[2]
    seen = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        seen.add(done.stdout)
    (keys,) = seen
    assert len(keys.split()) == 3
