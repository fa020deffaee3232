"""Kernels that build layouts are compiled once, then launched directly; where they cannot run, torch builds."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stof.errors import KernelError
from stof.layout.fill import mask_input as source
from stof.layout.fill.mask_input import on_device

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.errors import PTXASError

from stof.runtime import launch
from tests.kernels.test_launch import STREAM, Kernel

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(source, "_without", set())


def run(kernel: Kernel, tensor: torch.Tensor, numbers: tuple[int, ...] = (1, 16), constant: int = 3) -> None:
    launch.launch(kernel, 5, (tensor,), numbers, (constant,), device=CUDA)


def test_compiled_once_for_all_numbers() -> None:
    kernel, first, second = Kernel(), torch.zeros(8), torch.zeros(8)
    run(kernel, first)
    run(kernel, second, (7, 9))
    assert kernel.through_jit == [((5,), first, 1, 16, 3)]
    assert kernel.options == {"num_warps": 4, "enable_fp_fusion": True}
    assert kernel.direct == [
        (5, 1, 1, STREAM, "function", "meta", None, None, None, second.data_ptr(), 7, 9),
    ]


def test_other_constants_are_compiled() -> None:
    kernel, tensor = Kernel(), torch.zeros(8)
    for constant in (3, 4, 4):
        run(kernel, tensor, constant=constant)
    assert [args[-1] for args in kernel.through_jit] == [3, 4]
    assert len(kernel.direct) == 1


def test_unaligned_tensors_take_tritons_path() -> None:
    kernel, tensor = Kernel(), torch.zeros(8)
    run(kernel, tensor[1:])
    run(kernel, tensor)  # what was compiled for it says nothing about alignment
    run(kernel, tensor[1:])
    assert (len(kernel.through_jit), len(kernel.direct)) == (3, 0)
    run(kernel, tensor)
    assert len(kernel.direct) == 1


def test_profilers_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensor = Kernel(), torch.zeros(8)
    run(kernel, tensor)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    run(kernel, tensor)
    assert (len(kernel.through_jit), len(kernel.direct)) == (2, 0)


def test_devices_without_triton_are_left_to_torch() -> None:
    broken = Kernel(PTXASError("no such target"))
    calls = []

    @on_device
    def make(*, device: torch.device) -> None:
        calls.append(device)
        run(broken, torch.zeros(8))

    with pytest.raises(KernelError, match="some_kernel does not run on this device: PTXASError"):
        run(broken, torch.zeros(8))
    with pytest.warns(RuntimeWarning, match="built by torch from now on"):
        assert make(device=torch.device("cuda")) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(device=CUDA) is None
    assert calls == [CUDA]
    assert on_device(lambda *, device: device)(device=torch.device("cpu")) == torch.device("cpu")


def test_rows_that_a_program_reads_at_once() -> None:
    """As many as make 2^14 scores of programs, 2^10 bytes or 2^13 bytes four by four; a divisor of the row block."""
    for kind, scores in ((source.PROGRAM, 2**14), (source.BYTES, 2**10), (source.QUADS, 2**13)):
        tiles: Any = SimpleNamespace(kind=kind)
        for block_m, columns in ((64, 64), (128, 128), (192, 128), (48, 16), (64, 4096), (16, 2**16)):
            rows = source.Source.rows_at_once(tiles, block_m, columns)
            assert block_m % rows == 0
            assert rows * columns <= max(scores, columns)
            assert 2 * rows * columns > scores or block_m % (2 * rows)
