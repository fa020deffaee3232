"""`python -m benchmarks first-call`: seconds of the first eager calls of a process, with and without caches on disk.

Every library makes the same calls, in the same order, in processes of its own. A call's time includes its mask and all
that is imported and compiled for it; importing the library and initialising the device are not in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIBRARIES = ("stof", "flex")
_HEADS, _LENGTH = 8, 512
# The largest error of a result, relative to the largest value, by bytes of an element.
_TOLERANCE = {2: 2e-2, 4: 1e-4}
_TIMEOUT_S = 600


@dataclass(frozen=True)
class FirstCall:
    """One call of a process.

    Attributes:
        library: stof or flex.
        caches: "empty" or "on disk".
        call: what is new about it.
        seconds: until its result is there; None where the call failed or its result is wrong.
        note: why.
    """

    library: str
    caches: str
    call: str
    seconds: float | None
    note: str = ""


class Problem(NamedTuple):
    """A call: `keep [Sq, Skv]` is what `mask_mod` keeps, `name` what stof is given, or None for the function."""

    call: str
    mask_mod: Callable[..., Tensor]
    named: Callable[[], Any]
    length: int = _LENGTH
    kv_heads: int = _HEADS
    head_dim: int = 64
    bfloat16: bool = False
    softcap: float | None = None


def problems(device: torch.device) -> Iterator[Problem]:
    """The calls of a process, in order."""
    from stof import masks

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv <= 64) & (kv - q <= 64)

    def longformer(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return window(b, h, q, kv) | (q < 2) | (kv < 2)

    generator = torch.Generator().manual_seed(0)
    random = (torch.rand(_LENGTH, _LENGTH, generator=generator) < 0.2).to(device)
    random.fill_diagonal_(True)
    ends = [0, 100, 230, 400, _LENGTH]
    lengths = torch.tensor(ends).diff()
    document = torch.arange(4).repeat_interleave(lengths).to(device)
    width = 48
    yield Problem("causal", causal, masks.causal)
    yield Problem("causal, another length", causal, masks.causal, length=640)
    yield Problem("sliding window", window, lambda: masks.sliding_window(64, 64))
    yield Problem("Longformer", longformer, lambda: masks.sliding_window(64, 64) | masks.global_tokens([0, 1]))
    yield Problem("bool tensor", lambda b, h, q, kv: random[q, kv], lambda: random)
    yield Problem(
        "documents", lambda b, h, q, kv: document[q] == document[kv], lambda: masks.documents(cu_seqlens=ends)
    )
    yield Problem("mask function", function := lambda b, h, q, kv: (q >= kv) & (q - kv < width), lambda: function)
    yield Problem(
        "causal, GQA, bfloat16, D 128", causal, masks.causal, kv_heads=_HEADS // 4, head_dim=128, bfloat16=True
    )
    yield Problem("causal, softcap", causal, masks.causal, softcap=30.0)


def run_processes(device: torch.device, libraries: tuple[str, ...], folder: Path) -> Iterator[FirstCall]:
    """Run each library in a process with empty caches, and in a second one with what the first left in `folder`."""
    for library in libraries:
        for caches in ("empty", "on disk"):
            environment = os.environ | {
                "TRITON_CACHE_DIR": str(folder / library / "triton"),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / library / "inductor"),
            }
            command = [sys.executable, "-m", "benchmarks.attention.first_call", library, str(device)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if done.returncode:
                yield FirstCall(library, caches, "all", None, done.stderr.strip().splitlines()[-1])
            for line in done.stdout.splitlines():
                call, seconds, note = json.loads(line)
                yield FirstCall(library, caches, call, seconds, note)


def _main(library: str, device: torch.device) -> None:
    """Make the calls in this process, and print one JSON list for each: call, seconds or null, note."""
    attend = {"stof": _stof, "flex": _flex}[library](device)
    torch.ones(8, 8, device=device).sum().item()
    for problem in problems(device):
        q, k, v = _inputs(problem, device)
        start = time.perf_counter()
        seconds: float | None = None
        try:
            with torch.no_grad():
                out = attend(problem, q, k, v)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds, note = time.perf_counter() - start, ""
            error = _error(problem, q, k, v, out)
            if not error <= _TOLERANCE[q.itemsize]:
                seconds, note = None, f"wrong: largest error {error:.2g}"
        except Exception as problem_found:  # a peer may refuse a call: a row of the table
            note = f"{type(problem_found).__name__}: {problem_found}"
        print(json.dumps([problem.call, seconds, note]), flush=True)


def _inputs(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    half = torch.bfloat16 if problem.bfloat16 else torch.float16
    dtype = half if device.type == "cuda" else torch.float32
    sizes = (problem.length, problem.head_dim)
    shapes = ((1, heads, *sizes) for heads in (_HEADS, problem.kv_heads, problem.kv_heads))
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def _error(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    at = torch.arange(problem.length, device=q.device)
    keep = problem.mask_mod(at.new_zeros(()), at.new_zeros(()), at[:, None], at)
    k, v = (x.double().repeat_interleave(_HEADS // problem.kv_heads, 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    if problem.softcap is not None:
        scores = problem.softcap * (scores / problem.softcap).tanh()
    expected = scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v
    return float((out.double() - expected).abs().max() / expected.abs().max())


def _stof(device: torch.device) -> Callable[..., Tensor]:
    import stof

    return lambda problem, q, k, v: stof.attention(q, k, v, problem.named(), softcap=problem.softcap)


def _flex(device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # calls beyond it would not be compiled
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block_mask = create_block_mask(
            problem.mask_mod, None, None, problem.length, problem.length, device=device.type, _compile=False
        )
        cap = problem.softcap
        score_mod = None if cap is None else lambda score, b, h, q, kv: cap * torch.tanh(score / cap)
        grouped = problem.kv_heads < _HEADS
        out = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    return attend


def as_json(rows: list[FirstCall], provenance: dict[str, object]) -> dict[str, object]:
    return {"provenance": provenance, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    _main(sys.argv[1], torch.device(sys.argv[2]))
