"""The operator's contract on its arguments: one check per rule, each error says what was given and what to do."""

from __future__ import annotations

import numbers
import sys
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stof.errors import ArgumentError, DeviceError, DtypeError, HeadCountError, ShapeError, UnsupportedError, shown
from stof.kernels.quantization import FP8
from stof.runtime.private import is_dual_level, is_jit_tracing, takes_derivatives

_LARGEST = sys.float_info.max
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_contexts(*tensors: object) -> None:
    """Refuse a call that is recorded or differentiated by something that attention does not serve.

    Args:
        tensors: whatever was given for tensors.

    Raises:
        UnsupportedError: under `torch.jit.trace`, of `torch.fx.symbolic_trace`, under torch.func's `grad` or `jvp`, and
            as of `refuse_tangents`.
    """
    refuse_jit_trace()
    if any(isinstance(tensor, torch.fx.Proxy) for tensor in tensors):
        raise UnsupportedError(
            "stof.attention was called with proxies of torch.fx.symbolic_trace, which have no shapes; use "
            "torch.export.export(model, args).module() for a graph, torch.compile(model), or a torch.fx.Tracer whose "
            "is_leaf_module is true of the module that calls stof.attention",
            {},
        )
    if takes_derivatives():
        refuse_derivatives("a transform of torch.func differentiates it")
    refuse_tangents(*tensors)


def refuse_jit_trace() -> None:
    """Refuse `torch.jit.trace`, under which sizes are tensors and the steps for one shape become constants.

    Raises:
        UnsupportedError: it runs.
    """
    if is_jit_tracing():
        raise UnsupportedError(
            "STOF was called under torch.jit.trace (which torch.onnx.export(dynamo=False) uses as well): it would "
            "record the steps for these shapes as constants; use torch.export.export(model, args) for a program to "
            "save, or torch.compile(model)",
            {},
        )


def refuse_tangents(*tensors: object) -> None:
    """Refuse dual tensors of forward-mode AD: kernels compute no tangents, and none reads as a derivative of zero.

    Raises:
        UnsupportedError: one of the tensors has a tangent.
    """
    if not is_dual_level():
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            refuse_derivatives("an input has a tangent of torch.autograd.forward_ad")


def refuse_gradients(mask_or_plan: object, scales: tuple[Tensor, ...], *, traced: bool) -> None:
    """Refuse gradients of 8-bit calls, and in traced code under plans whose mask the next step replaces.

    Args:
        mask_or_plan, scales: of the call.
        traced: whether the call is traced, or has tensors without values.

    Raises:
        UnsupportedError: of such a call.
    """
    if scales:
        refuse_derivatives("8-bit tensors and their scales have no gradients; train in bfloat16")
    if traced and getattr(mask_or_plan, "is_dynamic", False):
        refuse_derivatives(
            "traced code would not notice updates of a dynamic plan before the backward pass; call attention outside "
            "of it, with torch.compile in a function under torch.compiler.disable"
        )


def refuse_dropout(scales: tuple[Tensor, ...]) -> None:
    """Refuse dropout of calls that have no gradients anyway.

    Raises:
        UnsupportedError: of 8-bit tensors.
    """
    if scales:
        raise UnsupportedError(
            "stof.attention was called with dropout, which is for training, and 8-bit tensors have no gradients; leave "
            "dropout_p out",
            {},
        )


def refuse_derivatives(why: str) -> NoReturn:
    """Raise the UnsupportedError of calls that are differentiated."""
    raise UnsupportedError(
        f"stof.attention has gradients of first order in reverse mode alone, and {why}; run inference under "
        "torch.inference_mode(), and differentiate otherwise with another attention implementation",
        {},
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q `[B, H, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`: shapes, dtype and device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a torch.Tensor, got {type(tensor).__name__}")
        _check_strided(name, tensor)
        if tensor.is_nested:
            raise ShapeError(
                f"{name} is one tensor [batch, heads, length, head_dim], got a nested tensor; pad it and give "
                "masks.padding(lengths), or put its sequences one after the other under masks.documents(cu_seqlens=...)"
            )
        if tensor.ndim != 4 or tensor.shape[3] == 0:
            raise ShapeError(
                f"{name} is [batch, heads, length, head_dim] with head_dim above 0, got {list(tensor.shape)}; "
                "unsqueeze missing dimensions, and transpose(1, 2) tensors that are [batch, length, heads, head_dim]"
            )
        if tensor.dtype not in (*_DTYPES, FP8):
            raise DtypeError(f"{name} is float16, bfloat16, float32, float64 or float8_e4m3fn, got {tensor.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            f"q, k and v share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them with .to(q.dtype)"
        )
    if not q.device == k.device == v.device:
        raise DeviceError(f"q, k and v share one device, got {q.device}, {k.device}, {v.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"k and v share batch, heads and length, got {list(k.shape[:3])} and {list(v.shape[:3])}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(f"q and k share batch and head_dim, got q {list(q.shape)} and k {list(k.shape)}")
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        raise HeadCountError(
            f"query heads are a multiple of key/value heads (grouped-query attention), "
            f"got {q.shape[1]} and {k.shape[1]}"
        )


def _check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided and not tensor.is_nested:
        raise DtypeError(f"{name} is a strided tensor, got layout {tensor.layout}; make it dense, as by x.to_dense()")


def usable_device(device: torch.device | str | int) -> torch.device:
    """A device of this machine.

    Raises:
        DeviceError: no name of a device, one that PyTorch does not find here, or meta.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{shown(device)} is no device of PyTorch, such as 'cpu', 'cuda' or 'cuda:1'") from error
    if where.type == "meta":
        raise DeviceError("a plan holds data, and device 'meta' holds none; give the device the calls will run on")
    if where.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (where.index or 0) >= count:
            raise DeviceError(f"PyTorch finds {count} CUDA devices here, and device {str(where)!r} is none of them")
    return where


def check_scales(scales: object, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Scales of 8-bit q, k and v, float32 `[B or 1, heads]`; tensors of other dtypes have none."""
    if scales is None:
        if q.dtype == FP8:
            raise ArgumentError(
                "float8_e4m3fn q, k and v need scales=(q_scale, k_scale, v_scale), got none; "
                "stof.quantise_heads(x) gives a tensor and its scale"
            )
        return ()
    if q.dtype != FP8:
        raise DtypeError(f"scales belong to float8_e4m3fn q, k and v, got {q.dtype}; leave scales out")
    if not isinstance(scales, (tuple, list)) or len(scales) != 3:
        got = f"{len(scales)} of them" if isinstance(scales, (tuple, list)) else type(scales).__name__
        raise ArgumentError(f"scales is (q_scale, k_scale, v_scale), got {got}")
    for name, scale, heads in zip(("q", "k", "v"), scales, (q.shape[1], k.shape[1], k.shape[1]), strict=True):
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            dtype = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
            raise DtypeError(f"the scale of {name} is a float32 tensor, got {dtype}")
        if scale.ndim != 2 or scale.shape[0] not in (1, q.shape[0]) or scale.shape[1] != heads:
            raise ShapeError(
                f"the scale of {name} is [1 or {q.shape[0]}, {heads}], one for each head, got {list(scale.shape)}"
            )
        if scale.device != q.device:
            raise DeviceError(f"the scale of {name} is on {scale.device}, the inputs on {q.device}")
    return tuple(scales)


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the scores, default `1 / sqrt(head_dim)`."""
    if scale is None:
        return head_dim**-0.5
    if not _finite(scale):
        raise ArgumentError(f"scale is a finite float or None for 1/sqrt(head_dim), got {scale!r}")
    return float(scale)


def _finite(value: object) -> bool:
    """Whether `value` is a number that float64 holds; comparisons, unlike `math.isfinite`, can be traced."""
    if not isinstance(value, int | float | torch.SymFloat | torch.SymInt):
        if not isinstance(value, numbers.Real):
            return False
        value = float(value)  # numpy's float32: compared in 32 bits, where the largest float64 is infinite
    return bool(-_LARGEST <= value <= _LARGEST)


def check_softcap(softcap: float | None) -> float:
    """The bound on the scaled scores, 0.0 for none."""
    if softcap is None:
        return 0.0
    if not _finite(softcap) or softcap <= 0:
        raise ArgumentError(f"softcap is a finite float above 0 or None, got {softcap!r}")
    return float(softcap)


def check_dropout(dropout_p: float) -> float:
    """The probability of dropout, 0.0 for none."""
    if not _finite(dropout_p) or not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p is a float from 0 to below 1, got {dropout_p!r}")
    return float(dropout_p)


def check_bias(bias: Tensor | None, q: Tensor, kv_len: int) -> Tensor | None:
    """The bias with 4 dimensions, each 1 or the full size."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise DtypeError(f"bias is a torch.Tensor or None, got {type(bias).__name__}")
    _check_strided("bias", bias)
    if bias.dtype not in _DTYPES:
        hint = "; a boolean mask is the mask argument" if bias.dtype == torch.bool else ""
        raise DtypeError(f"bias is a floating-point tensor, got {bias.dtype}{hint}")
    if bias.device != q.device:
        raise DeviceError(f"bias is on {bias.device}, the inputs on {q.device}")
    full = (q.shape[0], q.shape[1], q.shape[2], kv_len)
    shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    # Spelled out, not `broadcast not in (1, size)`: compilers compare symbolic sizes with ==, not in tuples.
    if bias.ndim > 4 or any(broadcast != 1 and broadcast != size for broadcast, size in zip(shape, full, strict=True)):
        raise ShapeError(f"bias broadcasts to [B, H, Sq, Skv] = {list(full)}, got {list(bias.shape)}")
    return with_four_dims(bias)


def with_four_dims(bias: Tensor) -> Tensor:
    """A bias that was checked, with leading dimensions of size 1."""
    return bias.view((1,) * (4 - bias.ndim) + tuple(bias.shape)) if bias.ndim < 4 else bias


def check_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """One logit per query head, one after the other."""
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor):
        raise DtypeError(f"sinks is a torch.Tensor or None, got {type(sinks).__name__}")
    _check_strided("sinks", sinks)
    if sinks.dtype not in _DTYPES:
        raise DtypeError(f"sinks is a floating-point tensor, got {sinks.dtype}")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ShapeError(f"sinks holds one logit per query head [{q.shape[1]}], got {list(sinks.shape)}")
    if sinks.device != q.device:
        raise DeviceError(f"sinks is on {sinks.device}, the inputs on {q.device}")
    return sinks.contiguous()
