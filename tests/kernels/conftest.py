"""Triton's interpreter made right where kernels of ours would look wrong in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _as_on_a_gpu() -> Iterator[None]:
    """Products and roundings of bfloat16 as a GPU does them, where there is none.

    The interpreters of Triton 3.6 and 3.7 hold bfloat16 as 16-bit integers: `tl.dot` multiplies those integers, and
    conversion from float32 cuts bits off instead of rounding to the nearest.
    """
    if torch.cuda.is_available():
        # The oracle's matrix products under PyTorch's deterministic mode, which poisons memory.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_dot, plain_convert = builder.create_dot, interpreter._convert_float

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return plain_dot(self, *(_widened(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), d, *rest)

    def _widened(x: Any) -> Any:
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        return plain_convert(data, source, target, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", dot)
        patch.setattr(interpreter, "_convert_float", convert)
        yield
