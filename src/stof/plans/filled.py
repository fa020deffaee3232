"""Lists of new masks, filled on the device under a choice that was made for another mask of their structure."""

from __future__ import annotations

from stof.kernels.fill.tiles import TileFill, start_fill
from stof.kernels.hopper.filled_lists import prepare_filled
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.triton.backward_tiles import PreparedBackward, filled_backward_tiles
from stof.layout import LayoutConfig
from stof.selection import KernelChoice, MaskGeometry
from stof.selection.backward_tilings import BackwardTiling


def is_fillable(choice: KernelChoice) -> bool:
    """Whether the lists of a choice can be filled: whole tiles of the Hopper kernel in 16 bits, rows in order."""
    kernel, layout = choice.kernel, choice.layout
    return (
        choice.implementation == "hopper"
        and layout is not None
        and _has_whole_tiles((layout, choice.row_order))
        and kernel is not None
        and not (kernel.split_tiles or kernel.paired or kernel.zero_unseen)
    )


def is_fillable_backward(tiling: BackwardTiling) -> bool:
    """The same of the Triton kernels for gradients."""
    layouts, kernels = (tiling.dq_layout, tiling.dkv_layout), (tiling.dq, tiling.dkv)
    whole = all(layout is not None and _has_whole_tiles(layout) for layout in layouts)
    return whole and all(kernel is not None and not kernel.split_tiles for kernel in kernels)


def _has_whole_tiles(layout: tuple[LayoutConfig, str | None]) -> bool:
    config, row_order = layout
    return row_order is None and config.slab is None and config.block_n % 32 == 0


def fill_forward(geometry: MaskGeometry, choice: KernelChoice) -> PreparedTiles | None:
    """The lists of a fillable choice; None for masks that the kernels that fill do not serve."""
    assert choice.layout is not None and choice.kernel is not None
    fill = _start(geometry, choice.layout)
    counts = None if fill is None else fill.counts()
    if fill is None or counts is None:
        return None
    filled = fill.write(*counts, every_column=False)
    lengths = geometry.q_len, geometry.kv_len
    return prepare_filled(filled, lengths, choice.layout.block_n, choice.kernel)


def fill_backward(
    geometry: MaskGeometry, transposed: MaskGeometry, tiling: BackwardTiling
) -> PreparedBackward | None:
    """The lists of a fillable tiling, of the mask and of the transposed mask; None as for `fill_forward`."""
    assert tiling.dq_layout and tiling.dkv_layout and tiling.dq and tiling.dkv
    # Both are counted before the host waits for either.
    fills = _start(geometry, tiling.dq_layout[0]), _start(transposed, tiling.dkv_layout[0])
    counts = [None if fill is None else fill.counts() for fill in fills]
    tiles = [
        filled_backward_tiles(fill.write(*count, every_column=True), rows)
        for fill, count, rows in zip(fills, counts, (geometry.q_len, transposed.q_len), strict=True)
        if fill is not None and count is not None
    ]
    if len(tiles) < len(fills):
        return None
    return PreparedBackward(tiles[0], tiling.dq, tiles[1], tiling.dkv)


def _start(geometry: MaskGeometry, config: LayoutConfig) -> TileFill | None:
    mask, sizes = geometry.mask, (geometry.batch, geometry.heads)
    return start_fill(
        mask, geometry.q_len, geometry.kv_len, mask.dims(*sizes, geometry.device), config.block_m, config.block_n,
        device=geometry.device,
    )  # fmt: skip
