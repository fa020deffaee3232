"""`torch.library` operators of the templates: argument checks, and the jump to a kernel or to plain PyTorch.

Each takes the arguments of the function of its name in `reference.py`, then a configuration as text (`GemmConfig`, or
one for each bucket of rows: `row_buckets.format_table`). An empty one, or one that does not fit the tensors of a call,
means the default for their shape; a CPU, and whatever no kernel serves, gets plain PyTorch (`reference.py`). Results
are contiguous. Statistics, GEMMs and epilogues are computed in float32 and rounded once.

Raises, beside what the references say:
    ArgumentError: an unknown activation or norm, or text that is no configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import launch, reference
from stof.fusion.templates.folded_weights import folded
from stof.fusion.templates.gemm_config import ACTIVATIONS, GATED, HALVES, NORMS, ROW_SCALED, GemmConfig
from stof.fusion.templates.launch import GemmCall, gemm_call
from stof.fusion.templates.norms import Norm, can_normalise


def _register(name: str) -> Callable[..., Any]:
    """Register `stof::NAME`: the arguments of `reference.NAME`, then `config`; results `[..., N]` in x's dtype."""
    plain = getattr(reference, name)
    names = list(inspect.signature(plain).parameters)
    schema = torch.library.infer_schema(plain, mutates_args=()).replace(") ->", ", str config) ->", 1)
    weight = names.index("weight")

    def compute(*arguments: Any) -> Any:
        *given, config = arguments
        named = dict(zip(names, given, strict=True))
        call = kernel_call(name, named)
        chosen = None if call is None else launch.resolve_config(call, config)
        if call is None or chosen is None:
            return plain(*given)
        return _with_norm(call, chosen, named) if name == "linear_norm" else launch.compute(call, chosen)

    def fake(*arguments: Any) -> Any:
        x, rows = arguments[0], arguments[weight].shape[0]
        shape = (*x.shape[:-1], rows // 2 if name in GATED else rows)
        return (x.new_empty(shape), x.new_empty(shape)) if name == "linear_norm" else x.new_empty(shape)

    operator = torch.library.custom_op(f"stof::{name}", compute, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.__doc__ = plain.__doc__
    return operator


def kernel_call(name: str, arguments: dict[str, Any]) -> GemmCall | None:
    """Check an operator's arguments and view its tensors as kernels read them; None for what no kernel serves."""
    x, weight, bias, rstd = arguments["x"], arguments["weight"], arguments["bias"], arguments.get("rstd")
    activation, kind = arguments.get("activation", "none"), arguments.get("norm", "rms")
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if kind not in NORMS:
        raise ArgumentError(f"norm is 'rms' or 'layer', got {kind!r}")
    if name in GATED and weight.shape[0] % 2:
        raise ArgumentError(f"gate and up have equally many rows, got a weight with {weight.shape[0]}")
    rotary = _rotary(weight, **{key: arguments[key] for key in _ROTARY}) if name == "rotary_linear" else None
    norm: Norm | None = None
    if name == "norm_linear":
        if not can_normalise(x.shape[-1], x):
            return None
        norm = _norm(arguments)
    if name in ROW_SCALED:
        norm_weight = arguments["norm_weight"]
        if x.device.type != "cuda" or x.dtype not in HALVES or not _alike(x, norm_weight, weight, bias):
            return None
        weight = weight if norm_weight is None else folded(weight, norm_weight)
        if weight is None:
            return None
        norm = None if rstd is None else Norm("rms", None, None, 0.0)
    return gemm_call(name, x, weight, bias, arguments.get("residual"), activation, norm, rstd, rotary)


_ROTARY = ("cos", "sin", "turned", "head_dim")


def _rotary(weight: Tensor, cos: Tensor, sin: Tensor, turned: int, head_dim: int) -> launch.Rotary:
    if turned % head_dim or head_dim % 2 or turned > weight.shape[0]:
        raise ArgumentError(f"{turned} columns of {weight.shape[0]} cannot be heads of {head_dim} that are rotated")
    tables = [table.reshape(-1, head_dim).contiguous() for table in (cos, sin)]
    return launch.Rotary(tables[0], tables[1], turned, head_dim)


def _norm(arguments: dict[str, Any]) -> Norm:
    return Norm.of(arguments["norm"], arguments["norm_weight"], arguments["norm_bias"], arguments["eps"])


def _with_norm(call: GemmCall, config: GemmConfig, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run the GEMM of `linear_norm`, and its norm by a kernel or by PyTorch."""
    if can_normalise(call.shape.n, call.x):
        return launch.compute_normed(call, config, _norm(arguments))
    h = launch.compute(call, config)
    return h, reference.normalised(h, *(arguments[name] for name in ("norm_weight", "norm_bias", "norm", "eps")))


def _alike(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all have the device and dtype of x."""
    return all(t is None or (t.device, t.dtype) == (x.device, x.dtype) for t in others)


linear = _register("linear")
norm_linear = _register("norm_linear")
gated_linear = _register("gated_linear")
linear_norm = _register("linear_norm")
rms_linear = _register("rms_linear")
rms_gated_linear = _register("rms_gated_linear")
rotary_linear = _register("rotary_linear")
