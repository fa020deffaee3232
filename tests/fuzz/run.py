"""Runs a case, and tells a right answer and a refusal of the catalogue from everything else."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import stof
from stof import masks
from stof.errors import StofError
from stof.kernels.dropout import Dropout, draw_seed
from stof.kernels.implementation import Gradients
from stof.testing import assert_attention, make_inputs, spread
from tests.fuzz.cases import Case
from tests.fuzz.entries import encoded, in_another_process, kernel
from tests.kernels.gradients import assert_gradients

_HEADER = """
import torch, stof
from stof import masks
from stof.testing import make_inputs, spread
""".strip()


@dataclass
class Outcome:
    """What a case came to.

    Attributes:
        refused: class of the error that refused it; empty when it was answered.
        failure: why it is wrong, and a program that shows it; empty when it is not.
        lost: the device answers no more in this process.
    """

    refused: str = ""
    failure: str = ""
    lost: bool = False


def poison_memory() -> None:
    """Let uninitialised memory hold NaN and largest integers, as `poisoned_memory` of tests/conftest.py does."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # some operators on a GPU have no deterministic form
    torch.utils.deterministic.fill_uninitialized_memory = True


def run_case(case: Case, device: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space: dict[str, Any] = {"torch": torch, "stof": stof, "masks": masks, "device": device}
        space |= {"make_inputs": make_inputs, "spread": spread, "path": os.path.join(folder, "file")}
        space |= {"in_another_process": in_another_process, "encoded": encoded, "kernel": kernel}
        space["kept"] = None if case.keep is None else torch.from_numpy(np.array(case.keep)).to(device)
        if case.entry == "kernel":
            from stof.kernels.config import KernelConfig

            space["KernelConfig"] = KernelConfig
        try:
            exec("\n".join(case.lines), space)
        except StofError as error:
            return Outcome(refused=type(error).__name__)
        except Exception as error:
            refusal = refusal_within(error)
            if refusal or of_block_mask(error):
                return Outcome(refused=refusal or type(error).__name__)
            return _failed(case, device, f"{type(error).__name__}: {str(error)[:500]}\n{place(error)}", error)
        finally:
            if case.entry in ("compiled", "exported"):
                torch._dynamo.reset()
        if case.must_refuse:
            return _failed(case, device, "an answer, where only a refusal is right")
        try:
            _check(case, space)
        except AssertionError as error:
            return _failed(case, device, str(error))
        except Exception as error:  # an asynchronous failure of a device shows here
            return _failed(case, device, f"{type(error).__name__}: {str(error)[:500]}", error)
    return Outcome()


def refusal_within(error: BaseException | None) -> str:
    """Dynamo and `torch.export` raise errors of their own because of ours."""
    while error is not None:
        if isinstance(error, StofError):
            return type(error).__name__
        text = str(error)
        if "graph_break" in text and "compiled code" in text:
            return "a broken graph"
        for name in vars(stof.errors):
            if name.endswith("Error") and f"{name}(" in text and type(error).__module__.startswith("torch."):
                return name
        error = error.__cause__ or error.__context__
    return ""


def of_block_mask(error: Exception) -> bool:
    """PyTorch's `create_block_mask` has refusals of its own."""
    return any(frame.name == "create_block_mask" for frame in traceback.extract_tb(error.__traceback__))


def place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(f"  {frame.filename}:{frame.lineno} {frame.line}" for frame in frames[-4:])


def _check(case: Case, space: dict[str, Any]) -> None:
    assert case.keep is not None
    if case.entry == "transformers":
        error = float((space["out"] - space["expected"]).abs().max())
        assert error <= 1e-4, f"the model's output is off by {error:.3e}"
        return
    options = {name: _clean(value) for name, value in space["options"].items()}
    if case.dropout_seed is not None:
        torch.manual_seed(case.dropout_seed)
        options["dropout"] = Dropout(options.pop("dropout_p"), draw_seed(space["q"].device).cpu())
    q, k, v = (_clean(space[name]) for name in "qkv")
    keep = torch.from_numpy(np.array(case.keep))
    lse = space.get("lse")
    # Plain PyTorch is exact by luck at times; parts merged by their log-sum-exps round more often.
    factor = 8.0 if q.dtype in (torch.float32, torch.float64) else 4.0
    assert_attention(
        space["out"].detach().cpu(),
        None if lse is None else lse.detach().cpu(),
        q,
        k,
        v,
        keep,
        factor=factor,
        **options,
    )
    if case.differentiated:
        call = {"q": q, "k": k, "v": v, "d_out": space["d_out"].cpu(), "keep": keep, **options}
        call["scale"] = call.get("scale", q.shape[-1] ** -0.5)
        gradients = dict.fromkeys(Gradients._fields) | {name: x.cpu() for name, x in space["gradients"].items()}
        assert_gradients(Gradients(**gradients), call, factor=factor)


def _clean(value: Any) -> Any:
    """On the host, without the NaN that nobody may read."""
    return torch.where(value.isnan(), 0.0, value).detach().cpu() if isinstance(value, torch.Tensor) else value


def _failed(case: Case, device: str, why: str, error: Exception | None = None) -> Outcome:
    lost = error is not None and any(text in str(error) for text in ("CUDA error", "cudaError", "device-side assert"))
    program = "\n".join([_HEADER, f"device = {device!r}", *_needed(case), *case.lines])
    kept = f"# {case.entry}; case {case.number} of seed {case.seed}"
    return Outcome(failure=f"{kept}\n# {why}\n{program}\n".replace("\n# \n", "\n"), lost=lost)


def _needed(case: Case) -> list[str]:
    text = "\n".join(case.lines)
    lines = [
        f"from tests.fuzz.entries import {name}"
        for name in ("in_another_process", "encoded", "kernel")
        if f"{name}(" in text
    ]
    if "KernelConfig" in text:
        lines.append("from stof.kernels.triton.work_list import KernelConfig")
    return lines + ["path = '/tmp/stof-fuzz-file'"] * ("path)" in text)
