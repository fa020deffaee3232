"""What an implementation can run. Dispatch, error texts, the docs' table and tests all read these."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from stof.kernels.quantization import FP8, wide_dtype

# Query rows the decode implementation takes: with the heads of a group they fill the rows of a matmul.
DECODE_ROWS = 16


@dataclass(frozen=True)
class CallSpec:
    """Everything about one attention call that can make an implementation refuse it.

    `bias_itemsize`: bytes of each of the bias's values. `tiled_bias`: TMA can copy tiles of it, or of a copy, see
    `stof.kernels.tma_bias.may_be_tma_readable`. `bias_to_copy`: bytes of a bias of which it takes a copy.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    has_bias: bool = False
    bias_itemsize: int = 2
    tiled_bias: bool = True
    bias_to_copy: int = 0
    has_softcap: bool = False
    has_sinks: bool = False
    has_dropout: bool = False
    permuted_rows: bool = False
    batch: int = 1
    q_len: int = 1
    kv_len: int = 1
    mask_heads: int = 1
    compute_capability: tuple[int, int] = (0, 0)

    def widened(self) -> CallSpec | None:
        """The call after 8-bit tensors have been widened, None for a call without any."""
        return replace(self, dtype=wide_dtype(self.device)) if self.dtype == FP8 else None


@dataclass(frozen=True)
class Capabilities:
    """Limits of one implementation.

    Attributes:
        devices: torch device types; empty means any.
        dtypes: accepted dtypes of q, k and v.
        head_dims: smallest and largest head_dim.
        value_dims: smallest and largest width of v.
        value_dim: whether the width of v may differ from head_dim.
        gqa: whether several query heads may share a key head.
        bias, softcap, sinks, dropout, permuted_rows: whether the option is served.
        tiled_bias: a bias must be one that TMA can copy tiles of, or of a copy of it.
        compute_capability: the oldest GPU that can run it.
        one_generation: it runs on GPUs of exactly that compute capability.
        head_dim_multiple: what head_dim must be a multiple of.
        q_len: most query rows, 0 for no bound.
        one_mask_per_group: query heads that share a key head must share a mask.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, int] = (1, 2**16)
    value_dims: tuple[int, int] = (1, 2**16)
    value_dim: bool = True
    gqa: bool = True
    bias: bool = True
    tiled_bias: bool = False
    softcap: bool = True
    sinks: bool = True
    dropout: bool = False
    permuted_rows: bool = True
    compute_capability: tuple[int, int] = (0, 0)
    one_generation: bool = False
    head_dim_multiple: int = 1
    q_len: int = 0
    one_mask_per_group: bool = False

    def refusals(self, call: CallSpec) -> list[str]:
        """Every reason this implementation cannot run `call`; empty when it can."""
        return list(_refusals(self, call))

    def _reasons(self, call: CallSpec) -> list[str]:
        low, high = self.head_dims
        checks = (
            (not self.devices or call.device in self.devices, f"runs on {', '.join(self.devices)}, not {call.device}"),
            (call.dtype in self.dtypes, f"takes {_names(self.dtypes)}, not {call.dtype}"),
            (low <= call.head_dim <= high, f"head_dim {call.head_dim} is outside {low}..{high}"),
            (
                call.head_dim % self.head_dim_multiple == 0,
                f"head_dim {call.head_dim} is no multiple of {self.head_dim_multiple}",
            ),
            (
                self.value_dims[0] <= call.value_dim <= self.value_dims[1],
                f"value width {call.value_dim} is outside {self.value_dims[0]}..{self.value_dims[1]}",
            ),
            (self.value_dim or call.value_dim == call.head_dim, "value width must equal head_dim"),
            (self.gqa or call.heads == call.kv_heads, "no grouped key/value heads"),
            (self.bias or not call.has_bias, "no bias"),
            (
                not self.tiled_bias or not call.has_bias or call.tiled_bias,
                "takes a bias in 16 bits with a value for every key",
            ),
            (self.softcap or not call.has_softcap, "no softcap"),
            (self.sinks or not call.has_sinks, "no attention sinks"),
            (self.dropout or not call.has_dropout, "no dropout"),
            (self.permuted_rows or not call.permuted_rows, "no permuted rows"),
            (
                call.device != "cuda" or call.compute_capability >= self.compute_capability,
                f"needs compute capability {_dotted(self.compute_capability)}, not {_dotted(call.compute_capability)}",
            ),
            (
                call.device != "cuda" or not self.one_generation or call.compute_capability <= self.compute_capability,
                f"runs on compute capability {_dotted(self.compute_capability)} alone, not "
                f"{_dotted(call.compute_capability)}",
            ),
            (not self.q_len or call.q_len <= self.q_len, f"takes {self.q_len} query rows at most, not {call.q_len}"),
            (
                not self.one_mask_per_group or call.mask_heads == 1 or call.heads == call.kv_heads,
                "query heads that share a key head have masks of their own",
            ),
        )
        return [reason for good, reason in checks if not good]


@functools.lru_cache(maxsize=1024)
def _refusals(capabilities: Capabilities, call: CallSpec) -> tuple[str, ...]:
    return tuple(capabilities._reasons(call))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
