"""Compile a few template kernels in other processes, then here: prints what came of it, and what was compiled anew.

    TRITON_CACHE_DIR=... python -m tests.fusion.compile_ahead

Without a GPU: Triton is told of one that is not there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import triton
from triton.runtime.driver import driver

from stof.fusion.ahead import CompileAhead, specializations
from stof.fusion.compile_worker import NoDriver
from stof.fusion.templates import run
from tests.fusion.compile_templates import cases, product_of

TARGET = ("cuda", 90, 32)
KINDS = ("tile", "pingpong")


def main() -> None:
    driver.set_active(NoDriver(*TARGET))
    some = {case.config.kind: case for case in cases(False) if case.config.kind in KINDS}
    calls = {kind: (lambda case=case: run.compute(product_of(case), case.config)) for kind, case in some.items()}
    found = {kind: specializations(call) for kind, call in calls.items()}
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert not list(folder.glob("*")), "nothing was compiled to find them"
    ahead = CompileAhead(2, TARGET)
    numbers = {ahead.submit(*one) for one in [job for jobs in found.values() for job in jobs] * 2}
    wrong = ahead.submit("stof.fusion.templates.run", "no_such_kernel", "{}")
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
