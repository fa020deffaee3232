"""`python -m benchmarks models` and `search`: whole models against torch.compile, and searches for their schemes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.fusion import gpu
from benchmarks.cli.options import integers
from stof.cli.common import names

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from benchmarks.fusion.search_ablation import Row as Searched
    from benchmarks.models.compare import Plan, Row
    from benchmarks.results_io import RowFile
    from stof.testing.models import Case


_Cases = Annotated[str, typer.Option(help="model,batch,length,mask separated by spaces; ViT's length is ignored.")]
_Dtype = Annotated[str, typer.Option(help="float16 or bfloat16.")]
_CASES = (
    "bert,1,128,full bert,8,512,bigbird bert,1,4096,bigbird gpt2,8,1024,window+sinks llama,1,4096,window+sinks "
    "llama,1,16384,window+sinks"
)
_TRAINED = "bert-large,16,512,documents llama,1,8192,window+sinks modernbert,8,2048,full vit,8,1025,neighborhood"


def models(
    cases: _Cases = _CASES,
    impls: Annotated[
        str, typer.Option(help="Ways to run them, separated by spaces; 'peers' are six, 'ours' three of them.")
    ] = "peers ours",
    dtype: _Dtype = "float16",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls; medians are reported.")] = 20,
    rest: Annotated[
        float, typer.Option(min=0, help="Time single calls as well, each after so many seconds of rest.")
    ] = 0.0,
    budget: Annotated[float | None, typer.Option(help="Seconds after which nothing further is started.")] = None,
    search_budget: Annotated[float | None, typer.Option(help="Seconds that each search may take.")] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Only compile, in parallel, so that a run after it finds its caches filled.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that --warm has at a time.")] = 12,
    output: Annotated[
        Path | None, typer.Option(help="Write the JSON here, after each way, into what it holds of this commit.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the output file has.")] = False,
) -> None:
    """Time models from transformers with random weights, after checking their outputs against float32.

    Ends with status 3 where the device no longer answers, which lasts as long as the process: go on with --resume.
    """
    import math

    from rich.console import Console
    from rich.text import Text

    from benchmarks.models.compare import KEY, Plan, Row, impls_of, in_order
    from benchmarks.models.precompile import jobs_of
    from benchmarks.models.precompile import warm as compile_all
    from benchmarks.results_io import RowFile
    from stof.testing.models import Case

    device, precision = gpu(dtype)
    console, start = Console(stderr=True), time.perf_counter()

    def say(line: str) -> None:
        console.print(Text(line, style="dim"), soft_wrap=True)

    wanted = list(in_order([Case.parse(text) for text in cases.split()], impls_of(impls)))
    if warm:
        for line in compile_all(jobs_of(wanted), dtype, workers=workers, seconds=budget or math.inf, tell=say):
            console.print(Text(line, style="red"), soft_wrap=True)
        return
    plan, file = Plan(device, precision, rounds, search_budget, rest), RowFile(output, device, Row, KEY)
    done = file.done() if resume else set()
    wanted = [(case, impl) for case, impl in wanted if (*astuple(case), dtype, impl) not in done]
    until = math.inf if budget is None else start + budget
    lost = _run_each(wanted, plan, file, until, lambda line: say(f"{time.perf_counter() - start:.0f} s: {line}"))
    Console(width=150).print(models_table(file.rows, device, dtype))
    if lost:
        raise typer.Exit(3)


def _run_each(
    wanted: Sequence[tuple[Case, str]], plan: Plan, file: RowFile[Row], until: float, say: Callable[[str], object]
) -> bool:
    """Run ways until a moment, and keep the row of each at once; whether the device was lost on the way."""
    from benchmarks.failures import device_problem
    from benchmarks.models.compare import Subject, run_way

    subjects: dict[Case, Subject] = {}
    for place, (case, impl) in enumerate(wanted):
        if time.perf_counter() > until:
            say(f"{len(wanted) - place} left out for the budget; go on with --resume")
            break
        if case not in subjects:
            subjects[case] = Subject.of(case, plan.device, plan.dtype)
        row = run_way(subjects[case], impl, plan)
        say(f"{case} {impl}: {row.problem or f'{row.ms:.3f} ms'}")
        file.add([row])
        problem = device_problem(plan.device) if row.problem else ""
        if problem:
            say(f"the device no longer answers ({problem}); {len(wanted) - place - 1} left: go on with --resume")
            return True
    return False


def models_table(rows: Sequence[Row], device: torch.device, dtype: str) -> Table:
    """A line for each way, case by case, and how many times as fast the fastest of ours is as it."""
    from rich.table import Table

    from benchmarks.models.compare import speedups
    from stof.tuning.machine import device_name

    table = Table(title=f"Whole models on {device_name(device)}, {dtype}, ms a call")
    rested = ("after a rest",) if any(row.rested_ms is not None for row in rows) else ()
    headings = ("model", "batch", "length", "mask", "way", "ms", *rested, "stof faster by", "first call s", "cosine")
    for heading in headings:
        left = heading in ("model", "mask", "way", "cosine")
        table.add_column(heading, justify="left" if left else "right")
    ratios = speedups(rows)
    for row in sorted(rows, key=lambda row: (row.model, row.batch, row.seq, row.mask)):
        figure = row.problem if row.ms is None else f"{row.ms:.3f}"
        cosine = "" if row.cosine is None else f"{row.cosine:.6f}"
        ratio = f"{ratios[row]:.2f}" if row in ratios else ""
        single = ["" if row.rested_ms is None else f"{row.rested_ms:.3f}"] if rested else []
        table.add_row(
            row.model, str(row.batch), str(row.seq), row.mask, row.impl, figure, *single, ratio,
            f"{row.first_call_s:.1f}", cosine,
        )  # fmt: skip
    return table


def search(
    model: Annotated[str, typer.Option(help="A model of `paper`.")] = "bert-base",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1)] = 512,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    budget: Annotated[float, typer.Option(help="Seconds for measuring; run again to go on.")] = 80.0,
    store: Annotated[Path | None, typer.Option(help="Folder for measurements; the user's cache otherwise.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Search times that this command wrote again; nothing is measured."),
    ] = None,
    sampling: Annotated[
        str, typer.Option(help="How stage 2 divides its draws among segments: some of none, even and reward.")
    ] = "even reward none",
    shares: Annotated[
        str, typer.Option(help="Budgets of the searches, as percentages of the exhaustive one's measurements.")
    ] = "10 20",
) -> None:
    """Compare the searches for a fusion scheme, after measuring all there is to measure."""
    from rich.console import Console

    from benchmarks.fusion.search_ablation import NAMES, compare, measured, model_graph, read_table
    from benchmarks.paper.models import MODELS
    from benchmarks.results_io import provenance, write_json
    from stof.errors import ArgumentError
    from stof.fusion.measure.parallel_compile import compile_candidates
    from stof.fusion.measure.segment_timer import SegmentTimer
    from stof.fusion.records.store import default_store
    from stof.runtime.files import cache_folder
    from stof.tuning.machine import device_name

    console = Console(width=100)
    samplings = [one for one in NAMES if one in names("--sampling", sampling, NAMES)]
    budgets = [percent / 100 for percent in integers("--shares", shares)]
    if replay is not None:
        content, table = read_table(replay)
    else:
        if model not in MODELS:
            raise ArgumentError(f"model is one of {', '.join(MODELS)}, got {model!r}")
        (device, precision), timer = gpu(dtype), SegmentTimer()
        gm = model_graph(model, batch, length, device, precision)
        start = time.monotonic()
        folder = store or cache_folder()
        kept = None if folder is None else default_store(device, folder)
        segment_times, count = measured(gm, timer, kept, budget, compile_candidates)
        console.print(f"{count} times taken in {time.monotonic() - start:.0f} s")
        for (name, config), why in timer.failures.items():
            console.print(f"{name} {config}: {why}", soft_wrap=True)
        if segment_times is None:
            console.print("not everything is measured yet; run the command again to go on")
            return
        case, table = f"{model} {batch} x {length} on {device_name(device)}, {dtype}", segment_times
        content = {"meta": provenance(device), "case": case, "table": table.to_json()}
        if output is not None:  # the searches of a large graph take minutes
            write_json(output, content)
    rows = compare(table, shares=budgets, samplings=samplings)
    if output is not None:
        write_json(output, content | {"rows": [asdict(row) for row in rows]})
    console.print(_searches(rows, content["case"]))


def _searches(rows: list[Searched], case: str) -> Table:
    from rich.table import Table

    table = Table(title=case)
    for heading in ("search", "us saved", "of the best", "worst draw", "measurements", "of all"):
        table.add_column(heading, justify="left" if heading == "search" else "right")
    for row in rows:
        best, worst = ((f"{us / row.best_us:.1%}" if row.best_us else "") for us in (row.saved_us, row.worst_us))
        share = f"{row.measurements / row.all_measurements:.1%}" if row.all_measurements else ""
        table.add_row(row.search, f"{row.saved_us:.1f}", best, worst, str(row.measurements), share)
    return table


def train(
    cases: _Cases = _TRAINED,
    ways: Annotated[str, typer.Option(help="stof, sdpa and flex, separated by spaces.")] = "stof sdpa flex",
    modes: Annotated[str, typer.Option(help="Of torch.compile, likewise.")] = "default reduce-overhead",
    device: Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps; medians are reported.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here, after each way.")] = None,
) -> None:
    """Time training steps of models from transformers, all compiled; gradients are checked against float32 first."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.models.training import MODES, WAYS, training_rows
    from benchmarks.results_io import saving
    from stof.testing.models import Case
    from stof.tuning.machine import device_name

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    table = Table("case", "way", "mode", "ms a step", "tokens a second", "peak GiB", "cosine", title=device_name(where))
    wanted = [Case.parse(text) for text in cases.split()]
    tried = names("--ways", ways, WAYS), names("--modes", modes, MODES)
    rows = training_rows(wanted, *tried, where, rounds)
    for row in saving(rows, output, where):
        figures = ((row.ms, ".1f"), (row.tokens_per_s, ".0f"), (row.peak_gib, ".2f"), (row.cosine, ".4f"))
        texts = ["" if x is None else format(x, form) for x, form in figures]
        table.add_row(row.case, row.way, row.mode, row.problem or texts[0], *texts[1:])
    Console(width=150).print(table)
