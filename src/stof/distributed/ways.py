"""The two ways to compute attention over split tokens, and which one is estimated to be faster."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from stof.distributed.row_ranges import Assignment
from stof.errors import HeadCountError
from stof.layout import LayoutConfig
from stof.layout.survey import Survey

# "heads": an all-to-all gives each rank all tokens of some heads (DeepSpeed-Ulysses, arXiv 2309.14509).
# "keys": each rank keeps its queries and gathers the keys and values of all.
WAYS = ("heads", "keys")

# Operations and bytes per second of one GPU, for four H200s over NVLink: rough values that only rank the two ways.
OPERATIONS = 7e14
BANDWIDTH = {"heads": 2.2e11, "keys": 2.6e11}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call on this rank, which decide the way and the plans."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.itemsize)


@dataclass(frozen=True)
class Costs:
    """What the estimate knows of shards.

    Attributes:
        scores: scores of all tiles of one head, in the mean over batch entries and heads.
        imbalance: tile cost of the heaviest rank over the mean, where rows are split.
        work_of_heads: tile cost of each head of a mask by head, up to 8 heads; one number for other masks.
        longest: tokens of the longest shard.
        ranks: number of ranks.
    """

    scores: float
    imbalance: float
    work_of_heads: tuple[float, ...]
    longest: int
    ranks: int

    @staticmethod
    def of(survey: Survey, tiles: LayoutConfig, assignment: Assignment) -> Costs:
        counts = survey.counts[tiles]
        work = (counts.partial + counts.full).double().sum(1)  # of each mask
        scores = float(work.mean()) * tiles.block_m * tiles.block_n
        by_head = survey.mask_batch == 1 and len(work) == survey.mask_heads
        longest = max(assignment.tokens)
        work_of_heads = tuple(work.tolist()) if by_head else (1.0,)
        return Costs(scores, assignment.imbalance, work_of_heads, longest, len(assignment.ranges))


def refusal(way: str, heads: int, ranks: int) -> str | None:
    """Why a way cannot be taken."""
    if way == "heads" and heads % ranks:
        return f"{heads} query heads do not divide among {ranks} ranks"
    return None


def check_way(way: str, heads: int, ranks: int) -> None:
    """Raise HeadCountError if a way cannot be taken."""
    why = refusal(way, heads, ranks)
    if why is not None:
        raise HeadCountError(f'{why}, which way="heads" needs; use way="keys", or leave way out')


def key_head_repeats(sizes: Sizes, ranks: int) -> int:
    """How often key heads are repeated so that each rank gets as many; 1 where they divide among the ranks."""
    return ranks // gcd(sizes.kv_heads, ranks)


def exchanged_bytes(costs: Costs, sizes: Sizes, way: str) -> float:
    """Bytes that the heaviest rank sends or receives in the forward pass."""
    per_key = sizes.head_dim + sizes.value_dim
    numbers: float
    if way == "keys":
        numbers = costs.longest * (costs.ranks - 1) * sizes.kv_heads * per_key
    else:
        kv_heads = sizes.kv_heads * key_head_repeats(sizes, costs.ranks)
        numbers = costs.longest * (1 - 1 / costs.ranks) * (sizes.heads + kv_heads) * per_key
    return numbers * sizes.batch * sizes.itemsize


def imbalance(costs: Costs, sizes: Sizes, way: str) -> float:
    """Work of the heaviest rank over the mean."""
    if way == "keys":
        return costs.imbalance
    work = costs.work_of_heads
    if len(work) % costs.ranks or sum(work) == 0 or len(work) != sizes.heads:
        return 1.0
    each = len(work) // costs.ranks
    return max(sum(work[n : n + each]) for n in range(0, len(work), each)) * costs.ranks / sum(work)


def seconds(costs: Costs, sizes: Sizes, way: str) -> float:
    """Estimated time of the forward pass on the heaviest rank; for comparison alone."""
    operations = 2 * costs.scores * sizes.batch * sizes.heads * (sizes.head_dim + sizes.value_dim)
    exchange = exchanged_bytes(costs, sizes, way) / BANDWIDTH[way]
    return operations / costs.ranks * imbalance(costs, sizes, way) / OPERATIONS + exchange


def choose_way(costs: Costs, sizes: Sizes) -> str:
    """The way with the lowest estimate among those that can be taken."""
    possible = [way for way in WAYS if refusal(way, sizes.heads, costs.ranks) is None]
    return min(possible, key=lambda way: seconds(costs, sizes, way))


def describe_ways(costs: Costs, sizes: Sizes) -> list[str]:
    """One line for each way: bytes, imbalance and estimate, the one that is taken first."""
    chosen = choose_way(costs, sizes)
    lines = []
    for way in sorted(WAYS, key=lambda way: way != chosen):
        why = refusal(way, sizes.heads, costs.ranks)
        if why is not None:
            lines.append(f"way {way!r}: refused, {why}")
            continue
        figures = (
            f"{exchanged_bytes(costs, sizes, way) / 1e6:.1f} MB exchanged by the longest shard, work of the heaviest "
            f"rank {imbalance(costs, sizes, way):.2f} of the mean, estimate {seconds(costs, sizes, way) * 1e3:.3g} ms"
        )
        lines.append(f"way {way!r}{' (taken)' if way == chosen else ''}: {figures}")
    return lines
