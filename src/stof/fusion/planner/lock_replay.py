"""Replay of a lock file: reproduce its choices in a graph, without measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stof.errors import ArgumentError
from stof.fusion.planner.graph_space import GraphSpace
from stof.fusion.planner.match import FusionChoice, TemplateMatch
from stof.fusion.records.choices import Choices, ChoiceTable, TunedConfig, current_versions
from stof.fusion.records.report import FusionReport
from stof.fusion.records.store import Records, Store, segment_key
from stof.fusion.templates.row_buckets import bucket_of, format_table, table


@dataclass(frozen=True)
class Replay:
    """A lock file to replay on a device.

    Attributes:
        check: returns why a configuration of a match may not be used, or "" (`segment_timer.check`).
        store: where the results of checks are recorded; None for nowhere.
    """

    lock: ChoiceTable
    device: str
    check: Callable[[TemplateMatch, str], str]
    store: Store | None = None

    def known(self, known: Mapping[str, TunedConfig]) -> Choices:
        """Choices by shape: the lock's, if it is for this device, come before those that are known."""
        return {**known, **(self.lock.choices if self.lock.device == self.device else {})}

    def folds(self, graph: str) -> bool:
        """Whether the lock, if it is for this device, folds norms' weights in a graph.

        In a graph that is not in the lock they are folded if they are in all graphs that are.
        """
        graphs = self.lock.graphs if self.lock.device == self.device else {}
        return graphs[graph].fold if graph in graphs else bool(graphs) and all(one.fold for one in graphs.values())


def replayed(graph: GraphSpace, replay: Replay, report: FusionReport) -> dict[int, FusionChoice] | None:
    """Return the lock's choices by first operator, None where rules decide; notes in the report say what does not fit.

    A configuration that may not be used is replaced by the template's default; where that may not be used either,
    Inductor computes the segment.
    """
    lock = replay.lock
    if lock.device != replay.device:
        report.notes.append(
            f"the lock is for {lock.device}, this is {replay.device}: rules decide; `stof tune MODEL --lock FILE` "
            "makes one for this device"
        )
        return None
    others = {name: version for name, version in current_versions().items() if version != lock.versions.get(name)}
    if others:
        made = ", ".join(f"{name} {lock.versions.get(name, 'unknown')}" for name in others)
        report.notes.append(f"the lock was made with {made}; here: {', '.join(f'{n} {v}' for n, v in others.items())}")
    locked = lock.graphs.get(report.graph)
    if locked is None:
        report.notes.append("the lock has no graph like this: rules decide, by its configurations where shapes agree")
        return None
    before = replay.store.load().checks if replay.store is not None else {}
    checks = _Checks(graph, replay, dict(before))
    chosen: dict[int, FusionChoice] = {}
    notes: dict[str, None] = {}  # segments that are alike have equal ones
    for start, stop, name, config in locked.segments:
        match = graph.matches(start, stop).get(name)
        choice, problems = (None, ["does not serve it here"]) if match is None else checks.choice(match, config)
        problems += ["Inductor computes it"] if choice is None else []
        if choice is not None:
            chosen[start] = choice
        if problems:
            notes[f"the lock's {graph.label(start, stop)} by {name}: {'; '.join(problems)}"] = None
    report.notes += notes
    if replay.store is not None and checks.known != before:
        replay.store.update(Records(checks=checks.known))
    return chosen


@dataclass(frozen=True)
class _Checks:
    """Checks of configurations, each done once; `known` has the reasons against them by key, "" for none."""

    graph: GraphSpace
    replay: Replay
    known: dict[str, str]

    def choice(self, match: TemplateMatch, text: str) -> tuple[FusionChoice | None, list[str]]:
        """Return the choice by what may be used of a configuration or table, None for Inductor, and what may not."""
        bucket, problems = bucket_of(match.problem.shape.m), []
        try:
            entries = table(text) if "=" in text else {bucket: text}
        except ArgumentError as error:
            entries, problems = {}, [str(error)]
        kept: dict[int, str] = {}
        for rows, config in entries.items():
            if why := self._problem(match, config, rows):
                problems.append(f"{config or '(default)'}{f' for {rows} rows' if '=' in text else ''}: {why}")
            else:
                kept[rows] = config
        if bucket not in kept and (why := self._problem(match, "", bucket)):
            return None, [*problems, f"(default): {why}"]
        config = format_table(kept) if "=" in text else kept.get(bucket, "")
        return FusionChoice(match, config, "by the lock" if bucket in kept else "default, see the note below"), problems

    def _problem(self, match: TemplateMatch, config: str, rows: int) -> str:
        """Return why a configuration may not be used for a bucket of rows, or "".

        The result of a kernel does not depend on the number of rows: each configuration is run on the rows of the call
        that is being compiled, and tested for whether it fits its own bucket.
        """
        problem = replace(match.problem, shape=replace(match.problem.shape, m=rows))
        if why := match.template.refusal(problem, config, self.graph.policy):
            return why
        key = segment_key((self.graph.match_key(match), config))
        if key not in self.known:
            self.known[key] = self.replay.check(match, config)
        return self.known[key]
