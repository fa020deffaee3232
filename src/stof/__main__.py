"""`python -m stof` is the `stof` command."""

from stof.cli.main import app

app()
