"""What a choice takes of a multiprocessor: shared memory of a thread block, and thread blocks that fit at once."""

from __future__ import annotations

import torch

from stof.kernels.hopper.config import blocks_per_sm, out_tile_width, padded_width, q_stages
from stof.selection.capabilities import CallSpec
from stof.selection.kernel_choice import KernelChoice

# A multiprocessor's registers on every GPU since sm_80, and bytes of shared memory that the system keeps of each block.
_REGISTERS, _RESERVED = 65536, 1024
# Most scores of a tile that a thread may hold with a bias, where a load brings 8 values of it and where it brings one.
# Spilled bytes at head_dim 64 with a 16-bit bias on sm_80 and sm_90, for tiles of 64 x 64 (32 scores a thread),
# 64 x 128 and 128 x 128: with 8 values 0, at most 24, and 320 to 752; with one 0, 1240 to 1304, and 4512 to 9784.
_SCORES, _SCORES_ONE_BY_ONE = 64, 32


def head_dim_class(head_dim: int, value_dim: int) -> int:
    """Tile width the kernels are tuned for: 64, 128 or 256."""
    return padded_width(max(head_dim, value_dim))


def tile_shared_memory(choice: KernelChoice, call: CallSpec) -> int:
    """Bytes of shared memory of the block-wise kernel, to within a few KB."""
    layout, kernel, itemsize = choice.layout, choice.kernel, call.dtype.itemsize
    assert layout is not None
    assert kernel is not None
    rows = max(16, layout.block_m * (_power(call.heads // call.kv_heads) if kernel.pack else 1))
    width, value_width = max(16, _power(call.head_dim)), max(16, _power(call.value_dim))
    held = itemsize * (rows * width + kernel.num_stages * layout.block_n * (width + value_width)) + _RESERVED
    # Three TF32 matmuls keep Q's remainder as well.
    held += rows * width * 4 if call.dtype == torch.float32 else 0
    if not call.has_bias:
        return held
    # A bias is prefetched there, as K and V are. A 16-bit bias that is read value by value is stored there in 32 bits.
    return held + rows * layout.block_n * max(4, max(1, kernel.num_stages - 1) * call.bias_itemsize)


def spills_registers(choice: KernelChoice, call: CallSpec) -> bool:
    """Whether threads of the block-wise kernel would spill registers with a bias."""
    if not call.has_bias or choice.layout is None or choice.kernel is None:
        return False
    scores = choice.layout.block_m * choice.layout.block_n // (32 * choice.kernel.num_warps)
    return scores > (_SCORES_ONE_BY_ONE if loads_bias_scalar(choice, call) else _SCORES)


def loads_bias_scalar(choice: KernelChoice, call: CallSpec) -> bool:
    """Whether the block-wise kernel reads a bias value by value, as columns or rows of it do not follow each other."""
    return call.bias_to_copy > 0 or (choice.layout is not None and choice.layout.slab == 1)


def block_shared_bytes(shared_bytes: int) -> int:
    """Bytes of shared memory that one thread block may have: its multiprocessor's, less what the system keeps."""
    return shared_bytes - _RESERVED


def hopper_shared_memory(choice: KernelChoice, call: CallSpec) -> int:
    """Bytes of shared memory of the Hopper kernel: Q and output of row blocks, stages of K, V and bias, barriers."""
    layout, kernel = choice.layout, choice.kernel
    assert layout is not None
    assert kernel is not None
    width = head_dim_class(call.head_dim, call.value_dim)
    block_m = layout.block_m * (1 + kernel.paired)
    places = q_stages(block_m, width, call.has_bias, kernel.paired)
    rows = block_m * (places * width + (out_tile_width(width) if places == 1 else 0))
    stage = layout.block_n * (2 * width + (block_m if call.has_bias else 0))
    return call.dtype.itemsize * (rows + kernel.num_stages * stage) + _RESERVED


def fp8_shared_memory(choice: KernelChoice, call: CallSpec) -> int:
    """The same of the kernel for 8-bit operands: two row blocks' Q, an output of 16 bits, stages of K and V."""
    layout, kernel = choice.layout, choice.kernel
    assert layout is not None
    assert kernel is not None
    rows = layout.block_m * (2 + 2) * call.head_dim
    return rows + kernel.num_stages * layout.block_n * 2 * call.head_dim + _RESERVED


def hopper_occupancy(choice: KernelChoice, call: CallSpec, shared_bytes: int) -> int:
    """Thread blocks of the Hopper kernel on a multiprocessor: as many as it is compiled for."""
    del shared_bytes
    layout, kernel = choice.layout, choice.kernel
    assert layout is not None
    assert kernel is not None
    width = head_dim_class(call.head_dim, call.value_dim)
    return blocks_per_sm(layout.block_m * (1 + kernel.paired), layout.block_n, width)


def tile_occupancy(choice: KernelChoice, call: CallSpec, shared_bytes: int) -> int:
    """Thread blocks of Triton's kernels on a multiprocessor with so much shared memory."""
    kernel = choice.kernel
    assert kernel is not None
    by_memory = shared_bytes // (tile_shared_memory(choice, call) + _RESERVED)
    registers = kernel.max_registers or (255 if head_dim_class(call.head_dim, call.value_dim) > 64 else 160)
    return max(1, min(by_memory, _REGISTERS // (registers * 32 * kernel.num_warps), 8))


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
