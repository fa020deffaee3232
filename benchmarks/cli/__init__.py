"""The command line of `python -m benchmarks`."""
