"""STOF: attention under any mask, and operator fusion for the rest of the model.

out = stof.attention(q, k, v, stof.masks.sliding_window(256) | stof.masks.global_tokens(64))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stof import errors, masks
from stof.attention import attention, explain, plan
from stof.dynamic.plan import DynamicPlan, dynamic_plan
from stof.kernels.merge import merge
from stof.kernels.quantization import quantise_heads
from stof.layout import Layout, LayoutConfig
from stof.plans.make import plan_cache
from stof.plans.plan import Plan
from stof.varlen import varlen_attention
from stof.version import __version__ as __version__

if TYPE_CHECKING:
    from torch import nn

    from stof.integrations.torch.sdpa import replace_sdpa

__all__ = [
    "DynamicPlan",
    "Layout",
    "LayoutConfig",
    "Plan",
    "attention",
    "dynamic_plan",
    "errors",
    "explain",
    "masks",
    "merge",
    "optimize",
    "plan",
    "plan_cache",
    "quantise_heads",
    "replace_sdpa",
    "varlen_attention",
]


def optimize(model: nn.Module, **options: Any) -> nn.Module:
    """`model` compiled with backend "stof", its weights packed and its attention stof's; inference only.

    Arguments, result and errors: `stof.integrations.torch.optimize`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
        >>> compiled = stof.optimize(model)
        >>> with torch.inference_mode():
        ...     compiled(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """
    # By name: it lies above this layer, and `import stof` loads neither it nor what it needs.
    compiled: nn.Module = import_module("stof.integrations.torch").optimize(model, **options)
    return compiled


def __getattr__(name: str) -> Any:
    if name == "replace_sdpa":
        return import_module("stof.integrations.torch.sdpa").replace_sdpa
    raise AttributeError(f"module 'stof' has no attribute {name!r}")
