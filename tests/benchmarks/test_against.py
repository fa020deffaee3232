"""`python -m benchmarks against` on a machine without a GPU: whose stof a process has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attention.against import ROOT, changes
from stof.errors import ArgumentError


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is not a checkout of stof"):
        changes(tmp_path, [("causal", "1,1,64,128")], tmp_path, 1, print)


@pytest.mark.slow
def test_another_checkouts_stof_is_not_timed(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "attention" / "checkout_worker.py"
    for checkout, wrong in ((ROOT, False), (tmp_path, True)):
        command = [sys.executable, "-P", str(script), str(checkout)]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120)
        assert bool(done.returncode) == wrong, done.stderr
        assert ("not the stof of" in done.stderr) == wrong
