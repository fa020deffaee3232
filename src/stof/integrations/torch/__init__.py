"""PyTorch's compiler: `torch.compile(model, backend="stof")`, `stof.optimize`, and CUDA graphs of whole models."""

from stof.fusion.records.report import FusionReport
from stof.integrations.torch.compile import optimize, pack_weights, stof_backend, unpack_weights
from stof.integrations.torch.compile_options import CompileOptions
from stof.integrations.torch.cuda_graphs import CudaGraphRunner

__all__ = [
    "CompileOptions",
    "CudaGraphRunner",
    "FusionReport",
    "optimize",
    "pack_weights",
    "stof_backend",
    "unpack_weights",
]
