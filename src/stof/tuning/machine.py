"""What machine this is, and which versions are installed."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch


def package_version(package: str) -> str | None:
    """Installed version of a distribution, without importing it; None when it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    table = Path("/proc/cpuinfo")
    for line in table.read_text(encoding="utf-8").splitlines() if table.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":  # x86; Arm kernels print none
            return value.strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or the processor with the number of threads torch uses and its vector instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
