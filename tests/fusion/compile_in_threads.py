"""Compile a few template kernels in threads, then call them: prints what came of it, and what was compiled anew.

    TRITON_CACHE_DIR=... python -m tests.fusion.compile_in_threads

Without a GPU: Triton is told of one that is not there.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from stof.fusion.measure.parallel_compile import compile_specializations, specializations
from stof.fusion.templates import launch
from stof.fusion.templates.triton.gemm import tile_gemm_kernel
from tests.fusion.compile_templates import cases, product_of

KINDS = ("tile", "pingpong")


class OfflineDriver:
    """What Triton asks of its driver before a kernel is launched, for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(OfflineDriver())
    some = {case.config.kind: case for case in cases(False) if case.config.kind in KINDS}
    calls = {kind: (lambda case=case: launch.compute(product_of(case), case.config)) for kind, case in some.items()}
    found = {kind: specializations(call) for kind, call in calls.items()}
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert not list(folder.glob("*")), "nothing was compiled to find them"
    with mock.patch.object(torch.cuda, "device", return_value=nullcontext()):
        wanted = [job for jobs in found.values() for job in jobs] * 2
        problems = compile_specializations([*wanted, (tile_gemm_kernel, "{}")], torch.device("cuda", 0))
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, **rest: compiled.append(src.name)
    for call in calls.values():
        try:
            call()
        except AttributeError:  # found in memory, and nothing to launch it with
            continue
    print(json.dumps({
        "kinds": sorted(found), "problems": problems, "cubins": len(list(folder.glob("*/*.cubin"))),
        "compiled": compiled,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
