"""One way to run a call: an implementation, the layout it reads, and how its kernel is configured."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from stof.kernels.config import KernelConfig
from stof.layout import LayoutConfig


@dataclass(frozen=True)
class KernelChoice:
    """What the selector decides on.

    Attributes:
        implementation: a name of `IMPLEMENTATIONS`.
        layout: block sizes and gathering; None takes the plan's own layout.
        row_order: a name for `stof.layout.orders.named_order`; None keeps the rows' order.
        kernel: settings of the block-wise kernel; None for implementations without any.
        filled: the lists of the kernel are filled on the GPU, and made of no layout.
        widened: q, k and v of 8 bits become 16 or 32 first, for an implementation that does not take them.
    """

    implementation: str
    layout: LayoutConfig | None = None
    row_order: str | None = None
    kernel: KernelConfig | None = None
    widened: bool = False
    filled: bool = False

    @property
    def layout_key(self) -> Hashable:
        """What decides whether a layout fits: choices with equal keys fit alike."""
        kernel = self.kernel
        copies = kernel is not None and (kernel.paired, kernel.zero_unseen)
        return self.implementation, self.layout, self.row_order, copies

    def __str__(self) -> str:
        parts = ["widened"] if self.widened else []
        if self.layout is not None:
            parts.append(f"{self.layout.block_m}x{self.layout.block_n} tiles, {self.layout.columns}")
        if self.filled:
            parts.append("filled lists")
        if self.row_order is not None:
            parts.append(f"rows by {self.row_order}")
        if self.kernel is not None:
            parts.append(str(self.kernel))
        return f"{self.implementation} ({'; '.join(parts)})" if parts else self.implementation
