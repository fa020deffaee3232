"""`python -m benchmarks paper`: masks by their definitions, equal for everyone, resuming, charts, and bad input."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli.attention import app
from benchmarks.cli.paper import PARTS, slug
from benchmarks.paper import attention, charts, experiment, models, search, selector
from benchmarks.paper.cells import cells_of, known_words
from benchmarks.paper.experiment import KEY, Cell, Row, missing, open_file, run
from benchmarks.paper.masks import neighborhoods, paper_masks, random_scores, z_order
from benchmarks.peers.mask_formats import mask_mod
from benchmarks.results_io import read_results
from stof import LayoutConfig, masks
from stof.calibration.layout_alternatives import Alternative
from stof.errors import ArgumentError, MissingDependencyError
from stof.kernels.config import KernelConfig
from stof.selection import KernelChoice
from stof.testing.mask_grid import Shape

CPU = torch.device("cpu")
LENGTH = 200  # of no whole number of blocks


def definition(name: str, i: int, j: int, length: int) -> bool:
    """The issue's definitions, one score at a time; without BigBird's random scores."""
    back, far = i - j, abs(i - j) <= 32
    first = i < 32 or j < 32
    middle = length // 2
    return {
        "causal": j <= i,
        "sliding 32": 0 <= back <= 32,
        "sliding 128": 0 <= back <= 128,
        "dilated": 0 <= back <= 32 and back % 2 == 0,
        "longformer": far or first or middle <= i < middle + 32 or middle <= j < middle + 32,
        "bigbird": far or first,
    }[name]


@pytest.mark.parametrize("name", paper_masks(CPU))
@pytest.mark.parametrize("length", [128, LENGTH])
def test_masks_are_those_of_the_paper(name: str, length: int) -> None:
    mask = paper_masks(CPU)[name]
    keep = mask.mask(length).to_dense(length)[0, 0]
    wanted = torch.tensor([[definition(name, i, j, length) for j in range(length)] for i in range(length)])
    if name == "bigbird":
        wanted |= random_scores(length, CPU)
    assert torch.equal(keep, wanted)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask_mod(mask, length, length, CPU)(zero, zero, rows, columns).expand(length, length), wanted)


def test_random_scores_lie_in_one_block_of_every_32_rows() -> None:
    keep = random_scores(1024, CPU)
    blocks = keep.view(32, 32, 32, 32).sum((1, 3))
    assert [int((row > 0).sum()) for row in blocks] == [1] * 32
    shifts = [int(row.argmax()) - i for i, row in enumerate(blocks)]
    assert set(shifts) == {-1, 0, 1}
    assert 0.08 < float(keep.sum()) / (32 * 32 * 32) < 0.12
    assert torch.equal(random_scores(1024, CPU), keep)
    assert bool(random_scores(197, CPU).any())


def test_neighbourhoods_in_both_orders_are_one_mask() -> None:
    plain, moved = neighborhoods(20, 16, CPU)
    order = z_order(20, 16)
    assert torch.equal(order.sort().values, torch.arange(320))
    assert order[:6].tolist() == [0, 1, 16, 17, 2, 3]
    rows = plain.mask(320).to_dense(320)[0, 0]
    at = random.Random(0)
    for _ in range(300):
        i, j = at.randrange(320), at.randrange(320)
        assert bool(rows[i, j]) == (abs(i // 16 - j // 16) <= 6 and abs(i % 16 - j % 16) <= 6)
    assert torch.equal(moved.mask(320).to_dense(320)[0, 0], rows[order][:, order])
    for mask in (plain, moved):
        places = torch.arange(320)
        got = mask_mod(mask, 320, 320, CPU)(places[0], places[0], places[:, None], places[None])
        assert torch.equal(got, mask.mask(320).to_dense(320)[0, 0])


def test_all_cells_of_the_paper_are_there() -> None:
    listed = attention.cells(torch.device("meta"), torch.float16, lambda line: None)
    assert len(listed) == 6 + 2
    sizes = {(batch, length) for batch in (1, 8, 16) for length in (128, 256, 512, 1024, 2048, 4096)}
    assert set(attention.SIZES) == sizes
    for part in PARTS:
        assert part == "selector" or cells_of([part], "bert-base", CPU, lambda line: None)


def test_native_attention_is_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    hidden = torch.rand(16, 16) < 0.3
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    torch.testing.assert_close(attention.native(q, k, v, hidden), wanted)


def tiny_cell(name: str, log: list[str], problem: Exception | None = None) -> Cell:
    rows = tuple(Row("9", name, "", 1, 64, impl) for impl in ("native", "stof"))

    def measure(wanted: Sequence[Row], report: Any, timed: bool) -> list[Row]:
        log.append(name)
        if problem is not None:
            raise problem
        return [replace(row, us=3.0 if row.impl == "native" else 1.5, max_rel_err=0.0) for row in wanted]

    return Cell(("fig9",), rows, measure)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log, said = tmp_path / "paper.json", list[str](), list[str]()
    cells = [tiny_cell(name, log) for name in ("a", "b", "c")]
    interrupted = [*cells[:1], tiny_cell("b", log, KeyboardInterrupt())]  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, open_file(path, CPU), seconds=99, report=said.append)
    assert {row.mask for row in read_results(path, Row).rows} == {"a"}
    file = open_file(path, CPU)
    assert run(cells, file, seconds=99, report=said.append) == 0
    assert log == ["a", "b", "b", "c"]
    found = read_results(path, Row)
    assert len(found.rows) == 6
    assert found.meta["versions"]["torch"] == torch.__version__
    assert "MCFuser" in found.meta["absent"]
    assert all(row.sources and row.device and row.versions for row in found.rows)
    # Nothing is left to do, until the sources change; what a run of no time leaves is counted.
    assert [missing(cell, open_file(path, CPU)) for cell in cells] == [[], [], []]
    monkeypatch.setattr(experiment, "sources", lambda models: "others")
    assert run(cells, open_file(path, CPU), seconds=-1, report=said.append) == 3
    assert run(cells, open_file(path, CPU), seconds=99, report=said.append) == 0
    assert {row.sources for row in read_results(path, Row).rows} == {"others"}
    assert len(read_results(path, Row).rows) == 6


def test_failures_and_too_little_memory_are_rows_that_say_so(tmp_path: Path) -> None:
    path, said = tmp_path / "paper.json", list[str]()
    cells = [
        tiny_cell("large", [], torch.OutOfMemoryError("tried to allocate 80 GiB")),
        tiny_cell("broken", [], RuntimeError("no such kernel")),
        tiny_cell("good", []),
        tiny_cell("no package", [], MissingDependencyError("models need transformers")),
    ]
    assert run(cells, open_file(path, CPU), seconds=99, report=said.append) == 0
    notes = {row.mask: row.note for row in read_results(path, Row).rows}
    assert notes == {
        "large": "skipped: too little memory on this GPU",
        "broken": "RuntimeError: no such kernel",
        "good": "",
    }
    assert any("too little memory" in line for line in said)
    assert all("about" in line for line in said if line.startswith("[2/"))


def test_a_cell_too_large_for_all_is_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def race(masks: Any, shapes: Any, peers: Sequence[Any], on_cell: Any, **settings: Any) -> None:
        if len(peers) > 1 or peers[0].name == "native":
            raise torch.OutOfMemoryError
        where = ("causal", 1, 12, 12, 64, 96, 96, "float32")
        on_cell([attention.race.Row(*where, 0.5, peers[0].name, None, 1.0, 1.0, 0.0)], [])

    monkeypatch.setattr(attention.race, "run_attention", race)
    cell = attention.cells(CPU, torch.float32, lambda line: None)[0]
    found = {row.impl: row for row in cell.measure(cell.rows, lambda line: None, True)}
    assert found["native"].note == "skipped: too little memory on this GPU"
    assert found["stof"].us == 1.0
    assert len(found) == len(cell.rows)


def test_who_loses_the_device_is_left_out_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(masks: Any, shapes: Any, peers: Sequence[Any], **settings: Any) -> None:
        raise attention.race.ContextLostError("sdpa on causal B1: illegal access")

    monkeypatch.setattr(attention.race, "run_attention", race)
    monkeypatch.setattr(experiment, "device_problem", lambda device: "illegal access")
    path, cell = tmp_path / "paper.json", attention.cells(CPU, torch.float32, lambda line: None)[0]
    with pytest.raises(experiment.StopError, match="no longer answers"):
        run([cell], open_file(path, CPU), seconds=99, report=lambda line: None)
    left = missing(cell, open_file(path, CPU))
    assert {row.impl for row in cell.rows} - {row.impl for row in left} == {"sdpa"}


def test_one_cell_from_command_to_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name in ("flex", "native-compiled"):  # they compile C++
        monkeypatch.delitem(attention.PEERS, name)
    path = tmp_path / "cpu.json"
    words = ["paper", "--device", "cpu", "--only", "order", "--output", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    rows = read_results(path, Row).rows
    assert {row.impl for row in rows} == {"native", "sdpa", "stof"}
    assert all(row.us and row.max_rel_err < 1e-5 for row in rows)
    assert {path.suffix for path in tmp_path.glob("*orders*")} == {".png", ".svg"}
    again = CliRunner().invoke(app, words)
    assert "0 cells to measure, 2 are there already" in again.output
    assert read_results(path, Row).rows == rows
    for picture in tmp_path.glob("*.png"):
        picture.unlink()
    drawn = CliRunner().invoke(app, ["paper", "--charts-only", "--output", str(path)])
    assert drawn.exit_code == 0, (drawn.output, drawn.exception)
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_bars_are_normalised_to_native() -> None:
    times = {"native": 6.0, "sdpa": 3.0, "sdpa-cudnn": 2.0, "stof": 1.0}
    assert charts.bar_height(times, ("sdpa", "sdpa-cudnn")) == 3.0
    assert charts.bar_height(times, ("flex",)) is None
    assert charts.bar_height(times, ("stof",), speedup=False) == 1.0
    rows = [Row("9", "causal", "", 1, 128, impl, us=us) for impl, us in times.items()]
    rows += [Row("11", "bigbird", "t5", 1, 128, impl, ms=us) for impl, us in times.items()]
    rows += [Row("13", "bigbird", "t5", 1, 128, "stof reward", s=0.5), Row("9", "causal", "", 8, 128, "stof", us=1.0)]
    made = {name: panels for name, _, panels in charts.charts(rows)}
    assert set(made) == {"figure-9-10", "figure-11", "figure-13"}
    heading, groups, bars = made["figure-9-10"][0]
    assert (heading, groups) == ("causal", ["1, 128"])  # a cell without native has no bar
    assert bars["STOF"] == [6.0]
    assert bars["FlexAttention"] == [None]
    assert made["figure-13"][0][2] == {"reward": [0.5]}
    assert charts.table(rows)[0] == ("9", "causal", "1, 128", "1 us", "2 us", "sdpa-cudnn", "2.00")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", models.MODELS)
def test_models_get_the_same_mask_from_everyone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import stof.integrations.transformers as hf

    bert = models._bert(1, 2) | {"vocab_size": 30000}
    tiny = {
        "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1},
        "t5": {"d_model": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "d_ff": 64, "d_kv": 32},
        "vit-base": models._bert(1, 2),
    }.get(name, bert)
    monkeypatch.setitem(models.TINY, name, tiny)
    length = 197 if name == "vit-base" else 150
    models.subject_of.cache_clear()
    subject = models.subject_of(name, 1, length, CPU, torch.float32)
    found = {}
    with torch.no_grad():
        for kind in ("native", "sdpa", "flex"):
            changed = models.with_attention(subject.model, kind, subject.mask, length, name in models.CAUSAL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # FlexAttention says that it was not compiled
                found[kind] = changed(**subject.inputs)[0]
        ours = copy.deepcopy(subject.model)
        hf.sparsify(hf.enable(ours), subject.mask.mask(length))
        found["stof"] = ours(**subject.inputs)[0]
        unmasked = copy.deepcopy(subject.model)(**subject.inputs)[0]
    models.subject_of.cache_clear()
    for out in found.values():
        torch.testing.assert_close(out.double(), subject.exact, atol=2e-5, rtol=1e-4)
    assert float((unmasked - subject.exact).abs().max()) > 1e-3


def test_a_wrong_model_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "prepared", lambda subject, impl: lambda **inputs: (-subject.exact,))
    subject = models.Subject("x", 4, paper_masks(CPU)["causal"], torch.nn.Identity(), {}, torch.ones(4).double(), 0.999)
    row = models._run(subject, Row("11", "m", "x", 1, 4, "stof"), CPU, True)
    assert row.ms is None
    assert row.note.startswith("wrong result, not timed")


@pytest.mark.parametrize("right", [True, False])
def test_a_search_times_what_it_tuned_if_it_is_right(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.ones(4).double()
    subject = models.Subject("x", 4, paper_masks(CPU)["causal"], torch.nn.Identity(), {}, exact, 0.999)
    monkeypatch.setattr(search, "subject_of", lambda *arguments: subject)
    monkeypatch.setattr(search.stof, "optimize", lambda model, **options: lambda: (exact if right else -exact,))
    monkeypatch.setattr(search, "wall_ms", lambda call, device: 3.0)
    rows = search.cells(["bert-base"], CPU, torch.float32)[0].rows
    found, _ = search._search(rows, True, CPU, torch.float32)
    tuned = next(row for row in found if row.impl == "stof-tuned")
    assert (tuned.figure, tuned.ms) == ("11", 3.0 if right else None)
    assert all((row.s is not None) is right for row in found if row is not tuned)
    assert right or all(row.note.startswith("wrong result") for row in found)


def test_a_search_fills_all_rows_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a resumed run wants some of them: rows of two searches in one cell would not belong together."""
    monkeypatch.setattr(search, "ProcessPoolExecutor", lambda *arguments: ThreadPoolExecutor(1))
    monkeypatch.setattr(search, "_search", lambda rows, *arguments: ([replace(row, s=1.0) for row in rows], ["done"]))
    (cell,), lines = search.cells(["bert-base"], CPU, torch.float32), list[str]()
    found = cell.measure(cell.rows[:1], lines.append, True)
    assert [replace(row, s=None) for row in found] == list(cell.rows)
    assert lines == ["done"]


def test_times_of_a_model_that_are_compared_are_measured_one_after_the_other() -> None:
    listed = models.cells(["bert-base", "gpt2"], torch.device("cuda"), torch.float16)
    one, other = listed[:2]
    assert {(row.model, row.batch, row.length) for row in one.rows + other.rows} == {("bert-base", 1, 128)}
    assert {"stof", "default-flex"} <= {row.impl for row in one.rows + other.rows}
    assert ["autotune" in cell.parts for cell in listed] == [False] * 12 + [True] * 6


def test_seconds_of_a_search_go_to_the_innermost_phase() -> None:
    now = iter(range(100))
    watch = search.Stopwatch(clock=lambda: float(next(now)))
    with watch.within("outer"), watch.within("inner"):
        pass
    assert watch.seconds == {"outer": 2.0, "inner": 1.0}
    for functions in search.PHASES.values():
        for owner, attribute in functions:
            assert callable(getattr(owner, attribute))


def alternative(implementation: str, tile: tuple[int, int], slab: int | None = None) -> Alternative:
    layout = LayoutConfig(*tile, slab)
    return Alternative(KernelChoice(implementation, layout, None, KernelConfig()), 1.0, 1.0)


def test_the_papers_second_phase() -> None:
    shape = Shape(2, 12, 12, 64, 1024, 1024)
    # occupancy x batch x S x heads x sqrt(multiprocessors x (S / BLOCK_M) x batch / (BLOCK_M x BLOCK_N))
    assert selector.block_score(64, 32, shape, 0.25, 132) == pytest.approx(6144 * (132 * 16 * 2 / 2048) ** 0.5)
    gathered, small, large, rows = (
        alternative("block_wise", (64, 32), 1),
        alternative("block_wise", (64, 64)),
        alternative("hopper", (128, 128)),
        alternative("row_wise", (64, 64), 1),
    )
    listed = [gathered, small, large, rows]

    def score(one: Alternative) -> float:
        assert one.choice.layout is not None
        return selector.block_score(one.choice.layout.block_m, one.choice.layout.block_n, shape, 0.25, 132)

    assert selector.paper_pick("row_wise", listed, score) is rows
    assert selector.paper_pick("block_wise", listed, score) is small
    assert selector.paper_pick("block_wise", [gathered, rows], score) is None
    assert float(selector.random_mask(512, CPU, 0.05).to_dense(512).float().mean()) == pytest.approx(0.05, rel=0.1)
    assert bool((selector.single_keys(64, CPU).to_dense(64).sum(-1) == 1).all())
    assert len(selector.mask_makers()) * len(selector.SHAPES) >= 200
    for name, make in selector.mask_makers().items():
        assert make(256, CPU).to_dense(256).shape[-2:] == (256, 256), name


@pytest.mark.parametrize("name", selector.mask_makers())
def test_other_libraries_get_the_same_unseen_masks(name: str) -> None:
    mask = selector.raced_mask(name, CPU)
    keep, places = mask.mask(160).to_dense(160)[0, 0], torch.arange(160)
    got = mask_mod(mask, 160, 160, CPU)(places[0], places[0], places[:, None], places[None])
    assert torch.equal(got.expand(160, 160), keep)
    assert torch.equal(keep, selector.mask_makers()[name](160, CPU).to_dense(160)[0, 0])
    if mask.window is not None:
        left, right = (160 if side is None else side for side in mask.window)
        assert torch.equal(keep, masks.sliding_window(left, right).to_dense(160)[0, 0])


def test_unseen_masks_are_raced_at_every_shape() -> None:
    listed = selector.unseen_cells(torch.device("meta"), torch.float16)
    assert len(listed) == len(selector.mask_makers()) * len(selector.SHAPES) >= 200
    assert {row.figure for cell in listed for row in cell.rows} == {"unseen"}
    assert len({(row.mask, row.batch, row.length) for cell in listed for row in cell.rows}) == len(listed)
    assert all({"stof", "flex", "sdpa"} <= {row.impl for row in cell.rows} for cell in listed)


def test_selectors_choose_among_the_measured_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cost model's estimates in place of measurements, as on an H200."""

    def measured(*args: Any, only: Sequence[Alternative], rounds: int) -> list[Alternative]:
        return [replace(one, measured_us=one.estimate_us) for one in only]

    monkeypatch.setattr(selector, "measured", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for name, kernel in (("random 0.01 %", "row_wise"), ("causal", ""), ("single keys", ""), ("band 3", "")):
        make, shape = selector.mask_makers()[name], Shape(1, 12, 12, 64, 512, 512)
        rows = [Row("selector", name, "", 1, 512, impl) for impl in (selector.OURS, "Eq. 1, tau 1.2", selector.BEST)]
        found = selector._measure(
            rows, lambda line: None, True, make=make, shape=shape, device=CPU, dtype=torch.float16
        )
        times = [row.us for row in found]
        assert times[0] == times[2] == min(times)
        assert found[1].note.startswith(kernel)


def test_layouts_that_do_not_fit_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And listed no more; a wrong result is shown."""
    asked: list[list[Any]] = []

    def measured(*args: Any, only: Sequence[Alternative], rounds: int) -> list[Alternative]:
        asked.append([one.choice for one in only])
        if len(asked) == 1:
            return [replace(one, measured_us=None if one is only[0] else 9.0, note="unfit") for one in only]
        return [replace(one, note="wrong") if one is only[0] else replace(one, measured_us=9.0) for one in only]

    monkeypatch.setattr(selector, "measured", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    rows = [Row("selector", "causal", "", 1, 512, impl) for impl in (selector.OURS, selector.BEST)]
    given: dict[str, Any] = {"make": selector.mask_makers()["causal"], "shape": Shape(1, 12, 12, 64, 512, 512)}
    found = selector._measure(rows, lambda line: None, True, **given, device=CPU, dtype=torch.float16)
    assert len(asked) == 2
    assert asked[0][0] not in asked[1]
    assert [(row.us, row.note == "wrong") for row in found] == [(None, True), (9.0, False)]


def test_regret_of_the_selectors() -> None:
    times = {"stof": 2.0, "Eq. 1, tau 1": 3.0, "best measured": 2.0}
    rows = [Row("selector", "random 1 %", "", 1, 128, impl, us=us) for impl, us in times.items()]
    assert charts.regrets(rows) == [
        ("stof", "1", "0.0%", "0%", "random 1 %, 128"),
        ("Eq. 1, tau 1", "1", "50.0%", "50%", "random 1 %, 128"),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "fig14"], "there is no 'fig14'; did you mean fig"),
        (["--only", "tabel4"], "did you mean table4?"),
        (["--device", "cpu", "--only", "fig11", "--models", "bert-bsae"], "did you mean bert-base?"),
        (["--seconds", "nan"], "--seconds is a number from 0"),
        (["--charts-only", "--output", "nofile.json"], "nofile.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_no_option_has(words: list[str], told: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["paper", *words])
    assert done.exit_code == 2, (done.output, done.exception)
    assert "Traceback" not in done.output
    assert told in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["paper"])
    assert done.exit_code == 2
    assert "need an NVIDIA GPU" in done.stderr


def test_words_and_names() -> None:
    assert known_words("--only", "fig9, table4 fig9", PARTS) == ["fig9", "table4"]
    assert known_words("--only", "", PARTS) == list(PARTS)
    with pytest.raises(ArgumentError, match="did you mean"):
        known_words("--only", "figg9", PARTS)
    assert slug("NVIDIA H200") == "h200"
    assert slug("NVIDIA H100 80GB HBM3") == "h100"
    assert slug("NVIDIA A100-SXM4-80GB") == "a100"
    assert len(KEY) == 6
