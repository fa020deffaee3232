"""Kernels are compiled in threads, and found again: nothing is compiled twice, or launched to find out what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stof.fusion.measure.parallel_compile import compile_candidates, specializations
from stof.runtime.private import init_triton_cache
from tests.fusion.test_segment_timer import segment
from tests.kernels.test_compile import OLDER, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6", "installed"])
def test_what_threads_compile_is_found(version: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if version == "3.6" and not OLDER.is_dir():
        pytest.skip("Triton 3.6 is not beside the environment; `make test` puts it there")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    if version == "3.6":
        environment["PYTHONPATH"] = os.pathsep.join([str(OLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.fusion.compile_in_threads"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    (problem,) = found.pop("problems")
    assert "KeyError" in problem
    assert found == {"kinds": ["pingpong", "tile"], "cubins": 2, "compiled": []}


def test_a_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.fusion.measure.parallel_compile.random_inputs", lambda match: pytest.fail("not needed"))
    compile_candidates([(segment(slice(0, 2)), [""])])


def test_triton_looks_where_inductor_would_send_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in a process in which Inductor compiles nothing."""
    from torch._inductor.runtime import compile_tasks

    triton = pytest.importorskip("triton")
    asked: list[str] = []
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: asked.append("ptxas"), raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    init_triton_cache(torch.device("cuda", 0))
    assert asked == ["ptxas"]
    assert Path(triton.knobs.cache.dir).is_relative_to(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    init_triton_cache(torch.device("cuda", 0))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own")
    monkeypatch.delattr(compile_tasks, "_set_triton_ptxas_path")
    init_triton_cache(torch.device("cuda", 0))  # a torch without it chooses nothing


def test_recording_stops_no_other_threads_kernels() -> None:
    """A kernel that is neither compiled nor launched leaves memory as it was."""
    runtime = pytest.importorskip("triton").knobs.runtime

    class Info:
        jit_function = "kernel"

    def asked() -> bool:
        return bool(runtime.jit_cache_hook(fn=Info, compile={"specialization_data": "text"}))

    answers: list[bool] = []

    def call() -> None:
        with ThreadPoolExecutor(1) as other:
            answers.extend([asked(), other.submit(asked).result()])

    assert specializations(call) == [("kernel", "text")]
    assert answers == [True, False]
