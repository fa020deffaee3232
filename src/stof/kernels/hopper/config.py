"""Compile-time choices of the Hopper kernels, and sizes that follow from the tile and the head width."""

from __future__ import annotations

from dataclasses import dataclass

# Consecutive columns that one TMA copy brings: half a tile.
RUN = 64
# Rows of a row block: one warpgroup for each 64.
ROW_BLOCKS = (64, 128, 192)
# Tile size for which the first tile of a work tile is chosen in any layout (`tile_lists.order_first_tiles`).
SMALL_TILE = (64, 64)
# The tile size of the FP8 kernel.
FP8_TILE = (128, 128)
# Stages of K and V that shared memory holds in 8 bits.
FP8_STAGES = 4


@dataclass(frozen=True)
class ForwardConfig:
    """Compile-time choices of both forward kernels.

    Fields alone: Triton's cache keys hold their values, but no code of properties.

    Attributes:
        groups: consumer warpgroups, 64 rows each.
        block_n: columns of a tile.
        width: head dimension of Q, K and V in shared memory, see `padded_width`.
        slab: columns of a slab, as `TileLists.slab`.
        stages, q_stages: pipeline stages of K and V, and of Q.
        permuted: rows have an order of their own.
        split: some row blocks are split along their keys, and their chunks are merged.
        has_score_mod: scores are modified by a bias, a softcap, or a scale that is not positive.
        has_softcap, has_bias, has_sinks: options of the call.
        has_full: there are full tiles.
        dynamic: the tile lists are written on the GPU, and may say that results are NaN.
        persistent: there are more work tiles than thread blocks.
        skip_empty: warpgroups without rows skip the tiles of the last row block.
        paired: a work tile is two row blocks, each with tiles of its own.
        transposed_v: V tiles are `[D, keys]`.
        exact_tiles: tiles at the start of a work tile that have no lazy rescaling, at least 1.
    """

    groups: int
    block_n: int
    width: int
    slab: int
    stages: int
    q_stages: int
    split: bool
    has_score_mod: bool
    has_softcap: bool
    has_sinks: bool
    has_full: bool
    persistent: bool
    permuted: bool = False
    has_bias: bool = False
    dynamic: bool = False
    skip_empty: bool = False
    paired: bool = False
    transposed_v: bool = False
    exact_tiles: int = 1


@dataclass(frozen=True)
class BackwardConfig:
    """Compile-time choices of the backward kernel; fields alone, as for `ForwardConfig`.

    Attributes:
        width: head dimension in shared memory, 64 or 128.
        head_dim: of the tensors.
        queries: of a tile, 64 or 128.
        has_softcap: whether scores are capped.
    """

    width: int
    head_dim: int
    queries: int
    has_softcap: bool


def padded_width(head_dim: int) -> int:
    """Return the width of Q, K and V tiles in shared memory; TMA fills columns past head_dim with zeros."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def q_stages(block_m: int, width: int, biased: bool = False, paired: bool = False) -> int:
    """Return the stages of Q in shared memory; output is stored through them too.

    Three: one work tile is computed, one is in its epilogue, one is being stored. Pairs hold Q in registers and need
    two. A Q of 128 x 256 takes 64 KB, and biases leave no memory for more stages: there is one, which the next Q
    overwrites after the last QK matmul, and a separate staging buffer for part of the output.
    """
    return 1 if biased or (block_m, width) == (128, 256) else 2 if paired else 3


def out_tile_width(width: int) -> int:
    """Return the columns of output that are stored at once where it has staging of its own."""
    return max(RUN, width // 2)


def blocks_per_sm(block_m: int, block_n: int, width: int) -> int:
    """Return how many thread blocks a multiprocessor holds at once.

    With a single consumer warpgroup the tensor cores idle during its exponentials; other thread blocks fill in. Three
    thread blocks leave 136 registers a consumer thread and 75 KB of shared memory each, enough where scores and output
    are 64 columns wide; with many short row blocks they are 10 % faster than two.
    """
    if block_m != 64 or width > 128:
        return 1
    return 3 if (block_n, width) == (64, 64) else 2
