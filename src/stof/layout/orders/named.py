"""Row permutations that put like rows side by side, for `build_layout(row_order=...)`."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import ArgumentError


def by_remainder(q_len: int, stride: int) -> Tensor:
    """Rows with equal `i % stride` side by side, int64 `[q_len]`: makes dilated masks dense."""
    if stride < 1:
        raise ArgumentError(f"stride is >= 1, got {stride}")
    rows = torch.arange(q_len, device="cpu")
    return torch.argsort(torch.remainder(rows, stride), stable=True)


def by_patch(height: int, width: int, patch_height: int, patch_width: int) -> Tensor:
    """Rows of a `height x width` grid, patch after patch, int64 `[height * width]`: for 2-D neighbourhoods."""
    if min(height, width, patch_height, patch_width) < 1:
        raise ArgumentError("grid and patch sizes are >= 1")
    y = torch.arange(height, device="cpu")[:, None].expand(height, width)
    x = torch.arange(width, device="cpu")[None, :].expand(height, width)
    across = -(-width // patch_width)
    key = torch.div(y, patch_height, rounding_mode="floor") * across + torch.div(x, patch_width, rounding_mode="floor")
    return torch.argsort(key.flatten(), stable=True)


def by_z_order(height: int, width: int) -> Tensor:
    """Rows of a `height x width` grid in Z order, int64 `[height * width]`: squares of 2, 4, 8, ... stay together.

    Source: Morton (1966).
    """
    if min(height, width) < 1:
        raise ArgumentError("grid sizes are >= 1")
    y = torch.arange(height, device="cpu")[:, None]
    x = torch.arange(width, device="cpu")[None, :]
    key = torch.zeros(height, width, dtype=torch.int64, device="cpu")
    for bit in range(max(height, width).bit_length()):
        key |= (x >> bit & 1) << 2 * bit | (y >> bit & 1) << 2 * bit + 1
    return torch.argsort(key.flatten())


def named_order(name: str, q_len: int) -> Tensor | None:
    """The row order a mask asks for by name, int64 `[q_len]`; None when it does not fit this length.

    Args:
        name: `remainder STRIDE`, or `patch HEIGHT WIDTH PATCH_HEIGHT PATCH_WIDTH`.
        q_len: number of query rows.
    """
    order_name, *numbers = name.split()
    sizes = [int(number) for number in numbers]
    if order_name == "remainder" and len(sizes) == 1:
        return by_remainder(q_len, *sizes)
    if order_name == "patch" and len(sizes) == 4:
        return by_patch(*sizes) if sizes[0] * sizes[1] == q_len else None
    raise ArgumentError(f"a row order is 'remainder S' or 'patch H W PH PW', got {name!r}")
