"""Triton's interpreter made quicker, and right where kernels of ours would look wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

# Of tests that give kernels tensors of the host.
IN_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; tests/gpu on GPUs")


@contextmanager
def hasty_interpreter() -> Iterator[None]:
    """Triton's interpreter without what it does in vain.

    It looks dtypes up in a table made anew each time, and with every call of a device function goes through all of
    `triton.language` once more to replace its operations, though the kernel that runs has them replaced. It looks for
    overflows of integers, and reports none unless it runs in debug mode. It says that comparisons are of the dtype they
    compare, so that Triton 3.9's turns a bool it broadcasts into an int32, which it refuses as a mask.
    """
    from triton.runtime import interpreter

    plain, plain_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    languages, builder = (interpreter.tl, interpreter.tl.core), interpreter.interpreter_builder
    replaced: set[int] = set()
    dtypes: dict[str, Any] = {}
    modules_of: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

    def patch_lang(fn: Any) -> Any:
        modules = modules_of.get(fn)
        if modules is None:
            modules = {id(value) for value in fn.__globals__.values() if any(value is one for one in languages)}
            modules_of[fn] = modules
        if modules and modules <= replaced:
            return interpreter._LangPatchScope()
        outermost = not replaced
        scope = plain(fn)
        replaced.update(modules)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = plain_dtype(scalar)
        return dtypes[scalar.name]

    def splat(self: Any, block: Any, scalar: Any) -> Any:
        return interpreter.TensorHandle(np.full(block.shape, scalar.data, scalar.data.dtype), scalar.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_lang)
        patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        patch.setattr(interpreter.InterpreterBuilder, "create_splat", splat)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
        yield


@contextmanager
def bfloat16_as_on_a_gpu() -> Iterator[None]:
    """Products and roundings of bfloat16 as a GPU does them.

    The interpreters of Triton 3.6 and 3.7 hold bfloat16 as 16-bit integers: `tl.dot` multiplies those integers, and
    conversion from float32 cuts bits off instead of rounding to the nearest.
    """
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
