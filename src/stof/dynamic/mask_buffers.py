"""Which masks a dynamic plan takes, and the buffers of each kind."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from stof.dynamic.block_topk.buffers import block_buffers
from stof.dynamic.buffers import HOPPER, WorkBuffers
from stof.dynamic.dense.buffers import dense_buffers
from stof.dynamic.sizes import DynamicSizes
from stof.dynamic.vertical_slash.buffers import vertical_slash_buffers
from stof.errors import MaskError
from stof.masks import Mask
from stof.masks.compose import Placed
from stof.masks.dynamic import BitMask, BlockTopK, VerticalSlash
from stof.masks.tensors import DenseMask
from stof.selection import IMPLEMENTATIONS

# Block sizes of the block-wise kernel, of which two thread blocks or more fit a multiprocessor at every head_dim:
# benchmarks/notes/attention.md.
BLOCK = 64


def core_of(mask: Mask) -> tuple[Mask, int]:
    """The mask without its query offset, and that."""
    if isinstance(mask, Placed) and not mask.kv_offset and mask.q_len is None and mask.kv_len is None:
        return mask.mask, mask.q_offset
    return mask, 0


def mask_tensors(mask: Mask) -> tuple[Tensor, ...]:
    """What a mask is made from, `[B | 1, H | 1, ...]`.

    Raises:
        MaskError: a mask that no dynamic plan takes.
    """
    core, offset = core_of(mask)
    if isinstance(core, VerticalSlash) or (isinstance(core, BlockTopK | BitMask) and not offset):
        return core.tensors()
    if isinstance(core, DenseMask) and not offset:
        return (core.for_rows(core.keep.shape[-2]),)
    raise MaskError(
        "a dynamic plan takes vertical_slash (also with a query offset), block_topk, from_bits or a dense bool tensor, "
        f"got {mask!r}; masks that stay the same go to stof.plan"
    )


def mask_signature(mask: Mask) -> Hashable:
    """What masks of one plan have in common."""
    core, offset = core_of(mask)
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in mask_tensors(mask))
    settings: tuple[int, ...] = ()
    if isinstance(core, BlockTopK):
        settings = (core.k, core.block_size, core.causal)
    elif isinstance(core, BitMask):
        settings = (core.kv_len,)
    return (type(core), offset, shapes, settings)


def make_buffers(
    mask: Mask, lengths: tuple[int, int], sizes: tuple[int, int], device: torch.device, density: float | None
) -> WorkBuffers:
    """Fixed lists for masks like this one; `sizes` are its leading dimensions."""
    core, offset = core_of(mask)
    if isinstance(core, BlockTopK):
        core.check_sizes(*lengths)
        block = min(core.block_size, BLOCK)
        problem = DynamicSizes(*lengths, block, block, *sizes)
        return _ready(block_buffers(problem, core.k, core.block_size, core.causal, device))
    problem = DynamicSizes(*lengths, BLOCK, BLOCK, *sizes)
    if isinstance(core, VerticalSlash):
        vertical, slash = core.tensors()
        return _ready(vertical_slash_buffers(problem, vertical.shape[-1], slash.shape[-1], offset, device))
    if isinstance(core, BitMask):
        core.check_sizes(*lengths)
    else:
        core.check(*lengths)
    return dense_buffers(problem, density, device)


def _ready(buffers: WorkBuffers) -> WorkBuffers:
    """The buffers, with the block-wise kernel's lists in use where there is no other kernel."""
    needed, device = IMPLEMENTATIONS[HOPPER].capabilities.compute_capability, buffers.flags.device
    if buffers.hopper_refusals() or device.type != "cuda" or torch.cuda.get_device_capability(device) != needed:
        buffers.use_work(captured=False)
    return buffers


def fill_buffers(buffers: WorkBuffers, mask: Mask) -> None:
    """Write a mask's lists; the host is not asked for anything."""
    buffers.fill(*mask_tensors(mask))
