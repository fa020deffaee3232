"""What an implementation can run. Dispatch, error texts, the docs' table and tests all read these."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CallSpec:
    """Everything about one attention call that can make an implementation refuse it."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    has_bias: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    permuted_rows: bool = False


@dataclass(frozen=True)
class Capabilities:
    """Limits of one implementation.

    Attributes:
        devices: torch device types; empty means any.
        dtypes: accepted dtypes of q, k and v.
        head_dims: smallest and largest head_dim.
        value_dim: whether the width of v may differ from head_dim.
        gqa: whether several query heads may share a key head.
        bias, softcap, sinks, permuted_rows: whether the option is served.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, int] = (1, 2**16)
    value_dim: bool = True
    gqa: bool = True
    bias: bool = True
    softcap: bool = True
    sinks: bool = True
    permuted_rows: bool = True

    def refusals(self, call: CallSpec) -> list[str]:
        """Every reason this implementation cannot run `call`; empty when it can."""
        low, high = self.head_dims
        checks = (
            (not self.devices or call.device in self.devices, f"runs on {', '.join(self.devices)}, not {call.device}"),
            (call.dtype in self.dtypes, f"takes {_names(self.dtypes)}, not {call.dtype}"),
            (low <= call.head_dim <= high, f"head_dim {call.head_dim} is outside {low}..{high}"),
            (self.value_dim or call.value_dim == call.head_dim, "value width must equal head_dim"),
            (self.gqa or call.heads == call.kv_heads, "no grouped key/value heads"),
            (self.bias or not call.has_bias, "no bias"),
            (self.softcap or not call.has_softcap, "no softcap"),
            (self.sinks or not call.has_sinks, "no attention sinks"),
            (self.permuted_rows or not call.permuted_rows, "no permuted rows"),
        )
        return [reason for good, reason in checks if not good]


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
