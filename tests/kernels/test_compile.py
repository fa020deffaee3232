"""Kernels compile for every GPU generation we serve, without one, for Hopper by both Tritons, and hardly spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `make test` puts the older release beside the environment's own.
OLDER = Path(sys.prefix) / "triton-3.6"

# Bytes a thread may spill, for sm_90 and for the other GPUs: what both Triton releases need, rounded up to 32. Head
# dimensions of 64 are compiled for more programs on a multiprocessor, which pays for its few spills; 256 and float32
# would need more than the 255 registers there are. The Hopper kernel spills at the ends of jobs where chunks are merged
# (240 registers; 128 for one warpgroup, 160 for three, which also spill their pointers; two accumulators of 256 columns
# would take all), and in the warp that copies (24) where it picks slabs. The backward kernel for dK and dV holds two
# accumulators; tiles that spill some of them are faster all the same (an H200), in float32 all that there are.
SPILLS = {
    "D 64": (96, 128),
    "D 128": (0, 0),
    "D 256": (192, 448),
    "fp32 D 64": (0, 64),
    "fp32": (992, 864),
    "options D 64": (0, 0),
    "options D 128": (544, 544),
    "bias": (0, 32),
    "dropout": (96, 64),
    "decode": (32, 0),
    "hopper D 64": (64, 0),
    "hopper 64 rows": (96, 0),
    "hopper 192 rows": (160, 0),
    "hopper D 128": (96, 0),
    "hopper D 256": (384, 0),
    "hopper pairs": (0, 0),
    "hopper bias": (64, 0),
    "hopper options": (96, 0),
    "hopper fp8": (32, 0),
    "hopper backward": (64, 0),
    "row-wise": (0, 0),
    "backward D 64": (128, 128),
    "backward D 128": (352, 256),
    "backward D 256": (96, 224),
    "backward fp32": (800, 1152),
    "backward options": (128, 224),
    "backward dropout": (160, 352),
    "backward sums": (0, 32),
    "fill": (0, 64),
    "layout": (32, 48),
}
# What differs on an sm_90 from Triton 3.9 on, which compiles for it by ptxas 13.4 (docs/versions.md).
NEWER_SPILLS = {
    "D 64": 128,
    "D 128": 32,
    "decode": 64,
    "hopper 192 rows": 416,
    "hopper D 64": 96,
    "hopper D 256": 320,
    "hopper pairs": 32,
    "hopper bias": 128,
    "hopper fp8": 64,
    "backward fp32": 832,
    "backward sums": 32,
    "fill": 32,
    "layout": 64,
}
# Shared memory a program may have.
LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# What the hardware takes of a multiprocessor's shared memory for each program; the limit leaves room for one.
RESERVED = 1024
# Predicates that the Hopper kernel may move to registers. Where it takes a tile again by its bits, the assembler would
# keep every one of them, in each tile that needs no such thing: 24 to 106 moves.
KEPT = 16
# What the selector's estimate may miss.
UNCOUNTED = 4096


def compile_all(path: Path | None, family: str, cache: Path, *only: str) -> list[dict[str, Any]]:
    """What `compile_kernels.py` reports of a family of kernels, under the Triton in `path` or the installed one.

    With `only`, its arguments, of some of them.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    if path is not None:
        paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", "--json", "--family", family]
    # Every combination for Hopper by the older release, which our GPUs run; other GPUs' kernels by the installed one.
    command += only or (["--covering"] if path is None else ["--arch", "90"])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hopper", "others"])
@pytest.mark.parametrize("version", ["3.6", "installed"])
def test_kernels_compile(version: str, family: str, tmp_path: Path) -> None:
    kernels = compile_all(path_of(version), family, tmp_path)
    groups = {group for group in SPILLS if group.startswith("hopper") == (family == "hopper")}
    assert {kernel["group"] for kernel in kernels} == groups, "every bound is used, and no kernel is without one"
    archs = set(LIMITS) if (version, family) == ("installed", "others") else {90}
    assert {kernel["arch"] for kernel in kernels} == archs
    if version == "3.6":
        assert all(kernel["triton"].startswith("3.6.") for kernel in kernels)
    problems = [f"sm_{kernel['arch']} {kernel['name']}: {problem}" for kernel in kernels for problem in faults(kernel)]
    assert not problems, "\n".join(["", *problems])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["installed", "3.6"])
def test_biases_are_read_16_bytes_at_once(version: str, tmp_path: Path) -> None:
    """Where rows begin at multiples of that, of 16 and 32 bits; nowhere else, where it would be an illegal address."""
    only = ("--only", "D 64 64x64 4w3s128r contiguous bias", "--arch", "80")
    kernels = compile_all(path_of(version), "others", tmp_path, *only)
    assert len(kernels) == 5
    assert not [problem for kernel in kernels for problem in faults(kernel)]


def path_of(version: str) -> Path | None:
    """Where a Triton is, None for the installed one."""
    pytest.importorskip("triton")
    if version == "3.6" and not OLDER.is_dir():
        pytest.skip("Triton 3.6 is not beside the environment; `make test` puts it there")
    return OLDER if version == "3.6" else None


def test_every_shape_is_compiled() -> None:
    """Also where combinations are left out: each tile that the selector has for Hopper, with its stages."""
    pytest.importorskip("triton")
    from stof.selection.gpu_candidates import _HOPPER_BIAS_TILES, _HOPPER_TILES, _PAIRED_STAGES
    from stof.selection.resources import head_dim_class
    from tests.kernels.compile_kernels import cases
    from tests.kernels.covering import covering

    wanted = {
        (has_bias, width, *tile)
        for has_bias, table in ((False, _HOPPER_TILES), (True, _HOPPER_BIAS_TILES))
        for width, tiles in table.items()
        for tile in tiles
    }
    wanted.add((False, 128, 64, 64, _PAIRED_STAGES))
    found = set()
    for case in covering(case for case in cases() if case.choice.implementation == "hopper"):
        layout, kernel, call = case.choice.layout, case.choice.kernel, case.call
        assert layout is not None
        assert kernel is not None
        width = head_dim_class(call.head_dim, call.value_dim)
        found.add((call.has_bias, width, layout.block_m, layout.block_n, kernel.num_stages))
    assert found == wanted


def faults(kernel: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = []
    allowed = SPILLS[kernel["group"]][kernel["arch"] != 90]
    if kernel["arch"] == 90 and tuple(int(part) for part in kernel["triton"].split(".")[:2]) >= (3, 9):
        allowed = NEWER_SPILLS.get(kernel["group"], allowed)
    if kernel["spilled"] > allowed:
        found.append(f"spills {kernel['spilled']} bytes, allowed {allowed}")
    if kernel["estimated"] and kernel["shared"] > kernel["estimated"] + UNCOUNTED:
        found.append(f"takes {kernel['shared']} bytes of shared memory, the selector counts {kernel['estimated']}")
    limit = LIMITS[kernel["arch"]]
    # The selector refuses by its estimate; what it lets through must fit.
    if kernel["shared"] > limit >= kernel["estimated"]:
        found.append(f"takes {kernel['shared']} bytes of shared memory, the GPU has {limit}")
    programs = kernel["resident"]
    if programs > 1 and programs * (kernel["shared"] + RESERVED) > limit + RESERVED:
        found.append(f"takes {kernel['shared']} bytes of shared memory, too much for {programs} at once")
    if kernel["group"] == "bias" and bool(kernel["narrow"]) != kernel["name"].endswith(
        ("in odd rows", "in uneven rows")
    ):
        found.append(f"reads less than 16 bytes at once in {kernel['narrow']} places")
    if kernel["kept"] > KEPT:
        found.append(f"moves {kernel['kept']} predicates to registers: are a tile's bits kept for a branch?")
    if kernel["arch"] == 90 and kernel["block_m"] >= 64 and kernel["itemsize"] <= 2 and not kernel["wgmma"]:
        found.append("has no wgmma")
    return found + kernel["warnings"]
