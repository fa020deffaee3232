"""`stof`: the command line's entry point."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from stof.cli.common import CheckedCommand, Commands
from stof.cli.demo import demo
from stof.cli.info import info
from stof.cli.inspect import inspect
from stof.cli.tune import tune
from stof.cli.verify import verify
from stof.errors import ArgumentError

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from stof import __version__

        typer.echo(f"stof {__version__}")
        raise typer.Exit


@app.callback()
def _stof(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Sparse Transformers, fast: attention under any mask, and operator fusion for the rest of the model."""
    del version  # handled by its callback


app.command(cls=CheckedCommand)(demo)
app.command(cls=CheckedCommand)(inspect)
app.command(cls=CheckedCommand)(info)
app.command(cls=CheckedCommand)(tune)
app.command(cls=CheckedCommand)(verify)


@app.command(
    cls=CheckedCommand,
    hidden=True,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Name the command that runs benchmarks, which the package does not contain."""
    command = shlex.join(("python", "-m", "benchmarks", *context.args))
    raise ArgumentError(f"benchmarks are run from a checkout of the sources, by {command}")
