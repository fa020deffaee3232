"""Before a part of a model runs: packed sequences are found, and the part is checked to keep them apart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stof.errors import UnsupportedError
from stof.handles import FULL
from stof.integrations.transformers.layer_code import calls_interface
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.packing_check import PASSED, TRACED_WIDTH, check, describe
from stof.integrations.transformers.sparse_mask import NAME
from stof.masks import documents
from stof.runtime.private import is_exporting

# Arguments of models that hold earlier tokens: the second since transformers 5.24, which still accepts the first.
_CACHE = ("past_key_values", "cache")
_PARAMETERS, _ATTENDS = "_stof_parameters", "_stof_attends"
# Dynamo runs the check while it traces: the verdict is a constant, and the graph holds no part of the check.
_check_while_tracing = torch.compiler.assume_constant_result(check)


def watch(model: nn.Module) -> None:
    """Have the parts of a model looked at before they run; parts that were checked will be checked again."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        part.__dict__.pop(PASSED, None)
        if not hasattr(part, _PARAMETERS):
            part.register_forward_pre_hook(before_forward, with_kwargs=True)
        setattr(part, _PARAMETERS, tuple(inspect.signature(part.forward).parameters))
        setattr(part, _ATTENDS, _attends(part))


def _attends(module: nn.Module) -> bool:
    """Whether a module has attention layers that do not belong to another part within it."""
    inner = [child for child in module.children() if not isinstance(child, PreTrainedModel)]
    return calls_interface(type(module)) or any(map(_attends, inner))


def before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a part of a model the mask of its packed sequences, checked.

    Raises:
        UnsupportedError: packed sequences, and the part does not keep them apart, or there are earlier tokens.
    """
    if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
        return None
    tracing = torch.compiler.is_dynamo_compiling()
    given = dict(zip(getattr(module, _PARAMETERS), args, strict=False)) | kwargs
    packed = next((value for value in given.values() if _is_unchecked(value)), None)
    if packed is None and getattr(module, _ATTENDS):
        packed = _mask_of_positions(module, given, tracing)
        if packed is not None:
            given["attention_mask"] = packed
    if packed is None:
        return None
    if not packed.is_packed and not tracing:
        return (), given  # a CUDA graph or an export: the model cannot be run on other values
    tokens = _tokens(given)
    rows, width = packed.shape[::2] if tokens is None else tokens.shape[:2]
    if tracing:
        verdict = _check_while_tracing(module, describe(given, rows, width, with_tensors=False), 1, TRACED_WIDTH)
    else:
        verdict = check(module, describe(given, rows, width, with_tensors=True), rows, width)
    if verdict.apart:
        return (), {name: value.after_check() if _is_unchecked(value) else value for name, value in given.items()}
    if verdict.apart is None and not getattr(module, _ATTENDS):
        return None  # the parts within it are checked in their turn
    advice = verdict.advice or (
        "Pass the padded batch instead: input_ids and attention_mask as they were before pack(), and no position_ids "
        "that begin anew within a row"
        if packed.is_packed
        else "Compiled code cannot tell whether position_ids begin anew within a row, as those of packed sequences: "
        "leave position_ids out, or do not compile this model"
    )
    raise UnsupportedError(f"{type(module).__name__} cannot run packed sequences: {verdict.reason}. {advice}", {})


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a model's call, None without one."""
    return next((given[name] for name in _CACHE if given.get(name) is not None), None)


def _is_unchecked(value: object) -> bool:
    return isinstance(value, ModelMask) and value.is_packed and not value.checked


def _tokens(given: dict[str, Any]) -> Tensor | None:
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    return tokens if isinstance(tokens, Tensor) and tokens.ndim > 1 else None


def _mask_of_positions(module: nn.Module, given: dict[str, Any], tracing: bool) -> ModelMask | None:
    """The mask of sequences whose positions begin anew within a row; None where none do.

    transformers looks for such positions only where a decoder is called without a mask and without a cache. In compiled
    code and CUDA graphs a tensor keeps sequences apart, whatever the positions are.

    Raises:
        UnsupportedError: such positions and a cache.
    """
    tokens, positions, valid = _tokens(given), given.get("position_ids"), given.get("attention_mask")
    if tokens is None or not isinstance(positions, Tensor) or "attention_mask" not in getattr(module, _PARAMETERS):
        return None
    rows, width = tokens.shape[:2]
    cache = cache_of(given)
    # Whether reading values would break a graph. Dynamo may trace this function alone, within an eager call.
    graph = tracing or is_exporting() or (positions.is_cuda and torch.cuda.is_current_stream_capturing())
    if positions.ndim != 2 or positions.shape[1] != width or width == 1 or (graph and cache is not None):
        return None
    if not graph and not bool((positions.diff(dim=1) <= 0).any()):
        return None
    if valid is None:
        valid = torch.ones(rows, width, dtype=torch.bool, device=positions.device)
    elif not isinstance(valid, Tensor) or valid.ndim != 2 or valid.shape[1] < width:
        return None
    valid = valid[:, -width:].to(positions.device, torch.bool)
    numbers = sequence_numbers(positions.expand(rows, -1), valid)
    shape = (rows, 1, width, width)
    if graph:
        keep = (numbers[:, None, :, None] == numbers[:, None, None, :]) & valid[:, None, None, :]
        return ModelMask(FULL, shape, keep=keep, includes_model_mask=False)
    if not bool((numbers > 0).any()):
        return None
    if cache is not None:
        raise UnsupportedError(
            f"position_ids begin anew within a row (packed sequences), and a cache ({' or '.join(_CACHE)}) is given; "
            "a packed batch runs once: leave the cache out, or pass the padded batch to go on from a cache",
            {},
        )
    return ModelMask(documents(torch.where(valid, numbers, -1)), shape, includes_model_mask=False)


def sequence_numbers(positions: Tensor, valid: Tensor) -> Tensor:
    """int64 `[B, S]`: how many sequences began before; one does at a position that is not above the one before it.

    Padding is passed over: positions may stand still there.
    """
    place = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    last_valid = torch.where(valid, place, -1).cummax(1).values
    previous = nn.functional.pad(last_valid[:, :-1], (1, 0), value=-1)
    begins = valid & (previous >= 0) & (positions <= positions.gather(1, previous.clamp(min=0)))
    return begins.cumsum(1)
