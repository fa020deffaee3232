"""The benchmark's JSON: stable keys, provenance, and the summary table."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import stof
from stof.bench.attention import Row
from stof.tuning.machine import device_name, package_version


def write_results(path: Path, rows: Iterable[Row], device: torch.device) -> None:
    """Write `{"meta": ..., "rows": [...]}`, one row a line."""
    meta = json.dumps(provenance(device), indent=1)
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"meta": {meta},\n "rows": [\n  {lines}\n ]}}\n', encoding="utf-8")


def provenance(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit and date of a run."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "stof": stof.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """Commit of the checkout this package runs from, marked when it has local changes."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+changes" if dirty.stdout.strip() else "")
