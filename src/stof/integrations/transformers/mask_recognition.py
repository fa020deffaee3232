"""Mask functions of transformers, read back as named masks where they are provably the same.

A named mask is a value, so its plan is found again at the next forward pass. What is not recognized is evaluated
exactly by the caller; nothing here guesses.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

from stof.masks import Mask, causal, documents, full, sliding_window
from stof.masks.rules import Documents

# A window open to the future; `& causal()` closes it.
_UNBOUNDED = 2**31 - 1
_PROBE = 12
# The mask itself: Dynamo may trace a function, or what follows a graph break in it, whose caller it does not trace.
documents_outside_graphs = torch.compiler.disable(documents)


def recognize_mask(fn: Callable[..., Any], q_length: int, kv_length: int, q_offset: int, kv_offset: int) -> Mask | None:
    """The named mask equal to transformers' mask function on this call's queries and keys; None if none is."""
    shift = q_offset - kv_offset
    if shift < 0:
        return None
    # Packed-sequence ids are per absolute position, so only whole sequences read as documents.
    whole = kv_length if q_length == kv_length and q_offset == kv_offset == 0 else None
    mask = _named(fn, whole)
    if mask is None:
        return None
    if mask == causal() and shift >= kv_length - 1:
        return full()
    return mask.with_query_offset(shift) if mask != full() else mask


def recognize_plain_mask(fn: Callable[..., Any]) -> Mask | None:
    """Causal or bidirectional, by the function's identity alone: what compilers can follow."""
    if fn is hf.causal_mask_function:
        return causal()
    return full() if fn is hf.bidirectional_mask_function else None


def recognize_window(fn: Callable[..., Any], q_length: int, kv_length: int) -> Mask | None:
    """The window equal to the mask function, for queries and keys from position 0; equal windows are one object.

    Compiled code guards on the identity of a mask. So masks of tensors are left out: each would be compiled anew.
    """
    mask = recognize_mask(fn, q_length, kv_length, 0, 0)
    return _shared(mask) if isinstance(mask, type(sliding_window(1))) else None


@functools.cache
def _shared(mask: Mask) -> Mask:
    return mask


def _named(fn: Callable[..., Any], whole: int | None) -> Mask | None:
    plain = recognize_plain_mask(fn)
    if plain is not None:
        return plain
    code = getattr(fn, "__code__", None)
    if code not in _TRUSTED:
        return None
    return _READERS[code](_held(fn), whole)


def _held(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a closure holds."""
    return dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in fn.__closure__ or ()), strict=True))


def _read_window(held: dict[str, Any], whole: int | None) -> Mask | None:
    window = held["sliding_window"]
    return sliding_window(window - 1, _UNBOUNDED) if isinstance(window, int) and window >= 1 else None


def _read_two_sided_window(held: dict[str, Any], whole: int | None) -> Mask | None:
    window = held["sliding_window"]
    return sliding_window(window, window) if isinstance(window, int) and window >= 0 else None


def _read_packed(held: dict[str, Any], whole: int | None) -> Mask | None:
    ids: Tensor = held["packed_sequence_mask"]
    if whole is None or ids.shape[-1] != whole:
        return None
    mask = documents_outside_graphs(ids)
    assert isinstance(mask, Documents)
    return mask if min(number for runs in mask.runs for number, _ in runs) >= 0 else None


def _read_remapped(held: dict[str, Any], whole: int | None, sequences: Tensor | None = None) -> Mask | None:
    """A mask function of positions, as one of indices; right within the `sequences` given, else in whole rows."""
    positions: Tensor = held["position_ids"]
    if whole is None or positions.shape[-1] != whole:
        return None
    steps = positions.diff(dim=-1) == 1
    if sequences is not None:
        new = sequences.diff(dim=-1)
        steps = (new > 0) | (steps & (new == 0))
    mask = _named(held["mask_function"], whole)
    by_distance = mask in (causal(), full()) or isinstance(mask, type(sliding_window(1)))
    return mask if by_distance and bool(steps.all()) else None


def _read_and(held: dict[str, Any], whole: int | None) -> Mask | None:
    functions = held["mask_functions"]
    codes = [getattr(fn, "__code__", None) for fn in functions]
    sequences = next(
        (_held(fn)["packed_sequence_mask"] for fn, code in zip(functions, codes, strict=True) if code is _PACKED), None
    )
    parts = [
        _read_remapped(_held(fn), whole, sequences)
        if code in _TRUSTED and _READERS[code] is _read_remapped
        else _named(fn, whole)
        for fn, code in zip(functions, codes, strict=True)
    ]
    out: Mask | None = full()
    for part in parts:
        if part is None or out is None:
            return None
        out = part if out == full() else out if part == full() else _intersection(out, part)
    return out


def _intersection(a: Mask, b: Mask) -> Mask:
    for window, other in ((a, b), (b, a)):
        if other == causal() and getattr(window, "right", None) == _UNBOUNDED:
            return sliding_window(window.left)  # type: ignore[attr-defined]
    return a & b


def _read_or(held: dict[str, Any], whole: int | None) -> Mask | None:
    out: Mask | None = None
    for fn in held["mask_functions"]:
        part = _named(fn, whole)
        if part is None:
            return None
        out = part if out is None else out | part
    return out


_PACKED_PROBE = torch.arange(_PROBE, device="cpu").div(5, rounding_mode="floor")[None]

_PACKED = hf.packed_sequence_mask_function(_PACKED_PROBE).__code__

# What each closure of transformers must mean for its reader to be used, with two sizes each.
_EXAMPLES: tuple[tuple[Callable[..., Any], Callable[..., Mask | None]], ...] = tuple(
    (fn, reader)
    for size in (1, 4)
    for fn, reader in (
        (hf.sliding_window_overlay(size), _read_window),
        (hf.sliding_window_bidirectional_overlay(size), _read_two_sided_window),
        (hf.packed_sequence_mask_function(_PACKED_PROBE + size), _read_packed),
        (hf.and_masks(hf.causal_mask_function, hf.bidirectional_mask_function), _read_and),
        (hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function), _read_or),
    )
)
if hasattr(hf, "remap_positions_for_packed_sequence"):  # transformers >= 5.23 lets packed positions begin anew
    _EXAMPLES += tuple(
        (hf.remap_positions_for_packed_sequence(hf.causal_mask_function, ids), _read_remapped)
        for ids in (torch.arange(first, first + _PROBE, device="cpu")[None] for first in (0, 3))
    )
_READERS: dict[CodeType, Callable[..., Mask | None]] = {fn.__code__: reader for fn, reader in _EXAMPLES}
_TRUSTED: set[CodeType] = set(_READERS)


def _check_readers() -> None:
    """Compare every reader with the function it reads; one that disagrees is not used, and says so."""
    steps = torch.arange(_PROBE, device="cpu")
    grid = (torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu"),) * 2 + (
        steps.view(1, 1, -1, 1),
        steps.view(1, 1, 1, -1),
    )
    for fn, _ in _EXAMPLES:
        code = fn.__code__
        try:
            mask = _named(fn, _PROBE)
            same = mask is not None and torch.equal(mask.to_dense(_PROBE), fn(*grid).expand(1, 1, _PROBE, _PROBE))
        except (KeyError, TypeError, ValueError, RuntimeError):
            same = False
        if not same and code in _TRUSTED:
            _TRUSTED.discard(code)
            warnings.warn(
                f"this version of transformers changed {fn.__qualname__}; stof evaluates such masks in full at every "
                "forward pass instead of reading them by name (correct, but slower)",
                RuntimeWarning,
                stacklevel=2,
            )


_check_readers()
