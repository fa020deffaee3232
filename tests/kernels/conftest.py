"""Triton's interpreter made right where kernels of ours would look wrong in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import bfloat16_as_on_a_gpu


@pytest.fixture(autouse=True, scope="package")
def _as_on_a_gpu() -> Iterator[None]:
    if torch.cuda.is_available():
        # The oracle's matrix products under PyTorch's deterministic mode, which poisons memory.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield
        return
    with bfloat16_as_on_a_gpu():
        yield
