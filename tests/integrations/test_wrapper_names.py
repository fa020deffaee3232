"""What kept wrappers import in place of Inductor's modules is what those define."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.codegen.memory_planning import _align
from torch._inductor.select_algorithm import extern_kernels as defined

import stof
from stof.integrations.wrapper_names import REPLACED, align, extern_kernels, lightened


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_mm"])
def test_kernels_are_those_of_inductor(name: str) -> None:
    assert getattr(extern_kernels, name) is getattr(defined, name)


def test_what_inductor_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = extern_kernels.no_such_kernel


def test_sizes_are_rounded_alike() -> None:
    assert [align(size) for size in (0, 1, 63, 64, 65)] == [_align(size) for size in (0, 1, 63, 64, 65)]


def test_lines_that_are_known_are_replaced_and_no_others() -> None:
    (first, instead), *_ = REPLACED.items()
    other = f"    {first}\n# {first}\nimport torch\n"
    assert lightened(f"{first}\n{other}") == f"{instead}\n{other}"


def test_the_compiler_is_not_loaded() -> None:
    names = "'torch._inductor.select_algorithm', 'torch._inductor.codegen.memory_planning'"
    program = (
        "import sys, stof.integrations.wrapper_names as w; w.extern_kernels.mm; "
        f"print([name in sys.modules for name in ({names})])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(stof.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False]"
