"""The scheme that shapes alone suggest: where the search starts, and what runs when nothing may be measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torch import fx

from stof.fusion.graph.operators import NORMS, Kind, Operator
from stof.fusion.graph.scheme import MAX_COMPUTE_INTENSIVE, Scheme
from stof.fusion.graph.symbolic_shapes import size_hint
from stof.fusion.passes.lower_segments import FusionChoice, GraphOrder
from stof.fusion.planner.match import TemplateMatch, find_matches
from stof.fusion.records.choices import ConfigLookup, TunedConfig
from stof.fusion.templates.gemm_config import GemmShape
from stof.fusion.templates.registry import KernelPolicy
from stof.fusion.templates.row_buckets import bucket_of, format_table

# Floating-point operations that a large half-precision product does while one byte is copied: about 680 TFLOP/s over
# 4.2 TB/s on an H200. A pass over a product's [M, N] result then costs about 325 / K of the product.
FLOPS_PER_BYTE = 162.0
# Copied in a microsecond: the measured 4.2 TB/s.
BYTES_PER_US = 4.2e6
# A product of fewer operations than that (about 3 us on an H200), its operands counted as what could be computed while
# they are copied, is mostly launching, waiting for memory and ending: see "Few rows" in docs/fusion.md.
FEW_FLOPS = 2e9
# The longest sequence that any template covers.
MAX_OPS = 4


def is_latency_bound(shape: GemmShape, itemsize: int) -> bool:
    """Whether a product takes so little that what counts is how fast its kernel starts and ends."""
    flops, moved = _work(shape, itemsize)
    return flops + moved * FLOPS_PER_BYTE <= FEW_FLOPS


def is_memory_bound(shape: GemmShape, itemsize: int) -> bool:
    """Whether copying a product's operands takes longer than computing it."""
    flops, moved = _work(shape, itemsize)
    return flops <= moved * FLOPS_PER_BYTE


def is_weight_bound(shape: GemmShape, itemsize: int) -> bool:
    """The same where it is the weight that is copied: few rows."""
    weight = shape.n * shape.k * shape.weight_size(itemsize)
    return is_memory_bound(shape, itemsize) and 2 * weight >= _work(shape, itemsize)[1]


def _work(shape: GemmShape, itemsize: int) -> tuple[float, int]:
    """Operations, and bytes of operands and result."""
    columns = shape.n * (2 if shape.gated else 1)
    moved = (shape.m * shape.k + shape.m * shape.n) * itemsize + columns * shape.k * shape.weight_size(itemsize)
    return 2.0 * shape.m * columns * shape.k, moved


def is_profitable(match: TemplateMatch, following: Operator | None = None) -> bool:
    """Whether a claim is faster than what Inductor makes of its segment, by shape alone.

    A small product: always, for the templates' kernels start while the one before still runs. Else where the memory
    traffic saved outweighs a product slower than cuBLAS by the template's share. What is saved are passes over the
    tensors between the product and its neighbours; of a norm's before it only the one that writes it, for the product
    reads another tensor then. Of a residual one pass less where what is `following`, the first to read it, is bound by
    memory as well (a norm, say): Inductor adds both up in one kernel.

    A weight of 8-bit values: with few rows, where it is read as such and nothing but its bytes counts. What reads it
    dequantised pays only with more.
    """
    if not match.template.by_rule:
        return False
    quantised = any(operator.quantised is not None for operator in match.operators)
    if match.problem.shape.stored:
        return is_weight_bound(match.problem.shape, match.problem.dtype.itemsize)
    if quantised and is_memory_bound(match.problem.shape, 1):
        return False
    if is_latency_bound(match.problem.shape, match.problem.dtype.itemsize):
        return True
    inner = match.operators[:-1]
    between = [o for o in inner if o.kind is Kind.LINEAR or (o.kind in NORMS and o is match.operators[0])]
    passes = match.template.passes - _joins_next(match, following)
    saved = sum((1 if o.kind in NORMS else passes) * _bytes(o) for o in between)
    shape = match.problem.shape
    flops = 2.0 * shape.m * shape.n * shape.k * (2 if shape.gated else 1)
    return saved * FLOPS_PER_BYTE >= flops * (1 / match.template.share - 1)


def _saved_us(match: TemplateMatch, tuned: TunedConfig, following: Operator | None) -> float:
    """What was measured to be saved, less what Inductor saves itself: it was timed without what is `following`."""
    shared = _bytes(match.operators[-1]) / BYTES_PER_US if _joins_next(match, following) else 0.0
    return tuned.inductor_us - tuned.template_us - shared


def reader(match: TemplateMatch, behind: Sequence[Operator]) -> Operator | None:
    """The first of the operators behind a claim that reads its result."""
    return next((operator for operator in behind if match.operators[-1].root in operator.inputs), None)


def _joins_next(match: TemplateMatch, following: Operator | None) -> bool:
    """Whether a claim ends with a sum that Inductor would compute in the kernel of what reads it first.

    A norm mostly; in T5 under float16, what looks for infinities.
    """
    if following is None or following.kind.compute_intensive:
        return False
    return match.operators[-1].kind is Kind.RESIDUAL and match.operators[-1].root in following.inputs


def _bytes(operator: Operator) -> int:
    """Of its result."""
    value = operator.value
    return int(prod(size_hint(size) for size in value.shape)) * value.element_size()


def heuristic_choices(
    operators: Sequence[Operator],
    order: GraphOrder,
    serving: KernelPolicy,
    known: ConfigLookup = lambda text: None,
    within: Sequence[range] | None = None,
) -> dict[int, FusionChoice]:
    """Choices by the first operator of their segments: from the left, the longest sequence whose claim pays.

    A product by itself counts as a sequence; unless it is small, nothing is saved. Where it is `known` what a shape
    takes, that decides: what saves most is chosen, also over one that begins before it, and what saves nothing is not.

    Args:
        within: stretches of operators to look at; None for all.
    """
    chosen: dict[int, FusionChoice] = {}
    for stretch in [range(len(operators))] if within is None else within:
        at = stretch.start
        while at < stretch.stop:
            choice, saved = _choice_at(operators, range(at, stretch.stop), order, serving, known)
            end = at + 1 if choice is None else at + len(choice.match.operators)
            later = (_choice_at(operators, range(o, stretch.stop), order, serving, known) for o in range(at + 1, end))
            if choice is None or (saved and any(more > saved for _, more in later)):
                at += 1
            else:
                chosen[at] = choice
                at = end
    return chosen


def _choice_at(
    operators: Sequence[Operator], rest: range, order: GraphOrder, serving: KernelPolicy, known: ConfigLookup
) -> tuple[FusionChoice | None, float]:
    """The choice for a segment that begins where `rest` does and ends within it.

    With the microseconds it was measured to save, 0 where nothing was measured.
    """
    at = rest.start
    by_rule: FusionChoice | None = None
    measured: FusionChoice | None = None
    saved = 0.0
    for length in range(min(MAX_OPS, len(rest)), 0, -1):
        for match in find_matches(operators[at : at + length], serving)[0]:
            if not isinstance(order.insertion(match), fx.Node):
                continue
            following = reader(match, operators[at + length :])
            tuned, configs = known(bucket(match, serving)), match.template.configs(match.problem, serving)
            if tuned is not None and tuned.config in configs:
                if _saved_us(match, tuned, following) > saved:
                    # Of other numbers of rows nothing is known.
                    rows = match.problem.shape.m
                    config = format_table({bucket_of(rows): tuned.config}) if match.has_dynamic_rows else tuned.config
                    saved = _saved_us(match, tuned, following)
                    measured = FusionChoice(match, config, "measured faster before")
            # Without a default, only what was measured is faster than Inductor.
            elif by_rule is None and "" in configs and is_profitable(match, following):
                reason = (
                    "a small product" if is_latency_bound(match.problem.shape, match.problem.dtype.itemsize) else ""
                )
                by_rule = FusionChoice(match, why=f"{reason or 'saves memory traffic'}, by rule")
    return measured or by_rule, saved


def bucket(match: TemplateMatch, serving: KernelPolicy) -> str:
    """What is known of a claim is known by this text; twins have times of their own."""
    return match.problem.bucket + (" twins" if serving is KernelPolicy.TWINS else "")


def isolated_scheme(operators: Sequence[Operator], chosen: Iterable[range]) -> Scheme:
    """The scheme with these segments and all other operators by themselves: where the search starts."""
    inner = {place for segment in chosen for place in segment[1:]}
    return Scheme.of(len(operators), (place for place in range(1, len(operators)) if place not in inner))


def merged_scheme(operators: Sequence[Operator], chosen: Iterable[range]) -> Scheme:
    """The scheme with these segments, and what lies between in as few more as their classes allow.

    Operators that no template computes are compiled together whatever the scheme says; this one reads best.
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
