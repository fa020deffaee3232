"""A kernel's key in Triton's cache is the same whichever kernels were hashed before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stof

pytest.importorskip("triton")

# Kernels that share functions. Hashes of all functions are forgotten, as if a new process began.
PROGRAM = """
import gc
from triton.runtime.jit import JITCallable
from stof.runtime.cache_keys import with_stable_key
from stof.fusion.templates.hopper.pingpong import pingpong_gemm_kernel
from stof.fusion.templates.hopper.cooperative import cooperative_gemm_kernel
from stof.fusion.templates.triton.gemm import tile_gemm_kernel
from stof.kernels.hopper.forward_kernel import forward_kernel
from stof.kernels.triton.block_wise_kernel import block_wise_kernel
from stof.layout.fill.slab_kernel import count_slabs
from stof.layout.fill.count_kernels import count_tiles
from stof.layout.fill.write_kernels import write_tiles

kernels = [
    count_slabs, count_tiles, write_tiles, tile_gemm_kernel, pingpong_gemm_kernel,
    cooperative_gemm_kernel, forward_kernel, block_wise_kernel,
]

def keys(order):
    for function in [f for f in gc.get_objects() if isinstance(f, JITCallable)]:
        function.hash, function.used_global_vals = None, {}
    return {kernel.__name__: with_stable_key(kernel).cache_key for kernel in order}

alone = {}
for kernel in kernels:
    alone |= keys([kernel])
print(keys(kernels) == keys(kernels[::-1]) == alone)
"""


def test_keys_do_not_depend_on_the_order_of_kernels() -> None:
    root = Path(stof.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root / "src"), os.environ.get("PYTHONPATH", "")))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr[-2000:]
