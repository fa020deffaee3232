"""Portable GPU kernels in Triton (sm_80 and newer). Nothing here is imported before a kernel is first launched."""
