"""Block top-k masks: choosing blocks, and lists for the kernels that read them."""
