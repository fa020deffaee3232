"""Whole models: backend "stof" against torch.compile, same masks, same weights.

Every way is checked against the model in float32, run eagerly, before it is timed; a wrong one has no time. Ways run
one after another, each compiled afresh: compiled versions of one class slow each other's calls down.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from benchmarks.failures import first_line
from benchmarks.models.attention_peers import with_attention
from stof.errors import ArgumentError
from stof.testing.models import CAUSAL, Case, build, inputs_of, mask_of
from stof.tuning.timing import wall_us

# Below this the outputs are not those of the model, unless half precision alone takes it there: see `lowest_cosine`.
COSINE = 0.999
AUTOTUNE = "max-autotune"
_MODES = {"default": None, "reduce-overhead": "reduce-overhead", AUTOTUNE: AUTOTUNE}
_KINDS = ("sdpa", "flex")
COMPILED = tuple(f"{mode}-{kind}" for mode in _MODES for kind in _KINDS)
PEERS = (*(f"eager-{kind}" for kind in _KINDS), *COMPILED)
# With our attention and no templates; with templates by rule, with norms folded, with a graph of the whole model (norms
# folded too), each also with the scheme searched for.
ATTENTION = "stof-attention"
OURS = (
    ATTENTION,
    *(f"stof{how}{effort}" for how in ("", "-folded", "-whole") for effort in ("", "-quick", "-full")),
)
# What a comparison needs at the least, and its name on the command line.
GROUPS = {"peers": COMPILED, "ours": (ATTENTION, "stof-folded", "stof-whole")}
KEY = ("model", "batch", "seq", "mask", "dtype", "impl")


@dataclass(frozen=True)
class Way:
    """A case and one way to run it: the fields of `KEY`."""

    model: str
    batch: int
    seq: int
    mask: str
    dtype: str
    impl: str


@dataclass(frozen=True)
class Row(Way):
    """What came of a way; `ms` is None when it was wrong or failed (`problem` says how).

    `rested_ms` is of single calls, each after a rest; None where those were not asked for.
    """

    ms: float | None
    first_call_s: float
    cosine: float | None
    problem: str = ""
    rested_ms: float | None = None


@dataclass(frozen=True)
class Plan:
    """How cases are run: dtype, timed calls, seconds that each search may take, and of rest before single calls."""

    device: torch.device
    dtype: torch.dtype
    rounds: int = 20
    budget_s: float | None = None
    rest_s: float = 0.0

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Subject:
    """A case ready to run: the model in its dtype, inputs, float32's result and the least cosine to it."""

    case: Case
    model: nn.Module
    inputs: dict[str, Tensor]
    exact: Tensor
    least: float

    @staticmethod
    def of(case: Case, device: torch.device, dtype: torch.dtype) -> Subject:
        with torch.device(device):  # where drawing a billion weights takes no time
            model = build(case.model, case.seq)
        inputs = inputs_of(case, device)
        with torch.no_grad():
            changed, arguments = with_attention(model, case, "sdpa", device)
            exact = changed(**inputs, **arguments)[0].double().flatten()
            model.to(dtype)
            inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
            changed.to(dtype)
            plain = changed(**inputs, **arguments)[0].double().flatten()
        return Subject(case, model, inputs, exact, lowest_cosine(float(F.cosine_similarity(plain, exact, 0))))


def lowest_cosine(plain: float) -> float:
    """What an implementation must reach: 0.999, or half again the distance of plain eager half precision (`plain`).

    A 1.0 B LLaMA of random weights is at 0.9985 in float16 whoever runs it.
    """
    return min(COSINE, 1 - 1.5 * (1 - plain))


def impls_of(text: str) -> list[str]:
    """Ways by their names and those of groups (`GROUPS`), separated by spaces.

    Raises:
        ArgumentError: an unknown name.
    """
    found = [impl for word in text.split() for impl in GROUPS.get(word, (word,))]
    for impl in found:
        if impl not in (*PEERS, *OURS):
            raise ArgumentError(
                f"unknown implementation {impl!r}; there are {', '.join((*PEERS, *OURS))}, and the groups "
                f"{', '.join(GROUPS)}"
            )
    return list(dict.fromkeys(found))


def in_order(cases: Sequence[Case], impls: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """What to run one after another, so that a stop loses little.

    Case by case all but max-autotune, whose compiling takes longest; then that, first with the attention that is mostly
    faster: FlexAttention in causal models (windows), SDPA in others.
    """
    yield from ((case, impl) for case in cases for impl in impls if not impl.startswith(AUTOTUNE))
    for likely in (True, False):
        for case in cases:
            slow = [impl for impl in impls if impl.startswith(AUTOTUNE)]
            yield from ((case, impl) for impl in slow if (impl.endswith("flex") == (case.model in CAUSAL)) is likely)


def prepared(
    model: nn.Module, case: Case, impl: str, device: torch.device, budget_s: float | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A compiled copy of the model, and further arguments of its calls.

    Raises:
        ArgumentError: an unknown implementation.
    """
    (impl,) = impls_of(impl)
    if impl in OURS:
        return _ours(model, case, impl, budget_s), {}
    mode, kind = impl.rsplit("-", 1)
    changed, arguments = with_attention(model, case, kind, device)
    if mode != "eager":
        compiled: Any = torch.compile(changed, mode=_MODES[mode], dynamic=False)
        return compiled, arguments
    return changed, arguments


def _ours(model: nn.Module, case: Case, impl: str, budget_s: float | None) -> nn.Module:
    changed = copy.deepcopy(model)
    if impl == ATTENTION:
        stof.optimize(changed, mask=mask_of(case), pack=False)
        compiled: Any = torch.compile(changed, mode="reduce-overhead", dynamic=False)
        return compiled
    words = impl.split("-")
    options: dict[str, Any] = {
        "fold": "folded" in words or "whole" in words,
        "cuda_graphs": "whole" if "whole" in words else True,
    }
    if words[-1] in ("quick", "full"):
        options |= {"effort": words[-1], "budget_s": budget_s}
    return stof.optimize(changed, mask=mask_of(case), dynamic=False, report=True, **options)


def run_case(case: Case, impls: Iterable[str], plan: Plan) -> list[Row]:
    """Check and time every implementation."""
    subject = Subject.of(case, plan.device, plan.dtype)
    return [run_way(subject, impl, plan) for impl in impls]


def run_way(subject: Subject, impl: str, plan: Plan) -> Row:
    """Check one implementation, then take the wall time of a call, results awaited."""
    torch.compiler.reset()
    case, start = subject.case, time.perf_counter()
    cosine, problem, ms, rested, first = None, "", None, None, 0.0
    try:
        with torch.no_grad():
            compiled, arguments = prepared(subject.model, case, impl, plan.device, plan.budget_s)
            call = partial(compiled, **subject.inputs, **arguments)
            out = call()[0]
            cosine = float(F.cosine_similarity(out.double().flatten(), subject.exact, 0))
            first = time.perf_counter() - start
            del out
            if cosine < subject.least:
                problem = f"WRONG: cosine {cosine:.6f} to float32"
            else:
                ms = wall_us({impl: call}, plan.device, rounds=plan.rounds)[impl] / 1e3
                if plan.rest_s:
                    taken = wall_us({impl: call}, plan.device, rounds=plan.rounds, rest=plan.rest_s)
                    rested = taken[impl] / 1e3
    except Exception as failure:  # whatever a compiler or a model raises must not end the comparison
        problem = first_line(failure)
    return Row(case.model, case.batch, case.seq, case.mask, plan.dtype_name, impl, ms, first, cosine, problem, rested)


def speedups(rows: Iterable[Row]) -> dict[Row, float]:
    """For each way that is not ours: its time over that of the fastest of ours in the same case and dtype."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.ms is not None:
            cases.setdefault((row.model, row.batch, row.seq, row.mask, row.dtype), []).append(row)
    found: dict[Row, float] = {}
    for ways in cases.values():
        ours = min((row.ms for row in ways if row.impl in OURS and row.ms is not None), default=None)
        if ours is not None:
            found |= {row: row.ms / ours for row in ways if row.impl not in OURS and row.ms is not None}
    return found
