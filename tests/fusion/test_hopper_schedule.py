"""The protocol of the Gluon kernel's producer and consumers, played out in any order: every tile once, no mix-up.

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

from stof.fusion.templates import hopper_gemm
from stof.fusion.templates.device import tile_place


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


class Block:
    """One thread block: `shares` consumers to a tile, its tiles, their steps, the stages in between."""

    def __init__(self, tiles: list[int], k_tiles: int, stages: int, shares: int) -> None:
        self.tiles, self.k_tiles, self.stages, self.shares = tiles, k_tiles, stages, shares
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(shares) for _ in range(stages)]
        self.turn = [Barrier(1), Barrier(1)]
        self.holds: list[tuple[int, int] | None] = [None] * stages
        self.copies: list[tuple[int, tuple[int, int]]] = []
        self.readers = [0] * stages
        self.done: list[tuple[int, int]] = []

    def producer(self) -> Step:
        stage, phase = 0, 1
        for tile in self.tiles:
            for k in range(self.k_tiles):
                yield self.empty[stage], phase
                assert self.readers[stage] == 0, "a stage is filled while it is read"
                self.copies.append((stage, (tile, k)))
                stage += 1
                if stage == self.stages:
                    stage, phase = 0, phase ^ 1

    def consumer(self, number: int) -> Step:
        turns = 2 // self.shares
        before_me = number if turns == 2 else 0
        for place in range(before_me, len(self.tiles), turns):
            stage, phase = hopper_gemm.first_step.fn(place, self.k_tiles, self.stages)
            if self.shares == 1:
                yield self.turn[number], hopper_gemm.turn_phase.fn(place, number)
            before: int | None = None
            for k in range(self.k_tiles):
                yield self.full[stage], phase
                assert self.holds[stage] == (self.tiles[place], k), "a step is taken for another"
                self.readers[stage] += 1
                if before is not None:
                    self.release(before)
                before = stage
                stage += 1
                if stage == self.stages:
                    stage, phase = 0, phase ^ 1
                yield None
            if self.shares == 1:
                self.turn[1 - number].arrive()
            yield None
            assert before is not None
            self.release(before)
            for _ in range(3):  # the epilogue
                yield None
            self.done.append((self.tiles[place], number))

    def release(self, stage: int) -> None:
        self.readers[stage] -= 1
        self.empty[stage].arrive()

    def land(self, copy: int) -> None:
        stage, step = self.copies.pop(copy)
        self.holds[stage] = step
        self.full[stage].arrive()

    def play(self, chance: random.Random) -> None:
        """Until all are done; a state in which nobody can go on fails."""
        waiting: dict[Step, tuple[Barrier, int] | None] = {self.producer(): None}
        waiting |= {self.consumer(number): None for number in range(2)}
        while waiting:
            ready = [one for one, on in waiting.items() if on is None or on[0].passed(on[1])]
            assert ready or self.copies, "deadlock"
            if self.copies and (not ready or chance.random() < 0.3):
                self.land(chance.randrange(len(self.copies)))
                continue
            one = chance.choice(ready)
            try:
                waiting[one] = next(one)
            except StopIteration:
                del waiting[one]


@given(
    tiles=st.integers(0, 9),
    k_tiles=st.integers(1, 13),
    stages=st.integers(2, 7),
    shares=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
def test_every_tile_is_computed_once(tiles: int, k_tiles: int, stages: int, shares: int, seed: int) -> None:
    block = Block(list(range(100, 100 + tiles)), k_tiles, stages, shares)
    block.play(random.Random(seed))
    assert sorted(tile for tile, _ in block.done) == sorted([*block.tiles] * shares)
    if shares == 1:
        assert all((tile - 100) % 2 == number for tile, number in block.done)


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), group=st.sampled_from([1, 4, 8]))
def test_tiles_are_placed_once(rows: int, columns: int, group: int) -> None:
    places = [tile_place.fn(tile, rows, columns, group) for tile in range(rows * columns)]
    assert sorted(places) == [(m, n) for m in range(rows) for n in range(columns)]
    # Neighbours in the list share operands: one group of rows is walked at a time.
    assert all(abs(a[0] - b[0]) < group or a[0] // group != b[0] // group for a, b in itertools.pairwise(places))
