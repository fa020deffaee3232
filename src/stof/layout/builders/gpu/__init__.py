"""Layouts built by Triton kernels where the mask's tiles are classified, numbered and written on the GPU.

`build.py` is the host's part; the kernels are imported when it first runs.
"""
