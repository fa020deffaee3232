"""`stof`: the command line's entry point."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stof.cli import bench
from stof.cli.common import CheckedCommand
from stof.cli.demo import demo
from stof.cli.info import info
from stof.cli.inspect import inspect
from stof.cli.tune import tune
from stof.cli.verify import verify
from stof.errors import StofError


class Commands(TyperGroup):
    """Reports STOF's own errors, whose messages say what to do, and files' in red and without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StofError as error:
            _show_error(str(error))
        except OSError as error:
            if error.filename is None or isinstance(error, BrokenPipeError):
                raise
            _show_error(f"cannot read or write {error.filename}: {error.strerror}")


def _show_error(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"error: {text}", style="red"), soft_wrap=True)
    raise typer.Exit(2) from None


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
app.add_typer(bench.app, name="bench")
