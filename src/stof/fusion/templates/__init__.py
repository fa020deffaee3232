"""Kernel templates: GEMMs together with what surrounds them.

`operators` registers them as `torch.ops.stof.linear` and so on; `gemm_config` says how they run.
"""

from stof.fusion.templates.candidates import configs
from stof.fusion.templates.gemm_config import GemmConfig, GemmShape, config_problems
from stof.fusion.templates.operators import (
    gated_linear,
    linear,
    linear_norm,
    norm_linear,
    rms_gated_linear,
    rms_linear,
    rotary_linear,
)

__all__ = [
    "GemmConfig",
    "GemmShape",
    "config_problems",
    "configs",
    "gated_linear",
    "linear",
    "linear_norm",
    "norm_linear",
    "rms_gated_linear",
    "rms_linear",
    "rotary_linear",
]
