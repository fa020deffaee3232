"""Kernels for Hopper GPUs (sm_90), in Gluon."""
