"""The benchmark's JSON: stable keys, provenance, and the summary table."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from stof.bench.attention import Row


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
        "triton": _version("triton"),
        "stof": _version("stof"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or the processor with the number of threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = "CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{model}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout this package runs from, marked when it has local changes."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+changes" if dirty.stdout.strip() else "")
