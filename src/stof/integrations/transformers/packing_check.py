"""Whether a model keeps the sequences of a packed row apart: found out by running it, once for each kind of call.

A packed mask separates sequences within attention. Recurrent and convolution layers, embeddings that read their
neighbours, and positions counted from the start of the row know nothing of it. The check calls the model with one short
sequence repeated in a row. The embeddings of one copy are NaN: a NaN in another copy's outputs shows a leak of any
size. The first and the last copy are equal, so their outputs are equal too, but for rounding: otherwise a token's
output depends on its place in the row. At last, one copy runs alone, with positions as `pack` numbers them and with
none: the outputs differ if the model counts from another number (RoBERTa: from `padding_idx + 1`).
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.sparse_mask import IGNORED
from stof.masks import documents
from stof.runtime.autocast import no_autocast_cache
from stof.runtime.locks import ForkSafeLock
from stof.runtime.private import past_modes, without_hooks

# Tokens of a copy, and of the longest row checked: long enough to overflow experts of limited capacity.
_COPY, _LONGEST = 8, 512
# Tokens of the row checked for compiled code, whose rows may have any length.
TRACED_WIDTH = 4 * _COPY
_LEAK = (
    "tokens of one sequence change the outputs of another, by layers besides attention (recurrent, convolution, "
    "pooling, embeddings that read neighbours) or by attention without the packed mask; or all outputs are NaN"
)
_PLACE = (
    "outputs of a sequence depend on its place in the row: positions are counted from the start of the row "
    "(position_ids are left out, or the model does not read them), or experts have a limited capacity"
)
# The attribute of a model that records the calls that passed. Copies of the model have it too.
PASSED = "_stof_packing_checked"
_LOCK = ForkSafeLock(reentrant=True)  # a check exchanges the hooks and modes of the model's modules


class Argument(NamedTuple):
    """An argument of a model's call, as far as it matters: compiled code has no values.

    Attributes:
        kind: "mask", a packed mask; "positions"; "tokens", a tensor with one entry per token; "value".
        sizes: for positions, the number of their kinds, if they have several, and 1 for one row or 2 for more; for
            tokens, the sizes after the first two.
        value: for a mask, its `first_position`; for a value, the value.
    """

    name: str
    kind: str
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    device: torch.device | None = None
    value: Any = None


class Verdict(NamedTuple):
    """Whether the model keeps sequences apart, None if that cannot be said; why not, and what to do if it is known."""

    apart: bool | None
    reason: str = ""
    advice: str = ""


def describe(given: Mapping[str, Any], rows: int, width: int, *, with_tensors: bool) -> tuple[Argument, ...]:
    """What `check` needs of a call's arguments; caches are left out, and so are tensors of indices.

    Args:
        rows, width: sizes of the tensors with one entry per token.
        with_tensors: keep numbers, and float tensors that do not belong to tokens (the states of an encoder). In
            compiled code neither has a value.
    """
    out = []
    for name, value in given.items():
        if isinstance(value, ModelMask):
            out.append(Argument(name, "mask", value=value.first_position))
        elif isinstance(value, Tensor):
            if name == "position_ids" and value.ndim > 1 and value.shape[-1] == width:
                sizes = (*value.shape[:-2], 1 if value.shape[-2] == 1 else 2)
                out.append(Argument(name, "positions", value.dtype, sizes, value.device))
            elif value.ndim > 1 and value.shape[0] == rows and value.shape[1] == width:
                out.append(Argument(name, "tokens", value.dtype, tuple(value.shape[2:]), value.device))
            elif with_tensors and value.is_floating_point():
                out.append(Argument(name, "value", value=value))
        elif isinstance(value, bool | str) or (with_tensors and isinstance(value, int | float)):
            out.append(Argument(name, "value", value=value))
    return tuple(out)


def check(module: nn.Module, arguments: tuple[Argument, ...], rows: int, width: int) -> Verdict:
    """Whether a model keeps packed sequences apart in calls with these arguments; rows of `width` tokens or fewer."""
    width = max(4, 1 << min(width, _LONGEST).bit_length() - 1)
    passed: set[Any] = module.__dict__.setdefault(PASSED, set())
    key = (width, _first_position(arguments), frozenset(argument.name for argument in arguments))
    if key in passed:
        return Verdict(True)
    if not any(isinstance(argument.value, Tensor) for argument in arguments):
        rows = 1
    with _LOCK:
        # Context variables of the call in progress are not the check's: transformers collects hidden states by one.
        verdict = contextvars.Context().run(_run, module, arguments, rows, width)
    if verdict.apart:
        passed.add(key)
    return verdict


@torch.compiler.disable
@past_modes
def _run(module: nn.Module, arguments: tuple[Argument, ...], rows: int, width: int) -> Verdict:
    copy = min(_COPY, width // 4)
    IGNORED.set(True)  # in this context only, which ends with the check
    try:
        # Parts that are compiled are not compiled anew for this row.
        with _undisturbed(module), torch.compiler.set_stance("force_eager"):
            # A token may be sent to another expert where rounding decides, but not with any tokens.
            for first_id in range(1, 1 + 3 * copy, copy):
                verdict = _run_row(module, arguments, _Row(rows, width, copy, first_id))
                if verdict.apart or verdict.reason != _PLACE:
                    break
            if verdict.apart:
                verdict = _compare_positions(module, arguments, rows, copy)
    except Exception as error:  # whatever the model's code raises for a call of another size
        return Verdict(None, f"stof ran it on a short row to check it, and got {type(error).__name__}: {error}")
    return verdict


def _run_row(module: nn.Module, arguments: tuple[Argument, ...], row: _Row) -> Verdict:
    outputs = _outputs(module, arguments, row, poison=True)
    if not outputs:
        return Verdict(None, "it returns nothing with one entry per token")
    if not any(out[:, row.poisoned].isnan().flatten(2).any(-1).all() for out in outputs):
        return Verdict(None, "its outputs do not depend on its input embeddings")
    outside = (slice(row.poisoned.start), slice(row.poisoned.stop, None))
    if any(out[:, tokens].isnan().any() for out in outputs for tokens in outside):
        return Verdict(False, _LEAK)
    first, last = ([out[:, part] for out in outputs] for part in (slice(row.copy), slice(-row.copy, None)))
    return Verdict(True) if _are_equal(module, first, last) else Verdict(False, _PLACE)


def _compare_positions(module: nn.Module, arguments: tuple[Argument, ...], rows: int, length: int) -> Verdict:
    """Whether one sequence has the same outputs with positions from the `first_position` of its mask and with none."""
    first = _first_position(arguments)
    if first is None or not any(argument.kind == "positions" for argument in arguments):
        return Verdict(True)
    # Models that count positions from the ids pass over padding.
    padding = {getattr(part, "padding_idx", None) for part in module.modules()} | {
        getattr(module.config, "pad_token_id", None)
    }
    first_id = next(start for start in itertools.count(1) if padding.isdisjoint(range(start, start + length)))
    alone = tuple(argument for argument in arguments if argument.kind != "mask")
    unnumbered = tuple(argument for argument in alone if argument.kind != "positions")
    expected = _outputs(module, unnumbered, _Row(rows, length, length, first_id), poison=False)

    def fits(first_position: int) -> bool:
        row = _Row(rows, length, length, first_id, first_position)
        return _are_equal(module, _outputs(module, alone, row, poison=False), expected)

    if fits(first):
        return Verdict(True)
    # Small numbers only: on a GPU, a position outside the table of embeddings ends the process.
    fitting = next((number for number in range(_COPY) if fits(number)), None)
    return Verdict(
        False,
        f"it gives other results for position_ids that count from {first}, as pack() wrote them, than for none",
        "Give pack() the position of a sequence's first token in this model, first_position="
        + ("..." if fitting is None else str(fitting)),
    )


def _first_position(arguments: tuple[Argument, ...]) -> int | None:
    return next((int(one.value) for one in arguments if one.kind == "mask" and one.value is not None), None)


class _Row(NamedTuple):
    """Equal rows of `width` tokens, `width // copy` sequences of `copy` tokens each, that begin with id `first_id`."""

    rows: int
    width: int
    copy: int
    first_id: int
    first_position: int = 0

    @property
    def poisoned(self) -> slice:
        """Tokens of the sequence whose embeddings are NaN; it has neighbours on both sides."""
        return slice(self.width // 2, self.width // 2 + self.copy)

    def mask(self) -> ModelMask:
        mask = documents(cu_seqlens=list(range(0, self.width + 1, self.copy)))
        shape = (self.rows, 1, self.width, self.width)
        return ModelMask(mask, shape, includes_model_mask=False, checked=True, exact_nan=True)

    def values(self, argument: Argument, ids: int) -> Tensor:
        """An argument of a sequence, repeated: positions, ids below `ids`, sines, ones of masks, and else 0."""
        repeats = self.width // self.copy
        steps = torch.arange(self.copy, device=argument.device)
        if argument.kind == "positions":
            *kinds, rows = argument.sizes  # several kinds of positions, or none; one row may stand for all
            values = (steps + self.first_position).to(argument.dtype).repeat(repeats)
            return values.expand(*kinds, self.rows if rows > 1 else 1, self.width)
        values = torch.zeros(self.copy, *argument.sizes, dtype=argument.dtype, device=argument.device)
        if values.is_floating_point():
            values.view(-1).copy_(torch.arange(self.first_id, self.first_id + values.numel()).sin())
        elif argument.name.endswith("input_ids"):
            values.copy_((steps + self.first_id) % ids)
        elif argument.name.endswith("attention_mask"):
            values.fill_(1)
        values = values.repeat(repeats, *[1] * len(argument.sizes))
        return values.expand(self.rows, *values.shape).clone()


def _outputs(module: nn.Module, arguments: tuple[Argument, ...], row: _Row, *, poison: bool) -> list[Tensor]:
    """Float outputs `[rows, width, features, ...]`; with `poison`, of inputs that are NaN at `row.poisoned`."""
    embeddings: nn.Module = module.get_input_embeddings()  # type: ignore[operator]

    def poisoned(out: Any) -> Any:
        if not poison or not _is_per_token(out, row):
            return out
        out = out.clone()
        out[:, row.poisoned] = torch.nan
        return out

    def value(argument: Argument) -> Any:
        if argument.kind in ("positions", "tokens"):
            return poisoned(row.values(argument, getattr(embeddings, "num_embeddings", 1)))
        return row.mask() if argument.kind == "mask" else argument.value

    call = {argument.name: value(argument) for argument in arguments}
    devices = {argument.device for argument in arguments if argument.device and argument.device.type == "cuda"}
    handle = embeddings.register_forward_hook(lambda layer, args, out: poisoned(out))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            return [out for out in _tensors(module(**call)) if _is_per_token(out, row)]
    finally:
        handle.remove()


def _is_per_token(out: Any, row: _Row) -> bool:
    """Whether it is a float tensor `[rows, width, features, ...]`."""
    is_float = isinstance(out, Tensor) and out.is_floating_point()
    return is_float and out.ndim > 2 and out.shape[:2] == (row.rows, row.width)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _are_equal(module: nn.Module, first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether outputs are equal but for rounding; NaN equals nothing, and infinities equal ones."""
    formats = {x.dtype for x in (*module.parameters(), *first) if x.is_floating_point() and x.dtype.itemsize > 1}
    device = first[0].device.type
    if torch.is_autocast_enabled(device):
        formats.add(torch.get_autocast_dtype(device))
    # Float32 products may be in TF32, whose machine epsilon is 2**-10.
    coarse = device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    tolerance = max(3e-4, 4 * max(2**-10 if coarse else 0.0, *(torch.finfo(dtype).eps for dtype in formats)))
    for one, other in zip(first, second, strict=True):
        x, y = (out.flatten(2).double() for out in (one, other))
        difference = torch.where(x == y, 0.0, x - y).norm(dim=-1)
        if not bool((difference <= tolerance * x.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)).all()):
            return False
    return True


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, without hooks of the user's, for this block; it leaves no casts without gradients behind."""
    training = [part for part in module.modules() if part.training]
    with without_hooks(module, keep=("torch", "transformers")), no_autocast_cache():
        try:
            for part in training:
                part.training = False
            yield
        finally:
            for part in training:
                part.training = True
