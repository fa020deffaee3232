"""Every example in the documentation runs, and the README's commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The python blocks of a page run in order, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, str(page), "exec"), {"__name__": "docs"})


def test_pages_with_examples_are_found() -> None:
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 10


def test_readme_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("program", ["stof", "python -m benchmarks"])
def test_commands_in_shell_blocks_parse(program: str) -> None:
    """Each such line of a shell block names a command and options that exist."""
    from typer.main import get_command

    from benchmarks.cli.attention import app as benchmarks
    from stof.cli.main import app as stof

    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    commands = [line.split("#")[0].removeprefix(program).split() for line in lines if line.startswith(program + " ")]
    assert commands
    for words in commands:
        command = get_command(stof if program == "stof" else benchmarks)
        assert words[0] in command.commands
        words.insert(0, program)
        while hasattr(command, "commands") and len(words) > 1 and words[1] in command.commands:
            command, words = command.commands[words[1]], words[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_local_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
