"""`python -m benchmarks kernels`: where the GPU time of whole models goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.fusion import gpu

# Kernels of less than this share of a call are not shown; the sums have them.
_SHOWN = 0.005
_NAME_WIDTH = 90


def kernels(
    cases: Annotated[
        str, typer.Option(help="As for `python -m benchmarks models`.")
    ] = "bert,8,512,bigbird gpt2,8,1024,window+sinks llama,1,4096,window+sinks",
    impls: Annotated[str, typer.Option(help="As for `python -m benchmarks models`.")] = "stof-whole",
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    budget: Annotated[float | None, typer.Option(help="Seconds after which nothing further is started.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here, into what it holds of this commit.")] = None,
) -> None:
    """Show which kernels a call of a model spends its time in, as PyTorch's profiler sees them."""
    import time

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from benchmarks.models.compare import Plan, Subject, impls_of
    from benchmarks.models.kernel_profile import KEY, Share, by_kind, run_kernels
    from benchmarks.results_io import RowFile
    from stof.testing.models import Case

    device, precision = gpu(dtype)
    plan, file, start = Plan(device, precision), RowFile(output, device, Share, KEY), time.perf_counter()
    console = Console(width=140)
    for case in [Case.parse(text) for text in cases.split()]:
        subject = Subject.of(case, device, precision)
        for impl in impls_of(impls):
            if budget is not None and time.perf_counter() - start > budget:
                console.print(f"left out for the budget: {case} {impl}", markup=False)
                continue
            rows = run_kernels(subject, impl, plan)
            file.add(rows)
            whole = sum(row.us for row in rows)
            kinds = ", ".join(f"{kind} {us:.0f} ({us / whole:.0%})" for kind, us in by_kind(rows).items())
            console.print(f"{case} {impl}: {whole:.0f} us a call; {kinds}", markup=False, soft_wrap=True)
            table = Table()
            for name in ("kind", "kernel", "times", "us", "us each"):
                table.add_column(name, justify="left" if name in ("kind", "kernel") else "right")
            for row in rows:
                if row.us >= _SHOWN * whole:
                    figures = (f"{row.times:.0f}", f"{row.us:.1f}", f"{row.us / max(1.0, row.times):.2f}")
                    table.add_row(row.kind, Text(row.kernel[:_NAME_WIDTH]), *figures)
            console.print(table)
