"""`stof.attention` of DTensors: each rank computes its batch entries and heads, under the mask of these.

A sharding rule of PyTorch (`register_sharding`) cannot do this: PyTorch keeps what it decided by shapes and placements,
not by the mask, and gives the operators of all ranks the same mask, that of all heads.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from stof.dispatch import under_autocast
from stof.errors import ArgumentError, DtypeError, PlanMismatchError, ShapeError, UnsupportedError
from stof.handles import mask_of
from stof.masks.per_head import for_batch, for_heads
from stof.plans.plan import Plan
from stof.validation import check_bias, check_sinks, check_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, torch.nn.Parameter)
_DIMS = ("batch entries", "heads")


class LocalCall(NamedTuple):
    """What this rank computes of a call of DTensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask_or_plan: Any
    bias: Tensor | None
    sinks: Tensor | None


def is_dtensor(x: object) -> bool:
    """Whether it is a DTensor; asked without importing these, which takes a second."""
    if not isinstance(x, Tensor) or type(x) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_call(
    q: Any, k: Any, v: Any, mask_or_plan: Any, bias: Any, sinks: Any, *, dropout_p: float, scales: object
) -> LocalCall:
    """Tensors of this rank and the mask of its batch entries and heads, differentiable.

    Nothing is exchanged but what the placements of a bias, sinks or a mask tensor call for.

    Args:
        q, k, v: DTensors on one mesh, with equal placements: replicated, or sharded by batch or heads.
        mask_or_plan: as for `attention`, of all batch entries and heads; or a DTensor.
        bias, sinks: None or DTensors, which are redistributed to follow q.
        dropout_p, scales: as for `attention`; refused.

    Raises:
        DtypeError: some tensors are DTensors, others are not.
        UnsupportedError: other placements, dropout, 8-bit tensors, and plans without a mask that can be split.
        ShapeError: a batch or heads that do not divide among their ranks.
    """
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    plain = [name for name, x in tensors.items() if x is not None and not is_dtensor(x)]
    if plain:
        raise DtypeError(
            f"if one of the tensors is a DTensor, all are; got others for {', '.join(plain)}: make them by "
            "torch.distributed.tensor.distribute_tensor(x, mesh, placements)"
        )
    q, k, v = under_autocast(q, k, v)
    check_tensors(q, k, v)
    if dropout_p or scales is not None:
        what = "dropout_p" if dropout_p else "8-bit tensors with scales"
        raise UnsupportedError(
            f"stof.attention of DTensors takes no {what}; call it on each rank's tensors (x.to_local())", {}
        )
    first, parts = _part(q, k, v)
    bias = _following(check_bias(bias, q, k.shape[2]), "the bias", q, (0, 1))
    sinks = _following(check_sinks(sinks, q), "sinks", q, (None, 0))
    mask = _local_mask(mask_or_plan, q, k, first, parts)
    return LocalCall(q.to_local(), k.to_local(), v.to_local(), mask, bias, sinks)


def global_result(x: Tensor, q: DTensor) -> Tensor:
    """A result of this rank, `[B, H, ...]`, as a DTensor with the placements of `q`."""
    result: Tensor = type(q).from_local(x, q.device_mesh, q.placements, run_check=False)
    return result


def _part(q: DTensor, k: DTensor, v: DTensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first batch entry and query head of this rank, and how many it has."""
    mesh, placements = q.device_mesh, q.placements
    for name, x in (("k", k), ("v", v)):
        if x.device_mesh != mesh or x.placements != placements:
            raise UnsupportedError(
                f"q, k and v are on one mesh with equal placements, got q {list(placements)} and {name} "
                f"{list(x.placements)} (of mesh {x.device_mesh}); redistribute them",
                {},
            )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ArgumentError(f"the tensors are on the ranks {mesh.mesh.tolist()}, and this process is none of them")
    first, parts, pieces = [0, 0], [q.shape[0], q.shape[1]], [1, 1]
    for place, placement, ranks in zip(coordinate, placements, mesh.shape, strict=True):
        dim = _shard_dim(placement)
        if dim is None:
            continue
        pieces[dim] *= ranks
        for name, size in zip("qk", (q.shape[dim], k.shape[dim]), strict=True):
            if size % pieces[dim] or not size:
                raise ShapeError(f"{name} has {size} {_DIMS[dim]}, which do not divide among {pieces[dim]} ranks")
        parts[dim] //= ranks
        first[dim] += place * parts[dim]
    return (first[0], first[1]), (parts[0], parts[1])


def _shard_dim(placement: Any) -> int | None:
    """0 for a shard of the batch, 1 for one of the heads, None for a replica; others are refused."""
    from torch.distributed.tensor import Replicate, Shard

    if type(placement) is Replicate:
        return None
    if type(placement) is Shard and placement.dim in (0, 1):
        return int(placement.dim)
    if type(placement) is Shard and placement.dim == 2:
        why = "a sequence is split by stof.distributed.shard, and attended to by stof.distributed.attention"
    else:
        why = "redistribute q, k and v"
    raise UnsupportedError(
        f"stof.attention takes DTensors that are replicated, or sharded by batch (Shard(0)) or heads (Shard(1)), got "
        f"{placement}; {why}",
        {},
    )


def _following(x: Any, name: str, q: DTensor, dims: tuple[int | None, int | None]) -> Tensor | None:
    """This rank's part of a tensor that has batch and heads in these dimensions; one of size 1 is for all ranks."""
    if x is None:
        return None
    from torch.distributed.tensor import Partial, Replicate, Shard

    if x.device_mesh != q.device_mesh:
        raise UnsupportedError(f"q and {name} are on one mesh, got {q.device_mesh} and {x.device_mesh}", {})
    wanted, of_gradient = [], []
    for placement in q.placements:
        shard = _shard_dim(placement)
        dim = None if shard is None else dims[shard]
        split = dim is not None and x.shape[dim] > 1
        wanted.append(Shard(dim) if dim is not None and split else Replicate())
        # Ranks that hold the same values and compute different parts have partial sums of the gradient.
        of_gradient.append(wanted[-1] if split or shard is None else Partial())
    local: Tensor = x.redistribute(placements=wanted).to_local(grad_placements=of_gradient)
    return local


def _local_mask(mask_or_plan: Any, q: DTensor, k: DTensor, first: tuple[int, int], parts: tuple[int, int]) -> Any:
    """The mask of some batch entries and heads; a plan as it is where its mask does not depend on what is split."""
    if is_dtensor(mask_or_plan):
        return _local_keep(mask_or_plan, q, k)
    split = [dim for dim in (0, 1) if parts[dim] != q.shape[dim]]
    if isinstance(mask_or_plan, Plan):
        plan, mask = mask_or_plan, mask_or_plan.mask
        plan.check_call(q, k)
        bound = (plan.batch, plan.heads) if mask is None else (mask.depends_on_batch, mask.depends_on_heads)
        if not any(bound[dim] for dim in split):
            return plan
        if mask is None or plan.is_dynamic:
            raise PlanMismatchError(
                "the plan's mask depends on the batch entry or the head, and this rank has some of these: give the "
                "mask in place of the plan; for a dynamic plan, call stof.attention with local tensors and a plan of "
                "each rank"
            )
        mask_or_plan = mask
    mask = mask_of(mask_or_plan)
    for dim, part_of in enumerate((for_batch, for_heads)):
        mask = part_of(mask, first[dim], parts[dim], q.shape[dim])
    return mask


def _local_keep(keep: Any, q: DTensor, k: DTensor) -> Tensor | None:
    """This rank's part of a bool DTensor."""
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    shape = (1,) * (4 - keep.ndim) + tuple(keep.shape)
    fits = len(shape) == 4 and all(n in (1, size) for n, size in zip(shape, full, strict=True))
    if keep.dtype != torch.bool or not fits:
        raise ShapeError(f"a mask is a bool tensor of up to {list(full)}, got {keep.dtype} {list(keep.shape)}")
    return _following(keep.view(shape), "the mask", q, (0, 1))
