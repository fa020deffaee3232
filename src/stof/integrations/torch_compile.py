"""Names of the compile backend: another path of `stof.integrations.torch`, where they are."""

from stof.integrations.torch import CompileOptions, FusionReport, optimize, pack_weights, stof_backend, unpack_weights

__all__ = ["CompileOptions", "FusionReport", "optimize", "pack_weights", "stof_backend", "unpack_weights"]
