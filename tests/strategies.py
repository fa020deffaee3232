"""Hypothesis strategies: mask expressions, dense masks, layouts' options and attention calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.masks import Mask
from stof.testing import MEMORY_LAYOUTS

small = st.integers(0, 40)


@st.composite
def named_masks(draw: st.DrawFn, kv_len: int = 32, batch: int = 1) -> Mask:
    """One named mask that fits `q_len <= kv_len` and this batch."""
    lengths = st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch)
    kind = draw(st.sampled_from(sorted(masks.NAMED_MASKS)))
    match kind:
        case "full" | "causal":
            return masks.NAMED_MASKS[kind]()
        case "sliding_window":
            return masks.sliding_window(draw(small), draw(small))
        case "dilated_window":
            return masks.dilated_window(draw(small), draw(small), dilation=draw(st.integers(1, 9)))
        case "strided":
            stride = draw(st.integers(1, 20))
            return masks.strided(draw(small), stride, draw(st.integers(0, stride)), causal=draw(st.booleans()))
        case "global_tokens":
            return masks.global_tokens(draw(small | st.lists(small, min_size=1, max_size=4)))
        case "sink_tokens":
            return masks.sink_tokens(draw(small))
        case "random_blocks":
            size = draw(st.sampled_from([1, 3, 16, 64]))
            return masks.random_blocks(draw(st.integers(1, 4)), block_size=size, seed=draw(st.integers(0, 2**31 - 1)))
        case "longformer":
            return masks.longformer(draw(small), draw(small))
        case "bigbird":
            return masks.bigbird(draw(small), draw(small), blocks=draw(st.integers(1, 3)), block_size=8)
        case "prefix_lm":
            return masks.prefix_lm(draw(lengths))
        case "padding":
            return masks.padding(draw(lengths))
        case "documents":
            return draw(document_masks(kv_len, batch))
        case "neighborhood_2d":
            sizes = [n for n in range(1, kv_len + 1) if kv_len % n == 0]
            height = draw(st.sampled_from(sizes))
            kernel = draw(st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 5])))
            return masks.neighborhood_2d(height, kv_len // height, kernel)
        case "per_head":
            return masks.per_head([draw(named_masks(kv_len, batch))])
    raise AssertionError(f"no strategy for {kind}")


@st.composite
def document_masks(draw: st.DrawFn, kv_len: int, batch: int = 1) -> Mask:
    if draw(st.booleans()):
        ends = [
            sorted([0, *draw(st.lists(st.integers(0, kv_len), max_size=4)), kv_len])  # repeated ends: empty documents
            for _ in range(batch)
        ]
        return masks.documents(cu_seqlens=ends)
    ids = [draw(st.lists(st.integers(-1, 3), min_size=kv_len, max_size=kv_len)) for _ in range(batch)]
    return masks.documents(ids)


def mask_trees(kv_len: int = 32, batch: int = 1, leaves: int = 5) -> st.SearchStrategy[Mask]:
    """Expressions of named masks with `& | ~`."""
    return st.recursive(
        named_masks(kv_len, batch),
        lambda inner: (
            st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1])
            | st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1])
            | inner.map(lambda mask: ~mask)
        ),
        max_leaves=leaves,
    )


@st.composite
def dense_masks(draw: st.DrawFn, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> Tensor:
    """Bool `[batch, heads, q_len, kv_len]` of one of several textures."""
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, q_len, kv_len)
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    texture = draw(
        st.sampled_from(
            [
                "random",
                "band",
                "blocks",
                "shuffled",
                "checkerboard",
                "crossing",
                "empty",
                "full",
                "single",
                "rows",
                "cols",
            ]
        )
    )
    noise = torch.rand(shape, generator=generator)
    match texture:
        case "random":
            return noise < draw(st.sampled_from([0.003, 0.05, 0.5, 0.97]))
        case "band":
            width = draw(st.integers(1, 40))
            return ((rows - columns).abs() < width).expand(shape).clone()
        case "blocks":
            size = draw(st.sampled_from([8, 16, 64]))
            coarse = torch.rand(batch, heads, -(-q_len // size), -(-kv_len // size), generator=generator) < 0.3
            return coarse.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :q_len, :kv_len].clone()
        case "shuffled":
            band = (rows - columns).abs() < 9
            return band[torch.randperm(q_len, generator=generator)].expand(shape).clone()
        case "checkerboard":
            return ((rows + columns) % 2 == 0).expand(shape).clone()
        case "crossing":
            return (rows + columns == kv_len - 1).expand(shape).clone()
        case "empty":
            return torch.zeros(shape, dtype=torch.bool)
        case "full":
            return torch.ones(shape, dtype=torch.bool)
        case "single":
            keep = torch.zeros(shape, dtype=torch.bool)
            keep.view(-1)[int(torch.randint(keep.numel(), (1,), generator=generator))] = True
            return keep
        case "rows":
            return (noise[..., :1] < 0.4).expand(shape).clone()
    return (noise[..., :1, :] < 0.4).expand(shape).clone()


@st.composite
def line_masks(draw: st.DrawFn, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> Tensor:
    """Bool `[batch, heads, q_len, kv_len]`: a band, and vertical lines from some row on, each mask's own."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    stride, width = draw(st.sampled_from([3, 20, 64, 100, 128])), draw(st.sampled_from([1, 2, 8, 30]))
    own = (batch, heads, 1, kv_len)
    lines = {
        "random": torch.rand(own, generator=generator) < draw(st.sampled_from([0.01, 0.1])),
        "spaced": (columns % stride < width).expand(own),
        "shifted": (columns + torch.randint(stride, (batch, heads, 1, 1), generator=generator)) % stride < width,
    }[draw(st.sampled_from(["random", "spaced", "shifted"]))]
    first_row = torch.randint(draw(st.sampled_from([1, q_len + 1])), own, generator=generator)
    causal = draw(st.booleans())
    seen = lines & (rows >= first_row) & ((columns <= rows + kv_len - q_len) | (not causal))
    return seen | ((rows - columns).abs() < draw(st.sampled_from([0, 1, 40])))


configs = st.builds(
    LayoutConfig,
    block_m=st.sampled_from([16, 32, 64, 128, 192]),
    block_n=st.sampled_from([16, 32, 64, 128]),
    slab=st.sampled_from([None, 1, 8, 16]),
) | st.builds(
    LayoutConfig,
    block_m=st.sampled_from([16, 64, 192]),
    block_n=st.sampled_from([16, 64, 128]),
    slab=st.just(1),
    compact_columns=st.just(True),
)


@st.composite
def row_orders(draw: st.DrawFn, q_len: int) -> Tensor | None:
    if draw(st.booleans()):
        return None
    return torch.randperm(q_len, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))


@dataclass(frozen=True)
class Call:
    """One attention call, small enough to read in a failure report.

    Attributes:
        sizes: keyword arguments of `make_inputs`.
        bias_shape, bias_dtype, bias_drops: the bias, and whether it holds -inf; no bias when the shape is None.
        sinks: None, "finite", or "some" when one of them is -inf.
        softcap, scale: as for `stof.attention`.
    """

    sizes: dict[str, Any]
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: torch.dtype = torch.float32
    bias_drops: bool = False
    sinks: str | None = None
    softcap: float | None = None
    scale: float | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `stof.attention`, the same each time."""
        generator = torch.Generator().manual_seed(self.sizes["seed"] + 1)
        made: dict[str, Any] = {"softcap": self.softcap, "scale": self.scale, "bias": None, "sinks": None}
        if self.bias_shape is not None:
            bias = torch.randn(self.bias_shape, generator=generator, dtype=torch.float64).to(self.bias_dtype)
            if self.bias_drops:
                bias = bias.masked_fill(torch.rand(self.bias_shape, generator=generator) < 0.2, -torch.inf)
            made["bias"] = bias
        if self.sinks is not None:
            made["sinks"] = torch.randn(self.sizes["heads"], generator=generator) * 2
            if self.sinks == "some":
                made["sinks"][0] = -torch.inf
        return made


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Call:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    head_dim = draw(st.sampled_from([1, 7, 16, 32]))
    sizes: dict[str, Any] = {
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "q_len": draw(st.sampled_from([1, 2, 15, 63, 65, 130])),
        "kv_len": draw(st.sampled_from([1, 3, 17, 63, 64, 65, 127, 150])),
        "head_dim": head_dim,
        "value_dim": draw(st.sampled_from([head_dim, head_dim, 5])),
        "dtype": dtype,
        "memory": draw(st.sampled_from(MEMORY_LAYOUTS)),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }
    every = (sizes["batch"], sizes["heads"], sizes["q_len"], sizes["kv_len"])
    shape: tuple[int, ...] | None = None
    if draw(st.booleans()):
        shape = tuple(size if draw(st.booleans()) else 1 for size in every)
        while shape and shape[0] == 1 and draw(st.booleans()):
            shape = shape[1:]
    return Call(
        sizes,
        bias_shape=shape,
        bias_dtype=draw(st.sampled_from([dtype, torch.float32])),
        bias_drops=draw(st.booleans()),
        sinks=draw(st.sampled_from([None, None, "finite", "some"])),
        softcap=draw(st.sampled_from([None, None, 0.5, 20.0])),
        scale=draw(st.sampled_from([None, None, 0.0, 0.3, -0.7])),
    )
