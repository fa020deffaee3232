"""Which sequences of operators each template covers, and what it may be configured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stof.fusion.operators import NORMS, Kind
from stof.fusion.templates import ops, twins

_NORM = frozenset(NORMS)
_LINEAR = frozenset({Kind.LINEAR})
_ACTIVATION = frozenset({Kind.ACTIVATION})
_RESIDUAL = frozenset({Kind.RESIDUAL})
_GATE = frozenset({Kind.GATE})


@dataclass(frozen=True)
class Slot:
    """A place in a template's sequence: the kinds that fit, and whether it may stay empty."""

    kinds: frozenset[Kind]
    optional: bool = False


@dataclass(frozen=True)
class Problem:
    """What a template is asked to compute.

    Attributes:
        template: its name.
        m, n, k: rows of x, columns of the result, columns of x. The weight of gated_linear has 2 n rows.
        dtype, device: of all tensors.
        activation: "none" or a name; norm: "", "rms" or "layer"; scaled: the norm has a weight or a bias.
        bias, residual: whether there is one.
        transposed: the weight is stored as `[K, N]`.
    """

    template: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    activation: str = "none"
    norm: str = ""
    scaled: bool = False
    bias: bool = False
    residual: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Template:
    """One kernel template.

    Attributes:
        name: the operator's name after `stof::`.
        slots: the sequences it covers.
        twin: the same function in plain PyTorch.
        share: the share of cuBLAS's speed its matrix product is assumed to reach where nothing has been measured.
        widest: the largest N it serves, None for any.
    """

    name: str
    slots: tuple[Slot, ...]
    twin: Callable[..., Any]
    share: float
    widest: int | None = None

    @property
    def operator(self) -> torch._ops.OpOverload:
        """The `torch.library` operator that a graph calls."""
        return _OPERATORS[self.name]._opoverload

    def assign(self, kinds: tuple[Kind, ...]) -> tuple[int | None, ...] | None:
        """For each slot the place of the operator that fills it; None when the sequence is not covered."""
        places: list[int | None] = []
        at = 0
        for slot in self.slots:
            if at < len(kinds) and kinds[at] in slot.kinds:
                places.append(at)
                at += 1
            elif slot.optional:
                places.append(None)
            else:
                return None
        return tuple(places) if at == len(kinds) else None

    def configs(self, problem: Problem) -> list[str]:
        """Configurations worth measuring, the default ("") first; where the twin serves there is no other."""
        return [""]


_OPERATORS = {
    "linear": ops.linear,
    "norm_linear": ops.norm_linear,
    "gated_linear": ops.gated_linear,
    "linear_norm": ops.linear_norm,
}
# What the break-even table of docs/fusion.md asks for at K = 1024; measurements take its place.
_ASSUMED_SHARE = 0.76

TEMPLATES: tuple[Template, ...] = (
    Template(
        "linear",
        (Slot(_LINEAR), Slot(_ACTIVATION, optional=True), Slot(_RESIDUAL, optional=True)),
        twins.linear,
        _ASSUMED_SHARE,
    ),
    Template(
        "norm_linear",
        (Slot(_NORM), Slot(_LINEAR), Slot(_ACTIVATION, optional=True)),
        twins.norm_linear,
        _ASSUMED_SHARE,
    ),
    Template("gated_linear", (Slot(_LINEAR), Slot(_GATE)), twins.gated_linear, _ASSUMED_SHARE),
    Template(
        "linear_norm",
        (Slot(_LINEAR), Slot(_RESIDUAL, optional=True), Slot(_NORM)),
        twins.linear_norm,
        _ASSUMED_SHARE,
        widest=1024,  # one program reads a whole row of the result
    ),
)
