"""The scheme that shapes alone suggest: where the search starts, and what runs when nothing may be measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from stof.fusion.claims import Claim, claims, size_hint
from stof.fusion.lower import Choice
from stof.fusion.operators import NORMS, Kind, Operator
from stof.fusion.scheme import MAX_COMPUTE_INTENSIVE, Scheme

# Floating-point operations that a large half-precision product does while one byte is copied: about 680 TFLOP/s over
# 4.2 TB/s on an H200. A pass over a product's [M, N] result then costs about 325 / K of the product.
FLOPS_PER_BYTE = 162.0
# The longest sequence that any template covers.
LONGEST = 3


def pays(claim: Claim) -> bool:
    """Whether the memory traffic a claim saves outweighs a product slower than cuBLAS by the template's share.

    What is saved is one write and one read of each tensor between the product and its neighbours.
    """
    inner = claim.operators[:-1]
    between = [o for o in inner if o.kind is Kind.LINEAR or (o.kind in NORMS and o is claim.operators[0])]
    saved = sum(2 * prod(size_hint(size) for size in o.value.shape) * o.value.element_size() for o in between)
    problem = claim.problem
    rows = 2 * problem.n if problem.template == "gated_linear" else problem.n
    flops = 2.0 * problem.m * rows * problem.k
    return saved * FLOPS_PER_BYTE >= flops * (1 / claim.template.share - 1)


def suggested(operators: Sequence[Operator]) -> tuple[Scheme, dict[int, Choice]]:
    """The initial scheme, and a choice for the segments (by first operator) that a template is to compute.

    From the first operator on, the longest covered sequence that pays is a segment. Between those, memory-intensive
    operators join the compute-intensive one before them.
    """
    starts: list[int] = []
    chosen: dict[int, Choice] = {}
    heavy = 0
    at = 0
    while at < len(operators):
        for length in range(min(LONGEST, len(operators) - at), 1, -1):
            served = [claim for claim in claims(operators[at : at + length])[0] if pays(claim)]
            if served:
                starts += [at, at + length]
                chosen[at] = Choice(served[0])
                at += length
                heavy = 0
                break
        else:
            intensive = operators[at].kind.compute_intensive
            if intensive and heavy + intensive > MAX_COMPUTE_INTENSIVE - 1:
                starts.append(at)
                heavy = 0
            heavy += intensive
            at += 1
    return Scheme.of(len(operators), (start for start in starts if start < len(operators))), chosen
