"""What the selector asks of a mask at one pair of lengths: tile counts under each geometry and row order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from stof.layout import Layout, LayoutConfig, build_layout
from stof.layout.builders.host_first import has_gpu_form, host_mask, scores_of
from stof.layout.fill.layouts import pattern_numbers
from stof.layout.orders.search import RowOrders, fitting_orders
from stof.layout.survey import Survey, survey, survey_of_layout
from stof.masks import Mask, transposed
from stof.masks.index import Index
from stof.masks.structure import Outline, dense_statistics, outline
from stof.runtime.memory import made_for_calls

T = TypeVar("T")


class Geometry:
    """What the selector may ask of a mask at two lengths.

    Attributes:
        fixed: the only layout there is (given by the user, or read from a file), None when any can be built.
        row_orders: names of row orders worth trying.
    """

    fixed: LayoutConfig | None = None
    row_orders: tuple[str, ...] = ()

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        """Tile counts under each geometry, for the cost model."""
        raise NotImplementedError

    def found_order(self) -> str | None:
        """Name of a row order that a search found, None where it found none beyond `row_orders`; searched once."""
        return None


class LayoutGeometry(Geometry):
    """The geometry of a plan that keeps to one layout."""

    def __init__(self, layout: Layout) -> None:
        self.fixed = layout.config
        self._layout = layout

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        del geometries, row_order
        return self._counted

    @functools.cached_property
    def _counted(self) -> Survey:
        return survey_of_layout(self._layout)


class MaskGeometry(Geometry):
    """Answers by looking at the mask, on any device; every layout can be built. Arguments as for `build_layout`."""

    def __init__(
        self,
        mask: Mask,
        q_len: int,
        kv_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.mask, self.q_len, self.kv_len = mask, q_len, kv_len
        self.batch, self.heads, self.device = batch, heads, torch.device(device)
        self.row_orders = fitting_orders(mask, q_len, kv_len)
        self._surveys: dict[tuple[tuple[LayoutConfig, ...], str | None], Survey] = {}

    @functools.cached_property
    def evaluated(self) -> Mask:
        """The mask; on a GPU, of one with neither a program nor a tensor, its scores as a tensor, if they fit."""
        scores = None
        if self.device.type == "cuda" and not has_gpu_form(self.mask, self.q_len, self.kv_len, self.dims):
            make = functools.partial(scores_of, self.mask, self.q_len, self.kv_len, self.dims, self.device)
            self.mask.refuse_changed()
            scores = made_for_calls(self.device, make)
            self.mask.refuse_changed()  # meanwhile
        return self.mask if scores is None else scores

    def transposed(self) -> MaskGeometry:
        """That of the mask with queries and keys swapped, at the same sizes: it has the same patterns."""
        sizes: dict[str, Any] = {"batch": self.batch, "heads": self.heads, "device": self.device}
        swapped = MaskGeometry(transposed(self.evaluated), self.kv_len, self.q_len, **sizes)
        swapped.__dict__ |= {"dims": self.dims, "which": self.which}  # cached properties
        return swapped

    def copies(self) -> list[Tensor]:
        """Tensors that are held besides those of the mask."""
        evaluated: Mask = self.__dict__.get("evaluated", self.mask)
        return [] if evaluated is self.mask else evaluated.copies()

    @functools.cached_property
    def _counted(self) -> tuple[Mask, torch.device]:
        """The mask whose tiles are counted, and where; decided at the first count, since a copy waits for the GPU."""
        known = self.outline
        row_keys = 2 ** known.statistics[1] if known is not None and known.is_regular and known.statistics else None
        on_host = host_mask(self.evaluated, self.q_len, self.kv_len, self.dims, self.device, row_keys)
        return (self.evaluated, self.device) if on_host is None else (on_host, torch.device("cpu"))

    @property
    def is_counted_on_device(self) -> bool:
        """Whether tiles are counted where the calls are, not on the host as those of small masks are at first."""
        return self._counted[1] == self.device

    @functools.cached_property
    def dims(self) -> tuple[int, int]:
        """Leading sizes of the mask."""
        return self.mask.dims(self.batch, self.heads, self.device)

    @functools.cached_property
    def which(self) -> list[int]:
        """The pattern of each batch entry and head; empty for masks that have no program and are no bool tensors."""
        return pattern_numbers(self.evaluated, self.q_len, self.kv_len, self.dims)

    @functools.cached_property
    def outline(self) -> Outline | None:
        """What is known of the mask without evaluating it; None for masks without a program."""
        heads = self.dims[1]
        entries = [divmod(self.which.index(n), heads) for n in range(max(self.which, default=-1) + 1)]
        return outline(self.mask, self.evaluated, self.q_len, self.kv_len, entries)

    @functools.cached_property
    def statistics(self) -> tuple[float, ...]:
        """By which masks of one structure are compared; for masks with an outline."""
        assert self.outline is not None
        return self.outline.statistics or dense_statistics(self.evaluated, self.q_len, self.kv_len)

    @functools.cached_property
    def orders(self) -> RowOrders:
        """The mask's row orders."""
        mask, place = self._counted
        return RowOrders(mask, self.q_len, self.kv_len, batch=self.batch, heads=self.heads, device=place)

    def found_order(self) -> str | None:
        return self.orders.searched_name()

    def build(self, config: LayoutConfig, row_order: str | None) -> Layout:
        """The layout under some block sizes and a row order by its name."""
        return self._by(build_layout, config, row_order).to(self.device)

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        key = (geometries, row_order)
        counts = self._surveys.get(key)
        if counts is None:
            known = (counts for (_, order), counts in self._surveys.items() if order == row_order)
            counts = next((one for one in known if one.counts.keys() >= set(geometries)), None)
        if counts is None:
            counts = self._surveys[key] = self._by(survey, geometries, row_order)
        return counts

    def kept_of(self, rows: Tensor) -> Tensor:
        """Which keys some rows keep: bool `[mask_batch, mask_heads, rows, kv_len]`."""
        mask, place = self._counted
        mask_batch, mask_heads = mask.dims(self.batch, self.heads, place)
        b, h, keys = (torch.arange(n, device=place) for n in (mask_batch, mask_heads, self.kv_len))
        index = Index.make(rows.to(place), keys, q_len=self.q_len, kv_len=self.kv_len, b=b, h=h)
        return mask.evaluate(index).expand(mask_batch, mask_heads, len(rows), self.kv_len)

    def _by(self, function: Callable[..., T], what: object, row_order: str | None) -> T:
        """`build_layout` or `survey` of the mask."""
        mask, place = self._counted
        sizes: dict[str, Any] = {"batch": self.batch, "heads": self.heads, "device": place}
        return function(mask, self.q_len, self.kv_len, what, **sizes, row_order=self.orders.rows(row_order))
