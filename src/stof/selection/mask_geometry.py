"""What the selector asks of a mask at one pair of lengths: tile counts under each geometry and row order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from stof.layout import Layout, LayoutConfig, build_layout
from stof.layout.orders.search import RowOrders
from stof.layout.survey import Survey, survey
from stof.masks import Mask
from stof.selection.kernel_choice import KernelChoice

T = TypeVar("T")


class MaskGeometry:
    """Answers by looking at the mask, on any device; every layout can be built. Arguments as for `build_layout`.

    Attributes:
        fixed: None, see `stof.selection.gpu_candidates.Geometry`.
        orders: the mask's row orders.
    """

    fixed: LayoutConfig | None = None

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
        self.batch, self.heads, self.device = batch, heads, device
        self.orders = RowOrders(mask, q_len, kv_len, batch=batch, heads=heads, device=device)
        self._surveys: dict[tuple[tuple[LayoutConfig, ...], str | None], Survey] = {}

    @property
    def row_orders(self) -> tuple[str, ...]:
        """Names of row orders that suit the mask and fit its length."""
        return self.orders.names

    def found_order(self) -> str | None:
        """Name of a row order found by looking at the mask, None where that is nothing new; searched once."""
        return self.orders.found()

    def unfit(self, choice: KernelChoice) -> str | None:
        """Nothing is known to be unfit before it was built."""
        del choice
        return None

    def build(self, config: LayoutConfig, row_order: str | None) -> Layout:
        """The layout under some block sizes and a row order by its name."""
        return self._by(build_layout, config, row_order)

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        """Tile counts under each geometry, for the cost model; counted once."""
        key = (geometries, row_order)
        found = self._surveys.get(key)
        if found is None:
            found = self._surveys[key] = self._by(survey, geometries, row_order)
        return found

    def _by(self, function: Callable[..., T], what: object, row_order: str | None) -> T:
        """`build_layout` or `survey` of the mask."""
        sizes: dict[str, Any] = {"batch": self.batch, "heads": self.heads, "device": self.device}
        return function(self.mask, self.q_len, self.kv_len, what, **sizes, row_order=self.orders.rows(row_order))
