"""The wheel and the sdist are complete: each installs and imports in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import stof

ROOT = Path(__file__).parents[1]
NAME = f"stof_attention-{stof.__version__}"
PROGRAM = """
import torch, stof
from stof import masks
q = torch.randn(1, 2, 32, 16)
assert stof.attention(q, q, q, masks.sliding_window(4)).shape == q.shape
"""


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, kind: str, out: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from the sdist as an installer does."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, "sdist", out)
    with tarfile.open(out / f"{NAME}.tar.gz") as archive:
        archive.extractall(out / "source", filter="data")
    build(out / "source" / NAME, "wheel", out)
    return out


@pytest.mark.slow
def test_the_wheel_of_the_sdist_has_every_file_of_the_package(built: Path) -> None:
    package = ROOT / "src" / "stof"
    expected = {
        f"stof/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        assert {name for name in wheel.namelist() if name.startswith("stof/")} == expected


@pytest.mark.slow
def test_the_sdist_has_what_its_readme_names(built: Path) -> None:
    source = built / "source" / NAME
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
    ):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()
    assert (source / "docs" / "index.md").is_file()
    assert (source / "tests" / "conftest.py").is_file()


@pytest.mark.slow
def test_the_wheel_runs_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """Torch and the other dependencies are borrowed from this environment; stof is not."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    wheel = built / f"{NAME}-py3-none-any.whl"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    borrowed = {"PYTHONPATH": sysconfig.get_path("purelib")}
    where = run(python, "-c", "import stof; print(stof.__file__)", **borrowed)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    run(python, "-c", PROGRAM, **borrowed)
    assert f"stof {stof.__version__}" in run(tmp_path / "env" / "bin" / "stof", "--version", **borrowed)


@pytest.mark.slow
def test_the_readme_runs_where_nothing_but_the_wheel_was_installed(built: Path, tmp_path: Path) -> None:
    """Without the extras: neither transformers nor matplotlib is there."""
    lines = re.search(r"## Ten lines\n+```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert lines is not None
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    wheel = built / f"{NAME}-py3-none-any.whl"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, PYTHONPATH="")
    program = lines[1] + "assert out.shape == q.shape\ncompiled(q, k, v)\n"
    missing = "import importlib.util as u\nassert not u.find_spec('transformers') and not u.find_spec('matplotlib')\n"
    run(python, "-c", missing + program, PYTHONPATH="")
