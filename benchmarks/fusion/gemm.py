"""The matrix products of Transformers with their epilogues: templates against cuBLAS with Inductor's code around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.failures import first_line
from benchmarks.timing import chain_us, sustained_us
from stof.fusion.templates import launch, reference
from stof.fusion.templates.candidates import configs
from stof.fusion.templates.gemm_config import KINDS, GemmConfig, config_problems, kind_in
from stof.fusion.templates.norms import Norm
from stof.testing.attention_check import relative_error
from stof.tuning.timing import time_calls

EPS = 1e-5
# Rows of each result that are compared with float64; all are compared with PyTorch's own result.
_CHECKED_ROWS = 256
# A candidate may be this much further from float64 than PyTorch in the same dtype, and a little more where that is
# exact to the last place by luck.
_FACTOR, _SLACK = 2.0, 2.0
# PyTorch's ways, as they are named in results.
BARE, INDUCTOR, AUTOTUNED = "gemm alone", "inductor", "inductor max-autotune"
_MODES = {INDUCTOR: "default", AUTOTUNED: "max-autotune-no-cudagraphs"}
# Candidates to try for every shape when time is short: one or two of every kind.
QUICK = (
    "128x128x64,5s,pingpong",
    "64x128x64,7s,pingpong",
    "64x256x64,4s,pingpong",
    "256x128x64,6s,cooperative",
    "128x256x64,5s,cooperative",
    "128x192x64,5s,cooperative",
    "128x128x64,8w,3s,tile",
    "128x64x64,4w,4s,tile",
    "64x64x64,4w,4s,tile",
    "64x32x128,4w,4s,tile",
    "64x32x128,4w,4s,tile,split2",
    "64x64x64,4w,6s,tile,split5",
    "64x64x128,4w,3s,tile,split3",
    "64x64x128,4w,3s,tile,split4",
)


@dataclass(frozen=True)
class Gemm:
    """A product of a model: its template, sizes and surroundings. Fields as in `GemmShape`."""

    model: str
    name: str
    template: str
    n: int
    k: int
    activation: str = "none"
    norm: str = ""
    bias: bool = True
    residual: bool = False
    transposed: bool = False


GEMMS = (
    Gemm("bert", "qkv", "linear", 2304, 768),
    Gemm("bert", "out", "linear_norm", 768, 768, norm="layer", residual=True),
    Gemm("bert", "ffn in", "linear", 3072, 768, "gelu"),
    Gemm("bert", "ffn out", "linear_norm", 768, 3072, norm="layer", residual=True),
    Gemm("gpt2", "qkv", "linear", 2304, 768, transposed=True),
    Gemm("gpt2", "out", "linear", 768, 768, residual=True, transposed=True),
    Gemm("gpt2", "ffn in", "linear", 3072, 768, "gelu_tanh", transposed=True),
    Gemm("gpt2", "ffn out", "linear", 768, 3072, residual=True, transposed=True),
    Gemm("llama", "qkv", "norm_linear", 3072, 2048, norm="rms", bias=False),
    Gemm("llama", "out", "linear", 2048, 2048, bias=False, residual=True),
    Gemm("llama", "gate up", "gated_linear", 8192, 2048, "silu", bias=False),
    Gemm("llama", "down", "linear", 2048, 8192, bias=False, residual=True),
    Gemm("t5", "qkv", "norm_linear", 2304, 768, norm="rms", bias=False),
    Gemm("t5", "out", "linear", 768, 768, bias=False, residual=True),
    Gemm("t5", "ffn in", "linear", 3072, 768, "relu", bias=False),
    Gemm("t5", "ffn out", "linear", 768, 3072, bias=False, residual=True),
    Gemm("vit", "qkv", "linear", 2304, 768),
    Gemm("vit", "out", "linear", 768, 768, residual=True),
    Gemm("vit", "ffn in", "linear", 3072, 768, "gelu"),
    Gemm("vit", "ffn out", "linear", 768, 3072, residual=True),
)
MODELS = tuple(dict.fromkeys(gemm.model for gemm in GEMMS))


@dataclass(frozen=True)
class Row:
    """One measurement. `us` is None when the result was wrong or the candidate failed (`problem` says how).

    With a `chain`, it is of a call among so many with weights of their own; `sustained`, of one among those that follow
    each other for so many seconds; else of a single one with a cold L2.
    """

    model: str
    gemm: str
    template: str
    tokens: int
    n: int
    k: int
    dtype: str
    impl: str
    us: float | None
    tflops: float | None
    max_rel_err: float | None
    torch_rel_err: float | None
    first_call_s: float | None
    problem: str = ""
    chain: int = 0
    sustained: float = 0.0


KEY = ("model", "gemm", "tokens", "dtype", "impl", "chain", "sustained")


@dataclass(frozen=True)
class Inputs:
    """Tensors of a product, seed 0; `vectors` are a norm's weight and bias where it has them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    vectors: tuple[Tensor | None, Tensor | None]

    @staticmethod
    def of(gemm: Gemm, tokens: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        rows = gemm.n * (2 if gemm.template == "gated_linear" else 1)
        weight = drawn(rows, gemm.k, scale=gemm.k**-0.5)
        after = gemm.template == "linear_norm"
        return Inputs(
            drawn(tokens, gemm.k),
            weight.t().contiguous().t() if gemm.transposed else weight,
            drawn(rows) if gemm.bias else None,
            drawn(tokens, gemm.n) if gemm.residual else None,
            (drawn(gemm.n), drawn(gemm.n)) if after else (None, None),
        )

    def wide(self, rows: Tensor) -> Inputs:
        """Some rows in float64."""
        residual = None if self.residual is None else self.residual[rows]
        vectors = (_double(self.vectors[0]), _double(self.vectors[1]))
        return Inputs(self.x[rows].double(), self.weight.double(), _double(self.bias), _double(residual), vectors)


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def twin(gemm: Gemm, given: Inputs) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is computed, in plain PyTorch: a function and its arguments."""
    x, weight, bias, residual = given.x, given.weight, given.bias, given.residual
    if gemm.template == "norm_linear":
        return reference.norm_linear, (x, *given.vectors, weight, bias, gemm.norm, EPS, gemm.activation)
    if gemm.template == "gated_linear":
        return reference.gated_linear, (x, weight, bias, gemm.activation)
    if gemm.template == "linear":
        return reference.linear, (x, weight, bias, residual, gemm.activation)
    return reference.linear_norm, (x, weight, bias, residual, *given.vectors, gemm.norm, EPS)


def product_of(gemm: Gemm, given: Inputs) -> launch.GemmCall:
    """The product as the templates' launching code takes it; a norm after it is not part of it."""
    norm = Norm(gemm.norm, *given.vectors, EPS) if gemm.template == "norm_linear" else None
    return launch.gemm_call(gemm.template, given.x, given.weight, given.bias, given.residual, gemm.activation, norm)


def calls_of(gemm: Gemm, givens: Sequence[Inputs], name: str) -> list[Callable[[], Any]]:
    """What to time under a name, a call for each inputs: one of PyTorch's ways (compiled once), or a configuration.

    linear_norm returns two tensors.
    """
    if name == BARE:
        return [partial(F.linear, given.x, given.weight) for given in givens]
    if name in _MODES:
        function = twin(gemm, givens[0])[0]
        compiled = torch.compile(function, mode=_MODES[name], dynamic=False, fullgraph=True)
        return [partial(compiled, *twin(gemm, given)[1]) for given in givens]
    config = GemmConfig.parse(name)
    if gemm.template != "linear_norm":
        return [partial(launch.compute, product_of(gemm, given), config) for given in givens]
    return [
        partial(launch.compute_normed, product_of(gemm, given), config, Norm(gemm.norm, *given.vectors, EPS))
        for given in givens
    ]


def run_gemm(
    gemm: Gemm,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    only: Collection[str] | None,
    named: Sequence[str] = (),
    autotuned: bool,
    chain: int,
    sustained: float,
    rounds: int,
    report: Callable[[str], None],
) -> list[Row]:
    """Check and time everything for one product.

    Args:
        only: of the search's configurations those to try; None for all.
        named: configurations to try beside them, where they fit.
        autotuned: Inductor's own search for products as well.
        chain: 0, or calls that follow each other, each with a weight of its own (`chain_us`).
        sustained: 0, or seconds for which each call is repeated (`sustained_us`).
        rounds: timed rounds.
        report: told about each check.
    """
    given = Inputs.of(gemm, tokens, device, dtype)
    capability = torch.cuda.get_device_capability(device)
    shape = product_of(gemm, given).shape
    fitting = [str(config) for config in configs(shape, dtype, capability)]
    chosen = fitting if only is None else [name for name in fitting if name in only]
    for name in named:
        if why := config_problems(GemmConfig.parse(name), shape, dtype, capability):
            report(f"  {name}: {'; '.join(why)}")
        else:
            chosen.append(name)
    wanted = [BARE, INDUCTOR, *([AUTOTUNED] if autotuned else []), *chosen]
    check = Check(gemm, given)
    givens = [given, *(replace(given, weight=given.weight.clone()) for _ in range(chain - 1))]
    good: dict[str, list[Callable[[], Any]]] = {}
    facts: dict[str, tuple[float | None, float | None, str]] = {}
    for name in wanted:
        start = time.perf_counter()
        problem, error = "", None
        try:
            calls = calls_of(gemm, givens, name)
            if name == BARE:
                calls[0]()
            else:
                error, problem = check(calls[0], poisoned=name not in _MODES)
        except Exception as failure:  # whatever a compiler or a kernel raises must not end the race
            problem = first_line(failure)
            torch.cuda.synchronize(device)
        facts[name] = error, time.perf_counter() - start, problem
        if problem:
            report(f"  {name}: {problem}")
        else:
            good[name] = calls
    if chain:
        taken: dict[str, float | None] = {**chain_us(good, device, rounds=rounds)}
    elif sustained:
        once = {name: calls[0] for name, calls in good.items()}
        taken = {**sustained_us(once, device, seconds=sustained, rounds=rounds)}
    else:
        timings = time_calls({name: calls[0] for name, calls in good.items()}, device, rounds=rounds)
        taken = {name: timing.gpu_us for name, timing in timings.items()}
    torch.compiler.reset()  # else compiled functions accumulate
    products = 2 * tokens * gemm.n * gemm.k * (2 if gemm.template == "gated_linear" else 1)
    rows = []
    for name, (error, first, problem) in facts.items():
        us = taken.get(name)
        tflops = products / us / 1e6 if us else None
        rows.append(
            Row(gemm.model, gemm.name, gemm.template, tokens, gemm.n, gemm.k, str(dtype).removeprefix("torch."), name,
                us, tflops, error, check.plain, first, problem, chain, sustained)
        )  # fmt: skip
    return rows


class Check:
    """Compares results with float64 on some rows, and with PyTorch's own result on all."""

    def __init__(self, gemm: Gemm, given: Inputs) -> None:
        tokens = given.x.shape[0]
        rows = torch.arange(tokens, device=given.x.device)
        if tokens > _CHECKED_ROWS:
            drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[: _CHECKED_ROWS - 64]
            rows = torch.cat((rows[:32], drawn.to(rows.device), rows[-32:]))
        self.rows = rows
        self.exact = _result(gemm, given.wide(rows))
        self.usual = _result(gemm, given)
        self.plain = relative_error(self.usual[..., rows, :], self.exact)
        # A unit in the last place of the largest value.
        self.unit = 2.0 ** -(10 if given.x.dtype == torch.float16 else 7)

    def __call__(self, call: Callable[[], Any], poisoned: bool) -> tuple[float, str]:
        """`(error, problem)`; the problem is empty when the result is right.

        Args:
            poisoned: results are made in memory full of NaN, so that what is not written shows.
        """
        found = _joined(_poisoned(call) if poisoned else call())
        error = relative_error(found[..., self.rows, :], self.exact)
        everywhere = relative_error(found, self.usual.double())
        bound = _FACTOR * self.plain + _SLACK * self.unit / 2
        if not (math.isfinite(everywhere) and error <= bound and everywhere <= 2 * bound):
            return error, f"WRONG: error {error:.1e} (PyTorch {self.plain:.1e}), {everywhere:.1e} from PyTorch's result"
        return error, ""


def _result(gemm: Gemm, given: Inputs) -> Tensor:
    function, arguments = twin(gemm, given)
    return _joined(function(*arguments))


def _joined(result: Any) -> Tensor:
    """One tensor of one or two, so that both are compared."""
    return torch.stack(result) if isinstance(result, tuple) else result


def _poisoned(call: Callable[[], Any]) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Summary:
    """One product: the bare product, Inductor's best, the best template, and what had to be reached.

    `by_kind` has the best time of each kind of configuration. `needed` is the share of cuBLAS's speed at which fusing
    pays, `reached` the best template's.
    """

    model: str
    gemm: str
    tokens: int
    bare_us: float
    inductor_us: float
    best: str
    best_us: float
    by_kind: dict[str, float]

    @property
    def needed(self) -> float:
        return self.bare_us / self.inductor_us

    @property
    def reached(self) -> float:
        return self.bare_us / self.best_us

    @property
    def speedup(self) -> float:
        return self.inductor_us / self.best_us


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """One line a product of which everything has a time."""
    cells: dict[tuple[str, str, int, int, float], dict[str, float]] = {}
    for row in rows:
        if row.us is not None:
            cells.setdefault((row.model, row.gemm, row.tokens, row.chain, row.sustained), {})[row.impl] = row.us
    found = []
    for (model, gemm, tokens, *_), times in cells.items():
        ours = {name: us for name, us in times.items() if kind_in(name) in KINDS}
        peers = [times[name] for name in _MODES if name in times]
        if BARE in times and peers and ours:
            best = min(ours, key=lambda name: ours[name])
            by_kind: dict[str, float] = {}
            for name, us in ours.items():
                kind = kind_in(name)
                by_kind[kind] = min(us, by_kind.get(kind, us))
            found.append(Summary(model, gemm, tokens, times[BARE], min(peers), best, ours[best], by_kind))
    return found
