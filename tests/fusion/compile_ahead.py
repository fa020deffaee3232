"""Compile a few template kernels in other processes, then here: prints what came of it, and what was compiled anew.

    TRITON_CACHE_DIR=... python -m tests.fusion.compile_ahead

Without a GPU: Triton is told of one that is not there.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver

from stof.fusion.measure.async_compile import WorkerPool, assembler, specializations
from stof.fusion.measure.compile_worker import OfflineDriver
from stof.fusion.templates import launch
from tests.fusion.compile_templates import cases, product_of

TARGET = ("cuda", 90, 32)
KINDS = ("tile", "pingpong")
# Another build of the same release, as far as anybody can tell.
OTHER = """#!/bin/sh
if [ "$*" = --version ]; then '{real}' --version; echo "Build other"; else exec '{real}' "$@"; fi
"""


def use_another_assembler(folder: Path) -> None:
    """What Inductor does when it first compiles, if torch comes with a ptxas: Triton has been asked for its own."""
    before = assembler(*TARGET[:2])
    path = folder / "ptxas"
    path.write_text(OTHER.format(real=get_ptxas(TARGET[1]).path), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    os.environ["TRITON_PTXAS_PATH"] = str(path)
    assert before is not None
    assert assembler(*TARGET[:2]) == (str(path), before[1]), "it is called, and kernels are kept as before"


def main() -> None:
    driver.set_active(OfflineDriver(*TARGET))
    some = {case.config.kind: case for case in cases(False) if case.config.kind in KINDS}
    calls = {kind: (lambda case=case: launch.compute(product_of(case), case.config)) for kind, case in some.items()}
    found = {kind: specializations(call) for kind, call in calls.items()}
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    use_another_assembler(folder.parent)
    assert not list(folder.glob("*")), "nothing was compiled to find them"
    ahead = WorkerPool(2, TARGET)
    numbers = {ahead.submit(*one) for one in [job for jobs in found.values() for job in jobs] * 2}
    wrong = ahead.submit("stof.fusion.templates.launch", "no_such_kernel", "{}")
    ahead.wait_for({*numbers, wrong})
    there = {file.parent.name for file in folder.glob("*/*.cubin")}
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, metadata, cache_hit, **rest: (
        None if cache_hit else compiled.append(src.name)
    )
    for call in calls.values():
        try:
            call()
        except AttributeError:  # compiled or found, and nothing to launch it with
            continue
    after = {file.parent.name for file in folder.glob("*/*.cubin")}
    ahead.close()
    print(json.dumps({
        "jobs": len(numbers), "kinds": sorted(found), "problems": ahead.problems, "cubins": len(there),
        "new": len(after - there), "compiled": compiled,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
