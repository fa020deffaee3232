"""Timing of calls on CPUs and GPUs, capture of CUDA graphs, and names of devices and versions."""
