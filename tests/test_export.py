"""Exported programs in other processes: they compute under their own mask, or exporting refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import ArgumentError, MaskError, UnsupportedError
from stof.testing import make_inputs

LENGTH = 64
KEEP = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.3


class Attending(torch.nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q, k, v, self.mask) + 0


class AttendingWithBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", KEEP)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q, k, v, self.keep) + 0


class AttendingWithInput(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return stof.attention(q, k, v, keep) + 0


KEPT: dict[str, Callable[[], torch.nn.Module]] = {
    "text": lambda: Attending("sliding_window(31)"),
    "named mask": lambda: Attending(masks.sliding_window(31) & masks.padding([50])),
    "plan of a named mask": lambda: Attending(stof.plan(masks.sliding_window(31), LENGTH)),
    "dense mask": lambda: Attending(masks.from_dense(KEEP)),
    "tensor": lambda: Attending(KEEP),
    "plan of a tensor": lambda: Attending(stof.plan(KEEP, LENGTH)),
    "buffer": AttendingWithBuffer,
}

# Makes plans and masks of its own before it loads the program: their numbers are not the exporting process's.
OTHER_PROCESS = """
import sys, torch, stof
from stof import masks
keep = torch.ones(64, 64, dtype=torch.bool).tril()
own = [stof.plan(masks.causal(), 64), stof.plan(keep, 64), stof.plan(lambda b, h, q, k: q == k, 64)]
own += [masks.from_dense(keep.clone()), masks.from_function(lambda b, h, q, k: q > k)]
program, data = sys.argv[1:]
inputs, expected = torch.load(data)
found = torch.export.load(program).module()(*inputs)
torch.testing.assert_close(found, expected)
"""


def compare_in_another_process(program: torch.export.ExportedProgram, inputs: Any, expected: Tensor, at: Path) -> None:
    torch.export.save(program, at / "program.pt2")
    torch.save((inputs, expected), at / "data.pt")
    command = [sys.executable, "-c", OTHER_PROCESS, str(at / "program.pt2"), str(at / "data.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(7)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_exported_programs_carry_their_mask(kind: str, strict: bool, tmp_path: Path) -> None:
    module, inputs = KEPT[kind](), make_inputs().qkv
    expected = module(*inputs)
    with torch.no_grad():
        program = torch.export.export(module, inputs, strict=strict)
    del module
    torch.testing.assert_close(program.module()(*inputs), expected)
    if not strict or kind == "plan of a tensor":
        compare_in_another_process(program, inputs, expected, tmp_path)


def test_exported_programs_take_masks_as_inputs(tmp_path: Path) -> None:
    q, k, v = make_inputs().qkv
    with torch.no_grad():
        program = torch.export.export(AttendingWithInput(), (q, k, v, KEEP), strict=False)
    other = ~KEEP
    expected = stof.attention(q, k, v, other)
    compare_in_another_process(program, (q, k, v, other), expected, tmp_path)


class AttendingInDocuments(torch.nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return stof.attention(q, k, v, self.mask & masks.documents(ids)) + 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_take_ids_of_documents_as_inputs(strict: bool, tmp_path: Path) -> None:
    q, k, v = make_inputs().qkv
    ids, mask = torch.arange(LENGTH) // 9, masks.causal() & masks.padding([50])
    with torch.no_grad():
        program = torch.export.export(AttendingInDocuments(mask), (q, k, v, ids), strict=strict)
        with pytest.raises(Exception, match=r"to_dense\("):
            torch.export.export(AttendingInDocuments(masks.from_dense(KEEP)), (q, k, v, ids), strict=strict)
    other = torch.arange(LENGTH) // 20
    expected = stof.attention(q, k, v, mask & masks.documents(other))
    compare_in_another_process(program, (q, k, v, other), expected, tmp_path)


REFUSED: dict[str, Callable[[Path], Any]] = {
    "function": lambda folder: lambda b, h, q, kv: q >= kv,
    "function mask": lambda folder: masks.from_function(lambda b, h, q, kv: q >= kv),
    "part of it a function": lambda folder: masks.causal() & masks.from_function(lambda b, h, q, kv: q != kv),
    "part of it a tensor": lambda folder: masks.causal() & masks.from_dense(KEEP),
    "plan of a function": lambda folder: stof.plan(lambda b, h, q, kv: q >= kv, LENGTH),
    "plan read from a file": lambda folder: saved_and_loaded(folder),
}


def saved_and_loaded(folder: Path) -> stof.Plan:
    stof.plan(masks.causal(), LENGTH).save(folder / "plan")
    return stof.Plan.load(folder / "plan")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exported_is_refused(kind: str, strict: bool, tmp_path: Path) -> None:
    module, inputs = Attending(REFUSED[kind](tmp_path)), make_inputs().qkv
    with torch.no_grad(), pytest.raises(Exception, match=r"to_dense\(") as caught:
        torch.export.export(module, inputs, strict=strict)
    # Dynamo wraps what the code it traces raises.
    assert strict or isinstance(caught.value, UnsupportedError)


def test_numbers_of_another_process_are_refused() -> None:
    """Wherever one comes from: a saved graph, a compiler's cache."""
    script = """
import stof, torch
from stof import masks
keep = torch.ones(64, 64, dtype=torch.bool).tril()
plan, mask = stof.plan(keep, 64), masks.from_dense(keep)
function = masks.from_function(lambda b, h, q, k: q >= k)
print(plan.number, mask.number, function.number, mask.key)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    plan, mask, function, key = done.stdout.strip().split(maxsplit=3)
    keep = torch.ones(64, 64, dtype=torch.bool).tril()
    own = (stof.plan(keep, 64), masks.from_dense(keep), masks.from_function(lambda b, h, q, k: q > k))
    q, k, v = make_inputs().qkv
    from stof.handles import NUMBERED, PLAN
    from stof.operators import masked_attention_op

    for name, number in ((PLAN, plan), (NUMBERED, mask), (NUMBERED, function), (key, 0)):
        with pytest.raises((ArgumentError, MaskError)):
            masked_attention_op(q, k, v, name, None, None, 1.0, 0.0, "", number=int(number))
    del own


def test_plans_of_named_masks_have_one_number_in_all_processes() -> None:
    """So that graphs that hold it are found again in compilers' caches."""
    script = "import stof; print(stof.plan('sliding_window(5)', 64).number)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    plan = stof.plan("sliding_window(5)", 64)
    assert plan.number == int(done.stdout)
    assert stof.plan("sliding_window(6)", 64).number != plan.number
