"""Triton kernels that rebuild the tile lists of dynamic plans on the GPU."""
