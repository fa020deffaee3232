"""Copies of tensors that masks keep: a tensor's identity or version does not prove its values.

PyTorch does not count writes by CUDA graphs, by compiled code that reuses a tensor object, or through `.data` and
`.numpy()`. So masks copy the tensors they are made of, and compare a tensor with its copy where they read it again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stof.errors import MaskError
from stof.runtime.locks import ForkSafeLock
from stof.runtime.memory import in_capture
from stof.runtime.private import past_modes, versions_of

_NOTES = WeakIdKeyDictionary()
# By the number of the tensor that was copied.
_SNAPSHOTS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
_LOCK = ForkSafeLock()


def identity(value: object) -> int:
    """A random number for an object that is compared by identity (a tensor, a function), the same while it lives.

    Random, not counted: a key or a handle that another process saved must not name an object of this one.
    """
    return _note_of(value).number


@dataclass(slots=True)
class _Note:
    """What is known of an object: its number, and for tensors `versions_of` when it was last compared or copied."""

    number: int
    version: tuple[int, ...] = ()


def _note_of(value: object) -> _Note:
    try:
        note: _Note | None = _NOTES.get(value)
        return _NOTES.setdefault(value, _Note(secrets.randbits(60))) if note is None else note
    except TypeError:
        raise MaskError(
            f"{type(value).__name__} objects cannot be told apart over time (no weak references); wrap it in a function"
        ) from None


@past_modes
def snapshot(tensor: Tensor, *, captured: bool = False) -> Tensor:
    """A copy of a strided tensor's present values; the last copy if the values are equal and it is still alive.

    Any byte but 0 is true in a view of bytes as bool, and operators of CUDA copy such bytes: true is 1 in the copy.
    On a GPU the comparison waits for the device, once for a tensor that was written to; the first copy of a tensor is
    not compared. While a CUDA graph is captured nothing is compared, and a new copy is made.

    Args:
        tensor: what to copy.
        captured: return the last copy during a capture; the owner of the graph checks the values later.
    """
    note, capturing, is_bool = _note_of(tensor), in_capture(), tensor.dtype == torch.bool
    with _LOCK:  # threads that copy one tensor get one copy
        last = _SNAPSHOTS.get(note.number)
        if last is not None and captured and capturing:
            return last
        if capturing:
            last = None
        version = versions_of([tensor])
        # Values that were written have most likely changed: the copy is compared at once, for it is needed then.
        written, note.version = is_bool and note.version != version, version
        if last is not None and not written and same_bits(tensor, last):
            return last
        copy = _bool_copy(tensor) if is_bool else copy_of(tensor)
        if last is not None and is_bool and same_bits(copy, last):
            return last
        _SNAPSHOTS[note.number] = copy
    return copy


def _bool_copy(tensor: Tensor) -> Tensor:
    """As `copy_of`, with the bytes 0 and 1."""
    return (_compact(tensor).view(torch.uint8) != 0).expand(tensor.shape)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy without gradients; dimensions that were expanded stay expanded."""
    return _compact(tensor.detach()).clone().expand(tensor.shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape, dtype, device and bits; NaN equals NaN. `a` may be a parameter."""
    if type(a) is not type(b) and not isinstance(a, torch.nn.Parameter):
        return False
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout) or a.layout != torch.strided:
        return False
    if _expanded(a) == _expanded(b):
        a, b = _compact(a), _compact(b)
    return torch.equal(memory_words(a), memory_words(b))


def _expanded(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


def _compact(tensor: Tensor) -> Tensor:
    """A view in which each expanded dimension has size 1."""
    for dim in _expanded(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def memory_words(tensor: Tensor) -> Tensor:
    """The memory of a tensor in the widest integers that divide it: bool tensors compare up to 8 times as fast."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    aligned = data.numel() % 8 == 0 and data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
    return data.view(torch.int64) if aligned else data
