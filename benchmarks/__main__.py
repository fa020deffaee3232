"""`python -m benchmarks` is the command line of the benchmarks."""

from benchmarks.cli.attention import app

app()
