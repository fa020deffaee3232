"""Packed batches for models of transformers: inputs without padding, and a mask that keeps sequences apart."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from stof.errors import DtypeError, ShapeError
from stof.integrations.transformers.model_mask import ModelMask
from stof.unpadding import Unpadding, unpad


@dataclass(frozen=True, eq=False)
class PackedBatch(Unpadding):
    """A padded batch `[B, S]` with its padding removed; `N` real tokens in `R` rows of `T`.

    A causal model intersects the mask with its own. Further attributes are those of `stof.unpadding.Unpadding`.

    Attributes:
        input_ids: `[R, T]` (`[1, N]` unless `max_tokens` asked for several rows).
        first_position: position of each sequence's first token.
        extras: other per-token tensors, packed alike, under the names they came with.
    """

    input_ids: Tensor
    first_position: int
    extras: dict[str, Tensor]

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a model with `attn_implementation="stof"`: `model(**packed.model_inputs())`.

        Other implementations cannot read the mask and say so. Outputs that a model takes from the first token of
        a row (BERT's `pooler_output`) describe the first sequence only: pool what `unpack` returns instead.
        """
        rows, width = self.packed_shape
        shape = (rows, 1, width, width)
        first = str(self.first_position)
        attention_mask = ModelMask(self.mask, shape, includes_model_mask=False, first_position=first)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": attention_mask,
            **self.extras,
        }


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_tokens: int | None = None,
    first_position: int = 0,
    **per_token: Tensor,
) -> PackedBatch:
    """Remove the padding of a batch: its tokens in one row, each sequence seeing itself only.

    Results equal those of the padded batch for right padding; sequences padded on the left get positions from 0,
    as they would alone. Reads the lengths on the host.

    The model has to keep sequences apart, which stof checks by running it before its first packed call: on one sequence
    repeated in a row of at most 512 tokens, with the embeddings of one copy NaN. The call raises `UnsupportedError` if

    - another copy's outputs are NaN: layers besides attention mix tokens (recurrent, convolution and pooling layers,
      embeddings that read neighbours), or a decoder's attention lacks the packed mask;
    - outputs of the first and the last copy differ by more than rounding: positions are counted from the start of the
      row, or experts have a limited capacity;
    - outputs of a sequence alone differ with its packed positions and with none: give the `first_position` that the
      error names;
    - the model cannot be run so, or returns nothing with one entry per token.

    The check runs once for each set of arguments, and again where rows are twice as long; compiled models are checked
    while they are traced. It covers the model and the parts in it that are a `PreTrainedModel`, in evaluation mode,
    without hooks but those of torch and transformers, and changes no random state, mode or cache. It does not cover
    layers and hooks that are added later (`enable` has the model checked again), code around the model, and layers that
    mix tokens in longer rows only. Calls that bypass the model, such as `model.forward`, are refused.

    `position_ids` that begin anew within a row, given without this function, are treated and checked alike. A token
    whose position is not above that of the token before it begins a sequence; padding is skipped. Compiled code and
    CUDA graphs cannot read positions: there, calls with `position_ids` evaluate a mask of every score, calls with a
    cache are not checked, and models that do not keep sequences apart refuse `position_ids`.

    Args:
        input_ids: int `[B, S]`.
        attention_mask: int or bool `[B, S]`, nonzero at real tokens, wherever the padding is.
        max_tokens: bound on the tokens of a row; sequences are then dealt over several rows, longest first, and
            rows end in padding. None packs everything in one row without any.
        first_position: position of a sequence's first token; RoBERTa counts from `padding_idx + 1`.
        per_token: more tensors `[B, S, ...]` to pack alike, such as `token_type_ids`.

    Raises:
        ShapeError: tensors that are not `[B, S]`, or a batch without tokens.
        DtypeError: an `attention_mask` of floats.
        ArgumentError: `max_tokens` below the longest sequence, a negative `first_position`.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> model = stof_hf.enable(model)
        >>> lengths = torch.tensor([[7], [12]])
        >>> padded = {"input_ids": torch.randint(1, 100, (2, 12)), "attention_mask": torch.arange(12) < lengths}
        >>> packed = stof_hf.pack(**padded)  # what tokenizer(texts, padding=True, return_tensors="pt") returns
        >>> packed.input_ids.shape
        torch.Size([1, 19])
        >>> with torch.no_grad():
        ...     packed.unpack(model(**packed.model_inputs()).last_hidden_state).shape
        torch.Size([2, 12, 32])
    """
    valid = _checked(input_ids, attention_mask, per_token)
    unpadding = unpad(valid, max_tokens=max_tokens, first_position=first_position)
    return PackedBatch(
        **{field.name: getattr(unpadding, field.name) for field in fields(unpadding)},
        input_ids=unpadding.pack_tokens(input_ids),
        first_position=first_position,
        extras={name: unpadding.pack_tokens(values) for name, values in per_token.items()},
    )


def _checked(input_ids: Tensor, attention_mask: Tensor, per_token: dict[str, Tensor]) -> Tensor:
    """Bool `[B, S]`, true at real tokens."""
    for name, values in {"input_ids": input_ids, "attention_mask": attention_mask, **per_token}.items():
        if not isinstance(values, Tensor):
            raise DtypeError(f"{name} is a torch.Tensor, got {type(values).__name__}")
    if input_ids.ndim != 2:
        raise ShapeError(f"input_ids is [B, S], got {list(input_ids.shape)}")
    if attention_mask.is_floating_point():
        raise DtypeError(f"attention_mask is an int or bool tensor, nonzero at real tokens, got {attention_mask.dtype}")
    for name, values in {"attention_mask": attention_mask, **per_token}.items():
        if values.shape[:2] != input_ids.shape or (name == "attention_mask" and values.ndim != 2):
            raise ShapeError(
                f"{name} has one value per token of input_ids {list(input_ids.shape)}, got {list(values.shape)}"
            )
    return attention_mask != 0
