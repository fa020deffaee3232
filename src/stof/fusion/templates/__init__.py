"""Kernel templates: GEMMs together with what surrounds them.

`operators` registers them as `torch.ops.stof.linear` and so on; `gemm_config` says how they run.
"""
