"""The search on tables of made-up times: it finds what is best, in few measurements, and knows when to stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fusion.repeated_layers import find_layers
from benchmarks.fusion.search_baselines import (
    OperatorClasses,
    SearchResult,
    exhaustive,
    paper_stage_one,
    paper_stage_two,
    random_search,
    search_result,
)
from stof.fusion.graph.scheme import Scheme
from stof.fusion.planner import two_stage_search
from stof.fusion.planner.search_space import Budget, MeasurementCache, Progress, Space, Wanted
from stof.fusion.planner.two_stage_search import best_known_scheme, stage_one, stage_two
from stof.fusion.records.store import SegmentCandidate
from tests.examples import examples

# One letter an operator: C and D are compute-intensive.
Table = dict[str, dict[str, float]]
INDUCTOR = 10.0


def two_stage(meter: MeasurementCache, **options: int) -> SearchResult:
    return search_result(meter, two_stage_search.two_stage(meter, **options))


class Tabled:
    """A space over letters: each entry of the table is a covered sequence with its configurations' times."""

    def __init__(self, letters: str, table: Table) -> None:
        self.letters, self.table = letters, table
        self.asked: list[tuple[str, SegmentCandidate | None]] = []
        layers = find_layers(letters)
        classes = [layers.place_class(i) for i in range(len(letters))]
        self.operators = OperatorClasses([c in "CD" for c in letters], classes)
        self.space = Space(len(letters), self.key, self.candidates, self.measure, 3)

    def key(self, start: int, stop: int) -> Hashable:
        return self.letters[start:stop]

    def candidates(self, start: int, stop: int) -> Sequence[SegmentCandidate]:
        text = self.letters[start:stop]
        return [(text, config) for config in self.table.get(text, {})]

    def measure(self, start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        text = self.letters[start:stop]
        self.asked += [(text, candidate) for candidate in candidates]
        return [INDUCTOR * len(text) if c is None else self.table[text][c[1]] for c in candidates]

    def apart(self) -> Scheme:
        return Scheme(len(self.letters), tuple(range(1, len(self.letters))))

    def brute_force(self) -> float:
        """The most any scheme can save, by trying all of them."""
        n, best = len(self.letters), 0.0
        for bits in itertools.product("01", repeat=n - 1):
            scheme = Scheme.from_bits("0" + "".join(bits))
            best = max(best, sum(self._saving(self.letters[s.start : s.stop]) for s in scheme.segments))
        return best

    def _saving(self, text: str) -> float:
        return max(0.0, INDUCTOR * len(text) - min(self.table.get(text, {"": math.inf}).values()))


# A layer of BERT: GEMM, residual, norm, GEMM, activation, GEMM, residual, norm; letters per kind.
LAYER = "CrnCgCrn"
TABLE: Table = {
    "Cr": {"": 18.0, "a": 16.0, "b": 19.0},
    "Crn": {"": 24.0, "a": 23.0, "b": 31.0},
    "Cg": {"": 21.0, "a": 17.0, "b": 12.0, "c": 30.0, "d": 14.0},
    "nC": {"": 25.0, "a": 25.0},
}


def measure_defaults(meter: MeasurementCache, scheme: Scheme) -> None:
    """What stage 1 measures of a scheme."""
    for segment in scheme.segments:
        meter.gain(segment.start, segment.stop)


def test_two_stages_find_the_best_scheme_of_layers() -> None:
    tabled = Tabled("e" + LAYER * 3 + "C", TABLE)
    meter = MeasurementCache(tabled.space)
    found = two_stage(meter)
    assert found.saved_us == pytest.approx(6 * (30 - 23) + 3 * (20 - 12))
    assert set(found.chosen.values()) == {("Crn", "a"), ("Cg", "b")}
    assert len(found.chosen) == 9
    assert tabled.operators.allows(found.scheme)
    # Layers are alike: nothing is measured twice.
    assert len(tabled.asked) == len(set(tabled.asked)) == found.measurements
    full = Tabled("e" + LAYER * 3 + "C", TABLE)
    best = exhaustive(MeasurementCache(full.space))
    assert best.saved_us == pytest.approx(found.saved_us)


def test_a_slower_template_is_not_taken() -> None:
    tabled = Tabled("Cr", {"Cr": {"": 25.0}})
    meter = MeasurementCache(tabled.space)
    stage_one(meter)
    assert best_known_scheme(meter) == tabled.apart()
    assert meter.measured(0, 2) == {None: 20.0, ("Cr", ""): 25.0}
    assert search_result(meter, Scheme(2)).chosen == {}


def test_stage_one_measures_one_segment_of_each_kind_the_given_and_the_longest_first() -> None:
    tabled = Tabled(LAYER * 2, TABLE)
    stage_one(MeasurementCache(tabled.space), [range(11, 13)])
    assert list(dict.fromkeys(text for text, _ in tabled.asked)) == ["Cg", "Crn", "Cr", "nC"]
    assert [candidate for _, candidate in tabled.asked] == [
        one for text in ("Cg", "Crn", "Cr", "nC") for one in (None, (text, ""))
    ]


def test_every_template_of_a_segment_is_tried_first() -> None:
    """The first template's default is slow, the second one's is fast; both come before any configuration."""
    times = {None: 20.0, ("a", ""): 26.0, ("b", ""): 10.0, ("a", "x"): 9.0}
    asked: list[SegmentCandidate | None] = []

    def measure(start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        asked.extend(candidates)
        return [times[candidate] for candidate in candidates]

    listed = [candidate for candidate in times if candidate is not None]
    space = Space(2, lambda i, j: (i, j), lambda i, j: listed if (i, j) == (0, 2) else [], measure, 2)
    meter = MeasurementCache(space)
    stage_one(meter)
    assert asked == [None, ("a", ""), ("b", "")]
    assert meter.known_gain(0, 2) == 10.0
    assert meter.known_gain(0, 2, 0.8) == 12.0
    assert two_stage(meter).chosen == {0: ("a", "x")}
    assert meter.known_gain(0, 2, 0.8) == 11.0


def test_segments_that_no_single_move_leads_to_are_found() -> None:
    """With the norm before it a GEMM is a little faster; with the activation behind it, much. Both share the GEMM."""
    tabled = Tabled("nCg" * 3, {"nC": {"": 18.0}, "Cg": {"": 9.0}})
    stuck = paper_stage_one(tabled.operators, MeasurementCache(tabled.space), tabled.apart())
    assert stuck == Scheme.of(9, (2, 3, 5, 6, 8))
    assert two_stage(MeasurementCache(tabled.space)).saved_us == 3 * 11.0


def test_the_papers_seize_takes_from_a_memory_intensive_segment() -> None:
    tabled = Tabled("rnCg", {"nCg": {"": 5.0}})
    meter = MeasurementCache(tabled.space)
    scheme = paper_stage_one(tabled.operators, meter, Scheme.from_bits("0011"), 1.0)
    assert scheme == Scheme.from_bits("0111")


def test_the_papers_compete_gives_the_contested_operator_to_the_faster_side() -> None:
    # Both sides hold a GEMM; the operator between them belongs left at first, and is worth more right.
    tabled = Tabled("CgD", {"Cg": {"": 19.0}, "gD": {"": 2.0}})
    meter = MeasurementCache(tabled.space)
    scheme = paper_stage_one(tabled.operators, meter, Scheme.from_bits("001"), 1.0)
    assert scheme == Scheme.from_bits("011")


def test_the_papers_moves_give_no_segment_three_compute_intensive_operators() -> None:
    tabled = Tabled("CDC", {"CDC": {"": 0.1}, "CD": {"": 15.0}})
    meter = MeasurementCache(tabled.space)
    scheme = paper_stage_one(tabled.operators, meter, tabled.apart(), 1.0)
    assert scheme == Scheme.from_bits("001")


@pytest.mark.parametrize("unclear", [(None,), ("Cg", "b"), ("Cg", "")])
def test_times_that_cannot_be_told_never_win(unclear: tuple[str, ...]) -> None:
    problem = Tabled(LAYER, TABLE)
    lost = None if unclear == (None,) else unclear

    def measure(start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        times = problem.measure(start, stop, candidates)
        lies = [candidate == lost and problem.key(start, stop) == "Cg" for candidate in candidates]
        return [math.nan if lie else taken for lie, taken in zip(lies, times, strict=True)]

    meter = MeasurementCache(replace(problem.space, measure=measure))
    found = two_stage(meter, per_segment=4)
    place = found.chosen.get(3)
    assert place == {None: None, ("Cg", "b"): ("Cg", "d"), ("Cg", ""): None}[lost]
    assert math.isfinite(found.saved_us)
    assert meter.noisy == {("Cg", lost)}
    assert lost not in meter.certain()["Cg"]
    assert "Cg" not in meter.searched
    asked = [one for one in problem.asked if one == ("Cg", lost)]
    assert len(asked) == 1


def test_configurations_that_fail_are_never_chosen() -> None:
    tabled = Tabled("Cg", {"Cg": {"": math.inf, "a": math.inf}})
    found = two_stage(MeasurementCache(tabled.space))
    assert found.chosen == {}
    assert found.saved_us == 0


@given(
    st.text("CDrng", min_size=2, max_size=8),
    st.dictionaries(
        st.text("CDrng", min_size=2, max_size=3),
        st.dictionaries(st.sampled_from(["", "a", "b", "c"]), st.floats(1, 40), min_size=1).filter(lambda d: "" in d),
        max_size=12,
    ),
)
@examples(60)
def test_exhaustive_is_exact_and_no_other_search_beats_it(letters: str, table: Table) -> None:
    table = {text: configs for text, configs in table.items() if sum(c in "CD" for c in text) <= 2}
    tabled = Tabled(letters, table)
    best = exhaustive(MeasurementCache(tabled.space))
    assert best.saved_us == pytest.approx(tabled.brute_force())
    assert sum(INDUCTOR * len(t) - table[t][c] for t, c in best.chosen.values()) == pytest.approx(best.saved_us)
    for search in (
        lambda m: two_stage(m),
        lambda m: random_search(tabled.operators, m, schemes=8),
        lambda m: search_result(m, paper_stage_one(tabled.operators, m, tabled.apart())),
    ):
        meter = MeasurementCache(tabled.space)
        found = search(meter)
        assert found.saved_us <= best.saved_us + 1e-9
        assert found.saved_us == pytest.approx(sum(meter.known_gain(s.start, s.stop) for s in found.scheme.segments))


def test_near_the_best_with_a_fifth_of_the_measurements() -> None:
    """Configurations differ a little, schemes a lot; the target of two stages is within 3 %."""
    table = {
        text: {"": base} | {f"c{i}": base * (0.8 + 0.01 * ((i * 37 + len(text)) % 41)) for i in range(60)}
        for text, base in {"Cr": 17.0, "Crn": 23.0, "Cg": 15.0, "nC": 14.0, "nCg": 26.0}.items()
    }
    letters = LAYER * 4
    full = Tabled(letters, table)
    best = exhaustive(MeasurementCache(full.space))
    tabled = Tabled(letters, table)
    meter = MeasurementCache(tabled.space, Budget(measurements=best.measurements // 5))
    found = two_stage(meter)
    total = INDUCTOR * len(letters)
    assert found.measurements <= best.measurements / 5
    assert (total - found.saved_us) / (total - best.saved_us) < 1.03


def test_more_is_drawn_where_more_was_gained() -> None:
    # Each further configuration of Cg is a little faster; those of Dr are all alike.
    table = {
        "Cg": {"": 18.0} | {f"{i:03}": 18.0 for i in range(200)},
        "Dr": {"": 18.0} | {str(i): 18.0 for i in range(200)},
    }
    tabled = Tabled("CgDr", table)
    meter = MeasurementCache(tabled.space)
    fast = iter(range(1, 1000))
    plain = tabled.measure

    def measure(start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        times = plain(start, stop, candidates)
        return [
            t - 0.01 * next(fast) if c is not None and c[0] == "Cg" else t
            for t, c in zip(times, candidates, strict=True)
        ]

    object.__setattr__(tabled.space, "measure", measure)
    scheme = Scheme.from_bits("0011")
    measure_defaults(meter, scheme)
    meter.budget = Budget(measurements=80)
    paper_stage_two(meter, scheme)
    drawn = {text: len(meter.measured(start, start + 2)) for text, start in (("Cg", 0), ("Dr", 2))}
    assert drawn["Cg"] > 3 * drawn["Dr"]


def test_as_many_are_drawn_for_each_segment() -> None:
    gaining = {"": 18.0} | {f"{i:03}": 18.0 - 0.01 * i for i in range(200)}
    tabled = Tabled("CgDr", {"Cg": gaining, "Dr": dict.fromkeys(gaining, 18.0)})
    scheme = Scheme.from_bits("0011")

    def drawn(meter: MeasurementCache) -> list[int]:
        return [len(meter.measured(start, start + 2)) for start in (0, 2)]

    meter = MeasurementCache(tabled.space, Budget(measurements=2 * 2 + 9 * 8))
    stage_two(meter, scheme, patience=99)
    assert drawn(meter) == [2 + 9 * 4] * 2


def test_nothing_gained_for_two_rounds_ends_the_second_stage() -> None:
    tabled = Tabled("Cg", {"Cg": {"": 18.0} | {str(i): 19.0 for i in range(100)}})
    meter = MeasurementCache(tabled.space)
    measure_defaults(meter, Scheme(2))
    stage_two(meter, Scheme(2), per_segment=4)
    assert meter.measurements == 2 + 2 * 4


def test_a_gain_counts_in_a_round_that_leaves_nothing_of_its_segment() -> None:
    """Round 1 uses up Cg, with a gain; two rounds without one follow before the search ends."""
    table = {"Cg": {"": 18.0, "a": 17.0}, "Dr": {"": 18.0} | {f"{i:02}": 19.0 for i in range(20)}}
    tabled = Tabled("CgDr", table)
    meter = MeasurementCache(tabled.space)
    stage_two(meter, Scheme.from_bits("0011"), per_segment=2, patience=2)
    # Inductor's code, the first candidate, and two draws in each of three rounds.
    assert len(meter.measured(2, 4)) == 2 + 3 * 2


def test_budgets_end_a_search_with_what_is_known() -> None:
    now = [0.0]
    tabled = Tabled("e" + LAYER * 2, TABLE)
    plain = tabled.measure

    def measure(start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        now[0] += len(candidates)
        return plain(start, stop, candidates)

    object.__setattr__(tabled.space, "measure", measure)
    seen: list[Progress] = []
    meter = MeasurementCache(tabled.space, Budget(4.0, clock=lambda: now[0]), seen.append)
    found = two_stage(meter)
    assert meter.exhausted
    assert found.measurements == 4
    assert len(seen) == 2
    assert seen[-1].seconds_left == 0.0
    shown = str(Progress(1, 3, "operators 1..2", 1, ("Cr", "a"), 18.0, 20.0, 2.0))
    assert shown == "operators 1..2: 1 tried, best Cr a 18.0 us, Inductor 20.0 us, 2 s left"
    assert all(p.inductor_us == INDUCTOR * (p.stop - p.start) and p.tried == 1 for p in seen)

    tabled = Tabled("e" + LAYER * 2, TABLE)
    found = two_stage(MeasurementCache(tabled.space, Budget(measurements=3)))
    assert found.measurements == 3
    found = random_search(tabled.operators, MeasurementCache(tabled.space, Budget(measurements=0)), schemes=9)
    assert found.measurements == 0
    assert found.chosen == {}


def test_equal_seeds_draw_equally() -> None:
    def drawn(seed: int) -> list[tuple[str, SegmentCandidate | None]]:
        tabled = Tabled("Cg", {"Cg": {"": 18.0} | {str(i): 19.0 for i in range(50)}})
        two_stage(MeasurementCache(tabled.space), seed=seed)
        return tabled.asked

    assert drawn(1) == drawn(1) != drawn(2)


def test_what_will_be_measured_is_announced_before() -> None:
    tabled = Tabled("e" + LAYER * 2, TABLE)
    announced: set[tuple[str, SegmentCandidate | None]] = set()
    surprises: list[tuple[str, SegmentCandidate | None]] = []

    def prepare(wanted: Sequence[Wanted]) -> None:
        announced.update((tabled.letters[start:stop], one) for start, stop, some in wanted for one in some)
        assert all(some for _, _, some in wanted)

    def measure(start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        asked = {(tabled.letters[start:stop], one) for one in candidates if one is not None}
        surprises.extend(asked - announced)
        return tabled.measure(start, stop, candidates)

    space = replace(tabled.space, prepare=prepare, measure=measure)
    found = two_stage(MeasurementCache(space))
    assert found.measurements > len(TABLE)
    assert surprises == []


def test_what_cannot_be_the_fastest_is_not_measured() -> None:
    tabled = Tabled("e" + LAYER * 2, TABLE)
    # All but the true times of the best: a floor that is as high as the best so far excludes.
    floors = {("Cg", "c"): 30.0, ("Crn", "b"): 24.0}
    space = replace(tabled.space, floor=lambda start, stop, candidate: floors.get(candidate, 0.0))
    meter = MeasurementCache(space)
    found = two_stage(meter, per_segment=5)
    assert found.saved_us == pytest.approx(4 * (30 - 23) + 2 * (20 - 12))
    measured = {candidate for _, candidate in tabled.asked}
    assert measured.isdisjoint(floors)
    # Nothing is left over that could be tried.
    assert {space.key(1, 4), space.key(4, 6)} <= meter.searched


def test_what_is_fast_in_one_segment_is_tried_next_in_the_others() -> None:
    """Two segments, one configuration of forty is the fastest in both; the second tries it once the first has."""
    table = {name: {f"{i}": 19.0 + i / 100 for i in range(40)} | {"best": 5.0} for name in ("Cr", "Dn")}
    tried = []
    for seed in range(20):
        tabled = Tabled("CrDn", table)
        meter = MeasurementCache(tabled.space)
        stage_two(meter, Scheme.from_bits("0011"), per_segment=2, seed=seed, patience=99)
        at = [place for place, (_, candidate) in enumerate(tabled.asked) if candidate and candidate[1] == "best"]
        tried.append(at[1] - at[0])
    # Both segments are measured in turn, two to four candidates a round.
    assert max(tried) <= 2 * 4


def test_one_of_each_kind_comes_first() -> None:
    table = {"Cr": {f"{kind}{i}": 19.0 for kind in "abc" for i in range(10)}}
    for seed in range(5):
        tabled = Tabled("Cr", table)
        space = replace(tabled.space, kind=lambda candidate: candidate[1][0])
        stage_two(MeasurementCache(space), Scheme(2), per_segment=3, seed=seed)
        drawn = [candidate[1][0] for _, candidate in tabled.asked[2:] if candidate]
        assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["a", "b", "c"]


def test_the_lowest_bound_of_each_kind_comes_first() -> None:
    """Kinds a to c in turn; each from the candidate that could be fastest on, alike ones in an order of the seed."""
    floors = {f"{kind}{i}": (i // 2) / 10 for kind in "abc" for i in range(10)}
    orders = set()
    for seed in range(5):
        tabled = Tabled("Cr", {"Cr": {"": 19.0} | dict.fromkeys(floors, 19.0)})
        space = replace(
            tabled.space,
            kind=lambda candidate: candidate[1][:1],
            floor=lambda i, j, candidate: floors.get(candidate[1], 0.0),
        )
        stage_two(MeasurementCache(space), Scheme(2), per_segment=30, seed=seed, patience=99)
        drawn = [candidate[1] for _, candidate in tabled.asked if candidate and candidate[1]]
        assert len(set(drawn)) == len(drawn) == 30
        for place in range(10):
            turn = drawn[3 * place : 3 * place + 3]
            assert sorted(text[0] for text in turn) == ["a", "b", "c"]
            assert {floors[text] for text in turn} == {(place // 2) / 10}
        orders.add(tuple(drawn))
    assert len(orders) > 1
