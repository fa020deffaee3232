"""How fast a configuration could be at best: what cannot beat the best so far need not be compiled or measured."""

from __future__ import annotations

import torch

from stof.fusion.templates.gemm_config import GemmConfig, GemmShape

# Operations on 16-bit values that a multiprocessor's tensor cores do in a cycle, by compute capability; others are
# taken for the fastest.
_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096}
_MOST_PER_CYCLE = 8192
# Bytes that a multiprocessor gets from the L2 in a cycle.
_L2_BYTES = {(8, 0): 64, (8, 6): 64, (8, 9): 64, (9, 0): 64}
_MOST_L2_BYTES = 128
# Cycles in a microsecond: no data-centre GPU has a faster clock, and others are not listed above them.
_CYCLES = {(8, 0): 1410, (9, 0): 1980}
_MOST_CYCLES = 3000


def floor_us(
    config: GemmConfig, shape: GemmShape, dtype: torch.dtype, capability: tuple[int, int], processors: int
) -> float:
    """Microseconds that a GEMM's tiles take at the least, on the multiprocessor that has most of them.

    A tile multiplies at the tensor cores' rate, and reads its rows and columns from the L2 meanwhile; whichever takes
    longer bounds it. Epilogues, launches and latencies come on top.
    """
    width = config.block_n // 2 if shape.gated else config.block_n
    programs = -(-shape.m // config.block_m) * -(-shape.n // width) * config.split
    depth = -(-shape.k // config.split)
    rate = _PER_CYCLE.get(capability, _MOST_PER_CYCLE) * 2 / max(2, dtype.itemsize)
    multiply = 2.0 * config.block_m * config.block_n * depth / rate
    read = (config.block_m + config.block_n) * dtype.itemsize * depth / _L2_BYTES.get(capability, _MOST_L2_BYTES)
    return -(-programs // processors) * max(multiply, read) / _CYCLES.get(capability, _MOST_CYCLES)
