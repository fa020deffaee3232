"""Runs the tests of a module in a copy of the repository where one line is another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.draw import Mutant
from tests.mutants.order import DISTANCES, PROFILE, RECORD, SECONDS
from tests.mutants.reach import Imports

ROOT = Path(__file__).parents[2]
# Of one mutant's tests.
SECONDS_LIMIT = 240
# Test files further away say little about a module, and there are many.
FARTHEST = 2
# Kernels on a GPU, kernels that are compiled for minutes and not run, and this check itself.
OTHERS = ("tests/gpu", "tests/kernels/test_compile.py", "tests/fusion/test_compile_templates.py", "tests/mutants")


@dataclass(frozen=True)
class Outcome:
    """`test` that failed first; where none did, whether all ran before the time limit."""

    test: str | None
    complete: bool = True

    def __str__(self) -> str:
        if self.test is not None:
            return f"caught by {self.test}"
        return "SURVIVED" if self.complete else f"SURVIVED (time limit of {SECONDS_LIMIT} s)"


def reaching_tests(imports: Imports, mutant: Path) -> dict[str, float]:
    """Test files that reach a module, nearest first, with their distances: half a step more in another folder."""
    module = ".".join(mutant.relative_to("src").with_suffix("").parts)
    folder = Path("tests", *mutant.parts[2:]).parent
    found = {}
    for path, steps in imports.distances(module).items():
        own = path.relative_to(ROOT)
        if steps <= FARTHEST and not own.as_posix().startswith(OTHERS):
            found[own.as_posix()] = steps + (0 if folder.is_relative_to(own.parent) else 0.5)
    return dict(sorted(found.items(), key=lambda one: (one[1], one[0])))


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the repository that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="stof-mutant-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "repository"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results"))
        yield root


def run_pytest(root: Path, arguments: Sequence[str], limit: float | None, **variables: str) -> tuple[int | None, str]:
    """Exit status, None when the time limit was reached, and output; caches lie beside the copy."""
    caches = {name: str(root.parent / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment = os.environ | caches | variables
    environment |= {"XDG_CACHE_HOME": str(root.parent / "cache"), "PYTHONPATH": str(root / "src")}
    environment |= {"OMP_NUM_THREADS": "1", "STOF_HYPOTHESIS_PROFILE": PROFILE}
    options = ["-q", "-p", "tests.mutants.order", "-p", "no:cacheprovider", "--tb=line", "--show-capture=no"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # tests start processes too
        process.wait()


def failed_tests(status: int, output: str) -> list[str]:
    """What the summary names; a crash and an import that fails in `conftest.py` have none."""
    named = re.findall(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return named or [f"no test in particular: pytest ended with {status}"]


def run_mutant(mutant: Mutant, imports: Imports) -> Outcome:
    """Run the tests until one fails."""
    distances = reaching_tests(imports, mutant.path)
    if not distances:
        return Outcome(None)
    end = time.monotonic() + SECONDS_LIMIT
    with copied() as root:
        mutant.mutate(root)
        # Importing all test files takes longer than most tests: first those that import the module itself.
        for far in (False, True):
            files = [path for path, distance in distances.items() if (distance >= 1) == far]
            if files:
                given = {DISTANCES: json.dumps(distances)}
                status, output = run_pytest(root, ["-x", *files], end - time.monotonic(), **given)
                if status is None:
                    return Outcome(None, complete=False)
                if status != 0:
                    return Outcome(failed_tests(status, output)[0])
    return Outcome(None)


def failing_anyway(tests: Iterable[str]) -> list[str]:
    """Those of `tests` that fail without a mutant."""
    known = sorted({test for test in tests if test.startswith("tests/")})
    if not known:
        return []
    with copied() as root:
        status, output = run_pytest(root, known, None)
    return [] if status == 0 else failed_tests(status or 0, output)


def record() -> int:
    """Write how long tests take, for the order in which mutants meet them."""
    with copied() as root:
        lines = root.parent / "seconds"
        ignored = [f"--ignore={path}" for path in OTHERS]
        status, output = run_pytest(root, ["tests", *ignored], None, **{RECORD: str(lines)})
        write_seconds(lines)
    print(output[-2000:])
    return status or 0


def write_seconds(lines: Path) -> None:
    """Make `SECONDS` of what the plugin has written, without the quick tests."""
    seconds: dict[str, float] = {}
    for line in lines.read_text().splitlines():
        name, took = line.split()
        seconds[name] = max(float(took), seconds.get(name, 0))
    SECONDS.write_text(json.dumps({name: took for name, took in sorted(seconds.items()) if took > 1}, indent=0) + "\n")
