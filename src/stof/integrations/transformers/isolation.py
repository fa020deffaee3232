"""A check that the sequences of a packed batch do not see each other, for any model and attention implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stof.errors import ArgumentError, IsolationError, ShapeError
from stof.integrations.transformers.packed_calls import sequence_numbers

# Outputs that differ by more than this share of the largest one depend on other tokens.
_TOLERANCE = 1e-3


def check_isolation(
    model: nn.Module, batch: Mapping[str, Any], sequences: Tensor | None = None, *, tolerance: float = _TOLERANCE
) -> None:
    """Change the tokens of some sequences of a packed batch, and raise if the outputs of another one change.

    It looks at results alone, so it judges any `attn_implementation`, and the collator that made the batch. The model
    runs in evaluation mode without gradients: once, and `2 log2(n)` times for n sequences in the longest row.

    Args:
        model: called as `model(**batch)`; its output, or the first tensor in it, is `[B, S, ...]`.
        batch: with `input_ids [B, S]`.
        sequences: int `[B, S]`, the number of each token's sequence, below 0 for padding. By default, a sequence begins
            where `position_ids [B, S]` do not increase, or where `cu_seq_lens_q` says in one row, and tokens with an
            `attention_mask` of 0 are padding.
        tolerance: the largest difference of outputs that counts as rounding, as a share of the largest output.

    Raises:
        IsolationError: a sequence depends on another one. The message names both.
        ArgumentError: the batch does not say where sequences begin, or has tokens of one kind only.
        ShapeError: `sequences` or the output have another shape.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = stof_hf.enable(LlamaForCausalLM(config))
        >>> positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        >>> stof_hf.check_isolation(model, {"input_ids": torch.arange(7)[None], "position_ids": positions})
    """
    ids: Tensor = batch["input_ids"]
    numbers = _sequences(batch) if sequences is None else sequences
    if numbers.shape != ids.shape:
        raise ShapeError(f"sequences has shape {list(numbers.shape)}, input_ids {list(ids.shape)}")
    count = int(numbers.amax()) + 1
    replacements = _other_tokens(ids, numbers)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            before = _output(model, batch)

            def leak(changed: Tensor) -> tuple[int, int, float] | None:
                """Row and sequence of an output that changes with the tokens of other sequences, and by how much."""
                after = _output(model, {**batch, "input_ids": torch.where(changed, replacements, ids)})
                change = (after - before).flatten(2).abs().amax(2).nan_to_num(torch.inf)
                change = change.masked_fill(changed | (numbers < 0), 0.0)
                row, token = divmod(int(change.argmax()), ids.shape[1])
                amount = float(change[row, token])
                return None if amount <= limit else (row, int(numbers[row, token]), amount)

            limit = tolerance * float(before[numbers >= 0].abs().amax())
            for bit in range(max(count - 1, 1).bit_length()):
                for side in (0, 1):
                    changed = (numbers >= 0) & ((numbers >> bit) & 1 == side)
                    change = leak(changed)
                    if change is not None:
                        raise IsolationError(_message(numbers, changed, change, leak))
    finally:
        for module, mode in training.items():
            module.training = mode


def _sequences(batch: Mapping[str, Any]) -> Tensor:
    """The number of each token's sequence, from 0 on in each row, below 0 for padding."""
    ids, positions, cu_seqlens = batch["input_ids"], batch.get("position_ids"), batch.get("cu_seq_lens_q")
    valid = batch.get("attention_mask")
    is_token = valid.bool() if isinstance(valid, Tensor) and valid.shape == ids.shape else torch.ones_like(ids) > 0
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        return torch.where(is_token, sequence_numbers(positions, is_token), -1)
    if isinstance(cu_seqlens, Tensor) and len(ids) == 1:
        place = torch.arange(ids.shape[1], device=ids.device)
        return torch.where(is_token, torch.bucketize(place, cu_seqlens.to(ids), right=True)[None] - 1, -1)
    raise ArgumentError(
        "the batch has neither position_ids [B, S] nor cu_seq_lens_q for one row, so it does not say where sequences "
        "begin; give sequences, the number of each token's sequence"
    )


def _other_tokens(ids: Tensor, numbers: Tensor) -> Tensor:
    """Another token of the batch in place of each one: padding and special tokens may mean something else."""
    known = ids[numbers >= 0].unique()
    if len(known) < 2:
        raise ArgumentError("all tokens of the batch are the same, so none can be changed; give another batch")
    place = torch.searchsorted(known, ids.contiguous()).clamp(max=len(known) - 1)
    return torch.where(numbers >= 0, known[(place + 1) % len(known)], ids)


def _output(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    out: Any = model(**batch)
    values = out if isinstance(out, tuple) else out.values() if isinstance(out, Mapping) else (out,)
    shape = batch["input_ids"].shape
    for value in values:
        if isinstance(value, Tensor) and value.shape[:2] == shape and value.is_floating_point():
            return value.double() if value.ndim > 2 else value[..., None].double()
    raise ShapeError(f"the model returned no tensor [B, S, ...] with B, S = {list(shape)}")


def _message(numbers: Tensor, changed: Tensor, change: tuple[int, int, float], leak: Any) -> str:
    """Names the sequence whose tokens the leak comes from."""
    row, reader, amount = change
    in_row = torch.zeros_like(changed)
    in_row[row] = True
    for source in numbers[row][changed[row]].unique().tolist():
        again = leak(in_row & (numbers == source))
        if again is not None:
            _, reader, amount = again
            break
    else:
        source = "another one"
    return (
        f"row {row}: tokens of sequence {source} change outputs of sequence {reader}, by {amount:.2g}; the model does "
        "not keep the sequences of this batch apart: give it position_ids that begin anew in every sequence, without "
        "an attention_mask of ones, or run stof's attention"
    )
