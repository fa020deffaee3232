"""`python -m benchmarks train`: training steps of whole models, stof's attention against PyTorch's, all compiled.

A step is forward, backward and a fused AdamW update in bfloat16 autocast over float32 weights. The gradients of the
first step are compared with those of the eager model in float32 before anything is timed.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from benchmarks.failures import first_line
from benchmarks.models.attention_peers import with_attention
from stof.testing.models import Case, build, inputs_of, mask_of

WAYS = ("stof", "sdpa", "flex")
# Of torch.compile, for every way.
MODES = ("default", "reduce-overhead")
# The least cosine of all gradients together to those in float32.
_COSINE = 0.98
_WARMUP = 3


@dataclass(frozen=True)
class TrainingRow:
    """One way to train one case.

    Attributes:
        mode: of torch.compile.
        ms: median wall time of a step; None where the way failed or its gradients are wrong.
        tokens_per_s: of the batch.
        peak_gib: memory that PyTorch held at most during a step.
        cosine: of the gradients to those in float32.
        problem: why there is no time.
    """

    case: str
    way: str
    mode: str
    ms: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    cosine: float | None = None
    problem: str = ""


def training_rows(
    cases: Sequence[Case], ways: Sequence[str], modes: Sequence[str], device: torch.device, rounds: int
) -> Iterator[TrainingRow]:
    """Check and time every way of every case in every mode."""
    for case in cases:
        with torch.device(device):
            model = without_dropout(build(case.model, case.seq)).train()
        inputs = inputs_of(case, device)
        exact = _exact_gradients(model, case, inputs, device)
        for way, mode in itertools.product(ways, modes):
            torch.compiler.reset()
            try:
                yield _timed(model, case, way, mode, inputs, exact, device, rounds)
            except Exception as problem:  # a peer may refuse, or run out of memory: a row of the table
                yield TrainingRow(str(case), way, mode, problem=first_line(problem))


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all dropout probabilities set to 0."""
    for part in model.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_prob", "dropout_rate"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model


def loss_of(model: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs)[0].float()
    return (out * torch.linspace(-1, 1, out.shape[-1], device=out.device)).sin().mean()


def gradients_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().float() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def _exact_gradients(model: nn.Module, case: Case, inputs: dict[str, Tensor], device: torch.device) -> Tensor:
    changed, arguments = with_attention(model, case, "sdpa", device)
    loss_of(changed, inputs | arguments).backward()
    return gradients_of(changed)


def _timed(
    model: nn.Module, case: Case, way: str, mode: str, inputs: dict[str, Tensor], exact: Tensor, device: torch.device,
    rounds: int,
) -> TrainingRow:  # fmt: skip
    arguments: dict[str, Any] = {}
    if way == "stof":
        changed = copy.deepcopy(model)
        graphs = mode == "reduce-overhead"
        compiled: Any = stof.optimize(changed, mask=mask_of(case), dynamic=False, cuda_graphs=graphs)
    else:
        changed, arguments = with_attention(model, case, way, device)
        compiled = torch.compile(changed, mode=mode, dynamic=False)
    optimizer = torch.optim.AdamW(changed.parameters(), lr=1e-5, fused=device.type == "cuda")

    def forward_and_backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(compiled, inputs | arguments)
        loss.backward()

    forward_and_backward()
    cosine = float(F.cosine_similarity(gradients_of(changed).double(), exact.double(), 0))
    if not cosine >= _COSINE:
        return TrainingRow(str(case), way, mode, cosine=cosine, problem=f"wrong: cosine {cosine:.4f} to float32")
    times = []
    for step in range(_WARMUP + rounds):
        if step == _WARMUP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        forward_and_backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[_WARMUP:])
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return TrainingRow(str(case), way, mode, seconds * 1e3, case.batch * case.seq / seconds, peak, cosine)
