"""How long a process takes until a compiled model answers: the first one on a machine, and those after it.

Each start is a process of its own. The cold one finds empty caches of ours, Inductor's and Triton's; warm ones what it
left. Loading the model is told apart: that depends on where its weights lie.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment
from stof.errors import StofError


@dataclass(frozen=True)
class Start:
    """One process.

    Attributes:
        kind: "cold" or "warm".
        import_s: seconds until Python, torch and stof are there.
        load_s: for the model and its inputs.
        compile_s: from `stof.optimize` to the first answer.
        optimize_s: for `stof.optimize`, part of it.
        call_ms: a call afterwards.
        measured: times taken for the search.
        compiled: graphs that Inductor compiled, and kernels that Triton did, because no cache had them.
        kernels: names of the latter.
        traced: graphs that Dynamo traced.
    """

    kind: str
    import_s: float
    load_s: float
    compile_s: float
    call_ms: float
    measured: int
    compiled: int
    kernels: tuple[str, ...] = ()
    optimize_s: float = 0.0
    traced: int = 0


@dataclass(frozen=True)
class Ask:
    """What is started; as for `stof.cli.model_loading.load`, and options of the backend."""

    model: str
    batch: int
    length: int
    mask: str
    dtype: str
    options: dict[str, Any]


def run_starts(ask: Ask, caches: Path, warm: int) -> list[Start]:
    """A cold start where the folder of caches is empty, then warm ones.

    Raises:
        StofError: a process failed; the message ends as its output does.
    """
    first = "warm" if caches.is_dir() and any(caches.iterdir()) else "cold"
    return [_run(ask, caches, kind) for kind in (first, *["warm"] * warm)]


def _run(ask: Ask, caches: Path, kind: str) -> Start:
    variables = {key: value for key, value in environment().items() if key != "TRITON_CACHE_DIR"}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "XDG_CACHE_HOME": str(caches / "user")}
    asked = json.dumps(asdict(ask) | {"kind": kind, "began": time.time()})
    command = [sys.executable, "-m", "benchmarks.models.startup_time", asked]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode != 0:
        raise StofError(f"the {kind} start failed:\n{done.stderr[-2000:]}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def start_here(asked: Mapping[str, Any]) -> Start:
    """Be the process that is started."""
    import torch

    import stof
    from stof.cli.model_loading import load
    from stof.fusion.records.report import FusionReport

    import_s, imported = time.time() - asked["began"], time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = getattr(torch, asked["dtype"])
    loaded = load(asked["model"], asked["batch"], asked["length"], asked["mask"], device, dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait()
    read = time.perf_counter()
    compiled: list[str] = []
    _count_compilations(compiled)
    reports: list[FusionReport] = []
    options = {"report": reports.append, **asked["options"]}
    if device.type != "cuda":
        options |= {"cuda_graphs": False}
    fast: Any = stof.optimize(loaded.model, mask=loaded.mask, dynamic=False, **options)
    wait()
    optimized = time.perf_counter()
    with torch.inference_mode():
        fast(*loaded.args, **loaded.kwargs)
        wait()
        first = time.perf_counter()
        for _ in range(3):  # CUDA graphs are recorded by then
            fast(*loaded.args, **loaded.kwargs)
        wait()
        before = time.perf_counter()
        fast(*loaded.args, **loaded.kwargs)
        wait()
        after = time.perf_counter()
    from torch._dynamo.utils import counters

    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
    return Start(
        kind=asked["kind"],
        import_s=import_s,
        load_s=read - imported,
        compile_s=first - read,
        call_ms=1e3 * (after - before),
        measured=sum(report.measurements for report in reports),
        compiled=misses + len(compiled),
        kernels=tuple(compiled),
        optimize_s=optimized - read,
        traced=counters["stats"]["unique_graphs"],
    )


def _nothing() -> None:
    """A CPU is never waited for."""


def _count_compilations(compiled: list[str]) -> None:
    """Note each kernel that Triton compiles in this process, not those that it finds."""
    try:
        import triton
    except ImportError:
        return

    def note(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = note


def main(arguments: Sequence[str]) -> None:
    try:
        print(json.dumps(asdict(start_here(json.loads(arguments[0])))))
    except StofError as error:  # whoever asked is told why, not where
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
