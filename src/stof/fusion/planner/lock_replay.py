"""Replay of a lock file: reproduce its scheme and configurations in a graph, without measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stof.errors import ArgumentError
from stof.fusion.graph.scheme import Scheme
from stof.fusion.planner.graph_space import GraphSpace
from stof.fusion.planner.heuristics import heuristic_choices, tuning_key
from stof.fusion.planner.match import FusionChoice, TemplateMatch
from stof.fusion.records.choices import ConfigLookup, TunedConfig
from stof.fusion.records.lock_file import Lock, LockedGraph, current_versions
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

    lock: Lock
    device: str
    check: Callable[[TemplateMatch, str], str]
    store: Store | None = None

    def folds(self, graph: str) -> bool:
        """Whether the lock folds norms' weights in a graph, on this device."""
        return self.lock.device == self.device and self.lock.folds(graph)


def replayed(graph: GraphSpace, replay: Replay, report: FusionReport) -> dict[int, FusionChoice]:
    """Return the lock's choices by first operator; heuristics decide the rest, and notes in the report say which."""
    lock = replay.lock
    if lock.device != replay.device:
        report.notes.append(
            f"the lock is for {lock.device}, this is {replay.device}: rules decide; `stof tune MODEL --lock FILE` "
            "makes one for this device"
        )
        return heuristic_choices(graph.operators, graph.order, graph.policy, graph.known)
    others = {name: version for name, version in current_versions().items() if version != lock.versions.get(name)}
    if others:
        made = ", ".join(f"{name} {lock.versions.get(name, 'unknown')}" for name in others)
        report.notes.append(f"the lock was made with {made}; here: {', '.join(f'{n} {v}' for n, v in others.items())}")
    locked = lock.graphs.get(report.graph)
    if locked is None:
        report.notes.append("the lock has no graph like this: rules decide, by its configurations where shapes agree")
        return heuristic_choices(graph.operators, graph.order, graph.policy, lock_known(graph, lock))
    chosen, left, bad = _fitting(graph, replay, locked, report)
    return chosen | heuristic_choices(graph.operators, graph.order, graph.policy, _without(graph.known, bad), left)


def lock_known(graph: GraphSpace, lock: Lock) -> ConfigLookup:
    """Look a shape up in the lock, then in the recorded choices."""
    return lambda text: lock.choices.get(text) or graph.known(text)


def _fitting(
    graph: GraphSpace, replay: Replay, locked: LockedGraph, report: FusionReport
) -> tuple[dict[int, FusionChoice], list[range], set[tuple[str, str]]]:
    """Return the locked choices that work here, segments of the others, and the configurations that failed."""
    segments = {segment.start: segment for segment in Scheme.from_bits(locked.scheme).segments}
    chosen: dict[int, FusionChoice] = {}
    left: list[range] = []
    bad: set[tuple[str, str]] = set()
    before = dict(replay.store.load().checks) if replay.store is not None else {}
    checks = _Checks(graph, replay, dict(before))
    for row in locked.segments:
        problems: dict[str, None] = {}
        for at in row.at:
            segment = segments[at]
            match = graph.matches(segment.start, segment.stop).get(row.template)
            if match is None:
                problems[f"{row.template} does not serve it here; rules decide"] = None
                left.append(segment)
                continue
            config, refused = checks.usable(match, row.config, segment)
            bucket = bucket_of(match.problem.shape.m)
            problems |= {
                f"{row.template} {text or '(default)'} for {rows} rows: {why}; left out of the table": None
                for rows, (text, why) in refused.items()
                if rows != bucket
            }
            if bucket in refused:
                text, why = refused[bucket]
                problems[f"{row.template} {text or '(default)'}: {why}; rules decide"] = None
                left.append(segment)
                bad.add((tuning_key(match, graph.policy), text))
            else:
                chosen[at] = FusionChoice(match, config, "by the lock")
        report.notes += [f"the lock's {row.segment}: {problem}" for problem in problems]
    if replay.store is not None and checks.known != before:
        replay.store.update(Records(checks=checks.known))
    return chosen, left, bad


@dataclass(frozen=True)
class _Checks:
    """Checks of configurations, each done once; `known` has the reasons against them by key, "" for none."""

    graph: GraphSpace
    replay: Replay
    known: dict[str, str]

    def usable(self, match: TemplateMatch, text: str, segment: range) -> tuple[str, dict[int, tuple[str, str]]]:
        """Return the usable part of a configuration or table, and the refused ones by bucket with the reason.

        The result of a kernel does not depend on the number of rows: each configuration is run on the rows of the call
        that is being compiled, and tested for whether it fits its own bucket.
        """
        bucket = bucket_of(match.problem.shape.m)
        try:
            entries = table(text) if "=" in text else {bucket: text}
        except ArgumentError as error:
            return "", {bucket: (text, str(error))}
        refused: dict[int, tuple[str, str]] = {}
        for rows, config in entries.items():
            there = match if rows == bucket else match.in_bucket(rows)
            shape = replace(match.problem.shape, m=rows)
            problem = there.problem if there is not None else replace(match.problem, shape=shape)
            why = match.template.refusal(problem, config, self.graph.policy) or self._checked(match, config, segment)
            if why:
                refused[rows] = (config, why)
        kept = {rows: config for rows, config in entries.items() if rows not in refused}
        return format_table(kept) if "=" in text else text, refused

    def _checked(self, match: TemplateMatch, config: str, segment: range) -> str:
        key = segment_key((self.graph.key(segment.start, segment.stop), match.template.name, config))
        if key not in self.known:
            self.known[key] = self.replay.check(match, config)
        return self.known[key]


def _without(known: ConfigLookup, bad: set[tuple[str, str]]) -> ConfigLookup:
    def look_up(text: str) -> TunedConfig | None:
        tuned = known(text)
        return None if tuned is not None and (text, tuned.config) in bad else tuned

    return look_up
