"""Drop-in replacements for parts of `torch.nn`."""
