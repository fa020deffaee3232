"""Weights with the norm's weight before them folded in, `weight * norm_weight`, kept beside the originals.

`norm(x) @ weight.T = rstd * (x @ (weight * norm_weight).T)` for an RMSNorm: with its weight folded, the norm is a
factor of the GEMM's rows. The model's own tensors stay as they are, so nothing needs to be taken back. A product takes
as much memory as the weight.

A product is used again only for the same tensor objects, at the versions that PyTorch counts for them, in the same
memory. That covers every write to a tensor but those that PyTorch does not count: through `tensor.data`, NumPy, a
kernel without a schema, and to tensors made under inference mode. To see those, a GPU would have to read the weight
again in every call, which takes what folding saves: they are excluded by the option `fold`. A CPU makes the product
anew in every call, as no kernel uses it there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from stof.runtime.locks import ForkSafeLock
from stof.runtime.memory import outside_graph_pool
from stof.runtime.private import versions_of


@dataclass(frozen=True)
class _Entry:
    """A folded weight (None: it does not fold), and what it was made of."""

    folded: Tensor | None
    sources: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    memory: tuple[StorageWeakRef, ...]

    @property
    def dead(self) -> bool:
        return any(memory.expired() for memory in self.memory)

    def is_of(self, sources: tuple[Tensor, ...]) -> bool:
        """Whether it was made of these tensors as they are, as far as PyTorch counts writes to them."""
        same = len(sources) == len(self.sources) and all(map(_is, self.sources, sources))
        return same and self.versions == versions_of(sources) and not self.dead


_entries: dict[Hashable, _Entry] = {}
_lock = ForkSafeLock()
# The attribute of a packed weight that holds the parameters it lies over: each counts writes to itself.
_SOURCES = "_stof_sources"


def note_sources(packed: Tensor, parameters: Sequence[Tensor]) -> None:
    """Tell `folded` which parameters' memory a tensor lies over."""
    setattr(packed, _SOURCES, tuple(parameters))


def folded(weight: Tensor, norm_weight: Tensor) -> Tensor | None:
    """`weight * norm_weight`, rounded once, or None where that loses accuracy.

    Args:
        weight: `[N, K]`.
        norm_weight: `[K]`, of the same dtype and device.

    Returns:
        `[N, K]`, laid out like the weight; None where products are too large or too small for the dtype (float16), with
        one warning, and inside a capture of a CUDA graph that has never run before.
    """
    pair = (weight, norm_weight)
    key = tuple((t.device, t.dtype, t.data_ptr(), t.shape, t.stride()) for t in pair)
    sources = (*getattr(weight, _SOURCES, (weight,)), norm_weight)
    on_gpu = weight.device.type == "cuda"
    kept = _entries.get(key)
    if kept is not None and kept.dead:
        kept = None
    if kept is not None and on_gpu and kept.is_of(sources):
        return kept.folded
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return None
    versions = versions_of(sources)
    made = outside_graph_pool(weight.device, lambda: _fold(weight, norm_weight))
    if made is None and (kept is None or kept.folded is not None):
        warnings.warn(
            f"a weight {tuple(weight.shape)} times its norm's does not fit into {weight.dtype}; it is not folded",
            stacklevel=2,
        )
    if kept is not None and kept.folded is not None and made is not None:
        with torch.inference_mode():
            made = kept.folded.copy_(made)  # CUDA graphs read that memory
    memory = tuple(StorageWeakRef(t.untyped_storage()) for t in pair)
    with _lock:
        for old in [old for old, entry in _entries.items() if entry.dead]:
            del _entries[old]
        _entries[key] = _Entry(made, tuple(map(weakref.ref, sources)), versions, memory)
    return made


def _is(source: weakref.ref[Tensor], tensor: Tensor) -> bool:
    return source() is tensor


def _fold(weight: Tensor, norm_weight: Tensor) -> Tensor | None:
    """The GEMM, unless a row of it is off by more than rounding alone explains."""
    with torch.no_grad():
        wide = torch.float64 if weight.dtype in (torch.float32, torch.float64) else torch.float32
        exact = weight.to(wide) * norm_weight.to(wide)
        rounded = exact.to(weight.dtype)
        off = (rounded.to(wide) - exact).norm(dim=1)
        return rounded if bool((off <= torch.finfo(weight.dtype).eps * exact.norm(dim=1)).all()) else None
