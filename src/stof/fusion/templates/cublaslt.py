"""Products of cuBLASLt with what they are added to: `x @ weight.T + bias + residual` in one kernel.

PyTorch reaches cuBLASLt for a bias and some activations. A residual it copies to the result first, and adds the product
to that; cuBLASLt itself reads it from where it lies, in the product's epilogue (its manual's D = A B + C, where C and D
may differ). So the library that PyTorch has loaded is called here, by its C interface.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Values of enumerations in cublasLt.h, library_types.h and cublas_api.h.
_DTYPES = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT32, _SUMS_IN_FLOAT32, _TRANSPOSED = 0, 68, 1
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _ADD_BIAS = 3, 7, 8, 4
_MOST_WORKSPACE, _REDUCTIONS = 1, 3
_LEAST_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D
# Where programs share a product's depth: partial sums in float32 beside the result, added up in one order.
_REDUCE_IN_FLOAT32 = 2
# What PyTorch gives cuBLASLt on Hopper.
_WORKSPACE_BYTES = 32 * 2**20
_ONE = c_float(1.0)


class CublasLtError(RuntimeError):
    """cuBLASLt refused a call; says which, and its status as numbered in cublas_api.h."""


class _Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Sizes(NamedTuple):
    """What an algorithm is chosen for; strides in elements and alignments in bytes, of weight, x, residual, result."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    strides: tuple[int, int, int, int]
    alignments: tuple[int, ...]
    bias_alignment: int | None


class _Plan(NamedTuple):
    """How all calls of the same sizes run: layouts of the four matrices, and an algorithm with its workspace."""

    layouts: tuple[c_void_p, ...]
    found: _Found


@functools.cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt as PyTorch has loaded it; None where there is none, as in builds without CUDA."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    name = f"cublasLt64_{major}.dll" if sys.platform == "win32" else f"libcublasLt.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def add_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, out: Tensor) -> None:
    """Into `out`: `x @ weight.T + bias + residual`, of float16 or bfloat16, summed in float32 and rounded once.

    Args:
        x: `[M, K]`, rows contiguous. No size is 0.
        weight: `[N, K]`, contiguous along one of its dimensions.
        bias: None or `[N]`, contiguous.
        residual: `[M, N]`, rows contiguous.
        out: `[M, N]`, contiguous; shares no memory with the others.

    Raises:
        CublasLtError: no algorithm serves these tensors, or the call failed.
    """
    transposed = weight.stride(1) != 1
    matrices = (weight, x, residual, out)
    sizes = _Sizes(
        out.shape[0],
        out.shape[1],
        x.shape[1],
        x.dtype,
        transposed,
        (_apart(weight.t() if transposed else weight), _apart(x), _apart(residual), _apart(out)),
        tuple(map(_alignment, matrices)),
        None if bias is None else _alignment(bias),
    )
    with torch.cuda.device(x.device):
        handle = torch.cuda.current_blas_handle()
        plan = _plan(sizes, x.device.index, handle)
        workspace = torch.empty(plan.found.workspace, dtype=torch.uint8, device=x.device)
        stream = torch.cuda.current_stream().cuda_stream
        weight_at, x_at, residual_at, out_at = (c_void_p(matrix.data_ptr()) for matrix in matrices)
        of_weight, of_x, of_residual, of_out = plan.layouts
        with _description(sizes, 0 if bias is None else bias.data_ptr()) as description:
            _call(
                "Matmul", c_void_p(handle), description, ctypes.byref(_ONE), weight_at, of_weight, x_at, of_x,
                ctypes.byref(_ONE), residual_at, of_residual, out_at, of_out, ctypes.byref(plan.found),
                c_void_p(workspace.data_ptr()), c_size_t(plan.found.workspace), c_void_p(stream),
            )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _plan(sizes: _Sizes, device: int, handle: int) -> _Plan:
    """cuBLASLt's first choice. Its matrices are column by column: it computes the result's transpose, weight first."""
    weight = (sizes.n, sizes.k) if sizes.transposed else (sizes.k, sizes.n)
    shapes = (weight, (sizes.k, sizes.m), (sizes.n, sizes.m), (sizes.n, sizes.m))
    layouts = tuple(_layout(sizes.dtype, *shape, s) for shape, s in zip(shapes, sizes.strides, strict=True))
    found, count = _Found(), c_int(0)
    with _description(sizes, sizes.bias_alignment or 0) as description, _made("MatmulPreference") as preference:
        _set("MatmulPreference", preference, _MOST_WORKSPACE, c_uint64(_WORKSPACE_BYTES))
        _set("MatmulPreference", preference, _REDUCTIONS, c_uint32(_REDUCE_IN_FLOAT32))
        for attribute, alignment in zip(_LEAST_ALIGNMENTS, sizes.alignments, strict=True):
            _set("MatmulPreference", preference, attribute, c_uint32(alignment))
        _call(
            "MatmulAlgoGetHeuristic", c_void_p(handle), description, *layouts, preference, c_int(1),
            ctypes.byref(found), ctypes.byref(count),
        )  # fmt: skip
    if not count.value or found.state:
        raise CublasLtError(f"cublasLtMatmulAlgoGetHeuristic found nothing for {sizes}")
    return _Plan(layouts, found)


@contextmanager
def _description(sizes: _Sizes, bias: int) -> Iterator[c_void_p]:
    """A product's description, with the address of its bias: of one call, since others may run at the same time."""
    with _made("MatmulDesc", c_int(_SUMS_IN_FLOAT32), c_int(_FLOAT32)) as description:
        if not sizes.transposed:
            _set("MatmulDesc", description, _TRANSPOSE_A, c_uint32(_TRANSPOSED))
        if sizes.bias_alignment is not None:
            _set("MatmulDesc", description, _EPILOGUE, c_uint32(_ADD_BIAS))
            _set("MatmulDesc", description, _BIAS_POINTER, c_void_p(bias))
        yield description


def _layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
    made = c_void_p()
    _call(
        "MatrixLayoutCreate", ctypes.byref(made), c_int(_DTYPES[dtype]), c_uint64(rows), c_uint64(columns),
        c_int64(stride),
    )  # fmt: skip
    return made


@contextmanager
def _made(what: str, *arguments: Any) -> Iterator[c_void_p]:
    made = c_void_p()
    _call(f"{what}Create", ctypes.byref(made), *arguments)
    try:
        yield made
    finally:
        _call(f"{what}Destroy", made)


def _set(what: str, of: c_void_p, attribute: int, value: Any) -> None:
    _call(f"{what}SetAttribute", of, c_int(attribute), ctypes.byref(value), c_size_t(ctypes.sizeof(value)))


def _call(name: str, *arguments: Any) -> None:
    found = library()
    assert found is not None
    status = getattr(found, f"cublasLt{name}")(*arguments)
    if status:
        raise CublasLtError(f"cublasLt{name} returned status {status}")


def _apart(rows: Tensor) -> int:
    """Elements from one row to the next; a single row may have any stride, cuBLASLt wants one."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def _alignment(tensor: Tensor) -> int:
    """The largest power of two, up to the 256 bytes that cuBLASLt asks about, that divides the address."""
    address = tensor.data_ptr()
    return min(256, address & -address) or 256
