"""The rule of the STOF paper for choosing a kernel, kept as a baseline to compare the cost model with."""

from __future__ import annotations

import math

from stof.layout import Layout

TAU = 1.2
_BLOCK = 16


def paper_choice(layout: Layout) -> str:
    """`row_wise` or `block_wise` by Eq. 1 of STOF (arXiv 2506.06095).

    `load_row_ptr[n] / n^2 - tau / (log2 n)^2 < 0` takes the row-wise kernel, with `n = ceil(S / 16)` rows of 16 x 16
    blocks, `load_row_ptr[n]` the blocks to load, and tau = 1.2.

    Args:
        layout: built with 16 x 16 contiguous tiles; its first pattern decides.

    Raises:
        ValueError: the layout has other tiles.
    """
    config = layout.config
    if (config.block_m, config.block_n, config.slab) != (_BLOCK, _BLOCK, None):
        raise ValueError(f"Eq. 1 counts 16 x 16 blocks, got {config}")
    n = max(2, math.ceil(max(layout.q_len, layout.kv_len) / _BLOCK))
    loaded = int(layout.row_block_ptr[layout.row_blocks])
    return "row_wise" if loaded / n**2 - TAU / math.log2(n) ** 2 < 0 else "block_wise"
