"""`python -m benchmarks build`: what compiling a mask costs, once and in every step, after it is checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import stof
from benchmarks.peers.mask_formats import mask_mod
from stof import LayoutConfig, masks
from stof.dynamic.plan import DynamicPlan
from stof.errors import ArgumentError
from stof.kernels.torch.reference import reference_attention
from stof.layout import build_layout
from stof.layout.extend import extend_layout
from stof.masks import Mask
from stof.masks.index import Index
from stof.testing.attention_check import TOLERANCE, relative_error
from stof.testing.mask_grid import GRID
from stof.tuning.timing import time_calls

# Tiles that suit most calls on a Hopper GPU; FlexAttention's blocks have the same size.
_CONFIG = LayoutConfig(128, 128)
_ROUNDS = 5
# Builds run for so long before they are timed: a GPU that has had little to do is slow. Those that take longer need no
# waking, and those that take very long are run once more only.
_AWAKE_MS, _LONG_MS = 100.0, 2000.0
# Layouts of up to this many queries and keys are compared with their masks, score by score.
_CHECKED = 8192


@dataclass(frozen=True)
class BuildRow:
    """One way to build one mask.

    Attributes:
        mask: name of the mask.
        q_len: queries, and keys.
        how: what builds it.
        ms: median wall time of a build that has run before, the host's included; None when it failed.
        first_ms: wall time of the first build in this process: compiling and warming up.
        gpu_us: GPU time of its kernels and copies, by themselves; the rest of `ms` is the host's, or waiting.
        kernels: the same by name.
        peak_mb: memory of the device used on top of what was allocated before.
        note: why it failed.
    """

    mask: str
    q_len: int
    how: str
    ms: float | None
    first_ms: float | None = None
    peak_mb: float | None = None
    note: str = ""
    gpu_us: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRow:
    """Attention under a mask that changes in every step, in microseconds of GPU time.

    Attributes:
        mask, q_len, heads, head_dim: the problem.
        density: share of the scores that the mask keeps, of the heads checked.
        update_us: building the work on the device.
        host_us: wall time until an eager update returns.
        attend_us: attention with the work there.
        step_us: both, captured and replayed together.
        best_us: attention with a plan that knew the mask ahead of time, by the choice the selector makes.
        static_build_ms: wall time of making that plan.
        error: largest error of the outputs against float64, relative to the largest value.
        plan_mb: memory of the dynamic plan.
        kernels: GPU time of each kernel of an eager update by itself, from PyTorch's profiler; empty on a CPU.
    """

    mask: str
    q_len: int
    heads: int
    head_dim: int
    density: float
    update_us: float
    host_us: float
    attend_us: float
    step_us: float
    best_us: float | None
    static_build_ms: float | None
    error: float
    plan_mb: float
    note: str = ""
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def overhead(self) -> float | None:
        """Time of a step over that of the best plan for a mask known ahead, less 1."""
        return None if self.best_us is None else self.step_us / self.best_us - 1.0


def _synchronized(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_build(mask: str, q_len: int, how: str, build: Callable[[], object], device: torch.device) -> BuildRow:
    """Run a build once, then for a while to wake the device up, then take the median; a failure is a row too."""

    def once() -> float:
        _synchronized(device)
        start = time.perf_counter()
        kept = build()
        _synchronized(device)
        taken = time.perf_counter() - start
        del kept
        return taken * 1e3

    try:
        first = once()
        before = 0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        rounds = [once()]
        while sum(rounds) < _AWAKE_MS and rounds[0] < _AWAKE_MS:
            rounds.append(once())
        if rounds[0] < _LONG_MS:
            rounds = [once() for _ in range(max(_ROUNDS, min(int(_AWAKE_MS / rounds[-1]), 10 * _ROUNDS)))]
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else None
        ms = statistics.median(rounds)
        kernels = kernel_us(build, device) if ms < _AWAKE_MS else {}
        gpu_us = sum(kernels.values()) if kernels else None
        return BuildRow(mask, q_len, how, ms, first, peak, gpu_us=gpu_us, kernels=kernels)
    except Exception as error:  # whatever a builder raises is its result; the first line says enough
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return BuildRow(mask, q_len, how, None, note=f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")


# ---- masks known ahead of time


@dataclass(frozen=True)
class Known:
    """A mask known ahead of time, for us and as FlexAttention's users would write it."""

    name: str
    q_len: int
    mask: Mask
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def known_masks(device: torch.device, small: bool, names: Sequence[str] = ()) -> Iterator[Known]:
    """Masks of the grid and of the issue's targets, or those named; `small` ones for machines without a GPU.

    Raises:
        ArgumentError: no mask has one of these names.
    """
    length = 1024 if small else 8192
    makers: dict[str, Callable[[], Known]] = {name: partial(_of_grid, name, length, device) for name in GRID}
    makers["documents"] = partial(_documents, "documents", length, length // 10, masks.causal(), device)
    makers["dense"] = partial(_dense, length, device)
    makers["function"] = partial(_function, 2048 if small else 65536)
    longest, document = (4096, 500) if small else (2**20, 30_000)
    makers["long-documents"] = partial(
        _documents, "long-documents", longest, document, masks.sliding_window(4095), device
    )
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise ArgumentError(f"unknown masks {', '.join(unknown)}; there are {', '.join(makers)}")
    for name in names or makers:
        yield makers[name]()


def _of_grid(name: str, length: int, device: torch.device) -> Known:
    grid = GRID[name]
    return Known(name, length, grid.mask(length), mask_mod(grid, length, length, device))


def _dense(length: int, device: torch.device) -> Known:
    dense = (torch.rand(length, length, device=device) < 0.01).tril()
    return Known("dense", length, masks.from_dense(dense), lambda b, h, q, k: dense[q, k])


def _function(length: int) -> Known:
    def window_and_sinks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q - k < 4096) | (k < 16))

    return Known("function", length, masks.from_function(window_and_sinks), window_and_sinks)


def _documents(name: str, length: int, document: int, band: Mask, device: torch.device) -> Known:
    """Documents of equal length within a band: causal, or the last 4096 keys."""
    reach = length if band == masks.causal() else 4096
    ids = (torch.arange(length, device=device) // document).int()
    mask = band & masks.documents(cu_seqlens=[*range(0, length, document), length])
    return Known(name, length, mask, lambda b, h, q, k: (q >= k) & (q - k < reach) & (ids[q] == ids[k]))


def known_rows(
    device: torch.device, small: bool, flex: bool, deadline: float, names: Sequence[str] = ()
) -> Iterator[BuildRow]:
    """Builds of masks known ahead of time, as for `known_masks`; after the deadline, ours alone."""
    from torch.nn.attention.flex_attention import create_block_mask

    for known in known_masks(device, small, names):
        length = known.q_len

        def ours(known: Known = known, length: int = length) -> object:
            return build_layout(known.mask, length, length, _CONFIG, device=device)

        # Timed first, since the first build in a process counts, but reported only when right.
        row = timed_build(known.name, length, f"stof {_CONFIG.block_m}x{_CONFIG.block_n}", ours, device)
        if length <= _CHECKED and row.ms is not None:
            kept = build_layout(known.mask, length, length, _CONFIG, device=device).to_dense()
            if not torch.equal(kept, known.mask.to_dense(length, device=device)):
                raise AssertionError(f"{known.name}: the layout keeps other scores than the mask")
            del kept
        yield row
        for how, compiled in (("create_block_mask", False), ("create_block_mask, compiled", True)):
            if not flex or time.monotonic() > deadline:
                continue
            if length >= 2**20 and not compiled:
                yield BuildRow(known.name, length, how, None, note="would need an S x S tensor of 1 TB")
                continue

            def theirs(known: Known = known, length: int = length, compiled: bool = compiled) -> object:
                return create_block_mask(
                    known.mask_mod, None, None, length, length, device=str(device), _compile=compiled
                )

            yield timed_build(known.name, length, how, theirs, device)


def growth_rows(device: torch.device, length: int) -> Iterator[BuildRow]:
    """A decoded token and a chunk of 512 added to a plan's layout, next to building it anew."""
    mask = masks.sliding_window(4095) | masks.sink_tokens(16)
    layout = build_layout(mask, length, length, _CONFIG, device=device)
    for rows in (1, 512):
        longer = length + rows

        def extend(longer: int = longer) -> object:
            return extend_layout(layout, mask, longer, longer)

        def rebuild(longer: int = longer) -> object:
            return build_layout(mask, longer, longer, _CONFIG, device=device)

        yield timed_build("window + sinks", length, f"extended by {rows}", extend, device)
        yield timed_build("window + sinks", length, f"rebuilt with {rows} more", rebuild, device)


# ---- masks made at run time


def step_masks(length: int, heads: int, device: torch.device) -> Iterator[tuple[str, Mask]]:
    """Name and mask of each mask made at run time."""
    generator = torch.Generator().manual_seed(0)

    def chosen(count: int, limit: int) -> Tensor:
        rows = [torch.randperm(limit, generator=generator)[:count].sort().values for _ in range(heads)]
        return torch.stack(rows).int().to(device)

    # As MInference finds them: a local band, some distances further back, some columns.
    near = length // 32
    band = torch.arange(near, dtype=torch.int32, device=device).expand(heads, -1)
    slash = torch.cat([band, chosen(min(64, near), length - near) + near], 1)
    yield "vertical-slash", masks.vertical_slash(chosen(near, length), slash)
    blocks = length // 64
    scores = torch.randn(heads, blocks, blocks, generator=generator).to(device)
    yield "block top-k", masks.block_topk(scores, max(1, blocks // 8), block_size=64, causal=True)


def step_rows(device: torch.device, length: int, heads: int, head_dim: int) -> Iterator[StepRow]:
    """Attention under masks made at run time, checked against float64 first."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, head_dim, generator=generator, device=device, dtype=dtype) for _ in range(3)
    )
    for name, mask in step_masks(length, heads, device):
        plan = stof.dynamic_plan(mask, length, heads=heads)
        out = stof.attention(q, k, v, plan)
        plan.check()
        error, kept = sampled_error(mask, q, k, v, out)
        if not error < TOLERANCE[dtype]:
            raise AssertionError(f"{name}: the output is off by {error:.2g} from float64")
        yield _stepped(name, mask, plan, q, k, v, error, kept)


def sampled_error(mask: Mask, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[float, float]:
    """Largest relative error on rows of the first and last head against float64, and the share of keys they keep."""
    heads, length = q.shape[1], q.shape[2]
    every = torch.arange(length, device=q.device)
    rows = torch.cat([every[:128], every[length // 2 : length // 2 + 64], every[-192:]]).unique()
    worst, kept = 0.0, []
    for head in sorted({0, heads - 1}):
        index = Index.make(
            rows, every, q_len=length, kv_len=length,
            h=torch.tensor([head], device=q.device),
        )  # fmt: skip
        keep = mask.evaluate(index)
        one = slice(head, head + 1)
        queries, keys, values = (x[:, one].double() for x in (q[:, :, rows], k, v))
        expected, _ = reference_attention(queries, keys, values, keep, scale=q.shape[-1] ** -0.5)
        worst = max(worst, relative_error(out[:, one, rows], expected))
        kept.append(float(keep[..., len(rows) // 2 :, :].float().mean()))
    if not bool(torch.isfinite(out).all()):
        worst = float("inf")
    return worst, statistics.mean(kept)


def _stepped(
    name: str, mask: Mask, plan: DynamicPlan, q: Tensor, k: Tensor, v: Tensor, error: float, density: float
) -> StepRow:
    device, (heads, length, head_dim) = q.device, q.shape[1:]

    def step() -> Tensor:
        plan.update(mask)
        return stof.attention(q, k, v, plan)

    calls: dict[str, Callable[[], object]] = {
        "update": lambda: plan.update(mask),
        "attend": lambda: stof.attention(q, k, v, plan),
        "step": step,
    }
    note, build_ms = "", None
    try:
        start = time.perf_counter()
        known = stof.plan(mask, length, heads=heads, device=device)
        stof.attention(q, k, v, known)
        _synchronized(device)
        build_ms = (time.perf_counter() - start) * 1e3
        calls["best"] = lambda: stof.attention(q, k, v, known)
    except (RuntimeError, ValueError) as problem:  # too large to build ahead of time
        note = f"static plan: {type(problem).__name__}: {str(problem).splitlines()[0][:80]}"
    found = time_calls(calls, device, rounds=_ROUNDS)
    times = {key: timing.gpu_us if timing.gpu_us is not None else timing.call_us for key, timing in found.items()}
    return StepRow(
        mask=name,
        q_len=length,
        heads=heads,
        head_dim=head_dim,
        density=density,
        update_us=times["update"],
        host_us=found["update"].call_us,
        attend_us=times["attend"],
        step_us=times["step"],
        best_us=times.get("best"),
        static_build_ms=build_ms,
        error=error,
        plan_mb=plan.bytes() / 2**20,
        note=note,
        kernels=kernel_us(lambda: plan.update(mask), device),
    )


def kernel_us(call: Callable[[], object], device: torch.device, *, calls: int = 5) -> dict[str, float]:
    """Median GPU time of each kernel and memory operation of a call, summed over those of one name."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize(device)
    taken: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        if event.device_type.name == "CUDA":
            taken.setdefault(event.name, []).append(event.device_time)
    return {name: statistics.median(times) * len(times) / calls for name, times in taken.items()}


def as_json(rows: list[BuildRow], steps: list[StepRow], meta: dict[str, Any]) -> dict[str, Any]:
    """What the output file holds."""
    return {
        "meta": meta,
        "builds": [asdict(r) for r in rows],
        "steps": [asdict(r) | {"overhead": r.overhead} for r in steps],
    }
