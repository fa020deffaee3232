"""What a model's layers receive as their attention mask when STOF runs the attention: a mask, not a tensor."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from stof.attention import plan
from stof.errors import UnsupportedError
from stof.handles import intersection, mask_of
from stof.integrations.transformers.sequence_positions import (
    documents_in,
    in_sequences,
    offsets_of_documents,
    offsets_of_rows,
)
from stof.masks import Mask, placed
from stof.masks.aligned import not_by_distance
from stof.masks.rules import Documents
from stof.masks.traced import Intersection
from stof.plans.plan import Plan


class _NotATensorError(UnsupportedError, AttributeError):
    """An `AttributeError`, as Python asks of attributes that are missing, and one of stof's errors."""


class ModelMask:
    """The mask of one forward pass, made once and shared by all layers; the first layer builds plans (not if compiled).

    It passes for a 4-D attention mask (`ndim`, `shape`), so models hand it through untouched. Code that wants to
    slice or add it gets an error that says what to do.

    Attributes:
        mask: what each query sees, in the coordinates of this call.
        keep: None, or bool broadcastable to `[B, heads or 1, Sq, Skv]`, false where a score is dropped as well. Used
            where reading the tensor to plan with it would break a graph (compiled code), and for the whole mask of a
            single query.
        shape: `(B, 1, Sq, Skv)` of the call.
        q_offset, kv_offset: position of the first query and of the first key; a tensor where compiled code does not
            know it.
        includes_model_mask: False for a mask a user passes in: the model's own mask is intersected with it.
        checked: for a packed mask, whether the model it was given to keeps packed sequences apart (`packing_check`).
        first_position: position of the first token of each sequence, for the mask of a batch that `pack` made; as text,
            because Dynamo takes a number that differs between objects for a symbol.
        valid: bool `[B, tokens]`, false at padding, of all tokens from position 0 on; None without padding.
        packed: the mask of the packed sequences of a batch, as it was given; None if there are none.
        sequences_unknown: whether `keep` holds packed sequences that begin at unknown positions.
        exact_nan: a NaN of a token reaches the queries that see the token, and no others; kernels multiply values
            that a mask drops by 0.
        breaks_graphs: whether compiled code may break its graph where it reads this mask, for windows to be read.
        split: who holds which tokens, where the sequence is split over ranks (`parallel.SplitSequence`): `mask` is
            that of all tokens, `shape` that of this rank's. Else None.
    """

    ndim = 4

    def __init__(
        self,
        mask: Mask | Intersection,
        shape: tuple[int, int, int, int],
        *,
        keep: Tensor | None = None,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        includes_model_mask: bool = True,
        checked: bool = False,
        first_position: str | None = None,
        exact_nan: bool = False,
        split: Any = None,
        valid: Tensor | None = None,
        packed: Mask | Intersection | None = None,
        sequences_unknown: bool = False,
        breaks_graphs: bool = False,
    ) -> None:
        self.mask = mask
        self.keep = keep
        self.shape = shape
        self.q_offset = q_offset
        self.kv_offset = kv_offset
        self.includes_model_mask = includes_model_mask
        self.checked = checked
        self.first_position = first_position
        self.exact_nan = exact_nan
        self.split = split
        self.valid = valid
        self.sequences_unknown = sequences_unknown
        self.breaks_graphs = breaks_graphs
        self.packed = mask if packed is None and not includes_model_mask else packed
        self._plans: dict[tuple[object, ...], Plan] = {}

    @property
    def is_packed(self) -> bool:
        """Whether it keeps the sequences of a packed batch apart, and the model has not added its own mask."""
        return not self.includes_model_mask and isinstance(self.mask, Documents)

    def after_check(self, *, breaks_graphs: bool = False) -> ModelMask:
        """A packed mask, for a model that keeps packed sequences apart."""
        return ModelMask(self.mask, self.shape, includes_model_mask=False, checked=True, breaks_graphs=breaks_graphs)

    def refuse_unchecked(self) -> None:
        """Refuse a packed mask on its way into attention, if nobody knows that the model keeps sequences apart.

        Raises:
            UnsupportedError: the model's forward pre-hook did not run.
        """
        if self.is_packed and not self.checked:
            raise UnsupportedError(
                "a packed mask came to an attention layer of a model that stof did not check; call the model itself, "
                "model(**packed.model_inputs()), not its forward method or its layers",
                {},
            )

    def queries_with_nan(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Bool `[B, Sq]`: queries that are NaN or see a key or value that is, in any head."""
        keys = k.isnan().any(-1).any(1) | v.isnan().any(-1).any(1)
        seen = mask_of(self.mask).to_dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], device=q.device)
        seen = seen if self.keep is None else seen & self.keep
        return (seen & keys[:, None, None, :]).any(-1).any(1) | q.isnan().any(-1).any(1)

    def narrowed(self, sparse: Mask | None) -> Mask | Intersection:
        """The mask, intersected with a sparse mask of positions in the rows of the call; see `intersection`."""
        if sparse is None:
            return self.mask
        q_offset, kv_offset = int(self.q_offset), self.kv_offset
        if kv_offset:  # a cache that dropped its first keys
            sparse.check(self.shape[2] + q_offset, self.shape[3] + kv_offset)
        return intersection(self.mask, placed(sparse, q_offset, kv_offset))

    def in_sequences(self, sparse: Mask, device: torch.device) -> Mask:
        """A sparse mask of positions within each sequence, as one of positions in the rows of the call.

        Raises:
            UnsupportedError: the mask depends on the length of a row, and sequences begin elsewhere.
        """
        if not_by_distance(sparse) is None:
            return sparse
        self.refuse_unknown_sequences()
        packed = self.packed if isinstance(self.packed, Documents) else documents_in(self.mask)
        if packed is not None:
            offsets = offsets_of_documents(packed, device)
        else:
            offsets = None if self.valid is None else offsets_of_rows(self.valid, device)
        return sparse if offsets is None else in_sequences(sparse, *offsets, packed is not None)

    def refuse_unknown_sequences(self) -> None:
        """Refuse a sparse mask that counts positions where a tensor of scores alone keeps packed sequences apart.

        Raises:
            UnsupportedError: it is such a call.
        """
        if self.sequences_unknown:
            raise UnsupportedError(
                "a sparse mask that looks at positions, and position_ids in an exported program or a CUDA graph, where "
                "nobody reads at which positions sequences begin; leave position_ids out, or use a mask by distance",
                {},
            )

    def plan(self, sparse: Mask | None, q: Tensor, k: Tensor) -> Plan:
        """The plan for these queries and keys; the same object for every layer with the same `sparse`."""
        key = (sparse, q.shape[:3], k.shape[2], q.device)
        stored = self._plans.get(key)
        if stored is None:
            batch, heads, q_len, _ = q.shape
            mask = mask_of(self.narrowed(None if sparse is None else self.in_sequences(sparse, q.device)))
            stored = plan(mask, q_len, k.shape[2], batch=batch, heads=heads, device=q.device)
            self._plans[key] = stored
        return stored

    def to(self, *args: Any, **kwargs: Any) -> ModelMask:
        """Itself on another device, for code that moves a batch of inputs; dtypes do not apply."""
        device = kwargs.get("device", next((arg for arg in args if not isinstance(arg, torch.dtype)), None))
        if self.keep is None or device is None:
            return self
        return ModelMask(
            self.mask,
            self.shape,
            keep=self.keep.to(device),
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            includes_model_mask=self.includes_model_mask,
            valid=self.valid,
            packed=self.packed,
            sequences_unknown=self.sequences_unknown,
        )

    def contiguous(self) -> ModelMask:
        """Itself; transformers >= 5.23 asks for it when it generates with a static cache."""
        return self

    def __repr__(self) -> str:
        extra = "" if self.keep is None else f", keep={list(self.keep.shape)}"
        return f"ModelMask({self.mask!r}, shape={self.shape}{extra})"

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotATensorError(_not_a_tensor(f"asked for .{name}"), {})

    def __getitem__(self, item: object) -> NoReturn:
        _refuse("indexed it")

    def __add__(self, other: object) -> NoReturn:
        _refuse("added it to scores")

    __radd__ = __add__

    def __mul__(self, other: object) -> NoReturn:
        _refuse("multiplied it")

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del cls, types, args, kwargs
        _refuse(f"passed it to {getattr(func, '__name__', func)}")


def _not_a_tensor(did: str) -> str:
    return (
        f"the attention mask is a stof mask, not a tensor, and code outside stof {did}. Either a layer of the model "
        "does not run stof's attention, which stof.integrations.transformers.enable(model) gives to all of them; or "
        "the model computes with its masks: give such a model the tensor mask of a padded batch, and if it raises this "
        'even so, call model.set_attn_implementation("sdpa")'
    )


def _refuse(did: str) -> NoReturn:
    raise UnsupportedError(_not_a_tensor(did), {})
