"""The example trains over several processes as in one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"


@pytest.mark.slow
def test_losses_are_those_of_one_process() -> None:
    command = [sys.executable, str(EXAMPLE), "--ranks", "2", "--length", "203", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    losses = re.findall(r"^\d +(\d\.\d+) +(\d\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert len(losses) == 4, done.stdout
    assert all(float(one) == pytest.approx(float(other), abs=1e-4) for one, other in losses)
    assert float(losses[-1][0]) < float(losses[0][0])
