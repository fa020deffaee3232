"""Template kernels compile for every GPU generation they serve, for Hopper by both Tritons, within their bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_compile import LIMITS, OLDER, ROOT, UNCOUNTED

# Bytes a thread may spill: what both Triton releases need, rounded up to 32. Blackwell's data-centre GPUs accumulate in
# tensor memory, which Triton moves through registers at the end of a tile; gate and up with a row's scale need 16 there
# before Hopper.
SPILLS = {80: 32, 89: 32, 90: 0, 100: 64, 120: 32}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6", "installed"])
def test_templates_compile(version: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if version == "3.6" and not OLDER.is_dir():
        pytest.skip("Triton 3.6 is not beside the environment; `make test` puts it there")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if version == "3.6":
        environment["PYTHONPATH"] = os.pathsep.join([str(OLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.fusion.compile_templates", "--json"]
    command += ["--arch", "90"] * (version == "3.6")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["arch"] for kernel in kernels} == (set(LIMITS) if version == "installed" else {90})
    assert len({kernel["kernel"] for kernel in kernels}) == 6
    problems = [f"sm_{one['arch']} {one['kernel']} {one['name']} {one['config']}: {fault}" for one in kernels
                for fault in faults(one)]  # fmt: skip
    assert not problems, "\n".join(["", *problems])


def faults(kernel: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = list(kernel["warnings"])
    if kernel["spilled"] > SPILLS[kernel["arch"]]:
        found.append(f"spills {kernel['spilled']} bytes")
    if kernel["estimated"] and kernel["shared"] > kernel["estimated"] + UNCOUNTED:
        found.append(f"takes {kernel['shared']} bytes of shared memory, {kernel['estimated']} were counted")
    rows = int(kernel["config"].split("x")[0])
    # What goes through registers on its way is no step ahead: rows to normalise, columns not known to be neighbours.
    through = kernel["name"].startswith("layer norm")
    if kernel["arch"] == 90 and rows >= 64 and ",tile" in kernel["config"] and not through:
        found += ["has fewer steps in flight than stages"] if kernel["shared"] < kernel["estimated"] else []
    if kernel["estimated"] and kernel["arch"] == 90 and rows >= 64 and "float32" not in kernel["name"]:
        found += [] if kernel["wgmma"] else ["has no wgmma"]
    return found
