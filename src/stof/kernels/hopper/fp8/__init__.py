"""Attention with FP8 (e4m3) operands on Hopper: experimental."""
