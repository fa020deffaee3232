"""A lock file applied to a graph: its scheme and configurations again, with nothing measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stof.fusion.choices import Known, Tuned
from stof.fusion.claims import Claim
from stof.fusion.lock import Lock, LockedGraph, current_versions
from stof.fusion.lower import Choice
from stof.fusion.report import FusionReport
from stof.fusion.rules import bucket, suggested
from stof.fusion.store import Contents, Store, segment_key
from stof.fusion.templates.buckets import in_bucket
from stof.fusion.tune import GraphSpace


@dataclass(frozen=True)
class Replay:
    """A lock, the device it is to serve, and how its templates are checked before they are used.

    Attributes:
        check: why a configuration of a claim may not be used, "" where it may (`stof.fusion.measure.check`).
        store: where checks are remembered; None for nowhere.
    """

    lock: Lock
    device: str
    check: Callable[[Claim, str], str]
    store: Store | None = None


def replayed(graph: GraphSpace, replay: Replay, report: FusionReport) -> dict[int, Choice]:
    """The lock's choices by first operator; rules decide what it does not say, and the report tells, a line each."""
    lock = replay.lock
    if lock.device != replay.device:
        report.notes.append(f"the lock is for {lock.device}, this is {replay.device}: rules decide")
        return suggested(graph.operators, graph.order, graph.serving, graph.known)
    others = {name: found for name, found in current_versions().items() if found != lock.versions.get(name)}
    if others:
        made = ", ".join(f"{name} {lock.versions.get(name, 'unknown')}" for name in others)
        report.notes.append(f"the lock was made with {made}; here: {', '.join(f'{n} {v}' for n, v in others.items())}")
    locked = lock.graphs.get(report.graph)
    if locked is None:
        report.notes.append("the lock has no graph like this: rules decide, by its configurations where shapes agree")
        return suggested(graph.operators, graph.order, graph.serving, lock_known(graph, lock))
    chosen, left, bad = _fitting(graph, replay, locked, report)
    return chosen | suggested(graph.operators, graph.order, graph.serving, _without(graph.known, bad), left)


def lock_known(graph: GraphSpace, lock: Lock) -> Known:
    """What the lock says of a shape, else what was known anyway."""
    return lambda text: lock.choices.get(text) or graph.known(text)


def _fitting(
    graph: GraphSpace, replay: Replay, locked: LockedGraph, report: FusionReport
) -> tuple[dict[int, Choice], list[range], set[tuple[str, str]]]:
    """The locked choices that serve, the segments of those that do not, and configurations that are no good."""
    segments = {segment.start: segment for segment in locked.scheme.segments}
    chosen: dict[int, Choice] = {}
    left: list[range] = []
    bad: set[tuple[str, str]] = set()
    checks = dict(replay.store.load().checks) if replay.store is not None else {}
    before = dict(checks)
    for row in locked.segments:
        problems: dict[str, None] = {}
        for at in row.at:
            segment = segments[at]
            claim = graph.claims(segment.start, segment.stop).get(row.template)
            if claim is None:
                problem = f"{row.template} does not serve it here"
            elif in_bucket(row.config, claim.problem.shape.m) not in claim.template.configs(
                claim.problem, graph.serving
            ):
                problem = f"{row.template} {row.config or '(default)'} does not fit here"
            else:
                key = segment_key((graph.key(segment.start, segment.stop), row.template, row.config))
                if key not in checks:
                    checks[key] = replay.check(claim, row.config)
                problem = checks[key] and f"{row.template} {row.config} {checks[key]}"
            if problem or claim is None:
                problems[problem] = None
                left.append(segment)
                bad |= {(bucket(claim, graph.serving), row.config)} if claim is not None else set()
            else:
                chosen[at] = Choice(claim, row.config, "by the lock")
        report.notes += [f"the lock's {row.segment}: {problem}; rules decide" for problem in problems]
    if replay.store is not None and checks != before:
        replay.store.update(Contents(checks=checks))
    return chosen, left, bad


def _without(known: Known, bad: set[tuple[str, str]]) -> Known:
    def look_up(text: str) -> Tuned | None:
        tuned = known(text)
        return None if tuned is not None and (text, tuned.config) in bad else tuned

    return look_up
