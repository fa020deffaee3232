"""Compute only: kernels take tensors, a layout and scalars, and never look at masks or choose a config."""
