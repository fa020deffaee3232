"""GEMM kernels for Hopper, in Gluon."""
