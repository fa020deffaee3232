"""Kernels for Hopper GPUs (sm_90) in Gluon. Nothing here is imported before a kernel is first launched."""
