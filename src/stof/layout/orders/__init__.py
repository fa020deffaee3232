"""Row permutations that put like rows side by side, for `build_layout(row_order=...)`."""

from stof.layout.orders.named import by_patch, by_remainder, by_z_order, named_order

__all__ = ["by_patch", "by_remainder", "by_z_order", "named_order"]
