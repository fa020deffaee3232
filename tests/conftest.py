"""Determinism, hypothesis profiles, and poisoned memory for every test."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

# Triton reads this when a kernel is defined: without a GPU its kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

import stof
from tests.examples import USUAL
from tests.interpreter import hasty_interpreter

_COMMON = {
    "deadline": None,  # the first example of a test pays for planning and lazy imports
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("quick", max_examples=12, derandomize=True, print_blob=True, **_COMMON)  # `make test`
settings.register_profile("dev", max_examples=USUAL, **_COMMON)
settings.register_profile("ci", max_examples=USUAL, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("STOF_HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every n-th case of a test marked `sampled(n)` runs in `make test`; the others are marked slow.

    With an n coprime to the number of values of each parameter, they do not share one value. Compile checks come first:
    they take minutes each, and the other workers would wait for them at the end.
    """
    items.sort(key=lambda item: item.path.name != "test_compile.py")
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker("slow")
            seen[test] += 1


def pytest_collection_finish() -> None:
    """Leave modules and tests out of the thousands of garbage collections that follow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _hasty_interpreter() -> Iterator[None]:
    if "TRITON_INTERPRET" not in os.environ or importlib.util.find_spec("triton") is None:
        yield
        return
    with hasty_interpreter():
        yield


@pytest.fixture(autouse=True, scope="session")
def _promises_hold() -> Iterator[None]:
    """What kernels tell Triton's compiler of their numbers is true: a GPU would read elsewhere, or fail."""
    if "TRITON_INTERPRET" not in os.environ or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import TensorHandle

    plain = TensorHandle.set_attr

    def set_attr(self: Any, name: str, values: list[int]) -> None:
        (width,) = values
        data = self.data.ravel()
        firsts = numpy.repeat(data[::width], width)[: len(data)]
        follow = data == firsts + numpy.arange(len(data)) % width
        if name == "tt.contiguity":
            assert follow.all(), data
        else:
            assert name == "tt.divisibility", name
            # Of numbers that follow each other the first alone.
            assert not (numpy.where(follow, firsts, data) % width).any(), data
        plain(self, name, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorHandle, "set_attr", set_attr)
        yield


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_plan_cache() -> None:
    """Tests do not see each other's plans."""
    stof.plan_cache.clear()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised floating-point memory holds NaN, integer memory the largest value: unwritten outputs show.

    PyTorch fills inside `empty`, `empty_like`, `new_empty` and `empty_strided`, whoever calls them, Python or C++;
    replacing the Python functions would miss the latter.
    """
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
