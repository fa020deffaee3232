"""Kernels are compiled in other processes, and found again: nothing is compiled twice, or launched to find out what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stof.fusion.measure.async_compile import WorkerPool, assembler, init_triton_cache, select_ptxas
from tests.fusion.test_segment_timer import segment
from tests.kernels.test_compile import OLDER, ROOT


@pytest.mark.parametrize("version", [pytest.param("3.6", marks=pytest.mark.slow), "installed"])
def test_what_others_compile_is_found(version: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if version == "3.6" and not OLDER.is_dir():
        pytest.skip("Triton 3.6 is not beside the environment; `make test` puts it there")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    if version == "3.6":
        environment["PYTHONPATH"] = os.pathsep.join([str(OLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.fusion.compile_ahead"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    (problem,) = found.pop("problems")
    assert "no_such_kernel" in problem
    assert found == {"kinds": ["pingpong", "tile"], "jobs": 2, "cubins": 2, "new": 0, "compiled": []}


def test_a_pool_without_work_and_a_pool_that_has_ended() -> None:
    match = segment(slice(0, 2))
    ahead = WorkerPool(1, ("cuda", 90, 32))
    ahead.start(match, [""])  # a reference: there is nothing to compile
    ahead.wait(match, ["", "never asked for"])
    ahead.close()
    number = ahead.submit("stof.fusion.templates.triton.gemm", "tile_gemm_kernel", "{}")
    ahead.wait_for({number})  # nobody will answer, and nobody waits
    assert ahead.compiled == 0


def test_caches_are_settled_before_any_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton looks where Inductor would send it, also in a process in which Inductor compiles nothing."""
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("stof.fusion.measure.async_compile.select_ptxas", lambda: None)
    init_triton_cache()
    assert Path(triton.knobs.cache.dir).is_relative_to(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    init_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own")


def test_the_assembler_is_settled_as_inductor_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import compile_tasks

    asked: list[str] = []
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: asked.append("ptxas"), raising=False)
    select_ptxas()
    assert asked == ["ptxas"]
    monkeypatch.delattr(compile_tasks, "_set_triton_ptxas_path")
    select_ptxas()  # a torch without it chooses nothing
    assert assembler("hip", 90) is None
