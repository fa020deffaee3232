"""The searches for a fusion scheme compared on one layer: how near to the best each comes, with how many measurements.

Every segment and configuration is measured once and remembered, on disk too, so that all searches see the same times
and a long comparison can be made in pieces.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from stof.bench.layer import LayerShape, plain_layer, weights_of
from stof.fusion.baselines import exhaustive, random_search
from stof.fusion.lower import GraphOrder
from stof.fusion.normalise import normalise
from stof.fusion.rules import apart
from stof.fusion.search import (
    Budget,
    Candidate,
    Meter,
    Outcome,
    Space,
    outcome,
    stage_one,
    two_stage,
)
from stof.fusion.store import Contents, Entry, Store, segment_key
from stof.fusion.tune import GraphSpace, TimeClaim

# Of the exhaustive search's measurements, what the others may take.
SHARE = 0.2


@dataclass(frozen=True)
class Row:
    """One search: microseconds it saves on the layer, of those that can be saved, and the measurements it took."""

    search: str
    saved_us: float
    best_us: float
    measurements: int
    all_measurements: int


def layer_graph(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> fx.GraphModule:
    """Dynamo's graph of a layer that is written as models write it."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    weights = weights_of(shape, device, dtype)
    x = torch.randn(shape.batch, shape.length, shape.hidden, device=device).to(dtype)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(plain_layer(shape), backend=keep, dynamic=False)(x, weights)
    return graphs[0]


class Recorded:
    """A graph's space whose measurements are taken once; `measured` counts those really taken."""

    def __init__(self, graph: GraphSpace, store: Store | None) -> None:
        self.store, self.measured = store, 0
        self.inner = graph.space()
        held = store.load().segments if store is not None else {}
        self.times: dict[Hashable, dict[Candidate | None, float]] = {
            key: dict(held.get(segment_key(key), Entry()).times) for key in graph.claimed_keys()
        }
        self.space: Space = replace(self.inner, measure=self._measure)

    def _measure(self, start: int, stop: int, candidates: Sequence[Candidate | None]) -> list[float]:
        key = self.inner.key(start, stop)
        known = self.times[key]
        new = [candidate for candidate in candidates if candidate not in known]
        if new:
            known |= dict(zip(new, self.inner.measure(start, stop, new), strict=True))
            self.measured += len(new)
            if self.store is not None:
                self.store.update(Contents({segment_key(key): Entry(known)}))
        return [known[candidate] for candidate in candidates]

    def missing(self) -> int:
        """Measurements that an exhaustive search would still take."""
        space, seen, count = self.inner, set(), 0
        for start in range(space.size):
            for stop in range(start + 1, min(start + space.longest, space.size) + 1):
                candidates, key = space.candidates(start, stop), space.key(start, stop)
                if candidates and key not in seen:
                    seen.add(key)
                    count += sum(candidate not in self.times[key] for candidate in (None, *candidates))
        return count


def compare(gm: fx.GraphModule, timer: TimeClaim, store: Store | None, seconds: float, seeds: int = 5) -> list[Row]:
    """Measure exhaustively for `seconds`; when that is complete, run all searches on what was measured.

    Random draws are averaged over `seeds`. Without a complete table there are no rows, only progress in the store.
    """
    operators = normalise(gm.graph)
    recorded = Recorded(GraphSpace(operators, GraphOrder(gm.graph), timer), store)
    space = recorded.space
    best = exhaustive(space, Meter(space, Budget(seconds)))
    if recorded.missing():
        return []
    start = apart(operators, [])
    share = int(SHARE * best.measurements)

    def mean(name: str, run: Callable[[Meter, int], Outcome], limit: float) -> Row:
        found = [run(Meter(space, Budget(measurements=limit)), seed) for seed in range(seeds)]
        saved, taken = (sum(v) / seeds for v in zip(*((o.saved_us, o.measurements) for o in found), strict=True))
        return Row(name, saved, best.saved_us, round(taken), best.measurements)

    def drawn(meter: Meter, seed: int) -> Outcome:
        return random_search(space, meter, schemes=100 * share, seed=random.Random(seed).randrange(2**31))

    return [
        Row("exhaustive", best.saved_us, best.saved_us, best.measurements, best.measurements),
        mean("two stages", lambda meter, seed: two_stage(space, meter, start, seed=seed), share),
        mean("stage 1 alone", lambda meter, seed: outcome(meter, stage_one(space, meter, start)), share),
        mean("random", drawn, share),
    ]
