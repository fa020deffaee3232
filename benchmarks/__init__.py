"""Comparisons with other implementations, run from the root of a source checkout: `python -m benchmarks`."""

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """Environment variables of a process that finds this package from any folder."""
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
