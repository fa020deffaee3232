"""Kernel templates: GEMMs together with what surrounds them.

`ops` registers `torch.ops.stof.linear`, `norm_linear`, `gated_linear` and `linear_norm`, `row_scaled`
`rms_linear`, `rms_gated_linear` and `rotary_linear`, `scaled` `scaled_linear`, `chain` `chain_linear`; `config` says
how they run.
"""

from stof.fusion.templates.candidates import configs
from stof.fusion.templates.chain import chain_linear
from stof.fusion.templates.gemm_config import GemmConfig, GemmShape, config_problems
from stof.fusion.templates.ops import gated_linear, linear, linear_norm, norm_linear
from stof.fusion.templates.row_scaled import rms_gated_linear, rms_linear, rotary_linear
from stof.fusion.templates.scaled import scaled_linear

__all__ = [
    "GemmConfig",
    "GemmShape",
    "chain_linear",
    "config_problems",
    "configs",
    "gated_linear",
    "linear",
    "linear_norm",
    "norm_linear",
    "rms_gated_linear",
    "rms_linear",
    "rotary_linear",
    "scaled_linear",
]
