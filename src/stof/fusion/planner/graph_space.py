"""A graph's search space: operators, template matches and timers, for `planner.two_stage_search`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import fx

from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operators import Operator, in_words
from stof.fusion.planner.heuristics import MAX_OPS, tuning_key
from stof.fusion.planner.match import TemplateMatch, find_matches, insertion_point
from stof.fusion.planner.search_space import Space, Wanted
from stof.fusion.records.choices import Choices, TunedConfig
from stof.fusion.records.store import SegmentCandidate
from stof.fusion.templates.gemm_config import GemmConfig, kind_in
from stof.fusion.templates.registry import KernelPolicy
from stof.fusion.templates.roofline import floor_us


class MatchTimer(Protocol):
    """Measures; `stof.fusion.measure.segment_timer.SegmentTimer` is one. `failures` says why candidates had no time."""

    failures: dict[SegmentCandidate, str]

    def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> Sequence[float]:
        """Microseconds of a match's segment with each configuration; None is Inductor's code.

        inf is a failure, nan a time that could not be told.
        """


# Compiles configurations of matches; `stof.fusion.measure.parallel_compile.compile_candidates` is one.
ParallelCompiler = Callable[[Sequence[tuple[TemplateMatch, Sequence[str]]]], object]


@dataclass
class GraphSpace:
    """The segments of one graph, their template matches, and how candidates are compiled and measured."""

    operators: Sequence[Operator]
    order: GraphOrder
    time_match: MatchTimer | None
    policy: KernelPolicy = KernelPolicy.KERNELS
    compiler: ParallelCompiler | None = None
    known: Mapping[str, TunedConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.signatures = [operator.signature() for operator in self.operators]
        self._matches: dict[tuple[int, int], dict[str, TemplateMatch]] = {}
        self._candidates: dict[tuple[int, int], list[SegmentCandidate]] = {}
        self._keys: dict[tuple[int, int], Hashable] = {}

    def matches(self, start: int, stop: int) -> dict[str, TemplateMatch]:
        """Return the matches of a segment whose call can be inserted into the graph, by template name."""
        matches = self._matches.get((start, stop))
        if matches is None:
            served = find_matches(self.operators[start:stop], self.policy)[0] if stop - start <= MAX_OPS else []
            matches = {c.template.name: c for c in served if isinstance(insertion_point(self.order, c), fx.Node)}
            self._matches[start, stop] = matches
        return matches

    def candidates(self, start: int, stop: int) -> list[SegmentCandidate]:
        """Return all configurations of all matches of a segment, the recorded best or default of each first."""
        candidates = self._candidates.get((start, stop))
        if candidates is None:
            served = self.matches(start, stop).values()
            lists = [[(c.template.name, config) for config in self._configs(c)] for c in served]
            candidates = [candidate for one in lists for candidate in one[:1]] + [
                candidate for one in lists for candidate in one[1:]
            ]
            self._candidates[start, stop] = candidates
        return candidates

    def _configs(self, match: TemplateMatch) -> list[str]:
        configs = match.template.configs(match.problem, self.policy)
        tuned = self.known.get(tuning_key(match, self.policy))
        if tuned is None:
            return configs
        first = match.template.as_candidate(match.problem, tuned.config)
        return [first, *(config for config in configs if config != first)] if first in configs else configs

    def choices(self, times: Callable[[int, int], Mapping[SegmentCandidate | None, float]]) -> Choices:
        """Of each template and shape that has been measured, the fastest configuration."""
        choices: Choices = {}
        for start, stop in self._segments():
            served = self.matches(start, stop)
            taken = times(start, stop) if served else {}
            for name, match in served.items() if 0 < taken.get(None, math.inf) < math.inf else ():
                tried = {c[1]: us for c, us in taken.items() if c is not None and c[0] == name and 0 < us < math.inf}
                if tried:
                    best = min(tried, key=tried.__getitem__)
                    config = match.template.as_recorded(match.problem, best)
                    us = (float(f"{time:.4g}") for time in (tried[best], taken[None]))  # files are compared by eye
                    choices[tuning_key(match, self.policy)] = TunedConfig(config, *us)
        return choices

    def _segments(self) -> list[tuple[int, int]]:
        places = range(len(self.operators))
        return [(i, j) for i in places for j in range(i + 1, min(i + MAX_OPS, len(places)) + 1)]

    def key(self, start: int, stop: int) -> Hashable:
        """Return a key equal for segments that cost the same, such as those of equal layers."""
        key = self._keys.get((start, stop))
        if key is None:
            problems = tuple(match.problem.text() for match in self.matches(start, stop).values())
            key = self._keys[start, stop] = (tuple(self.signatures[start:stop]), problems, self.policy.name)
        return key

    def match_key(self, match: TemplateMatch) -> Hashable:
        """Return a key equal for matches that compute the same at their sizes, whether the graph leaves sizes open."""
        signatures = tuple(operator.signature(match.at) for operator in match.operators)
        return signatures, (match.problem.text(),), self.policy.name

    def matched_keys(self) -> set[Hashable]:
        """The keys of all segments that templates match."""
        return {self.key(start, stop) for start, stop in self._segments() if self.matches(start, stop)}

    def measure(self, start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> list[float]:
        """Times of candidates, template by template, since templates differ in what they read."""
        assert self.time_match is not None
        served = self.matches(start, stop)
        times: dict[SegmentCandidate | None, float] = {}
        for i, (name, match) in enumerate(served.items()):
            configs = [c[1] for c in candidates if c is not None and c[0] == name]
            with_inductor = None in candidates and i == 0
            asked: list[str | None] = [*([None] if with_inductor else []), *configs]
            for config, taken in zip(asked, self.time_match(match, asked) if asked else (), strict=True):
                times[None if config is None else (name, config)] = taken
        return [times[candidate] for candidate in candidates]

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        """Compile candidates that will be measured soon."""
        if self.compiler is not None:
            self.compiler(
                [
                    (match, [c[1] for c in candidates if c is not None and c[0] == name])
                    for start, stop, candidates in wanted
                    for name, match in self.matches(start, stop).items()
                ]
            )

    def floor(self, start: int, stop: int, candidate: SegmentCandidate) -> float:
        """Microseconds that a candidate's GEMM takes at the least; 0 for defaults, which are measured anyway."""
        template, config = candidate
        problem = self.matches(start, stop)[template].problem
        if not config or problem.device.type != "cuda":
            return 0.0
        device = torch.cuda.get_device_properties(problem.device)
        capability, processors = (device.major, device.minor), device.multi_processor_count
        return floor_us(GemmConfig.parse(config), problem.shape, problem.dtype, capability, processors)

    def label(self, start: int, stop: int) -> str:
        return in_words(self.operators[start:stop])

    def space(self) -> Space:
        return Space(
            len(self.operators),
            self.key,
            self.candidates,
            self.measure,
            MAX_OPS,
            self.prepare,
            self.floor,
            self.label,
            lambda candidate: kind_in(candidate[1]),
        )
