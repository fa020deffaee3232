"""The masks under which a model's layers computed, recorded for a look or a check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stof.errors import IsolationError, ShapeError, UnsupportedError
from stof.handles import mask_of
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.sparse_mask import IGNORED
from stof.integrations.transformers.sparsify import self_attention_layers
from stof.masks import Mask, from_dense

# Added to a score, it leaves no weight.
_HIDDEN = -1e4


class LayerMask(NamedTuple):
    """The mask of one call of an attention layer.

    Attributes:
        layer: the name of the layer in the model.
        mask: what its queries saw: the model's mask, and the layer's sparse one.
        shape: `(B, H, Sq, Skv)` of the call.
        offset: the key that the first query stands at: the number of tokens in a cache; None if the call does not say.
    """

    layer: str
    mask: Mask
    shape: tuple[int, int, int, int]
    offset: int | None

    def to_dense(self) -> Tensor:
        """Bool `[B or 1, H or 1, Sq, Skv]` on the CPU, true where a query saw a key."""
        batch, heads, q_len, kv_len = self.shape
        return self.mask.to_dense(q_len, kv_len, batch=batch, heads=heads)


class RecordedMasks(list[LayerMask]):
    """The masks of the calls inside of `record_masks`, in the order of the calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._expected = [layer.name for layer in self_attention_layers(model)]

    def add(
        self, layer: nn.Module, mask: ModelMask, sparse: Mask | None, attention_mask: Any, query: Tensor, key: Tensor
    ) -> None:
        """Record a call of a layer of the model.

        Args:
            mask, sparse: of the model and of the layer.
            attention_mask: the layer's argument; a float tensor hides keys by values of -10,000 and less.
        """
        if layer not in self._names:  # another model's
            return
        if mask.split is not None:
            raise UnsupportedError("masks of a sequence that is split over ranks are not recorded", {})
        combined = mask_of(mask.narrowed(None if sparse is None else mask.in_sequences(sparse, query.device)))
        if mask.keep is not None:
            combined = combined & from_dense(mask.keep)
        if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
            combined = combined & from_dense(attention_mask[..., : key.shape[2]] > _HIDDEN)
        q_len, kv_len = query.shape[2], key.shape[2]
        offset = None
        if q_len == kv_len:
            offset = 0
        elif attention_mask is mask and isinstance(mask.q_offset, int):
            offset = mask.q_offset - mask.kv_offset
        # Frozen: as it is now, whatever happens to tensors that it reads.
        self.append(LayerMask(self._names[layer], combined.frozen(), (*query.shape[:3], kv_len), offset))

    def check(self, *, documents: Tensor | None = None, causal: bool = False) -> None:
        """Raise if a query of self-attention saw a key that it should not see.

        Compares every score: memory grows with the square of the length.

        Args:
            documents: int `[B, S]`, the document of each token, below 0 for padding. A document's tokens see its own
                tokens alone; padding may see all. With a cache, S counts all keys in it.
            causal: no token sees a later one.

        Raises:
            IsolationError: names the first such layer, query and key.
            UnsupportedError: a layer with self-attention was not recorded: it was not called, or without STOF.
            ShapeError: `documents` has another shape than the calls.
            UnsupportedError: a call with a mask tensor and more keys than queries, which does not say where those are.
        """
        missing = set(self._expected) - {one.layer for one in self}
        if missing:
            raise UnsupportedError(f"no call of {', '.join(sorted(missing))} was recorded, so it cannot be checked", {})
        for one in self:
            if one.layer in self._expected:
                self._check_layer(one, documents, causal)

    @staticmethod
    def _check_layer(one: LayerMask, documents: Tensor | None, causal: bool) -> None:
        batch, _, q_len, kv_len = one.shape
        if one.offset is None:
            raise UnsupportedError(
                f"{one.layer} was given a mask tensor for {q_len} queries and {kv_len} keys, which does not say at "
                "which keys the queries stand",
                {},
            )
        places = slice(one.offset, one.offset + q_len)
        visible = one.to_dense().any(1)  # in any head
        wrong = torch.zeros_like(visible)
        if documents is not None:
            if documents.shape != (batch, kv_len):
                raise ShapeError(
                    f"documents has shape {list(documents.shape)}, {one.layer} read {[batch, kv_len]} keys"
                )
            documents = documents.cpu()
            of_queries = documents[:, places, None]
            wrong = visible & (of_queries >= 0) & (of_queries != documents[:, None, :])
        if causal:
            position = torch.arange(kv_len)
            wrong = wrong | (visible & (position > position[places, None]))
        if wrong.any():
            row, query, key = wrong.nonzero()[0].tolist()
            token = one.offset + query
            if documents is None or documents[row, token] == documents[row, key]:
                what = "a later token"
            elif documents[row, key] < 0:
                what = "which is padding"
            else:
                what = f"of document {int(documents[row, key])}, and is of document {int(documents[row, token])}"
            raise IsolationError(f"{one.layer}: in row {row}, token {token} sees token {key}, {what}")


_RECORDING: ContextVar[RecordedMasks | None] = ContextVar("stof_recorded_masks", default=None)


def recording() -> RecordedMasks | None:
    """Where this thread's calls are recorded; None if they are not. Compiled code must not call it."""
    return None if IGNORED.get() else _RECORDING.get()


@contextmanager
def record_masks(model: nn.Module) -> Iterator[RecordedMasks]:
    """Record the mask under which each layer of a model computes, in this thread and outside of compiled code.

    Args:
        model: a model of transformers, enabled.

    Yields:
        a list with a `LayerMask` for each call, and a `check` of what the masks should be.

    Raises:
        UnsupportedError: nothing was recorded by the end: the model was not called, was compiled, or is not enabled.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = stof_hf.enable(LlamaModel(config).eval())
        >>> positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        >>> with torch.inference_mode(), stof_hf.record_masks(model) as seen:
        ...     out = model(torch.arange(7)[None], position_ids=positions)
        >>> seen.check(documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), causal=True)
        >>> print(seen[0].layer, int(seen[0].to_dense().sum()))
        layers.0.self_attn 16
    """
    seen = RecordedMasks(model)
    token = _RECORDING.set(seen)
    try:
        yield seen
    finally:
        _RECORDING.reset(token)
    if not seen:
        raise UnsupportedError(
            "no mask was recorded: call the model inside of record_masks, without torch.compile, after enable(model)",
            {},
        )
