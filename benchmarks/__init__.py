"""Comparisons with other implementations, run from the root of a source checkout: `python -m benchmarks`."""
