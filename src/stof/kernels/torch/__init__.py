"""Attention by PyTorch operators, on any device."""
