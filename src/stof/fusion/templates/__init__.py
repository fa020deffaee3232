"""Kernel templates: operators with a GEMM inside and everything around it as prologue and epilogue.

`ops` holds the operators and their plain PyTorch twins, `registry` says which sequences of a model's operators each one
covers.
"""
