"""Every example in the documentation runs, links and commands lead somewhere, and figures are as computed."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import stof

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *SITE]
# Pages whose links are checked but whose code is not run.
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks" / "notes").glob("*.md"))]
# Their public functions have examples in their docstrings.
MODULES = (
    "stof",
    "stof.nn.functional",
    "stof.distributed",
    "stof.integrations.torch",
    "stof.integrations.transformers",
)
GALLERY: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "draw_gallery.py"), run_name="gallery")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The python blocks of a page run in order, as a reader would type them."""
    if "transformers" in page.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, str(page), "exec"), {"__name__": "docs"})


def public_functions() -> dict[str, Any]:
    """Functions that users call, by the path under which they import them; without those of `attention.py`."""
    modules = [importlib.import_module(name) for name in MODULES]
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name in module.__all__
        if inspect.isfunction(value := getattr(module, name)) and value.__module__ != "stof.attention"
    }


@pytest.mark.parametrize("name", public_functions())
def test_examples_of_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of public functions print what they say."""
    # Inductor takes a minute to compile these for a CPU; the page about `torch.compile` runs it.
    backend = importlib.import_module("stof.integrations.torch.compile")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, options, digest: gm.forward)
    torch._dynamo.reset()
    torch.manual_seed(0)
    known = {"torch": torch, "nn": torch.nn, "stof": stof, "masks": stof.masks}
    tests = doctest.DocTestFinder(recurse=False).find(public_functions()[name], name, globs=known)
    assert any(test.examples for test in tests), f"{name} has no example"
    printed: list[str] = []
    for test in tests:
        doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert not printed, "".join(printed)


def test_pages_with_examples_are_found() -> None:
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 10


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
        assert {"test", "docs"} <= named <= targets


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
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, words


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site and GitHub make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=name_of)
def test_local_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        found = page if not target else (page.parent / target).resolve()
        assert found.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(found), f"{name_of(page)} links to {target}#{anchor}"


def test_pages_of_the_site_link_within_it() -> None:
    """The built site has `docs` alone."""
    for page in SITE:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), f"{name_of(page)} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in SITE)


def test_reference_names_exist() -> None:
    pytest.importorskip("transformers")
    names = [
        name for page in SITE for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    ]
    assert len(names) > 30
    for name in names:
        path, _, last = name.rpartition(".")
        found = importlib.import_module(name) if name == "stof.errors" else getattr(importlib.import_module(path), last)
        assert found.__doc__, name


def test_user_documentation_stays_short() -> None:
    words = [word for page in PAGES for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= 15_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_documentation_has_no_history() -> None:
    """Hashes of commits and dates belong to `benchmarks/notes`."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b|\b20[12]\d-\d\d", text), name_of(
            page
        )


def test_gallery_has_the_costs_of_its_masks() -> None:
    rows = GALLERY["rows"]()
    assert len(rows) >= 10
    for name, mask, figures in rows:
        assert (ROOT / "docs" / "images" / "gallery" / f"{name}.svg").is_file()
        assert GALLERY["figures"](mask) == figures, name


def test_gallery_draws_what_the_mask_keeps() -> None:
    drawn = (ROOT / "docs" / "images" / "gallery" / "causal.svg").read_text(encoding="utf-8")
    assert GALLERY["picture"]("causal()") == drawn
    assert GALLERY["runs"](torch.tensor([[False, True, True], [True, False, True]]), 10) == (
        "M11 0h2v1h-2zM10 1h1v1h-1zM12 1h1v1h-1z"
    )


def speed_ups(file: str, time: str, **shape: int) -> dict[str, float]:
    """Time of the fastest peer over stof's, by mask, in a file of results."""
    rows = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))["rows"]
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row[time] and all(row[key] == value for key, value in shape.items()):
            times.setdefault(row["mask"], {})[row["impl"]] = row[time]
    return {
        mask: min(us for impl, us in found.items() if impl != "stof") / found["stof"] for mask, found in times.items()
    }


def test_figures_of_the_first_pages_are_those_of_the_results() -> None:
    gpu = speed_ups("h200-attention.json", "gpu_us", heads=32, head_dim=128, q_len=8192)
    cpu = speed_ups("cpu-attention.json", "call_us", heads=12, head_dim=64, q_len=4096)
    gradients = backward_speed_ups("h200-backward-one-pass.json") | backward_speed_ups("h200-backward-bfloat16.json")
    names = {"strided": "strided", "BigBird": "bigbird", "Longformer": "longformer", "causal": "causal", "full": "full"}
    names["causal window of 512"] = "window512"
    readme = (ROOT / "README.md").read_text("utf-8")
    table = re.findall(r"^\| ([\w ]+) \| ([\d.]+)x \| (?:([\d.]+)x)? ?\| ([\d.]+)x \|$", readme, flags=re.MULTILINE)
    assert {row[0] for row in table} == set(names)
    for name, on_gpu, backward, on_cpu in table:
        assert gpu[names[name]] == pytest.approx(float(on_gpu), abs=0.006), name
        assert cpu[names[name]] == pytest.approx(float(on_cpu), abs=0.06 if float(on_cpu) > 2 else 0.006), name
        if backward:
            assert gradients[names[name]] == pytest.approx(float(backward), abs=0.006), name


def backward_speed_ups(file: str) -> dict[str, float]:
    """As `speed_ups`, of backward passes for 8192 tokens and heads of 128."""
    rows = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))["rows"]
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["passes"] == "backward" and row["us"] and row["shape"] == "B1 H32/32 D128 S8192x8192":
            times.setdefault(row["mask"], {})[row["impl"]] = row["us"]
    return {
        mask: min(us for impl, us in found.items() if impl != "stof") / found["stof"] for mask, found in times.items()
    }


def test_documented_versions_are_those_of_the_distribution() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "stof-attention"
    assert "pip install stof-attention" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"## {stof.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
