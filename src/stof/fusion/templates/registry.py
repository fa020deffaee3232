"""Which sequences of operators each template covers, and what it may be configured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any

import torch

from stof.errors import ArgumentError
from stof.fusion.graph.operators import NORMS, Kind
from stof.fusion.templates import operators, reference  # noqa: F401
from stof.fusion.templates.candidates import configs
from stof.fusion.templates.gemm_config import GemmConfig, GemmShape, config_problems, default, unsupported
from stof.fusion.templates.row_buckets import bucket_of

# The break-even at K = 1024 in the table of `benchmarks/notes/fusion.md`.
_ASSUMED_FRACTION = 0.76
# Query, key and value, 4096 tokens, H200: BERT's 27.2 us where cuBLAS takes 24.6; LLaMA-1B's as fast as cuBLAS's.
_PLAIN_FRACTION = 0.9
_NORM = frozenset(NORMS)
_RMS_NORM = frozenset({Kind.RMS_NORM})
_LINEAR = frozenset({Kind.LINEAR})
_ACTIVATION = frozenset({Kind.ACTIVATION})
_RESIDUAL = frozenset({Kind.RESIDUAL})
_GATE = frozenset({Kind.GATE})
_ROTARY = frozenset({Kind.ROTARY})


class KernelPolicy(Enum):
    """What may compute matched segments; each has all that those before it have."""

    DEFAULTS = "kernels that are the default for some shapes"
    KERNELS = "kernels that are there to be measured"
    REFERENCE = "PyTorch references where no kernel serves"


def no_kernel(device: torch.device, dtype: torch.dtype, policy: KernelPolicy) -> str:
    """What has nothing to compute a GEMM, such as "cpu" or "float64"; "" if there is something."""
    if policy is KernelPolicy.REFERENCE:
        return ""
    if device.type != "cuda":
        return device.type
    return unsupported(dtype, torch.cuda.get_device_capability(device), measured=policy is KernelPolicy.KERNELS)


@dataclass(frozen=True)
class Slot:
    """A place in a template's sequence: the kinds that fit, and whether it may stay empty."""

    kinds: frozenset[Kind]
    optional: bool = False


@dataclass(frozen=True)
class GemmProblem:
    """What a template is asked to compute: sizes and options, and where."""

    shape: GemmShape
    dtype: torch.dtype
    device: torch.device

    def text(self, rows: int | None = None) -> str:
        """`linear 4096x3072x768 activation=gelu bias float16`: equal problems, in any process, have equal texts.

        Args:
            rows: another number of rows to write.
        """
        words = [self.shape.template, f"{rows or self.shape.m}x{self.shape.n}x{self.shape.k}"]
        for field in fields(self.shape):
            value = getattr(self.shape, field.name)
            if field.default is not MISSING and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join([*words, str(self.dtype).removeprefix("torch.")])

    @property
    def bucket(self) -> str:
        """The text with its rows rounded up to a power of two, so that what is measured serves like numbers as well."""
        return self.text(bucket_of(self.shape.m))


@dataclass(frozen=True)
class Template:
    """One kernel template.

    Attributes:
        name: the operator's name after `stof::`.
        slots: the sequences it covers.
        reference: the same function in plain PyTorch.
        saved_passes: how often less than Inductor's code it goes over the tensors between the GEMM and its neighbours;
            2 is one write and one read.
        cublas_fraction: the share of cuBLAS's speed its GEMM is assumed to reach where nothing has been measured.
    """

    name: str
    slots: tuple[Slot, ...]
    reference: Callable[..., Any]
    saved_passes: int
    cublas_fraction: float = _ASSUMED_FRACTION

    @property
    def operator(self) -> Callable[..., Any]:
        """The `torch.library` operator that a graph calls."""
        registered: Callable[..., Any] = getattr(torch.ops.stof, self.name).default
        return registered

    def covers(self, kinds: tuple[Kind, ...]) -> bool:
        """Whether the slots can be filled by these operators, in order and without leaving one over."""
        at = 0
        for slot in self.slots:
            if at < len(kinds) and kinds[at] in slot.kinds:
                at += 1
            elif not slot.optional:
                return False
        return at == len(kinds)

    def configs(self, problem: GemmProblem, policy: KernelPolicy) -> list[str]:
        """Return configurations worth measuring, the default ("") first if it has a kernel or references may serve."""
        default = [""] if policy is KernelPolicy.REFERENCE else []
        if problem.device.type != "cuda":
            return default
        device = torch.cuda.get_device_properties(problem.device)
        capability = (device.major, device.minor)
        usual = self._default_config(problem)
        others = [str(c) for c in configs(problem.shape, problem.dtype, capability) if c != usual]
        return [*(default if usual is None else [""]), *others]

    def as_candidate(self, problem: GemmProblem, config: str) -> str:
        """Return a recorded configuration as `configs` lists it: "" for the default."""
        if problem.device.type == "cuda" and config == str(self._default_config(problem)):
            return ""
        return config

    def as_recorded(self, problem: GemmProblem, config: str) -> str:
        """Return a configuration for a record: the default by its text, since a later version may have another."""
        if config or problem.device.type != "cuda":
            return config
        usual = self._default_config(problem)
        return "" if usual is None else str(usual)

    def _default_config(self, problem: GemmProblem) -> GemmConfig | None:
        """The default of the bucket's largest GEMM."""
        device = torch.cuda.get_device_properties(problem.device)
        bucket = replace(problem.shape, m=bucket_of(problem.shape.m))
        return default(bucket, problem.dtype, (device.major, device.minor), device.multi_processor_count)

    def refusal(self, problem: GemmProblem, config: str, policy: KernelPolicy) -> str:
        """Why a configuration cannot run a problem, in words; "" where it can, whether worth measuring or not."""
        if config in self.configs(problem, policy):
            return ""
        if problem.device.type != "cuda":
            return f"no kernel runs on {problem.device.type}"
        if not config:
            return f"there is no default for {str(problem.dtype).removeprefix('torch.')}"
        try:
            given = GemmConfig.parse(config)
        except ArgumentError as error:
            return str(error)
        capability = torch.cuda.get_device_capability(problem.device)
        return "; ".join(config_problems(given, problem.shape, problem.dtype, capability))


TEMPLATES: tuple[Template, ...] = (
    Template(
        "linear",
        (Slot(_LINEAR), Slot(_ACTIVATION, optional=True), Slot(_RESIDUAL, optional=True)),
        reference.linear,
        saved_passes=2,
        # BERT's up-projection with GELU, 4096 tokens, H200: 35.4 us; cuBLAS's GEMM alone takes 32.8.
        cublas_fraction=0.92,
    ),
    # Inductor computes the row factors together with what x is made by; what is saved is writing the normalized rows.
    Template(
        "rms_linear",
        (Slot(_RMS_NORM), Slot(_LINEAR), Slot(_ACTIVATION, optional=True)),
        reference.rms_linear,
        saved_passes=1,
        cublas_fraction=_PLAIN_FRACTION,
    ),
    Template(
        "rms_gated_linear",
        (Slot(_RMS_NORM), Slot(_LINEAR), Slot(_GATE)),
        reference.rms_gated_linear,
        saved_passes=2,
        cublas_fraction=1.0,
    ),
    Template(
        "rotary_linear",
        (Slot(_RMS_NORM, optional=True), Slot(_LINEAR), Slot(_ROTARY), Slot(_ROTARY, optional=True)),
        reference.rotary_linear,
        saved_passes=2,
        cublas_fraction=_PLAIN_FRACTION,
    ),
    # The norm's statistics are a pass of their own; what is saved is writing the normalized rows.
    Template(
        "norm_linear",
        (Slot(_NORM), Slot(_LINEAR), Slot(_ACTIVATION, optional=True)),
        reference.norm_linear,
        saved_passes=1,
    ),
    # LLaMA-1B's, 4096 tokens, H200: 379 us, cuBLAS without the gate 399.
    Template("gated_linear", (Slot(_LINEAR), Slot(_GATE)), reference.gated_linear, saved_passes=2, cublas_fraction=1.0),
    # The norm reads the sum again; what is saved is writing the GEMM.
    Template(
        "linear_norm",
        (Slot(_LINEAR), Slot(_RESIDUAL, optional=True), Slot(_NORM)),
        reference.linear_norm,
        saved_passes=1,
        # BERT's down-projection, residual and LayerNorm, 4096 tokens, H200: 41.1 us; cuBLAS's GEMM alone takes 28.3.
        cublas_fraction=0.69,
    ),
)
