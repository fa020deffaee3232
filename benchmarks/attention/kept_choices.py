"""`python -m benchmarks kept`: what choices that are kept for the structure of a mask cost, by the cost model.

Masks of each structure come one after another. The first half fills a registry, as the first steps of a training run
do; for the second half, the estimate of the choice that is kept is compared with the best estimate for the mask itself.
Nothing runs: the estimates are those of an H200.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stof import masks
from stof.layout import LayoutConfig
from stof.masks import Mask, transposed
from stof.plans.filled import is_fillable, keep_choice, keep_tiling
from stof.plans.kept_choices import KeptByStructure, KeptChoices, structure_key
from stof.selection import CallSpec, KernelChoice, MaskGeometry, candidates
from stof.selection.backward_tilings import (
    BackwardTiling,
    best_tiling,
    compiled_by,
    critical_load,
    head_groups,
    tiles_of,
    triton_tilings,
)
from stof.selection.compiled import compiled_or_best
from stof.selection.cost_model import estimate
from stof.selection.device_model import DEFAULT_DEVICE, load_model
from stof.selection.gpu_choices import for_call, is_l2_bound
from stof.testing.mask_grid import Shape

_GPU = torch.device("cuda")
# What the cost model does not tell of choices that are bound by the L2 cache, for each doubling of the tiles of a row
# block beyond 8: see `stof.selection.gpu_choices`.
_L2_BOUND = 0.08
SHAPES = ("1,12,64,4096", "1,32,8,128,4096,4096")


@dataclass(frozen=True)
class Regret:
    """One mask under a choice that was made for another.

    Attributes:
        structure, mask: its name, and the repr of the mask.
        direction: "forward" or "backward".
        kept_us, best_us: estimates of the kept choice and of the best one for this mask.
        surveyed: no choice was kept for masks like this one; `kept_us` is that of the choice that is made.
    """

    structure: str
    mask: str
    direction: str
    kept_us: float
    best_us: float
    surveyed: bool

    @property
    def share(self) -> float:
        return self.kept_us / self.best_us - 1.0


def _log_uniform(draw: random.Random, low: float, high: float) -> int:
    return round(low * (high / low) ** draw.random())


def _documents(draw: random.Random, length: int, most: int = 400) -> Mask:
    """Documents of log-normal lengths, 4 to `most` of them."""
    parts = [draw.lognormvariate(0.0, 1.0) for _ in range(_log_uniform(draw, 4, most))]
    total, ends, passed = sum(parts), [0], 0.0
    for part in parts:
        passed += part
        ends.append(max(ends[-1] + 1, round(passed / total * (length - len(parts))) + len(ends)))
    ends[-1] = length
    return masks.documents(cu_seqlens=ends)


def _window(draw: random.Random, length: int) -> Mask:
    return masks.sliding_window(_log_uniform(draw, 64, length))


def _tensor(draw: random.Random, length: int) -> Mask:
    """Bool tensors from local to scattered: a window, rows and columns that are kept, and scores anywhere."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    keep = (i >= j) & (i - j < _log_uniform(draw, 32, length))
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    if draw.random() < 0.3:
        keep |= torch.rand(length, generator=generator) < draw.choice([0.002, 0.02])
    if draw.random() < 0.4:
        keep &= torch.rand(length, length, generator=generator) < draw.choice([0.01, 0.1, 0.5, 0.9])
    return masks.from_dense(keep)


def _padding(draw: random.Random, length: int) -> Mask:
    return masks.padding([draw.randint(length // 16, length) for _ in range(4)])


# By name: a mask of some length.
STRUCTURES: dict[str, Callable[[random.Random, int], Mask]] = {
    "causal-documents": lambda draw, length: _documents(draw, length) & masks.causal(),
    "documents": _documents,
    "window": _window,
    "document-window": lambda draw, length: _documents(draw, length, 40) & _window(draw, length),
    "tensor": _tensor,
    "padding": _padding,
    "causal-padding": lambda draw, length: _padding(draw, length) & masks.causal(),
    "dilated": lambda draw, length: masks.dilated_window(_log_uniform(draw, 64, length), dilation=4),
    "longformer": lambda draw, length: masks.longformer(_log_uniform(draw, 16, 512), _log_uniform(draw, 1, 128)),
    "bigbird": lambda draw, length: (
        masks.random_blocks(_log_uniform(draw, 1, 12), block_size=64, seed=draw.getrandbits(20)) | _window(draw, 1024)
    ),
}


class Measured:
    """One mask under one call, with the cost model of the default GPU."""

    def __init__(self, mask: Mask, call: CallSpec) -> None:
        self.mask, self.call = mask, call
        self.batch = call.batch
        self.geometry = self._geometry(mask)
        self.transposed = self._geometry(transposed(mask))
        self.model = load_model(DEFAULT_DEVICE)
        self.ranked = [
            one for one in candidates(call, _GPU, self.geometry, model=self.model) if one.estimate_us is not None
        ]

    def _geometry(self, mask: Mask) -> MaskGeometry:
        return MaskGeometry(mask, self.call.q_len, self.call.kv_len, batch=self.batch, heads=self.call.heads)

    def survey_of(self, layout: LayoutConfig, order: str | None, swap: bool = False) -> Any:
        geometry = self.transposed if swap else self.geometry
        known = (counts for (counted, by), counts in geometry._surveys.items() if by == order and layout in counted)
        return next(known, None) or geometry.survey((layout,), order)

    def forward_us(self, choice: KernelChoice) -> float:
        """The estimate of a choice."""
        assert choice.layout is not None
        survey = self.survey_of(choice.layout, choice.row_order)
        us, best_us = estimate(choice, self.call, survey, self.model), self.ranked[0].estimate_us
        assert us is not None
        assert best_us is not None
        if not is_l2_bound(choice, self.call, survey):
            return max(us, best_us)  # the list of candidates leaves out those that differ from another in nothing
        counts = survey.counts[choice.layout]
        tiles = float((counts.partial + counts.full).double().mean())
        return max(us, best_us * (1.0 + _L2_BOUND * max(0.0, math.log2(tiles / 8))))

    def geometry_of(self, swap: bool) -> MaskGeometry:
        """That of the mask, or of the transposed mask."""
        return self.transposed if swap else self.geometry

    def backward_us(self, tiling: BackwardTiling) -> float:
        """The estimate of a tiling."""
        us = 0.0
        for kernel, chosen, config in (("dq", tiling.dq_layout, tiling.dq), ("dkv", tiling.dkv_layout, tiling.dkv)):
            assert chosen is not None
            assert config is not None
            layout, order = chosen
            tile = next(
                t for t in tiles_of(kernel, self.call) if (t.rows, t.columns) == (layout.block_m, layout.block_n)
            )
            times = self.model.backward[tile.key(kernel, self.call)]
            counts = self.survey_of(layout, order, swap=kernel == "dkv").counts[layout]
            groups = head_groups(kernel, self.call)
            load = critical_load(tile, counts, config.split_tiles, *groups, self.model, times)
            us += float(load @ times.weights())
        return us


def regrets(
    shape: Shape, names: list[str], count: int, seed: int = 0, progress: Callable[[str], None] = lambda text: None
) -> list[Regret]:
    """The regret of kept choices under `count` masks of each structure, after as many that fill the registry."""
    results: list[Regret] = []
    for name in names:
        registry = KeptByStructure()
        draw = random.Random(f"{seed} {name}")
        for n in range(2 * count):
            length = draw.choice([shape.q_len, 64 * draw.randint(shape.q_len // 128 + 1, shape.q_len // 64)])
            mask = STRUCTURES[name](draw, length)
            batch = max(shape.batch, mask.batch)
            call = CallSpec(
                "cuda", torch.bfloat16, shape.head_dim, shape.head_dim, shape.heads, shape.kv_heads, batch=batch,
                q_len=length, kv_len=length, compute_capability=(9, 0),
            )  # fmt: skip
            one = Measured(mask, call)
            for direction, served in (("forward", _forward), ("backward", _backward)):
                kept = registry.of(structure_key(one.geometry, call, direction))
                kept_us, best_us, surveyed = served(kept, one)
                if n >= count:
                    results.append(Regret(name, repr(mask)[:80], direction, kept_us, best_us, surveyed))
        progress(name)
    return results


def _forward(kept: KeptChoices, one: Measured) -> tuple[float, float, bool]:
    """The estimates of the choice that serves a mask, and of the best, and whether the mask was surveyed."""
    best = one.ranked[0]
    assert best.estimate_us is not None
    assert best.choice is not None
    near = kept.near(one.geometry.statistics)
    if near is not None and near.choice.row_order in (None, *one.geometry.row_orders):
        if is_fillable(near.choice):
            kept.compiled.add(near.choice.layout)
        return one.forward_us(for_call(near.choice, one.call)), best.estimate_us, False
    if near is None and kept.may_count:
        whole = {c.choice: c.estimate_us or 0.0 for c in one.ranked if c.choice is not None and is_fillable(c.choice)}
        choice = compiled_or_best(whole, lambda choice: choice.layout in kept.compiled)
        kept.compiled.add(choice.layout)
        kept.keep(one.geometry.statistics, choice, repr(one.mask))
        return one.forward_us(choice), best.estimate_us, False
    keep_choice(kept, one.geometry, one.ranked, best.choice, repr(one.mask))
    return best.estimate_us, best.estimate_us, True


def _backward(kept: KeptChoices, one: Measured) -> tuple[float, float, bool]:
    """The same for gradients."""
    best = triton_tilings(one.call, one.geometry_of)[0]
    best_us = one.backward_us(best)
    near = kept.near(one.geometry.statistics)
    if near is not None:
        kept.compiled |= compiled_by(near.choice)
        return one.backward_us(near.choice), best_us, False
    if kept.may_count:
        tiling, _ = best_tiling(one.call, one.geometry_of, whole_tiles=True, compiled=kept.compiled)
        kept.compiled |= compiled_by(tiling)
        kept.keep(one.geometry.statistics, tiling, repr(one.mask))
        return one.backward_us(tiling), best_us, False
    keep_tiling(kept, one.call, one.geometry_of, best, repr(one.mask))
    return best_us, best_us, True
