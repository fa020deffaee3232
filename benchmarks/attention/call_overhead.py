"""`python -m benchmarks launch`: what an eager call costs the host, on problems too small to keep the device busy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import stof
from benchmarks.timing import host_us
from stof import masks
from stof.masks.functions import FunctionMask


@dataclass(frozen=True)
class Launch:
    """Host time in microseconds of one eager call."""

    name: str
    us: float


def launch_times(device: torch.device, dtype: torch.dtype, calls: int) -> list[Launch]:
    """Median host time of `stof.attention` with a ready plan or a mask, and of PyTorch's attention on the same inputs.

    The problem is one sequence of 128 tokens (16 on the CPU, where the computation itself is in the time).
    """
    length, heads, head_dim = (16, 1, 16) if device.type == "cpu" else (128, 4, 64)
    q, k, v = (torch.randn(1, heads, length, head_dim, dtype=dtype, device=device) for _ in range(3))
    window = masks.sliding_window(length // 4)
    keep = window.to_dense(length, device=device)
    plan, causal = (stof.plan(mask, length, device=device) for mask in (window, masks.causal()))
    dense = masks.from_dense(keep)
    function = masks.from_function(lambda b, h, q, kv: (q >= kv) & (q - kv < length // 4))
    assert isinstance(function, FunctionMask)
    block_mask = create_block_mask(function.fn, None, None, length, length, device=device.type)
    flex = torch.compile(flex_attention, dynamic=False)
    contenders = {
        "stof.attention, plan of a sliding window": lambda: stof.attention(q, k, v, plan),
        "stof.attention, plan of causal": lambda: stof.attention(q, k, v, causal),
        "stof.attention, sliding window": lambda: stof.attention(q, k, v, window),
        "stof.attention, from_dense mask": lambda: stof.attention(q, k, v, dense),
        "stof.attention, from_function mask": lambda: stof.attention(q, k, v, function),
        "stof.attention, mask function": lambda: stof.attention(q, k, v, function.fn),
        "FlexAttention compiled, BlockMask": lambda: flex(q, k, v, block_mask=block_mask),
        "scaled_dot_product_attention, dense mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
        "scaled_dot_product_attention, is_causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and dtype.itemsize == 2:
        contenders["stof.attention, causal, Hopper kernel"] = lambda: stof.attention(
            q, k, v, causal, implementation="hopper"
        )
    q_leaf, k_leaf, v_leaf = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    d_out = torch.ones_like(q)

    def ours() -> Tensor:
        return stof.attention(q_leaf, k_leaf, v_leaf, causal)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q_leaf, k_leaf, v_leaf, is_causal=True)

    trained = {
        f"{name}, causal, {passes}": call
        for name, attend in (("stof.attention", ours), ("scaled_dot_product_attention", theirs))
        for passes, call in (
            ("forward with gradients", attend),
            ("backward", partial(torch.autograd.grad, attend(), leaves, d_out, retain_graph=True)),
        )
    }
    with torch.no_grad():
        times = host_us(contenders, device, calls=calls)
    return [Launch(name, us) for name, us in (times | host_us(trained, device, calls=calls)).items()]
