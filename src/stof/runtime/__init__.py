"""What this library needs of PyTorch, Triton and the system: launches, memory, streams, locks and files."""
