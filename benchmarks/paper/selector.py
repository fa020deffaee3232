"""The paper's rules for choosing a kernel and its blocks, against our cost model and what is measured.

The paper (arXiv 2506.06095) chooses the row-wise or the block-wise kernel by Eq. 1, and in a second phase the block
sizes of the block-wise kernel by a score. Both choose among the layouts that can be measured here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.paper.attention import race_cell
from benchmarks.paper.experiment import Cell, Report, Row
from benchmarks.peers.mask_formats import MaskMod, WrittenMask
from stof import masks
from stof.calibration.layout_alternatives import Alternative, estimated, measured
from stof.calibration.measure import call_of
from stof.layout import Layout, LayoutConfig, build_layout
from stof.masks import Mask
from stof.selection.device_model import load_model
from stof.selection.implementations import gpu_of
from stof.testing.mask_grid import GRID, GridMask, Shape

TAU = 1.2  # in the paper; 1 in its published script
TAUS = (1.2, 1.0)
_BLOCK = 16
_WARPS_PER_SM = 64
# Keys that each query sees on either side of its own position.
BANDS = {f"band {2 * reach + 1}": reach for reach in (0, 1, 4, 45)}
DENSITIES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)

# One for every length. No constant of the cost model was fitted to them: leave their measurements out of every fit.
SHAPES = tuple(
    map(
        Shape.parse,
        (
            "5,6,6,64,128,128",
            "2,20,5,128,256,256",
            "7,12,12,64,512,512",
            "3,10,10,96,1024,1024",
            "2,28,4,128,2048,2048",
            "1,14,14,64,4096,4096",
            "2,6,6,128,8192,8192",
            "1,4,4,64,16384,16384",
        ),
    )
)
# How many of the best estimates are timed, besides the choices of the rules.
_TIMED = 10
BEST, OURS = "best measured", "stof"
# What `unseen_cells` times. Native attention would need memory for all scores; compiled, it is up to 9 % faster than
# the fastest of these, at 256 tokens and fewer (figure 9).
RACED = ("stof", "flex", "sdpa", "sdpa-native", "sdpa-cudnn", "flash-2")


def paper_choice(layout: Layout, tau: float = TAU) -> str:
    """`row_wise` or `block_wise` by Eq. 1 of STOF (arXiv 2506.06095).

    `load_row_ptr[n] / n^2 - tau / (log2 n)^2 < 0` takes the row-wise kernel, with `n = ceil(S / 16)` rows of 16 x 16
    blocks, `load_row_ptr[n]` the blocks to load, and tau = 1.2.

    Args:
        layout: built with 16 x 16 contiguous tiles; its first pattern decides.

    Raises:
        ValueError: the layout has other tiles.
    """
    config = layout.config
    if (config.block_m, config.block_n, config.slab) != (_BLOCK, _BLOCK, None):
        raise ValueError(f"Eq. 1 counts 16 x 16 blocks, got {config}")
    n = max(2, math.ceil(max(layout.q_len, layout.kv_len) / _BLOCK))
    loaded = int(layout.row_block_ptr[layout.row_blocks])
    return "row_wise" if loaded / n**2 - tau / math.log2(n) ** 2 < 0 else "block_wise"


def block_score(block_m: int, block_n: int, shape: Shape, resident: float, multiprocessors: int) -> float:
    """The score of the paper's second phase, without a unit; the block sizes where it is highest are taken.

    Occupancy x batch x S x heads x sqrt(multiprocessors x (S / BLOCK_M) x batch / (BLOCK_M x BLOCK_N)), S = q_len.

    Args:
        block_m, block_n: rows and columns of a tile.
        shape: the call.
        resident: occupancy, 0 to 1, the share of a multiprocessor's warps that thread blocks of this size fill.
        multiprocessors: of the GPU.
    """
    inner = multiprocessors * (shape.q_len / block_m) * shape.batch / (block_m * block_n)
    return resident * shape.batch * shape.q_len * shape.heads * math.sqrt(inner)


def paper_pick(kind: str, listed: Sequence[Alternative], score: Callable[[Alternative], float]) -> Alternative | None:
    """What the paper's rules take of the layouts there are; None where none is of that kind.

    The paper has contiguous tiles and rows in their own order.

    Args:
        kind: of `paper_choice`.
        score: `block_score` of an alternative.
    """
    if kind == "row_wise":
        return next((one for one in listed if one.choice.implementation == "row_wise"), None)
    tiles = [
        one
        for one in listed
        if one.choice.implementation in ("block_wise", "hopper")
        and one.choice.row_order is None
        and one.choice.layout is not None
        and one.choice.layout.slab is None
    ]
    return max(tiles, key=score, default=None)


def random_mask(length: int, device: torch.device, density: float) -> Mask:
    """Scores kept independently of each other, seed 0. Devices draw different ones; the CPU would take long."""
    generator = torch.Generator(device).manual_seed(0)
    keep = torch.empty(length, length, dtype=torch.bool, device=device)
    for start in range(0, length, 1024):  # a float of each score would take 1 GB at 16384
        rows = min(1024, length - start)
        keep[start : start + rows] = torch.rand(rows, length, generator=generator, device=device) < density
    return masks.from_dense(keep)


def single_keys(length: int, device: torch.device) -> Mask:
    """One key for each query, anywhere."""
    keys = torch.randint(length, (length, 1), generator=_generator()).to(device)
    return masks.from_dense(torch.zeros(length, length, dtype=torch.bool, device=device).scatter_(1, keys, True))


def random_blocks(length: int, device: torch.device, block: int, density: float) -> Mask:
    """Square blocks of scores kept independently of each other, seed 0."""
    count = math.ceil(length / block)
    keep = (torch.rand(count, count, generator=_generator()) < density).to(device)
    return masks.from_dense(keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:length, :length])


def random_keys(length: int, device: torch.device, density: float) -> Mask:
    """The same random keys for all queries, each kept with probability `density`, seed 0."""
    keys = (torch.rand(1, length, generator=_generator()) < density).to(device)
    return masks.from_dense(keys.expand(length, length))


def random_documents(length: int, device: torch.device) -> Mask:
    """Documents one after another, about 8, with random bounds, seed 0."""
    document = (torch.rand(length, generator=_generator()) < 8 / length).cumsum(0).to(device)
    return masks.from_dense(document[:, None] == document)


def _generator() -> torch.Generator:
    """Seed 0 on the CPU: the same mask on every device."""
    return torch.Generator("cpu").manual_seed(0)


def mask_makers() -> dict[str, Callable[[int, torch.device], Mask]]:
    """The masks of the table by name, for a length and a device."""
    made: dict[str, Callable[[int, torch.device], Mask]] = {
        f"random {100 * density:g} %": partial(random_mask, density=density) for density in DENSITIES
    }
    made |= {name: partial(_band, reach) for name, reach in BANDS.items()}
    made |= {name: partial(_of_grid, name) for name in GRID}
    made |= {
        "single keys": single_keys,
        "blocks of 32, 10 %": partial(random_blocks, block=32, density=0.1),
        "blocks of 64, 30 %": partial(random_blocks, block=64, density=0.3),
        "keys 5 %": partial(random_keys, density=0.05),
        "causal and random 20 %": lambda length, device: masks.causal() & random_mask(length, device, 0.2),
        "window 129 or random 1 %": lambda length, device: (
            masks.sliding_window(64, 64) | random_mask(length, device, 0.01)
        ),
        "causal and blocks of 64, 20 %": lambda length, device: (
            masks.causal() & (masks.sliding_window(63) | random_blocks(length, device, 64, 0.2))
        ),
        "causal documents": lambda length, device: masks.causal() & random_documents(length, device),
        "documents and random 50 %": lambda length, device: (
            random_documents(length, device) & random_mask(length, device, 0.5)
        ),
    }
    return made


def row_name(name: str, shape: Shape) -> str:
    """The mask in rows, with what a row's key lacks of the shape: heads, key heads and their width."""
    return f"{name}, H{shape.heads}/{shape.kv_heads} D{shape.head_dim}"


def _band(reach: int, length: int, device: torch.device) -> Mask:
    del length, device
    return masks.sliding_window(reach, reach)


def _of_grid(name: str, length: int, device: torch.device) -> Mask:
    del device
    return GRID[name].mask(length)


def cells(device: torch.device, dtype: torch.dtype) -> list[Cell]:
    """Every mask at every shape, shuffled, so that a partial run is a sample.

    Empty without a GPU, where there is one kernel.
    """
    if device.type != "cuda":
        return []
    impls = (OURS, *(f"Eq. 1, tau {tau:g}" for tau in TAUS), BEST)
    listed = [
        Cell(
            ("selector",),
            tuple(Row("selector", row_name(name, shape), "", shape.batch, shape.q_len, impl) for impl in impls),
            partial(_measure, make=make, shape=shape, device=device, dtype=dtype),
        )
        for shape in SHAPES
        for name, make in mask_makers().items()
    ]
    random.Random(0).shuffle(listed)
    return listed


def unseen_cells(device: torch.device, dtype: torch.dtype) -> list[Cell]:
    """The masks and shapes of `cells`, our choice against other libraries. On the CPU two masks at one tiny shape."""
    shapes, names = SHAPES, list(mask_makers())
    if device.type == "cpu":
        shapes, names = (Shape(1, 2, 2, 16, 96, 96),), ["causal", "keys 5 %"]
    listed = []
    for shape in shapes:
        for name in names:
            mask, label = raced_mask(name, device), row_name(name, shape)
            listed.append(race_cell(("unseen",), mask, shape, device, dtype, figure="unseen", label=label, names=RACED))
    random.Random(0).shuffle(listed)
    return listed


def raced_mask(name: str, device: torch.device) -> GridMask:
    """A mask of `mask_makers` as other libraries take it; for FlexAttention a look-up unless `GRID` has a function."""
    if name in GRID:
        return GRID[name]
    make = mask_makers()[name]

    def mod(length: int, device: torch.device) -> MaskMod:
        keep = make(length, device).to_dense(length, device=device)[0, 0]
        return lambda b, h, q, k: keep[q, k]

    window = (BANDS[name], BANDS[name]) if name in BANDS else None
    return WrittenMask(name, lambda length: make(length, device), dense_like=False, window=window, mod=mod)


def _measure(
    wanted: Sequence[Row],
    report: Report,
    timed: bool,
    *,
    make: Callable[[int, torch.device], Mask],
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    length = shape.q_len
    mask = make(length, device)
    gpu = torch.cuda.get_device_name(device)
    model, call = load_model(gpu), call_of(shape, dtype)
    blocks = build_layout(mask, length, length, LayoutConfig(_BLOCK, _BLOCK), device=device)

    def score(one: Alternative) -> float:
        layout, kernel = one.choice.layout, one.choice.kernel
        assert layout is not None
        assert kernel is not None
        resident = gpu_of(one.choice).occupancy(one.choice, call, model.shared_bytes) * kernel.num_warps / _WARPS_PER_SM
        return block_score(layout.block_m, layout.block_n, shape, resident, model.multiprocessors)

    unfit: dict[Hashable, str] = {}
    while True:  # until every chosen layout fits, as a plan does
        listed = estimated(mask, shape, dtype, gpu, device, unfit)
        picked = {f"Eq. 1, tau {tau:g}": paper_pick(paper_choice(blocks, tau), listed, score) for tau in TAUS}
        picked[OURS] = listed[0]
        row_wise = paper_pick("row_wise", listed, score)
        chosen = list(dict.fromkeys((*listed[:_TIMED], *filter(None, (*picked.values(), row_wise)))))
        times = {one.choice: one for one in measured(mask, shape, dtype, device, only=chosen, rounds=3 if timed else 1)}
        for alternative in times.values():
            us, estimate_us = alternative.measured_us, alternative.estimate_us
            report(f"    {alternative.note or f'{us:.2f} us, estimate {estimate_us:.2f}'}: {alternative.choice}")
        refused = {choice.layout_key: one.note for choice, one in times.items() if one.measured_us is None}
        # A wrong result stays in the table, without a time.
        refused = {key: note for key, note in refused.items() if not note.startswith("wrong")}
        if not refused:
            break
        unfit |= refused
    best = min((one for one in times.values() if one.measured_us), key=lambda one: one.measured_us or math.inf)
    picked[BEST] = best
    found = []
    for row in wanted:
        one = picked[row.impl]
        us = None if one is None else times[one.choice].measured_us
        note = "there is no such layout" if one is None else times[one.choice].note or str(one.choice)
        found.append(replace(row, us=us, note=note))
        if us and best.measured_us:
            report(f"  {row.impl}: {us:.1f} us, regret {us / best.measured_us - 1:.0%}, {note}")
    return found
