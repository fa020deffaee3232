"""Random attention calls, the same for the same numbers on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stof import masks
from stof.kernels.quantization import FP8
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.selection import CallSpec, Implementation
from stof.testing.inputs import AttentionInputs, make_inputs

LENGTHS = (1, 2, 7, 16, 17, 47, 63, 64, 65, 127, 128, 129, 200, 300)
HEAD_DIMS = (1, 3, 8, 16, 31, 32, 64, 64, 72, 80, 128, 128)
MEMORY = ("bhsd", "bshd", "packed", "strided", "transposed", "offset")
# So many calls in a row share what a kernel is compiled for: compiling takes longer than all of them.
_ALIKE = 6
# Draws of a call that the implementation's capabilities allow.
_DRAWS = 500


@dataclass(frozen=True, eq=False)
class RandomCall:
    """One call of `stof.attention`.

    Attributes:
        inputs: q, k and v on the device; keys and values that no query sees are NaN where `poisoned`.
        mask: what is seen.
        keep: the same from the mask's definition, bool `[B | 1, H | 1, Sq, Skv]` on the CPU.
        options: scale, softcap, bias and sinks.
        config: blocks of a plan to make for the call; None for a call with the mask itself.
        poisoned: see `inputs`.
        text: all of this for people.
    """

    inputs: AttentionInputs
    mask: Mask
    keep: Tensor
    options: dict[str, Any]
    config: LayoutConfig | None
    poisoned: bool
    text: str


def random_call(
    implementation: Implementation, device: torch.device, seed: int, number: int, *, poison: bool = True
) -> RandomCall:
    """The call of this seed and number for an implementation, mostly one that its capabilities allow."""
    alike = random.Random(f"{seed} {implementation.name} {number // _ALIKE}")
    for _ in range(_DRAWS):
        kernel = _draw_kernel(alike, device, implementation)
        if not implementation.capabilities.refusals(kernel):
            break
    draw = random.Random(f"{seed} {implementation.name} {number}")
    most = implementation.capabilities.q_len or LENGTHS[-1]
    q_len = draw.choice([length for length in LENGTHS if length <= most])
    sizes: dict[str, Any] = {
        "batch": draw.choice([1, 1, 2, 3]),
        "heads": kernel.heads,
        "kv_heads": kernel.kv_heads,
        "q_len": q_len,
        "kv_len": draw.choice([q_len, *draw.choices(LENGTHS, k=2)]),
        "head_dim": kernel.head_dim,
        "value_dim": kernel.value_dim,
        "dtype": torch.float32 if kernel.dtype == FP8 else kernel.dtype,
        "memory": draw.choice(MEMORY),
        "seed": draw.randrange(10_000),
    }
    inputs = make_inputs(**sizes, device=device)
    mask = random_mask(draw, sizes["batch"], sizes["heads"], q_len, sizes["kv_len"], device)
    keep = mask.to_dense(q_len, sizes["kv_len"], batch=sizes["batch"], heads=sizes["heads"])
    poison = poison and draw.random() < 0.6
    if poison:
        seen = keep.expand(sizes["batch"], sizes["heads"], -1, -1).any(2)
        seen = seen.unflatten(1, (kernel.kv_heads, -1)).any(2).to(device)  # a key head serves a group of query heads
        inputs.k[~seen] = inputs.v[~seen] = torch.nan
    config = None
    if draw.random() < 0.4:
        config = LayoutConfig(draw.choice([16, 64, 128]), draw.choice([32, 64, 128]), draw.choice([None, 1, 8, 16]))
    options = _draw_options(draw, kernel, sizes, device)
    shown = {name: list(x.shape) if isinstance(x, Tensor) else x for name, x in options.items()}
    text = f"mask {mask!r}; {sizes | {'dtype': kernel.dtype}}; options {shown}; {config}; poisoned: {poison}"
    return RandomCall(inputs, mask, keep, options, config, poison, text)


def _draw_kernel(draw: random.Random, device: torch.device, implementation: Implementation) -> CallSpec:
    """What a kernel is compiled for."""
    kv_heads, group = draw.choice([(1, 1), (2, 1), (1, 3), (2, 2), (1, 4), (3, 1)])
    head_dim = draw.choice(HEAD_DIMS)
    return CallSpec(
        device=device.type,
        dtype=draw.choice(implementation.capabilities.dtypes),
        head_dim=head_dim,
        value_dim=draw.choice([head_dim, head_dim, 5, 24]),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        has_bias=draw.random() < 0.3,
        has_softcap=draw.random() < 0.25,
        has_sinks=draw.random() < 0.2,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
    )


def _draw_options(draw: random.Random, kernel: CallSpec, sizes: dict[str, Any], device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {}
    dtype = torch.bfloat16 if kernel.dtype == FP8 else kernel.dtype
    if draw.random() < 0.3:
        options["scale"] = draw.choice([0.0, 0.3, -0.7, 0.125])
    if kernel.has_softcap:
        options["softcap"] = draw.choice([0.5, 5.0, 20.0])
    if kernel.has_bias:
        every = (sizes["batch"], sizes["heads"], sizes["q_len"], sizes["kv_len"])
        shape = [size if draw.random() < 0.6 else 1 for size in every]
        options["bias"] = torch.randn(shape, generator=_generator(draw), device="cpu").to(device, dtype)
    if kernel.has_sinks:
        options["sinks"] = torch.randn(sizes["heads"], generator=_generator(draw), device="cpu").to(device, dtype)
    return options


def random_mask(draw: random.Random, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Mask:
    """A named mask, a random tensor or a function; or several of them composed, by heads, or moved."""
    offset = draw.choice([0, 0, 0, max(0, kv_len - q_len), draw.randint(0, 20)])
    rows = q_len + offset
    kind = draw.random()
    if kind < 0.4:
        mask = _leaf(draw, batch, heads, rows, kv_len, device)
    elif kind < 0.55:
        mask = masks.per_head([_leaf(draw, batch, 1, rows, kv_len, device) for _ in range(heads)])
    elif kind < 0.65:
        mask = ~_leaf(draw, batch, heads, rows, kv_len, device)
    else:
        mask, other, third = (_leaf(draw, batch, heads, rows, kv_len, device) for _ in range(3))
        mask = draw.choice([mask | other, mask & other, mask & ~other, (mask | other) & third])
    return mask.with_query_offset(offset) if offset else mask


def _leaf(draw: random.Random, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Mask:
    """One mask that is not composed; the same for all heads where `heads` is 1."""
    near, far, few = draw.randint(0, 8), draw.randint(0, kv_len), draw.randint(0, 3)
    stride, seed = draw.randint(1, 40), draw.randrange(1000)
    lengths = [draw.randint(0, kv_len) for _ in range(batch)]
    ends = sorted({0, kv_len, *(draw.randint(0, kv_len) for _ in range(3))})
    makers = [
        masks.full,
        masks.causal,
        lambda: masks.sliding_window(far, near),
        lambda: masks.sliding_window(near, near),
        lambda: masks.dilated_window(far, near, dilation=draw.choice([2, 3, 16])),
        lambda: masks.strided(near, stride, min(stride, few + 1), causal=draw.random() < 0.5),
        lambda: masks.global_tokens(few),
        lambda: masks.sink_tokens(near),
        lambda: masks.random_blocks(few + 1, block_size=draw.choice([3, 16, 64]), seed=seed),
        lambda: masks.longformer(near, [far, few]),
        lambda: masks.bigbird(near, few, blocks=2, block_size=16, seed=seed),
        lambda: masks.prefix_lm(lengths),
        lambda: masks.padding(lengths),
        lambda: _random_tensor(draw, batch, heads, q_len, kv_len, 1, device),
        lambda: _random_tensor(draw, batch, heads, q_len, kv_len, draw.choice([16, 32]), device),
        lambda: masks.from_function(lambda b, h, q, kv: (q * 7 + kv * 3 + min(heads - 1, 1) * h) % stride <= few),
    ]
    if q_len <= kv_len:
        makers += [lambda: masks.documents(cu_seqlens=ends), lambda: masks.neighborhood_2d(1, kv_len, (1, 7))]
    return draw.choice(makers)()


def _random_tensor(
    draw: random.Random, batch: int, heads: int, q_len: int, kv_len: int, block: int, device: torch.device
) -> Mask:
    """Random scores, or random blocks of scores, by batch entry and head or not."""
    mask_sizes = (draw.choice([1, batch]), draw.choice([1, heads]))
    shape = (*mask_sizes, -(-q_len // block), -(-kv_len // block))
    keep = torch.rand(shape, generator=_generator(draw), device="cpu") < draw.choice([0.02, 0.2, 0.5, 0.95])
    keep = keep.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :q_len, :kv_len]
    return masks.from_dense(keep.to(device))


def _generator(draw: random.Random) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(draw.randrange(10_000))
