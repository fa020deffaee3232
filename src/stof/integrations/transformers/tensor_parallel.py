"""Tensor parallelism of a model's layers: which query heads a rank has, and the masks and sinks of these."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stof.dtensors import is_dtensor
from stof.errors import UnsupportedError
from stof.masks import Mask
from stof.masks.per_head import for_heads
from stof.runtime.private import break_graph


def mask_of_rank(layer: nn.Module, mask: Mask, heads: int) -> Mask:
    """The part of a layer's sparse mask for the query heads that this rank has.

    Args:
        layer: the attention layer; under tensor parallelism parameters of it are DTensors, as those of transformers'
            `tp_plan` and of `torch.distributed.tensor.parallel` are.
        mask: of all query heads.
        heads: query heads of the call.

    Raises:
        UnsupportedError: the mask depends on the head, and it is not known which heads these are.
        ShapeError: the mask is bound to another number of heads than the layer has on all ranks.
    """
    may_depend = mask.heads != 1 or mask.depends_on_sizes
    if not may_depend or not dist.is_available() or not dist.is_initialized():
        return mask
    if any(map(is_dtensor, layer.parameters())):
        if torch.compiler.is_dynamo_compiling():
            break_graph("a mask by head is split over the ranks of tensor parallelism outside of compiled graphs")
            return torch.compiler.disable(_part)(layer, mask, heads)
        return _part(layer, mask, heads)
    if mask.heads == 1 and _all_heads(layer) not in (None, heads) and mask.depends_on_heads:
        raise _unknown(layer, mask, heads)
    return mask


def local_sinks(sinks: Any, query: Tensor) -> Tensor | None:
    """Sinks of this rank's heads: those of a DTensor, where `query` is a local tensor."""
    local: Tensor | None = sinks.to_local() if is_dtensor(sinks) and not is_dtensor(query) else sinks
    return local


def _part(layer: nn.Module, mask: Mask, heads: int) -> Mask:
    if not mask.depends_on_heads:
        return mask
    parameters: list[Any] = list(filter(is_dtensor, layer.parameters()))
    meshes = {x.device_mesh for x in parameters if any(placement.is_shard() for placement in x.placements)}
    total = _all_heads(layer)
    if not meshes:
        return mask
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1 or total is None or total != heads * mesh.size():
        raise _unknown(layer, mask, heads)
    return for_heads(mask, mesh.get_local_rank() * heads, heads, total)


def _all_heads(layer: nn.Module) -> int | None:
    """Query heads of a layer on all ranks, as its configuration says."""
    count: int | None = getattr(getattr(layer, "config", None), "num_attention_heads", None)
    return count


def _unknown(layer: nn.Module, mask: Mask, heads: int) -> UnsupportedError:
    return UnsupportedError(
        f"the mask {mask!r} depends on the query head, and {type(layer).__name__} has {heads} heads on this rank and "
        f"{_all_heads(layer)} in its configuration: which ones is not known; give a mask that is the same for "
        "all heads",
        {},
    )
