"""What every mask can do except being combined: `compose.py` adds `&`, `|`, `~`, offsets and the transpose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError, shown
from stof.masks.bounds import TileBounds
from stof.masks.index import Index
from stof.runtime.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Self

# Masks that vary from call to call or hold functions or tensors: a compiled graph is told one by its number or key.
LIVING: Registry[Any] = Registry(lambda mask: mask.key)


class BaseMask(ABC):
    """The interface of `stof.masks.Mask` without its operators, which make masks of other classes.

    Attributes:
        key: the repr, which identifies the value: it is what equality and hashing use.
        number: of masks that `varies` tells of, the same for equal living ones, else 0. Compiled code is told masks by
            it: Dynamo makes a number that changes an input of its graph, but compiles anew for every text.
        may_change: whether it reads tensors or Python values that others may write to; see `frozen`.
    """

    key: str
    number: int
    may_change: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", repr(self))  # the dataclasses are frozen
        number = 0
        if self.varies or "<" in self.key:  # text alone cannot rebuild it
            number, first = LIVING.add(self, self.key)
            if first is not self:
                # Equal masks keep the first of them alive, so that it is found while any of them lives.
                object.__setattr__(self, "_first", first)
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "may_change", self._reads_others())

    @property
    def varies(self) -> bool:
        """Whether masks like this change from call to call: they hold a tensor, or lengths of a batch's sequences."""
        return "<" in self.key

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # a copy holds other tensors and functions, so its key is another one

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, BaseMask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    @abstractmethod
    def __repr__(self) -> str: ...

    @abstractmethod
    def evaluate(self, index: Index) -> Tensor:
        """Bool tensor broadcastable to `[B, H, Q, K]`, true where the score is kept.

        A leading dimension larger than 1 means that the mask depends on the batch (or head) index, or that `index`
        holds several rectangles.
        """

    def tile_bounds(self, index: Index) -> TileBounds:
        """What is kept of whole rectangles: `index` holds `Interval`s of queries and keys, and one sequence and head.

        By default the rule itself is run on the ranges; where it looks at single positions the answer is unknown.
        """
        try:
            return TileBounds.of(self.evaluate(index))
        except Exception:  # whatever a user's function raises on what is no tensor; evaluating it will say so again
            return TileBounds.unknown(index.device)

    def check(self, q_len: int, kv_len: int) -> None:
        """Raise `ShapeError` when this mask's own data do not fit the lengths."""
        del q_len, kv_len  # most masks hold no data that could disagree

    @property
    def batch(self) -> int:
        """Batch size this mask is bound to, 1 when it is the same for every sequence."""
        return 1

    @property
    def heads(self) -> int:
        """Number of query heads this mask is bound to, 1 when it is the same for every head."""
        return 1

    @property
    def depends_on_batch(self) -> bool:
        """Whether sequences of a batch may have different masks; True where that cannot be told."""
        return self.batch != 1 or self.depends_on_sizes

    @property
    def depends_on_heads(self) -> bool:
        """Whether heads may have different masks; True where that cannot be told."""
        return self.heads != 1 or self.depends_on_sizes

    def _reads_others(self) -> bool:
        """The attribute `may_change`."""
        return False

    def frozen(self) -> Self:
        """The mask at the present values of all that it reads; itself if nothing can change.

        Frozen masks are equal while these values are. Plans are made of frozen masks. On a GPU, comparing tensors with
        those of the last call waits for the device.
        """
        return self

    def copies(self) -> list[Tensor]:
        """Tensors that the mask keeps for itself: what plans add to memory besides their layouts."""
        return []

    def tensors_device(self) -> torch.device | None:
        """The device of the tensors that the mask reads, a GPU rather than the CPU; None if it reads none."""
        devices = {copy.device for copy in self.frozen().copies()}
        return max(devices, key=lambda device: device.type != "cpu", default=None)

    def changed(self) -> bool:
        """Whether a frozen mask would now keep other scores: a function cannot be copied as tensors are."""
        return False

    def refuse_changed(self) -> None:
        """Raise `MaskError` if a frozen mask cannot be evaluated any more."""
        if self.changed():
            raise MaskError(
                "what a mask function reads was changed after the plan or mask was made; make another plan, or use "
                "stof.dynamic_plan for masks that change"
            )

    @property
    def depends_on_sizes(self) -> bool:
        """Whether `dims` must be asked with the sizes of a call (functions; named masks know)."""
        return False

    @property
    def grows(self) -> bool:
        """Whether a score is kept or not regardless of how long the sequences are."""
        return True

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        """Row permutations worth trying, as `stof.layout.orders.named_order` spells them."""
        return ()

    @property
    def has_monotonic_ranges(self) -> bool:
        """Whether every query keeps one range of keys, and no later query's begins or ends before it.

        Rows that see alike keys then stand together already, and no other order is worth looking for.
        """
        return False

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        """`(mask_batch, mask_heads)`, each 1 or the full size, for a call with `batch` and `heads`.

        Raises:
            ShapeError: the mask is bound to another batch size or number of heads.
        """
        del device
        for name, bound, called in (("batch size", self.batch, batch), ("number of heads", self.heads, heads)):
            if bound not in (1, called):
                raise ShapeError(
                    f"the mask is bound to a {name} of {bound}, the inputs have {called}; "
                    f"give a mask for {called} (or one that does not depend on it)"
                )
        return self.batch, self.heads

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        """Which batch entries and heads share a mask, as far as that is cheap to tell.

        Args:
            mask_batch, mask_heads: as `dims` gave them.

        Returns:
            int64 `[mask_batch | 1, mask_heads | 1]` on the CPU, equal where the mask is the same; different numbers
            promise nothing.
        """
        batch, heads = (mask_batch, mask_heads) if self.depends_on_sizes else (self.batch, self.heads)
        return torch.arange(batch * heads, device="cpu").view(batch, heads)

    def draw(
        self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int | None = None,
        title: str | None = None, pattern: int = 0,
    ) -> Figure:  # fmt: skip
        """Draw the mask and its tiles on a CPU: a matplotlib figure, which notebooks show, with `savefig(path)`.

        Args:
            q_len, kv_len, batch, heads: as for `stof.plan`.
            title: heading; default the mask's text.
            pattern: which distinct (batch, head) mask to draw.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            ArgumentError: no such pattern.
            ShapeError: the mask does not fit the lengths, batch or heads.
        """
        # By name: it lies above this layer.
        plan = import_module("stof.attention").plan(self, q_len, kv_len, batch=batch, heads=heads, device="cpu")
        figure: Figure = plan.draw(title=title, pattern=pattern)
        return figure

    def to_dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Exact dense form: bool `[mask_batch, mask_heads, q_len, kv_len]`; for tests and pictures.

        Memory grows with `q_len * kv_len`. `batch` and `heads` matter only to masks that depend on them.
        """
        kv_len = q_len if kv_len is None else kv_len
        check_lengths(q_len, kv_len)
        if self.may_change:
            return self.frozen().to_dense(q_len, kv_len, batch=batch, heads=heads, device=device)
        self.refuse_changed()
        self.check(q_len, kv_len)
        batch = self.batch if batch is None else batch
        heads = self.heads if heads is None else heads
        check_sizes(batch, heads)
        mask_batch, mask_heads = self.dims(batch, heads, device)
        index = Index.make(
            torch.arange(q_len, device=device),
            torch.arange(kv_len, device=device),
            q_len=q_len,
            kv_len=kv_len,
            b=torch.arange(mask_batch, device=device),
            h=torch.arange(mask_heads, device=device),
        )
        return self.evaluate(index).expand(mask_batch, mask_heads, q_len, kv_len).contiguous()


def check_lengths(q_len: int, kv_len: int) -> None:
    """Raise `ShapeError` unless both lengths are positive and rows and columns fit int32 indices."""
    for name, value in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ShapeError(f"{name} is an int, got {type(value).__name__} {shown(value)}")
        if not 0 < value < 2**31:
            raise ShapeError(f"{name} is between 1 and 2**31 - 1, got {shown(value)}")


def check_sizes(batch: int, heads: int) -> None:
    """Raise `ShapeError` unless both counts are positive and fit int32 indices."""
    for name, value in (("batch", batch), ("heads", heads)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ShapeError(f"{name} is an int between 1 and 2**31 - 1, got {shown(value)}")


def foreign_layout(tensor: Tensor) -> str | None:
    """What is no strided tensor (nested, sparse, MKL-DNN, of subclasses that wrap others): nothing here reads it."""
    if tensor.is_nested:
        return "nested"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return type(tensor).__name__
    return None if tensor.layout == torch.strided else str(tensor.layout)


def numbered(values: Sequence[object]) -> Tensor:
    """int64 `[len(values)]` on the CPU: equal values get equal numbers, counted from 0."""
    seen: dict[object, int] = {}
    return torch.tensor([seen.setdefault(value, len(seen)) for value in values], dtype=torch.int64, device="cpu")
