"""`stof demo`: the main job on real input, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stof.cli.common import device_of, must_be_replaceable, must_be_writable, picture_kind

if TYPE_CHECKING:
    from rich.table import Table

    from stof.demo.jobs import Outcome

# Embeddings whose cosine is below this are not the same embeddings; the demo then fails.
SAME_EMBEDDING = 0.9999


def demo(
    passages: Annotated[int, typer.Option(min=2, help="Passages to embed.")] = 240,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the long document.")] = 4096,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the long-document encoder.")] = 12,
    device: Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")] = "",
    picture: Annotated[Path, typer.Option(help="Where to draw the BigBird mask and its tiles.")] = Path(
        "out/bigbird.png"
    ),
) -> None:
    """Embed ragged text with a real checkpoint, read a long document; ordinary way against STOF."""
    from rich.console import Console

    must_be_writable(picture)
    must_be_replaceable(picture, picture_kind(picture))
    console = Console()
    with console.status("importing PyTorch and transformers"):
        from stof.demo.jobs import embed_passages, long_document_masks, read_long_document
        from stof.demo.texts import passages as read_passages
        from stof.tuning.machine import device_name
    where = device_of(device)
    console.print(f"STOF demo on [bold]{device_name(where)}[/bold]")

    def progress(step: str) -> None:
        status.update(step)
        console.print(f"  {step}", style="dim")

    with console.status("reading the standard library's documentation") as status:
        texts = read_passages(passages)
        outcomes = embed_passages(texts, where, progress)
        outcomes += read_long_document(tokens, where, progress, layers=layers)
        progress("drawing the BigBird mask and its tiles")
        _draw(long_document_masks()["BigBird"], tokens, picture)
    console.print(outcomes_table(outcomes))
    console.print(f"picture: {picture}")
    lowest = min(outcome.cosine for outcome in outcomes if outcome.cosine is not None)
    console.print(f"lowest cosine of a passage's two embeddings: {lowest:.7f}")
    if lowest < SAME_EMBEDDING:
        console.print(f"error: below {SAME_EMBEDDING}, the embeddings differ", style="bold red")
        raise typer.Exit(1)


def _draw(mask: object, tokens: int, picture: Path) -> None:
    import stof
    from stof.drawing import draw_picture

    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(stof.plan(mask, tokens), picture)


def outcomes_table(outcomes: list[Outcome]) -> Table:
    """Before, after, speed-up and error of each job."""
    from rich.table import Table

    table = Table(title="Whole-model wall time, median of interleaved runs")
    for heading in ("job", "before"):
        table.add_column(heading)
    for heading in ("before ms", "STOF ms", "speed-up", "max error"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        speedup = outcome.before_us / outcome.after_us
        table.add_row(
            outcome.job,
            outcome.before,
            f"{outcome.before_us / 1e3:,.0f}",
            f"{outcome.after_us / 1e3:,.0f}",
            f"{speedup:.2f}x",
            f"{outcome.error:.1e}",
        )
    return table
