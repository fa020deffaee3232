"""Descriptions are equal in every process, and refuse what is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stof
from stof.integrations.code_text import IndescribableError
from stof.integrations.fingerprint import Description
from stof.integrations.traced import Looks, file_digest, names_of


def test_descriptions_are_equal_in_every_process() -> None:
    program = (
        "from tests.integrations.test_starts import Layer\n"
        "from stof.integrations.fingerprint import Description\n"
        "said = Description(); said.add(Layer()); said.add({'a': {1, 'b', None}, 'f': len, 's': (1.5, 2j)})\n"
        "print(said.digest())"
    )
    root = Path(stof.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    found = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("value", [iter([1]), object(), {object()}, [torch.empty(2, device="meta")], [].append])
def test_what_cannot_be_described_is_refused(value: object) -> None:
    holder = nn.Module()
    holder.value = value
    with pytest.raises(IndescribableError):
        Description().add(holder)


def test_files_that_were_changed_since_are_not_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\n", encoding="utf-8")
    os.utime(path, (time.time() + 60, time.time() + 60))
    assert file_digest(str(path)) is None
    os.utime(path, (1.0, 1.0))
    assert file_digest(str(path)) is not None
    assert file_digest(str(tmp_path / "none.py")) is None


def test_code_that_is_no_modules_is_refused() -> None:
    found: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x + unknown\n", str(Path("somewhere.py").resolve()), "exec"), found)
    with pytest.raises(IndescribableError, match="which is no module"):
        names_of([found["f"].__code__], Looks())
