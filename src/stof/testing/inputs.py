"""Random attention inputs, also in the memory orders that break kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY_LAYOUTS = ("bhsd", "bshd", "packed", "strided", "transposed", "offset", "expanded")


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """q `[B, H, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def make_inputs(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int = 64,
    kv_len: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    memory: str = "bhsd",
    seed: int = 0,
) -> AttentionInputs:
    """Standard normal inputs, the same for the same arguments on every device.

    Args:
        batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: sizes; those left out equal `heads`, `q_len` and
            `head_dim`.
        dtype, device: of all three tensors.
        memory: one of `MEMORY_LAYOUTS`, see `spread`.
        seed: of the values.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    value_dim = head_dim if value_dim is None else value_dim
    generator = torch.Generator("cpu").manual_seed(seed)
    shapes = (
        (batch, heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, value_dim),
    )
    drawn = (torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64) for shape in shapes)
    q, k, v = (spread(x.to(device=device, dtype=dtype), memory) for x in drawn)
    return AttentionInputs(q, k, v)


def spread(x: Tensor, memory: str) -> Tensor:
    """The same values in another memory order; whatever lies between them is NaN, so stray reads show.

    `bhsd`: contiguous. `bshd`: heads inside the sequence. `packed`: a slice of a fused projection. `strided`: every
    second element of the last dimension. `transposed`: last two dimensions swapped. `offset`: not at the start of its
    memory. `expanded`: one batch entry and head repeated with stride 0 (which changes the values: all are equal).
    """
    match memory:
        case "bhsd":
            return x.contiguous()
        case "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "packed":
            batch, heads, length, width = x.shape
            buffer = x.new_full((batch, length, 3, heads, width), torch.nan)
            buffer[:, :, 1] = x.transpose(1, 2)
            return buffer[:, :, 1].transpose(1, 2)
        case "strided":
            buffer = x.new_full((*x.shape, 2), torch.nan)
            buffer[..., 0] = x
            return buffer[..., 0]
        case "transposed":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        case "offset":
            buffer = x.new_full((x.numel() + 3,), torch.nan)
            buffer[3:] = x.flatten()
            return buffer[3:].view(x.shape)
        case "expanded":
            return x[:1, :1].contiguous().expand(x.shape)
    raise ValueError(f"memory is one of {', '.join(MEMORY_LAYOUTS)}, got {memory!r}")
