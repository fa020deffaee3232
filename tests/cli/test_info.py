"""`stof info`."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stof.cli import info
from stof.cli.main import app
from stof.selection import IMPLEMENTATIONS, CallSpec, Capabilities, Implementation
from stof.selection.device_model import load_model

ROOT = Path(__file__).parents[2]


def run_info(*options: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["info", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_describes_this_machine() -> None:
    report = json.loads(run_info("--json"))
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["cpu"]["torch_threads"] == torch.get_num_threads()
    assert report["cpu"]["simd"] == torch.backends.cpu.get_cpu_capability()
    assert report["cpu"]["model"]
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert [found["name"] for found in report["implementations"]] == list(IMPLEMENTATIONS)


def test_table_has_the_same_facts() -> None:
    out = run_info()
    assert metadata.version("torch") in out
    assert torch.backends.cpu.get_cpu_capability() in out
    assert all(name in out for name in IMPLEMENTATIONS)
    assert all(f"extra {name}" in out for name in info.EXTRAS)


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, driver: str | None) -> None:
    properties = SimpleNamespace(name="Test GPU", major=9, minor=0, total_memory=141 * 2**30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def answer(*_: Any, **__: Any) -> Any:
        if driver is None:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout=f"{driver}\n{driver}\n")

    monkeypatch.setattr(subprocess, "run", answer)


@pytest.mark.parametrize("driver", ["570.86.15", None])
def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch, driver: str | None) -> None:
    _pretend_gpu(monkeypatch, driver)
    report = info.collect()
    notice = load_model("Test GPU").notice()
    facts = {"compute_capability": "9.0", "memory_bytes": 141 * 2**30, "multiprocessors": 132, "cost_model": notice}
    assert report["gpus"] == 2 * [{"name": "Test GPU", **facts}]
    assert report["cuda"]["driver"] == driver
    assert "cuda" in report["implementations"][0]["refusals"]
    out = run_info()
    assert "Test GPU (compute capability 9.0, 141.0 GiB, 132 multiprocessors)" in out
    assert (driver or "unknown") in out
    assert out.count("Test GPU was never tuned") == 1
    assert "constants of NVIDIA H200" in out


def test_refusals_come_from_the_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = Implementation(
        name="picky",
        summary="float16 on the moon",
        capabilities=Capabilities(devices=("moon",), dtypes=(torch.float16,)),
        prepare=lambda layout, settings: ([], []),
        bind=lambda *_: pytest.fail("info runs nothing"),
    )
    monkeypatch.setitem(IMPLEMENTATIONS, "picky", picky)
    found = {entry["name"]: entry["refusals"]["cpu"] for entry in info.collect()["implementations"]}
    for dtype in (torch.float16, torch.float32):
        call = CallSpec(device="cpu", dtype=dtype, head_dim=64, value_dim=64, heads=8, kv_heads=8)
        assert found["picky"][str(dtype).removeprefix("torch.")] == picky.capabilities.refusals(call)
    assert len(found["picky"]["float16"]) == 1
    missing = {entry["name"]: entry["missing"] for entry in info._implementations(["cpu"])}
    assert missing["picky"] == ["runs on moon, not cpu"]
    assert missing["hopper"] == missing["hopper_fp8"] == ["runs on cuda, not cpu"]
    assert missing["reference"] == []
    lines = [line for line in run_info().splitlines() if "picky" in line]
    assert len(lines) == 1
    assert "runs on moon, not cpu" in lines[0]
    assert found["reference"]["float32"] == []
    assert "moon" in run_info()


def test_missing_extras_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "matplotlib":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    extra = info.collect()["extras"]["bench"]
    assert extra == {"present": False, "missing": ["matplotlib"], "install": "pip install matplotlib"}
    assert "extra bench: missing matplotlib; pip install matplotlib" in run_info()


def test_extras_are_those_of_the_distribution() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        out: set[str] = set()
        for requirement in declared[extra]:
            name, _, inner = requirement.partition(">=")[0].rstrip("]").partition("[")
            out |= set().union(*map(packages, inner.split(","))) if name == "stof-attention" else {name}
        return out

    assert set(info.EXTRAS) == set(declared) - {"dev", "docs"}
    assert {name: set(wanted) for name, wanted in info.EXTRAS.items()} == {name: packages(name) for name in info.EXTRAS}


@pytest.mark.parametrize("installed", [True, False])
def test_another_distribution_of_the_same_name_is_told(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "stof":
            if installed:
                return "9.9"
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert ("a distribution named stof (9.9) is installed beside" in run_info()) == installed
    assert ("pip uninstall stof" in "".join(info.collect()["warnings"])) == installed
