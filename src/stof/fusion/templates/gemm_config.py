"""Shapes and configurations of GEMM templates, and which configurations fit which shapes."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from stof.errors import ArgumentError
from stof.fusion.templates.device_properties import tilelang_installed

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
NORMS = ("rms", "layer")
# Templates whose weight has the rows of the gate first, then those of the up projection.
GATED = ("gated_linear", "rms_gated_linear")
# Templates that take the row factors of an RMSNorm, whose weight is folded into the GEMM's.
ROW_SCALED = ("rms_linear", "rms_gated_linear", "rotary_linear")
# tile: portable Triton. pingpong, cooperative: Gluon on Hopper. tilelang: TileLang, where it is installed.
KINDS = ("tile", "pingpong", "cooperative", "tilelang")
GLUON = ("pingpong", "cooperative")
HALVES = (torch.float16, torch.bfloat16)
# cuBLAS is faster than the templates: candidates of a search, never a default.
_IF_MEASURED = (torch.float32,)
_LEAST_CAPABILITY = (8, 0)
# Shared memory that one program may have, in bytes, by compute capability; what is not listed has the least of them.
_SHARED = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448}
_LEAST_SHARED = 101_376
# Barriers, and what the compiler aligns.
_SHARED_REST = 2048
# Bytes of x that stay in Hopper's L2 (50 MB) while all of a weight is read, and bytes of a weight that stay themselves.
_ROWS_KEPT, _WEIGHT_KEPT = 2**24, 24 * 2**20
# Depth from which wide tiles are the default for gated GEMMs.
_DEEP = 2048


@dataclass(frozen=True)
class GemmShape:
    """What a template is asked to compute.

    Attributes:
        template: the name of one of `registry.TEMPLATES`.
        m, n, k: rows of x, columns of the result, width of x. For gated ones the weight has 2 n rows.
        activation: one of `ACTIVATIONS`.
        norm: "" or one of `NORMS`; scaled: the norm has a weight or a bias.
        bias, residual: whether there is one.
        transposed: the weight's columns are contiguous in memory (`[K, N]` stored, seen as `[N, K]`).
        head_dim, turned: heads of that width are rotated in the first `turned` columns; 0 for none.
        aligned: TMA can read x, weight and residual (16-byte addresses and row strides) and write the result.
    """

    template: str
    m: int
    n: int
    k: int
    activation: str = "none"
    norm: str = ""
    scaled: bool = False
    bias: bool = False
    residual: bool = False
    transposed: bool = False
    head_dim: int = 0
    turned: int = 0
    aligned: bool = True

    @property
    def gated(self) -> bool:
        return self.template in GATED

    @property
    def commutes(self) -> bool:
        """Whether the norm before the GEMM scales rows alone, and so may follow it."""
        return self.template in ("norm_linear", *ROW_SCALED) and self.norm == "rms" and not self.scaled


@dataclass(frozen=True)
class GemmConfig:
    """How a GEMM is computed. `str` gives the text that operators take, `parse` reads it.

    Attributes:
        kind: one of `KINDS`.
        block_m, block_n, block_k: rows and columns of a tile (gated: gate and up together), and depth of a step.
            With pingpong each of the two consumers has a tile of its own. Powers of two; cooperative also takes 192
            columns or rows.
        warps: of a Triton program (Gluon kernels have four for each consumer, and one).
        stages: steps in flight (cooperative: of the columns).
        split: programs that share a tile's depth (tile only).
        group: rows of tiles that are walked side by side, 0 for as many as suit the shape (`tile_group_rows`).
    """

    kind: str
    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    split: int = 1
    group: int = 0

    def __str__(self) -> str:
        parts = [f"{self.block_m}x{self.block_n}x{self.block_k}"]
        parts += [f"{self.warps}w"] * (self.kind not in GLUON)
        parts += [f"{self.stages}s", self.kind]
        parts += [f"split{self.split}"] * (self.split > 1) + [f"group{self.group}"] * (self.group > 0)
        return ",".join(parts)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def parse(text: str) -> GemmConfig:
        """Read `"128x128x64,5s,pingpong"`, `"64x64x64,4w,4s,tile,split4"`, ...

        Raises:
            ArgumentError: the text is none.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ArgumentError(
                f"{text!r} is no configuration; expected MxNxK[,Ww],Ss,kind[,splitP][,groupG] with kind one of "
                f"{', '.join(KINDS)}, such as '128x128x64,8w,3s,tile'"
            )
        numbers = {name: int(value) for name, value in match.groupdict().items() if value and name != "kind"}
        return GemmConfig(match["kind"], **numbers)

    def shared_memory(self, shape: GemmShape, itemsize: int) -> int:
        """Bytes that one program takes, compiler's extras left out."""
        width = self.block_n // 2 if shape.gated else self.block_n
        if self.kind in ("tile", "tilelang"):
            return self.stages * (self.block_m + self.block_n) * self.block_k * itemsize
        loads = self.stages * (self.block_m + self.block_n) * self.block_k * itemsize
        if self.kind == "cooperative":
            loads = (self.row_stages * self.block_m + self.stages * self.block_n) * self.block_k * itemsize
        outputs = 2 if self.kind == "pingpong" else 1
        output = width if self.extra_columns else self.piece(shape, itemsize)
        return loads + outputs * self.block_m * output * itemsize

    def tile_group_rows(self, shape: GemmShape, itemsize: int) -> int:
        """Rows of tiles that are walked side by side.

        A weight that the L2 does not keep is read from memory once for each so many rows. LLaMA's gate and up (67 MB)
        took 3 to 4 % less by 32 than by 8, where calls in a row bring an H200 to its power limit; single calls as long.
        """
        weight = shape.n * (2 if shape.gated else 1) * shape.k * itemsize
        if self.group or self.kind not in GLUON or weight <= _WEIGHT_KEPT:
            return self.group or 8
        rows = max(8, _ROWS_KEPT // (self.block_m * shape.k * itemsize))
        return 1 << (rows.bit_length() - 1)

    @property
    def extra_columns(self) -> int:
        """cooperative: columns of a GEMM of their own, where a tile's columns are no power of two."""
        return self.block_n - (1 << (self.block_n.bit_length() - 1)) if self.kind == "cooperative" else 0

    @property
    def consumers(self) -> int:
        """cooperative: warpgroups that share a tile's rows."""
        return 3 if self.block_m == 192 else 2

    @property
    def row_stages(self) -> int:
        """cooperative: steps in flight of each consumer's own rows; the columns' may be more, for the lag."""
        return self.stages if self.consumers == 3 else min(self.stages, 3)

    @property
    def lag(self) -> int:
        """cooperative: steps that the second consumer is behind the first, as far as the columns' stages reach."""
        return self.stages - self.row_stages

    def piece(self, shape: GemmShape, itemsize: int) -> int:
        """Columns of the output that leave a consumer at once: all of a tile where the stages leave room for it."""
        width = self.block_n // 2 if shape.gated else self.block_n
        loads = self.stages * (self.block_m + self.block_n) * self.block_k * itemsize
        whole = self.kind == "pingpong" and loads + 2 * self.block_m * width * itemsize <= _SHARED[9, 0] - _SHARED_REST
        return width if whole else min(width, 64)


_PATTERN = re.compile(
    r"(?P<block_m>\d+)x(?P<block_n>\d+)x(?P<block_k>\d+)(,(?P<warps>\d+)w)?,(?P<stages>\d+)s,(?P<kind>tilelang|tile|pingpong|cooperative)"
    r"(,split(?P<split>\d+))?(,group(?P<group>\d+))?"
)


def kind_in(text: str) -> str:
    """Return the kind that a recorded configuration names, one of an earlier version too; "" for a default."""
    return next((part for part in text.split(",") if part.isalpha()), "")


def config_problems(config: GemmConfig, shape: GemmShape, dtype: torch.dtype, capability: tuple[int, int]) -> list[str]:
    """All reasons why a configuration cannot serve a shape; empty when it can."""
    if shape.template in ROW_SCALED and (dtype not in HALVES or config.kind not in ("tile", *GLUON)):
        return [f"{config.kind} does not scale rows of {dtype}"]
    if shape.head_dim and config.kind not in ("tile", "pingpong"):
        return [f"{config.kind} does not rotate heads"]
    problems = []
    tall = config.kind == "cooperative" and config.block_m == 192
    sizes = (64 if tall else config.block_m, config.block_n - config.extra_columns, config.block_k)
    if any(size < 16 or size & (size - 1) for size in sizes):
        problems.append("tile sizes are powers of two from 16 up")
    if config.extra_columns and (config.extra_columns, config.block_n) != (64, 192):
        problems.append("the only other number of columns is 192")
    if config.extra_columns and shape.gated:
        problems.append("gate and up are powers of two wide")
    if config.warps not in (1, 2, 4, 8, 16) or not 1 <= config.stages <= 8 or config.group < 0 or config.split < 1:
        problems.append("1 to 16 warps (a power of two), 1 to 8 stages, split from 1 up")
    if config.split > 1 and config.kind != "tile":
        problems.append("only plain tiles are split along their depth")
    if config.split > max(1, shape.k // config.block_k):
        problems.append("more splits than steps")
    if dtype not in HALVES and not (config.kind == "tile" and dtype in _IF_MEASURED):
        problems.append(f"{config.kind} does not compute {dtype}")
    limit = _SHARED.get(capability, _LEAST_SHARED)
    if (needed := config.shared_memory(shape, dtype.itemsize) + _SHARED_REST) > limit:
        problems.append(f"needs {needed} bytes of shared memory, there are {limit}")
    if capability < _LEAST_CAPABILITY:
        problems.append("written for compute capability {}.{} and up".format(*_LEAST_CAPABILITY))
    if shape.head_dim and (config.block_n % shape.head_dim or shape.turned % config.block_n):
        problems.append("tiles hold whole heads, all of them rotated or none")
    if config.block_m * config.block_n > 128 * 256:
        problems.append("the accumulator is larger than the registers")
    if config.kind == "tilelang":
        problems += _unfit_for_tilelang(shape)
    elif config.kind in GLUON:
        problems += _unfit_for_hopper(config, shape, capability)
    return problems


@functools.lru_cache(maxsize=4096)  # asked in every call
def fitting(text: str, shape: GemmShape, dtype: torch.dtype, capability: tuple[int, int]) -> GemmConfig | None:
    """Return the configuration of a text if it can serve a shape, else None."""
    config = GemmConfig.parse(text)
    return None if config_problems(config, shape, dtype, capability) else config


def _unfit_for_tilelang(shape: GemmShape) -> list[str]:
    problems = []
    if not tilelang_installed():
        problems.append("TileLang is not installed (pip install tilelang)")
    if shape.template != "linear" or shape.transposed or not shape.aligned:
        problems.append("TileLang computes plain GEMMs of rows and weights aligned to 16 bytes")
    return problems


def _unfit_for_hopper(config: GemmConfig, shape: GemmShape, capability: tuple[int, int]) -> list[str]:
    problems = []
    if not shape.aligned:
        problems.append("TMA needs addresses and row strides that are multiples of 16 bytes")
    if capability != (9, 0):
        problems.append("written for compute capability 9.0")
    rows = config.block_m if config.kind == "pingpong" else config.block_m // config.consumers
    if config.consumers == 3 and config.extra_columns:
        problems.append("three consumers have no columns on the side")
    if rows not in (64, 128) or rows * config.block_n > 128 * 128:
        problems.append("a consumer computes 64 or 128 rows and at most 128 x 128 accumulators")
    if config.block_k != 64 or config.stages < 2:
        problems.append("steps are 64 deep (a row of 128 bytes), and a stage is free again when the next step runs")
    if shape.gated and shape.transposed:
        problems.append("gate and up must lie below each other")
    if config.block_n < (128 if shape.gated else 64):
        problems.append("a piece of the result has 64 columns (gated: from 128 columns of accumulators)")
    return problems


def unsupported(dtype: torch.dtype, capability: tuple[int, int], *, measured: bool) -> str:
    """What no kernel of ours computes, whatever the shape: "compute capability 7.5", "float64"; "" for nothing.

    Args:
        measured: count kernels that are not the default for any shape, but may be measured.
    """
    if capability < _LEAST_CAPABILITY:
        return "compute capability {}.{}".format(*capability)
    name = str(dtype).removeprefix("torch.")
    if dtype in _IF_MEASURED:
        return "" if measured else f"{name} without measuring"
    return "" if dtype in HALVES else name


@functools.lru_cache(maxsize=4096)  # asked in every call: a few buckets of each GEMM of a model
def default(shape: GemmShape, dtype: torch.dtype, capability: tuple[int, int], processors: int) -> GemmConfig | None:
    """A configuration for a shape that nobody has tuned; None when no kernel serves it.

    Args:
        processors: multiprocessors of the device.
    """
    if dtype in _IF_MEASURED:
        return None
    for config in _preferred(shape, processors):
        if not config_problems(config, shape, dtype, capability):
            return config
    return None


def _preferred(shape: GemmShape, processors: int) -> list[GemmConfig]:
    """Best first, by what fills the device: few tiles of large ones, or many of small ones, split where too few."""
    large = -(-shape.m // 128) * -(-shape.n // 128) * (2 if shape.gated else 1)
    tile = GemmConfig("tile", 64, max(64, shape.head_dim), 64, warps=4, stages=4)
    if 2 * large < processors:
        small = _for_few_rows(shape, processors)
        return [small, replace(small, stages=2), replace(small, block_k=32, stages=2)]
    # Six stages took up to 5 % less on an H200 for GPT-2's and LLaMA's GEMMs, and more for one of BERT's, which is
    # packaged with five. LLaMA's gated GEMM is as fast either way alone, and 1 % faster by wide tiles where calls in
    # a row bring the card to its power limit: they read less from the L2.
    pingpong = GemmConfig("pingpong", 128, 128, 64, stages=5)
    wide = GemmConfig("cooperative", 128, 256, 64, stages=5)
    first = replace(pingpong, stages=6) if not shape.gated else wide if shape.k >= _DEEP else pingpong
    return [
        first,
        pingpong,
        GemmConfig("tile", 128, 128, 64, warps=8, stages=3),
        GemmConfig("tile", 128, 128, 32, warps=8, stages=3),
        replace(tile, block_k=32, stages=3),
        replace(tile, block_k=32, stages=2),
    ]


def _for_few_rows(shape: GemmShape, processors: int) -> GemmConfig:
    """Small tiles, most of whose steps are under way at once; two such programs fit a multiprocessor.

    Measured on an H200 for BERT's GEMMs at 128 tokens, one call after the other (`python -m benchmarks gemm --chain`).
    The choices for up to 32 rows are not measured.
    """
    if shape.m <= 32:
        small = GemmConfig("tile", 16 if shape.m <= 16 else 32, 64, 64, warps=4, stages=4)
    elif shape.template == "linear_norm" or shape.gated or shape.head_dim:
        small = GemmConfig("tile", 64, 64, 128, warps=4, stages=3)
    else:
        small = GemmConfig("tile", 64, 32, 128, warps=4, stages=4)
    small = replace(small, block_n=max(small.block_n, shape.head_dim))  # heads are rotated whole
    width = small.block_n // 2 if shape.gated else small.block_n
    tiles = -(-shape.m // small.block_m) * -(-shape.n // width)
    # A norm's kernel reduces partial sums for free. Without one, the last program of a tile does, after the others.
    least = 768 if small.block_n == 32 else 256
    return replace(small, split=max(1, min(8, processors // tiles, shape.k // least)))
