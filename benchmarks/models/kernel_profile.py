"""Where a model's GPU time goes: its kernels in the order they ran, by what they compute, and the gaps between them.

Taken by PyTorch's profiler over some calls. A kernel's share is the time from the end of all before it to its own end:
kernels that are set up while the one before still runs (programmatic dependent launch) wait, and waiting is no work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.models.compare import KEY as WAY_KEY
from benchmarks.models.compare import Plan, Subject, Way, prepared

# The first found in a kernel's name says what it computes. Inductor's templates (`triton_tem`) are products, its
# attention apart; its other kernels have everything that was fused in their names.
_KINDS = (
    ("copy", r"memcpy|memset"),
    ("Inductor's", r"triton_(poi|red|per|for)"),
    ("attention", r"attention|flash|fmha|block_wise|forward_kernel|row_wise|cudnn.*sdpa"),
    ("norm", r"row_norm|merged_norm|row_statistics"),
    ("product", r"gemm|nvjet|cutlass|cublas|splitk|triton_tem|triton_mm|chain_kernel"),
)
REST, GAPS, LONGEST = "other", "gaps", "longest gap"
# Calls before the profiled ones: CUDA graphs are recorded by then.
_BEFORE = 4


@dataclass(frozen=True)
class Ran:
    """A kernel as it ran: name, and microseconds since some moment."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Share(Way):
    """Of one call: what ran under a name, how often, and its microseconds."""

    kind: str
    kernel: str
    times: float
    us: float


KEY = (*WAY_KEY, "kind", "kernel")


def kind_of(name: str) -> str:
    """What a kernel computes, by its name."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), REST)


def shares(ran: Iterable[Ran]) -> dict[str, tuple[int, float]]:
    """By name how often a kernel ran and its share in microseconds; `GAPS` are those between kernels.

    The longest of them is told apart: where calls are CUDA graphs, a graph begins some time after its inputs were
    copied. The shares add up to the time from the first start to the last end.
    """
    found: dict[str, tuple[int, float]] = {}

    def add(name: str, us: float) -> None:
        times, before = found.get(name, (0, 0.0))
        found[name] = times + 1, before + us

    gaps: list[float] = []
    done: float | None = None
    for one in sorted(ran, key=lambda one: one.start):
        if done is not None and one.start > done:
            gaps.append(one.start - done)
        begun = one.start if done is None else max(one.start, done)
        add(one.name, max(0.0, one.end - begun))
        done = one.end if done is None else max(done, one.end)
    for place, us in enumerate(sorted(gaps, reverse=True)):
        add(GAPS if place else LONGEST, us)
    return found


def profiled(call: Callable[[], object], device: torch.device, calls: int) -> list[list[Ran]]:
    """What ran on the GPU in each of some calls, each awaited."""
    from torch.profiler import ProfilerActivity, profile

    found = []
    for _ in range(calls):
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize(device)
        events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        found.append([Ran(event.name, event.time_range.start, event.time_range.end) for event in events])
    return found


def run_kernels(subject: Subject, impl: str, plan: Plan, calls: int = 3) -> list[Share]:
    """The shares of one way to run a case, by time; means over calls."""
    torch.compiler.reset()
    case = subject.case
    with torch.no_grad():
        compiled, arguments = prepared(subject.model, case, impl, plan.device, plan.budget_s)
        for _ in range(_BEFORE):
            compiled(**subject.inputs, **arguments)
        lists = profiled(lambda: compiled(**subject.inputs, **arguments), plan.device, calls)
    sums: dict[str, tuple[int, float]] = {}
    for ran in lists:
        for name, (times, us) in shares(ran).items():
            before = sums.get(name, (0, 0.0))
            sums[name] = before[0] + times, before[1] + us
    rows = [
        Share(case.model, case.batch, case.seq, case.mask, plan.dtype_name, impl,
              GAPS if name in (GAPS, LONGEST) else kind_of(name), name, times / calls, us / calls)
        for name, (times, us) in sums.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row.us)


def by_kind(rows: Sequence[Share]) -> dict[str, float]:
    """Microseconds of each kind, largest first."""
    found: dict[str, float] = {}
    for row in rows:
        found[row.kind] = found.get(row.kind, 0.0) + row.us
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
