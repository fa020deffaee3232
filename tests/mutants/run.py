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
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.draw import Mutant
from tests.mutants.order import DISTANCES, PROFILE, RECORD, SECONDS, function_of
from tests.mutants.reach import Imports

ROOT = Path(__file__).parents[2]
# Test files that import a module through more modules than this say little about it, and there are many.
MOST_IMPORTS = 2
# Tests that are not run: those that only compile kernels, which takes minutes, and those of this package.
EXCLUDED = ("tests/kernels/test_compile.py", "tests/fusion/test_compile_templates.py", "tests/mutants")


@dataclass(frozen=True)
class Outcome:
    """`test` that failed first; where none did, whether all ran before the time limit."""

    test: str | None
    complete: bool = True

    def __str__(self) -> str:
        if self.test is not None:
            return f"caught by {self.test}"
        return "SURVIVED" if self.complete else "SURVIVED (time limit reached)"


def reaching_tests(imports: Imports, source: Path) -> dict[str, float]:
    """Test files that import a module, also through other modules, nearest first, with their distances.

    A distance is the number of modules between the two: half of it where the test lies in the folder of the module's
    tests, 0.5 more elsewhere.
    """
    module = ".".join(source.relative_to("src").with_suffix("").parts)
    folder = Path("tests", *source.parts[2:-1][:1])
    found = {}
    for path, steps in imports.distances(module).items():
        own = path.relative_to(ROOT)
        if steps <= MOST_IMPORTS and not own.as_posix().startswith(EXCLUDED):
            found[own.as_posix()] = steps / 2 if own.parent == folder else steps + 0.5
    return dict(sorted(found.items(), key=lambda one: (one[1], one[0])))


def _not_copied(folder: str, names: list[str]) -> set[str]:
    built = {"build", "dist"} if Path(folder) == ROOT else set()
    return {name for name in names if name.startswith(".") or name in {"__pycache__", "results", *built}}


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the repository that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="stof-mutant-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "repository"
        shutil.copytree(ROOT, root, ignore=_not_copied)
        yield root


def run_pytest(
    root: Path, arguments: Sequence[str], limit: float | None, *, gpu: bool = False, **variables: str
) -> tuple[int | None, str]:
    """Exit status, None when the time limit was reached, and output; caches lie beside the copy."""
    caches = {name: str(root.parent / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    paths = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | caches | variables
    environment |= {"XDG_CACHE_HOME": str(root.parent / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1", "STOF_HYPOTHESIS_PROFILE": PROFILE}
    if not gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    marked = ["-m", "gpu" if gpu else "not gpu"]
    options = ["-q", *marked, "-p", "tests.mutants.order", "-p", "no:cacheprovider", "--tb=line", "--show-capture=no"]
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
    """Tests that pytest's summary lists as failed; "no test ..." where a signal or `conftest.py` ended pytest."""
    named = re.findall(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    if not named and status in (1, 2, 3):
        raise RuntimeError(f"pytest ended with {status} and names no test:\n{output[-2000:]}")
    return named or [f"no test in particular: pytest ended with {status}"]


class Runner:
    """Runs the tests of mutants. Tests that also fail on the unchanged sources are left out.

    Args:
        limit: seconds for the tests of one mutant.
        gpu: whether the tests marked `gpu` run, or all others.
    """

    def __init__(self, limit: float, gpu: bool = False) -> None:
        self.limit, self.gpu = limit, gpu
        self.imports = Imports(ROOT)
        self.failing: set[str] = set()
        self._passing: set[str] = set()
        self._lock = threading.Lock()

    def run(self, mutant: Mutant) -> Outcome:
        """Run tests until one fails that does not fail without the mutant."""
        distances = reaching_tests(self.imports, mutant.path)
        began, complete = time.monotonic(), True
        with copied() as root:
            mutant.mutate(root)
            # Importing all test files takes longer than most tests: first the nearest.
            for far in (False, True):
                # Half of the time at most, since slow tests near by would leave none for others.
                end = began + (self.limit if far else self.limit / 2)
                files = [path for path, distance in distances.items() if (distance >= 1) == far]
                while files:
                    left_out = [f"--deselect={test}" for test in sorted(self.failing)]
                    arguments, left = ["-x", *left_out, *files], end - time.monotonic()
                    given = {DISTANCES: json.dumps(distances)}
                    status, output = run_pytest(root, arguments, left, gpu=self.gpu, **given)
                    if status in (None, 0, 5):  # time is over, all passed, or all were left out
                        complete &= status is not None
                        break
                    test = failed_tests(status, output)[0]
                    if self.passes(test):
                        return Outcome(test)
        return Outcome(None, complete)

    def passes(self, test: str) -> bool:
        """Whether a test passes on the unchanged sources; of "no test ...", whether pytest can collect tests."""
        with self._lock:
            if test in self._passing:
                return True
            if test not in self.failing:
                arguments = [test] if test.startswith("tests/") else ["tests/masks", "--collect-only"]
                with copied() as root:
                    status, output = run_pytest(root, arguments, None, gpu=self.gpu)
                    if status == 4:  # no such parameters without the mutant
                        status, output = run_pytest(root, [function_of(test)], None, gpu=self.gpu)
                if status == 0:
                    self._passing.add(test)
                    return True
                if not test.startswith("tests/"):
                    raise RuntimeError(f"the tests do not run without a mutant:\n{output[-2000:]}")
                self.failing.add(test)
                print(f"fails without a mutant too, and is left out: {test}", flush=True)
            return False


def record() -> int:
    """Write how long tests take, for the order in which mutants meet them."""
    with copied() as root:
        lines = root.parent / "seconds"
        ignored = [f"--ignore={path}" for path in EXCLUDED]
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
