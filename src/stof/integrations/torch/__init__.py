"""PyTorch: `torch.compile(model, backend="stof")`, `stof.optimize`, CUDA graphs of whole models, `replace_sdpa`."""

from stof.fusion.records.report import FusionReport
from stof.integrations.torch.compile import optimize, pack_weights, stof_backend, unpack_weights
from stof.integrations.torch.compile_options import CompileOptions
from stof.integrations.torch.cuda_graphs import CudaGraphRunner
from stof.integrations.torch.flash_registry import register_flash_attention
from stof.integrations.torch.sdpa import replace_sdpa

__all__ = [
    "CompileOptions",
    "CudaGraphRunner",
    "FusionReport",
    "optimize",
    "pack_weights",
    "register_flash_attention",
    "replace_sdpa",
    "stof_backend",
    "unpack_weights",
]

register_flash_attention()
