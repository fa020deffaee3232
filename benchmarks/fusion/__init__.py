"""Fused operators beside code of PyTorch's compiler, and the searches for them."""
