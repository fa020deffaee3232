"""Portable GEMM and row-norm kernels, in Triton."""
