"""`torch.compile(model, backend="stof")`: templates for the segments they cover, Inductor for everything else.

Inference only. The backend rewrites the graph Dynamo captured and hands it to Inductor, whose caches stay in use: its
keys hold the rewritten graph, this package's source and the fusion scheme.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

import stof
from stof.errors import ArgumentError, UnsupportedError
from stof.fusion.pipeline import FusionReport, fuse
from stof.fusion.weights import pack_weights, unpack_weights
from stof.masks import Mask

__all__ = ["CompileOptions", "FusionReport", "optimize", "pack_weights", "stof_backend", "unpack_weights"]


@dataclass(frozen=True)
class CompileOptions:
    """Options of the backend, as `torch.compile(..., options={...})` takes them.

    Attributes:
        cuda_graphs: let Inductor replay the compiled model as CUDA graphs; for fixed shapes and few tokens.
        report: called with the `FusionReport` of each graph that is compiled.
    """

    cuda_graphs: bool = False
    report: Callable[[FusionReport], object] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from a mapping.

        Raises:
            ArgumentError: a name that is no option, or a value it cannot have.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options or {}) - set(known))
        if unknown:
            raise ArgumentError(f"no such option: {', '.join(unknown)}; backend 'stof' takes {', '.join(known)}")
        return cls(**dict(options or {}))


def stof_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: rewrites `gm`, then compiles it with Inductor.

    Args:
        options: see `CompileOptions`.
        mode: not used by this backend; anything but None or "default" is refused.

    Raises:
        ArgumentError: unknown options, or a mode.
        UnsupportedError: the graph is to be differentiated.
    """
    from torch._inductor.compile_fx import compile_fx

    parsed = CompileOptions.parse(options)
    if mode not in (None, "default"):
        raise ArgumentError(
            f"backend 'stof' has no modes (got mode={mode!r}); use options={{'cuda_graphs': True, ...}}"
        )
    refuse_training(gm)
    report = fuse(gm)
    if parsed.report is not None:
        parsed.report(report)
    patches: dict[str, Any] = {"post_grad_custom_post_pass": _cache_mark(report.digest)}
    if parsed.cuda_graphs:
        patches["triton.cudagraphs"] = True
    compiled: Callable[..., Any] = compile_fx(gm, list(example_inputs), config_patches=patches)
    return compiled


def optimize(
    model: nn.Module,
    *,
    mask: Mask | None = None,
    attention: bool = True,
    pack: bool = True,
    dynamic: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare a model's modules for fusion, in place, and compile it with backend "stof".

    Args:
        model: in evaluation mode.
        mask: a sparse mask for the self-attention layers of a Hugging Face model (`hf.sparsify`); None leaves them to
            the model's own mask.
        attention: let stof compute the attention of a Hugging Face model; other models choose theirs themselves.
        pack: pack the weights of query, key and value and of gate and up projection (`stof.fusion.weights`).
        dynamic: as in `torch.compile`.
        options: of the backend, see `CompileOptions`.

    Returns:
        the compiled model. `unpack_weights(model)` undoes the packing; attention is set back by
        `model.set_attn_implementation`.

    Raises:
        UnsupportedError: the model is in training mode, or its attention cannot be served.
        ArgumentError: an unknown option, or a mask without `attention`.
    """
    CompileOptions.parse(options)
    if model.training:
        raise UnsupportedError("stof.optimize compiles inference only; call model.eval() first", {})
    if mask is not None and not attention:
        raise ArgumentError("a mask needs stof's attention; leave attention=True")
    if attention and (mask is not None or _is_transformers(model)):
        from stof.integrations import transformers as hf

        hf.enable(model)
        if mask is not None:
            hf.sparsify(model, mask)
    if pack:
        pack_weights(model)
    compiled: Any = torch.compile(model, backend=stof_backend, dynamic=dynamic, options=options)
    return cast(nn.Module, compiled)


def _is_transformers(model: nn.Module) -> bool:
    """Whether a module comes from Hugging Face transformers, without importing it."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def refuse_training(gm: fx.GraphModule) -> None:
    """Raise UnsupportedError if gradients will be asked of the graph: the templates compute forward passes only."""
    if not torch.is_grad_enabled():
        return
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.requires_grad:
            raise UnsupportedError(
                "backend 'stof' compiles inference only, and this call records gradients; call the model under "
                "torch.inference_mode() or torch.no_grad(), or train with backend='inductor'",
                {},
            )


def _cache_mark(digest: str) -> Any:
    """A pass for Inductor that changes nothing and whose identity is this package's source and the scheme."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class CacheMark(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            """Nothing: the graph was rewritten before it came to Inductor."""

        def uuid(self) -> str:
            return f"stof-{stof.__version__}-{_source_digest()}-{digest}"

    return CacheMark()


@functools.cache
def _source_digest() -> str:
    """A hash of the fusion package's source: caches made by another version of it are not used."""
    folder = Path(stof.__file__).parent / "fusion"
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]
