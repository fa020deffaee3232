"""The protocols of the Gluon kernels' producers and consumers, played out in any order: every tile once, no mix-up.

Barriers keep one phase bit, as in hardware: a wait that looks at the wrong fill passes when it must not, and the step
found in the stage is then not the one expected.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from stof.fusion.templates.device_functions import tile_coordinates
from stof.fusion.templates.gemm_config import GemmConfig
from stof.fusion.templates.hopper import pingpong


class Barrier:
    """Arrivals until its phase ends; whoever waits knows the phase's last bit alone."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.phase = count, count, 0

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase + 1

    def passed(self, bit: int) -> bool:
        return self.phase & 1 != bit


Step = Iterator[tuple[Barrier, int] | None]


class Ring:
    """Stages with their barriers. Copies land whenever they like; what a consumer finds must be what it expects."""

    def __init__(self, stages: int, readers: int) -> None:
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(readers) for _ in range(stages)]
        self.holds: list[object] = [None] * stages
        self.reading = [0] * stages
        self.copies: list[tuple[int, object]] = []

    def fill(self, stage: int, content: object) -> None:
        assert self.reading[stage] == 0, "a stage is filled while it is read"
        self.copies.append((stage, content))

    def land(self, copy: int) -> None:
        stage, content = self.copies.pop(copy)
        self.holds[stage] = content
        self.full[stage].arrive()

    def read(self, stage: int, content: object) -> None:
        assert self.holds[stage] == content, "a step is taken for another"
        self.reading[stage] += 1

    def release(self, stage: int) -> None:
        self.reading[stage] -= 1
        self.empty[stage].arrive()


class Place:
    """A stage and its phase, one step after the other."""

    def __init__(self, stages: int, phase: int, stage: int = 0) -> None:
        self.stages, self.stage, self.phase = stages, stage, phase

    def advance(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.phase = 0, self.phase ^ 1


def play(actors: list[Step], rings: list[Ring], chance: random.Random) -> None:
    """Until all are done; a state in which nobody can go on fails."""
    waiting: dict[Step, tuple[Barrier, int] | None] = dict.fromkeys(actors)
    while waiting:
        ready = [one for one, on in waiting.items() if on is None or on[0].passed(on[1])]
        flying = [ring for ring in rings if ring.copies]
        assert ready or flying, "deadlock"
        if flying and (not ready or chance.random() < 0.3):
            ring = chance.choice(flying)
            ring.land(chance.randrange(len(ring.copies)))
            continue
        one = chance.choice(ready)
        try:
            waiting[one] = next(one)
        except StopIteration:
            del waiting[one]


class PingPong:
    """The thread block of `pingpong.py`."""

    def __init__(self, tiles: int, k_tiles: int, stages: int) -> None:
        self.tiles, self.k_tiles, self.stages = tiles, k_tiles, stages
        self.ring = Ring(stages, 1)
        self.turn = [Barrier(1), Barrier(1)]
        self.done: list[tuple[int, int]] = []

    def producer(self) -> Step:
        place = Place(self.stages, 1)
        for tile in range(self.tiles):
            for k in range(self.k_tiles):
                yield self.ring.empty[place.stage], place.phase
                self.ring.fill(place.stage, (tile, k))
                place.advance()

    def consumer(self, number: int) -> Step:
        for tile in range(number, self.tiles, 2):
            stage, phase = pingpong.first_step.fn(tile, self.k_tiles, self.stages)
            place, before = Place(self.stages, phase, stage), None
            yield self.turn[number], pingpong.turn_phase.fn(tile, number)
            for k in range(self.k_tiles):
                yield self.ring.full[place.stage], place.phase
                self.ring.read(place.stage, (tile, k))
                if before is not None:
                    self.ring.release(before)
                before = place.stage
                place.advance()
                yield None
            self.turn[1 - number].arrive()
            yield None
            assert before is not None
            self.ring.release(before)
            for _ in range(3):  # the epilogue
                yield None
            self.done.append((tile, number))


class Together:
    """The thread block of `hopper/cooperative.py`; a_stages, stages and lag as `GemmConfig` derives them."""

    def __init__(self, tiles: int, k_tiles: int, config: GemmConfig) -> None:
        self.tiles, self.k_tiles, self.config = tiles, k_tiles, config
        self.columns = Ring(config.stages, config.consumers)
        self.rows = [Ring(config.row_stages, 1) for _ in range(config.consumers)]
        self.done: list[tuple[int, int]] = []

    def producer(self) -> Step:
        columns = Place(self.config.stages, 1)
        rows = [Place(self.config.row_stages, 1) for _ in self.rows]
        steps = [(tile, k) for tile in range(self.tiles) for k in range(self.k_tiles)]
        for number in range(len(steps) + self.config.lag):
            if number < len(steps):
                yield self.columns.empty[columns.stage], columns.phase
                self.columns.fill(columns.stage, steps[number])
                columns.advance()
            for consumer, step in enumerate([number] + [number - self.config.lag] * (len(rows) - 1)):
                if 0 <= step < len(steps):
                    place = rows[consumer]
                    yield self.rows[consumer].empty[place.stage], place.phase
                    self.rows[consumer].fill(place.stage, steps[step])
                    place.advance()

    def consumer(self, number: int) -> Step:
        columns, rows = Place(self.config.stages, 0), Place(self.config.row_stages, 0)
        mine = self.rows[number]
        for tile in range(self.tiles):
            before: tuple[int, int] | None = None
            for k in range(self.k_tiles):
                yield self.columns.full[columns.stage], columns.phase
                yield mine.full[rows.stage], rows.phase
                self.columns.read(columns.stage, (tile, k))
                mine.read(rows.stage, (tile, k))
                if before is not None:
                    mine.release(before[0])
                    self.columns.release(before[1])
                before = rows.stage, columns.stage
                rows.advance()
                columns.advance()
                yield None
            assert before is not None
            mine.release(before[0])
            self.columns.release(before[1])
            for _ in range(3):  # the epilogue
                yield None
            self.done.append((tile, number))


SIZES = {"tiles": st.integers(0, 9), "k_tiles": st.integers(1, 13), "seed": st.integers(0, 2**32)}


@given(**SIZES, stages=st.integers(2, 7))
def test_ping_pong_computes_every_tile_once(tiles: int, k_tiles: int, seed: int, stages: int) -> None:
    block = PingPong(tiles, k_tiles, stages)
    play([block.producer(), block.consumer(0), block.consumer(1)], [block.ring], random.Random(seed))
    assert sorted(block.done) == [(tile, tile % 2) for tile in range(tiles)]


@given(**SIZES, stages=st.integers(2, 8), consumers=st.integers(2, 3))
def test_cooperative_computes_every_share_once(
    tiles: int, k_tiles: int, seed: int, stages: int, consumers: int
) -> None:
    config = GemmConfig("cooperative", 64 * consumers, 128, 64, stages=stages)
    assert config.consumers == consumers
    block = Together(tiles, k_tiles, config)
    actors = [block.producer(), *map(block.consumer, range(consumers))]
    play(actors, [block.columns, *block.rows], random.Random(seed))
    assert sorted(block.done) == [(tile, number) for tile in range(tiles) for number in range(consumers)]


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), group=st.sampled_from([1, 4, 8]))
def test_tiles_are_placed_once(rows: int, columns: int, group: int) -> None:
    places = [tile_coordinates.fn(tile, rows, columns, group) for tile in range(rows * columns)]
    assert sorted(places) == [(m, n) for m in range(rows) for n in range(columns)]
    # Neighbours in the list share operands: one group of rows is walked at a time.
    assert all(abs(a[0] - b[0]) < group or a[0] // group != b[0] // group for a, b in itertools.pairwise(places))
