"""Checks that all ranks call a function with the same arguments, before they exchange tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from stof.errors import RankMismatchError, StofError, shown
from stof.layout.survey import Survey
from stof.runtime.private import past_modes
from stof.selection import MaskGeometry

# Masks of tensors and functions are named after random numbers of their process.
_IDENTITY = re.compile(r" ?#\d+[^,)\]>]*")
# Scores of a mask that are compared: all up to 4096 tokens, 128 rows of 131072. Evaluating them takes a second at most.
SCORES_COMPARED = 2**24


@past_modes
def agree(group: dist.ProcessGroup, facts: Mapping[str, object], error: StofError | None) -> None:
    """Compare what the ranks of a group were called with; one exchange of small objects.

    Args:
        group: the ranks.
        facts: what must be equal, by name.
        error: what this rank refused the call with, if it did; it is raised here.

    Raises:
        RankMismatchError: another rank has another fact, or refused the call.
    """
    refusal = None if error is None else f"{type(error).__name__}: {error}"
    every: list[tuple[str | None, dict[str, str]]] = [(None, {})] * dist.get_world_size(group)
    texts = {name: fact if isinstance(fact, str) else shown(fact) for name, fact in facts.items()}
    dist.all_gather_object(every, (refusal, texts), group=group)
    if error is not None:
        raise error
    for rank, (refused, _) in enumerate(every):
        if refused is not None:
            raise RankMismatchError(f"rank {rank} refused the call: {refused}")
    _, first = every[0]
    for rank, (_, facts_there) in enumerate(every):
        different = [name for name in first | facts_there if facts_there.get(name) != first.get(name)]
        if different:
            name = different[0]
            raise RankMismatchError(
                f"all ranks of a mesh make the same call, but {name} is {first.get(name, 'missing')} on rank 0 and "
                f"{facts_there.get(name, 'missing')} on rank {rank}"
            )


def mask_facts(geometry: MaskGeometry, survey: Survey) -> dict[str, str]:
    """What tells masks of other processes apart: their text, their tensors' values, the keys that their rows keep."""
    mask = geometry.mask
    text = _IDENTITY.sub("", mask.key)
    shortened = text if len(text) <= 80 else f"{text[:77]}... ({_digest(text.encode())})"
    tensors = hashlib.blake2b(digest_size=8)
    for tensor in mask.copies():
        tensors.update(f"{tensor.dtype} {list(tensor.shape)}".encode() + _bytes(tensor))
    kept = _digest(_bytes(survey.kept))
    facts = {"mask": shortened, "hash of the mask's tensors": tensors.hexdigest(), "hash of the keys kept": kept}
    return facts | rows_facts(geometry)


def rows_facts(geometry: MaskGeometry) -> dict[str, str]:
    """Which keys rows keep under a mask that its text does not tell: all rows, or of long sequences random ones."""
    if "<" not in geometry.mask.key:
        return {}
    mask_batch, mask_heads = geometry.mask.dims(geometry.batch, geometry.heads, geometry.device)
    count = max(1, SCORES_COMPARED // (mask_batch * mask_heads * geometry.kv_len))
    order = torch.randperm(geometry.q_len, generator=torch.Generator().manual_seed(0))
    return {"hash of which keys are kept": _digest(_bytes(geometry.kept_of(order[:count])))}


def digest(tensor: Tensor) -> str:
    """A hash of shape, dtype and values."""
    return _digest(f"{tensor.dtype} {list(tensor.shape)}".encode() + _bytes(tensor))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
