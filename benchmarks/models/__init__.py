"""Whole models beside torch.compile."""
