"""Choices made from shapes and recorded times: what runs without a search, and where a search starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType

from torch import fx

from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operators import NORMS, Kind, Operator
from stof.fusion.graph.scheme import MAX_COMPUTE_INTENSIVE, Scheme
from stof.fusion.graph.symbolic_shapes import size_hint
from stof.fusion.planner.match import FusionChoice, TemplateMatch, find_matches, insertion_point
from stof.fusion.records.choices import TunedConfig
from stof.fusion.templates.gemm_config import GemmShape
from stof.fusion.templates.registry import KernelPolicy
from stof.fusion.templates.row_buckets import bucket_of, format_table

# Floating-point operations of a large half-precision GEMM in the time of copying one byte: about 680 TFLOP/s over
# 4.2 TB/s on an H200. A pass over the [M, N] result of a GEMM then costs about 325 / K of the GEMM.
FLOPS_PER_BYTE = 162.0
# Bytes copied in a microsecond on an H200, measured (4.2 TB/s).
BYTES_PER_US = 4.2e6
# A GEMM with fewer operations (about 3 us on an H200; each byte of its operands counts as FLOPS_PER_BYTE operations)
# spends most of its time in launch, memory latency and kernel end: see `benchmarks/notes/fusion.md`.
FEW_FLOPS = 2e9
# Operators in the longest segment that a template covers.
MAX_OPS = 4


def is_latency_bound(shape: GemmShape, itemsize: int) -> bool:
    """Whether launch and memory latency dominate the time of a GEMM."""
    columns = shape.n * (2 if shape.gated else 1)
    flops = 2.0 * shape.m * columns * shape.k
    moved = (shape.m * shape.k + shape.m * shape.n + columns * shape.k) * itemsize
    return flops + moved * FLOPS_PER_BYTE <= FEW_FLOPS


def is_profitable(match: TemplateMatch, following: Operator | None = None) -> bool:
    """Estimate from shapes alone whether a match is faster than Inductor's code for its segment.

    A latency-bound GEMM always is: programmatic dependent launch hides part of its latency. Another GEMM is if the
    memory traffic saved outweighs a GEMM that runs at `cublas_fraction` of the speed of cuBLAS. The template saves
    passes over the tensors between the GEMM and its neighbours. For a norm before the GEMM it saves one pass, the write
    of the normalized rows. If `following`, the first reader of a residual, is memory-bound, Inductor fuses the addition
    there: count one pass less.
    """
    if is_latency_bound(match.problem.shape, match.problem.dtype.itemsize):
        return True
    inner = match.operators[:-1]
    between = [o for o in inner if o.kind is Kind.LINEAR or (o.kind in NORMS and o is match.operators[0])]
    passes = match.template.saved_passes - _inductor_fuses_residual(match, following)
    saved = sum((1 if o.kind in NORMS else passes) * _bytes(o) for o in between)
    shape = match.problem.shape
    flops = 2.0 * shape.m * shape.n * shape.k * (2 if shape.gated else 1)
    return saved * FLOPS_PER_BYTE >= flops * (1 / match.template.cublas_fraction - 1)


def _saved_us(match: TemplateMatch, tuned: TunedConfig, following: Operator | None) -> float:
    """Return the measured saving, less the pass that Inductor saves by fusing the residual into `following`."""
    shared = _bytes(match.operators[-1]) / BYTES_PER_US if _inductor_fuses_residual(match, following) else 0.0
    return tuned.inductor_us - tuned.template_us - shared


def first_reader(match: TemplateMatch, behind: Sequence[Operator]) -> Operator | None:
    """Return the first of the operators behind a match that reads its result."""
    return next((operator for operator in behind if match.operators[-1].root in operator.inputs), None)


def _inductor_fuses_residual(match: TemplateMatch, following: Operator | None) -> bool:
    """Whether a match ends with a residual addition that Inductor would fuse into its first reader.

    The reader is a norm in most models; T5 in float16 clamps infinities before the norm.
    """
    if following is None or following.kind.compute_intensive:
        return False
    return match.operators[-1].kind is Kind.RESIDUAL and match.operators[-1].root in following.inputs


def _bytes(operator: Operator) -> int:
    """Return the size of an operator's result in bytes."""
    value = operator.value
    return int(prod(size_hint(size) for size in value.shape)) * value.element_size()


def heuristic_choices(
    operators: Sequence[Operator],
    order: GraphOrder,
    policy: KernelPolicy,
    known: Mapping[str, TunedConfig] = MappingProxyType({}),
) -> dict[int, FusionChoice]:
    """Return choices by the first operator of their segments: from the left, the longest profitable segment.

    A GEMM alone is a segment too; unless it is latency-bound, a template saves nothing there. Recorded times (`known`)
    decide before estimates: the segment that saves most is chosen, even over one that begins earlier, and a segment
    that saves nothing is not chosen.
    """
    chosen: dict[int, FusionChoice] = {}
    at = 0
    while at < len(operators):
        choice, saved = _choice_at(operators, at, order, policy, known)
        end = at + 1 if choice is None else at + len(choice.match.operators)
        later = (_choice_at(operators, other, order, policy, known) for other in range(at + 1, end))
        if choice is None or (saved and any(more > saved for _, more in later)):
            at += 1
        else:
            chosen[at] = choice
            at = end
    return chosen


def _choice_at(
    operators: Sequence[Operator], at: int, order: GraphOrder, policy: KernelPolicy, known: Mapping[str, TunedConfig]
) -> tuple[FusionChoice | None, float]:
    """Return the choice for a segment that begins at an operator.

    The second value is the measured saving in microseconds, 0 without measurements.
    """
    by_rule: FusionChoice | None = None
    measured: FusionChoice | None = None
    saved = 0.0
    for length in range(min(MAX_OPS, len(operators) - at), 0, -1):
        for match in find_matches(operators[at : at + length], policy)[0]:
            if not isinstance(insertion_point(order, match), fx.Node):
                continue
            following = first_reader(match, operators[at + length :])
            tuned, configs = known.get(tuning_key(match, policy)), match.template.configs(match.problem, policy)
            if tuned is not None and match.template.as_candidate(match.problem, tuned.config) in configs:
                if _saved_us(match, tuned, following) > saved:
                    # The times hold for this bucket of rows alone.
                    rows = match.problem.shape.m
                    config = format_table({bucket_of(rows): tuned.config}) if match.has_dynamic_rows else tuned.config
                    saved = _saved_us(match, tuned, following)
                    measured = FusionChoice(match, config, "measured faster before")
            # A template without a default configuration is used only where it was measured.
            elif by_rule is None and "" in configs and is_profitable(match, following):
                reason = "a small GEMM" if is_latency_bound(match.problem.shape, match.problem.dtype.itemsize) else ""
                by_rule = FusionChoice(match, why=f"{reason or 'saves memory traffic'}, by rule")
    return measured or by_rule, saved


def tuning_key(match: TemplateMatch, policy: KernelPolicy) -> str:
    """Return the text under which times of a match are recorded; PyTorch references have texts of their own."""
    return match.problem.bucket + (" references" if policy is KernelPolicy.REFERENCE else "")


def merged_scheme(operators: Sequence[Operator], chosen: Iterable[range]) -> Scheme:
    """Return the scheme with these segments, and as few others between them as the classes of operators allow.

    Inductor compiles operators without a template together whatever the scheme says; this scheme is for reports.
    """
    segments = {segment.start: segment for segment in chosen}
    starts: list[int] = []
    at = heavy = 0
    while at < len(operators):
        if at in segments:
            starts += [at, segments[at].stop]
            at, heavy = segments[at].stop, 0
            continue
        intensive = operators[at].kind.compute_intensive
        if heavy + intensive > MAX_COMPUTE_INTENSIVE:
            starts.append(at)
            heavy = 0
        heavy += intensive
        at += 1
    return Scheme.of(len(operators), (start for start in starts if start < len(operators)))
