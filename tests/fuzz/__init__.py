"""Random calls of STOF checked against float64; see `python -m tests.fuzz --help` and CONTRIBUTING.md."""
