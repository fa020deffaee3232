"""Weights with the norm's weight before them folded in, `weight * norm_weight`, kept beside the originals.

`norm(x) @ weight.T = rstd * (x @ (weight * norm_weight).T)` for an RMSNorm: with its weight folded, the norm is a
factor of the GEMM's rows. The model's own tensors stay as they are, so nothing needs to be taken back; what is
folded is found by the tensors it was made of, and made again when one of them was written to. It takes as much memory
as the weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from stof.runtime.locks import ForkSafeLock
from stof.runtime.memory import outside_graph_pool
from stof.runtime.private import version_of


@dataclass(frozen=True)
class _Entry:
    """A folded weight (None: it does not fold), and what it was made of."""

    folded: Tensor | None
    versions: tuple[int, int]
    sources: tuple[StorageWeakRef, StorageWeakRef]

    @property
    def dead(self) -> bool:
        return any(source.expired() for source in self.sources)


_entries: dict[Hashable, _Entry] = {}
_lock = ForkSafeLock()


def folded(weight: Tensor, norm_weight: Tensor) -> Tensor | None:
    """`weight * norm_weight`, rounded once, or None where that loses accuracy.

    Args:
        weight: `[N, K]`.
        norm_weight: `[K]`, of the same dtype and device.

    Returns:
        `[N, K]`, laid out like the weight; None where products are too large or too small for the dtype (float16), with
        one warning, and inside a capture of a CUDA graph that has never run before.

    Writes to either tensor are noticed by its version; tensors made under inference mode have none and must not change.
    """
    pair = (weight, norm_weight)
    key = tuple((t.device, t.dtype, t.data_ptr(), t.shape, t.stride()) for t in pair)
    versions = (_version(weight), _version(norm_weight))
    found = _entries.get(key)
    if found is not None and found.versions == versions and not found.dead:
        return found.folded
    if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    made = outside_graph_pool(weight.device, lambda: _fold(weight, norm_weight))
    if made is None:
        warnings.warn(
            f"a weight {tuple(weight.shape)} times its norm's does not fit into {weight.dtype}; it is not folded",
            stacklevel=2,
        )
    sources = (StorageWeakRef(weight.untyped_storage()), StorageWeakRef(norm_weight.untyped_storage()))
    if found is not None and found.folded is not None and made is not None and not found.dead:
        with torch.inference_mode():
            made = found.folded.copy_(made)  # CUDA graphs read that memory
    with _lock:
        for old in [old for old, entry in _entries.items() if entry.dead]:
            del _entries[old]
        _entries[key] = _Entry(made, versions, sources)
    return made


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(version_of(tensor))


def _fold(weight: Tensor, norm_weight: Tensor) -> Tensor | None:
    """The GEMM, unless a row of it is off by more than rounding alone explains."""
    with torch.no_grad():
        wide = torch.float64 if weight.dtype in (torch.float32, torch.float64) else torch.float32
        exact = weight.to(wide) * norm_weight.to(wide)
        rounded = exact.to(weight.dtype)
        off = (rounded.to(wide) - exact).norm(dim=1)
        return rounded if bool((off <= torch.finfo(weight.dtype).eps * exact.norm(dim=1)).all()) else None
