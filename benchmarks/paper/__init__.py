"""The experiments of the STOF paper (arXiv 2506.06095): `python -m benchmarks paper`."""
