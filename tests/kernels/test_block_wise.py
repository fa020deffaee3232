"""The block-wise Triton kernel against float64: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import Options, attend_once
from stof.kernels.triton import arguments
from stof.kernels.triton import block_wise as triton_attention
from stof.kernels.triton.work_list import prepare
from stof.layout import Layout, build_layout
from stof.masks.tensors import as_mask
from stof.testing import MEMORY_LAYOUTS, assert_attention, make_inputs, spread
from tests.examples import examples
from tests.strategies import dense_masks, row_orders

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 20, 64, 80, 96, 128, 192, 256)
DEFAULT = KernelConfig()
KV_LENGTHS = (1, 3, 17, 63, 64, 65, 127, 150, 300) + ((1000, 4099) if ON_GPU else ())

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # NumPy warns of lanes whose result is dropped, and of a tanh that saturates; wrong results fail anyway.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


def layout_of(
    mask: Any, q_len: int, kv_len: int, config: LayoutConfig, batch: int = 1, heads: int = 1, **options: Any
) -> Layout:
    mask = as_mask(mask.to(DEVICE) if isinstance(mask, Tensor) else mask)
    return build_layout(mask, q_len, kv_len, config, batch=batch, heads=heads, device=DEVICE, **options)


def run(
    inputs: tuple[Tensor, Tensor, Tensor], layout: Layout, config: KernelConfig, **options: Any
) -> tuple[Tensor, Tensor]:
    """The kernel on prepared work; options as for `stof.attention`, on any device."""
    q, k, v = (x.to(DEVICE) for x in inputs)
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items() if x is not None}
    called = Options(**{"scale": q.shape[-1] ** -0.5, **given})
    return attend_once(triton_attention.bind, q, k, v, prepare(layout, config), called)


def check(
    inputs: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    config: KernelConfig = DEFAULT,
    keep: Tensor | None = None,
    factor: float = 2.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the kernel and compare with float64 under the layout's own mask, or under `keep`."""
    out, lse = run(inputs, layout, config, **options)
    keep = layout.to_dense() if keep is None else keep.to(DEVICE)
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    q, k, v = (x.to(DEVICE) for x in inputs)
    assert_attention(out, lse, q, k, v, keep, factor=factor, **moved)
    return out, lse


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@st.composite
def geometries(draw: st.DrawFn) -> LayoutConfig:
    return LayoutConfig(
        block_m=draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64])),
        block_n=draw(st.sampled_from([16, 32, 64, 128])),
        slab=draw(st.sampled_from([None, 1, 8, 16])),
    )


@st.composite
def kernel_configs(draw: st.DrawFn) -> KernelConfig:
    return KernelConfig(
        num_warps=draw(st.sampled_from([2, 4, 8] if ON_GPU else [4])),
        num_stages=draw(st.integers(2, 3)),
        pack=draw(st.booleans()),
        split_tiles=draw(st.sampled_from([0, 1, 2, 3])),
        side=draw(st.sampled_from([0, 1, 2, 3, 100])),
    )


@st.composite
def options(draw: st.DrawFn, every: tuple[int, ...], dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """Bias in every broadcast shape, with and without -inf; softcap; sinks; positive, zero and negative scales."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    bias = None
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in every]
        bias = torch.randn(shape, dtype=draw(st.sampled_from([dtype, torch.float32])), generator=generator)
        if draw(st.booleans()):
            bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf)
    sinks = draw(st.sampled_from([None, None, 0.0, -torch.inf]))
    if sinks is not None:
        sinks = torch.cat([torch.full((1,), sinks), torch.randn(every[1] - 1, generator=generator)])
    scale = draw(st.sampled_from([None, None, 0.0, 1.5, -2.0]))
    return {
        "bias": bias,
        "sinks": sinks,
        "softcap": draw(st.sampled_from([None, None, 0.5, 20.0])),
        "scale": None if scale is None else scale * head_dim**-0.5,
    }


@given(data=st.data(), geometry=geometries(), config=kernel_configs(), dtype=st.sampled_from(DTYPES))
@examples(400 if ON_GPU else 60)
def test_against_float64(data: st.DataObject, geometry: LayoutConfig, config: KernelConfig, dtype: torch.dtype) -> None:
    rows = geometry.block_m
    q_len = data.draw(st.sampled_from([1, rows, rows + 1, max(1, 2 * rows - 1)]))
    if ON_GPU:
        q_len = data.draw(st.sampled_from([q_len, 1021]))
    kv_len = data.draw(st.sampled_from(KV_LENGTHS))
    batch, (kv_heads, group) = (
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])),
    )
    heads, head_dim = kv_heads * group, data.draw(st.sampled_from(HEAD_DIMS))
    inputs = make_inputs(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=data.draw(st.sampled_from([head_dim, head_dim, 24, 64])),
        dtype=dtype,
        memory=data.draw(st.sampled_from(MEMORY_LAYOUTS)),
        seed=data.draw(st.integers(0, 99)),
    )
    # Heads packed into the rows of a tile share a mask.
    mask_heads = 1 if config.pack and group > 1 else data.draw(st.sampled_from([1, heads]))
    keep = data.draw(dense_masks(q_len, kv_len, data.draw(st.sampled_from([1, batch])), mask_heads))
    layout = layout_of(keep, q_len, kv_len, geometry, batch, heads, row_order=data.draw(row_orders(q_len)))
    # The budget follows the plain result's error, which is almost nothing by luck when there are few float32 scores:
    # smaller scores keep our own roundings below its floor.
    q = inputs.q / 4 if dtype == torch.float32 else inputs.q
    chosen = data.draw(options((batch, heads, q_len, kv_len), dtype, head_dim))
    check((q, inputs.k, inputs.v), layout, config, keep, factor=3.0 if dtype == torch.float32 else 2.0, **chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(heads=2, kv_heads=1, q_len=20, kv_len=70, head_dim=head_dim, value_dim=40, dtype=dtype)
    check(inputs.qkv, layout_of(masks.causal() | masks.sink_tokens(3), 20, 70, LayoutConfig(16, 32)))


@pytest.mark.parametrize("slab", [None, 1, 8, 16])
@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
def test_every_bit_of_a_tile(block_n: int, slab: int | None) -> None:
    """One kept score per row, its value returned exactly: a bit decoded for its neighbour cannot hide in a sum."""
    length = 2 * block_n + 5
    inputs = make_inputs(heads=1, q_len=length, head_dim=16, dtype=torch.float16)
    columns = torch.randperm(length)
    keep = torch.zeros(1, 1, length, length, dtype=torch.bool)
    keep[0, 0, torch.arange(length), columns] = True
    layout = layout_of(keep, length, length, LayoutConfig(64, block_n, slab))
    out, _ = check(inputs.qkv, layout)
    assert torch.equal(out.cpu(), inputs.v[:, :, columns])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slab", [None, 1])
def test_several_patterns(slab: int | None) -> None:
    """Masks per batch entry and head with very different numbers of items, tiles and kinds of tiles."""
    keep = torch.zeros(2, 4, 40, 200, dtype=torch.bool)
    keep[0, 0] = True
    keep[0, 1] = masks.sliding_window(90).to_dense(40, 200)
    keep[0, 2, 5] = True
    keep[1, 0, :, ::3] = True
    keep[1, 1, 20:, 64:] = True
    keep[1, 2] = torch.rand(40, 200) < 0.5
    keep[1, 3] = keep[0, 1]
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=40, kv_len=200, head_dim=16)
    layout = layout_of(keep, 40, 200, LayoutConfig(16, 32, slab), 2, 4)
    assert layout.patterns == 7
    for split, side in ((0, 0), (0, 3), (2, 0), (2, 3)):
        check(inputs.qkv, layout, KernelConfig(split_tiles=split, side=side), keep)
    one_batch_entry = layout_of(keep[:1], 40, 200, LayoutConfig(16, 32, slab), 2, 4)
    check(inputs.qkv, one_batch_entry, KernelConfig(split_tiles=2), keep[:1])
    one_head = layout_of(keep[:, 1:2], 40, 200, LayoutConfig(8, 32, slab), 2, 4)
    for pack in (False, True):
        check(inputs.qkv, one_head, KernelConfig(split_tiles=1, pack=pack), keep[:, 1:2])
    with pytest.raises(UnfitLayoutError, match="packed heads share one mask"):
        check(inputs.qkv, layout, KernelConfig(pack=True), keep)


@pytest.mark.parametrize("config", [KernelConfig(), KernelConfig(split_tiles=1)], ids=str)
def test_rows_that_keep_nothing(config: KernelConfig) -> None:
    inputs = make_inputs(heads=2, q_len=20, kv_len=70, head_dim=16)
    sinks = torch.tensor([3.0, -torch.inf])
    nothing = layout_of(~masks.full(), 20, 70, LayoutConfig(16, 16))
    out, lse = check(inputs.qkv, nothing, config, sinks=sinks)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())
    keep = torch.rand(1, 1, 20, 70) < 0.5
    keep[:, :, 3:18] = False  # the whole second row block but two rows, and parts of both
    for slab in (None, 1):
        check(inputs.qkv, layout_of(keep, 20, 70, LayoutConfig(16, 16, slab)), config, keep, sinks=sinks)


@pytest.mark.parametrize("split_tiles", [0, 1])
def test_a_bias_that_drops_whole_tiles(split_tiles: int) -> None:
    """A bias of -inf is a mask too: a row may see nothing in its first full tiles, or nothing at all."""
    inputs = make_inputs(heads=1, q_len=16, kv_len=64, head_dim=16)
    bias = torch.randn(1, 1, 16, 64)
    bias[:, :, :8, :32] = -torch.inf
    bias[:, :, 8:12, 16:48] = -torch.inf
    bias[:, :, 15] = -torch.inf
    for mask in (masks.full(), masks.causal() | masks.sink_tokens(16)):
        layout = layout_of(mask, 16, 64, LayoutConfig(16, 16))
        check(inputs.qkv, layout, KernelConfig(split_tiles=split_tiles), bias=bias, sinks=torch.randn(1))


def among_nan(*shape: int, before: int = 0, after: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """A bias whose rows lie in memory that is NaN before and behind them."""
    *outer, keys = shape
    memory = torch.full((*outer, before + keys + after), torch.nan, dtype=dtype, device=DEVICE)
    return memory[..., before : before + keys].copy_(torch.randn(shape))


def some_layout(slab: int | None, kv_len: int, row_order: Tensor | None = None) -> Layout:
    """Partial and full tiles for 40 rows, some columns of which no row sees: at the ends of rows, and between slabs."""
    rows, columns = torch.arange(40)[:, None], torch.arange(kv_len)
    keep = (columns > rows) & (columns <= rows + kv_len - 45) & (columns // 8 % 5 != 2)
    if row_order is not None:
        keep &= (columns - rows) % 2 == 0
    return layout_of(keep[None, None], 40, kv_len, LayoutConfig(16, 32, slab), 2, 2, row_order=row_order)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kv_len", "before", "after"),
    [(96, 0, 0), (96, 8, 24), (96, 1, 7), (100, 0, 4), (97, 0, 7), (97, 0, 0), (98, 2, 0)],
)
@pytest.mark.parametrize("slab", [None, 1, 8, 16, "evenly spaced"])
def test_biases_among_nan(slab: int | str | None, kv_len: int, before: int, after: int) -> None:
    """Read in vectors or one by one: what lies around the rows never shows."""
    inputs = make_inputs(batch=2, heads=2, q_len=40, kv_len=kv_len, head_dim=16, dtype=torch.float16)
    order = torch.arange(40).view(-1, 2).T.flatten() if slab == "evenly spaced" else None
    layout = some_layout(1 if isinstance(slab, str) else slab, kv_len, order)
    for shape, dtype in (((1, 2, 40, kv_len), torch.float16), ((2, 1, 1, kv_len), torch.float32)):
        bias = among_nan(*shape, before=before, after=after, dtype=dtype)
        check(inputs.qkv, layout, KernelConfig(split_tiles=2), bias=bias)


@pytest.mark.parametrize("slab", [None, 8])
def test_biases_of_any_strides(slab: int | None) -> None:
    inputs = make_inputs(batch=2, heads=2, q_len=40, kv_len=96, head_dim=16)
    layout = some_layout(slab, 96)
    rows = among_nan(1, 1, 40, 96, after=8)
    for bias in (
        rows.expand(2, 2, 40, 96),
        among_nan(2, 1, 1, 96).expand(2, 2, 40, 96),
        among_nan(1, 2, 40, 1, after=7),
        among_nan(1, 2, 40, 1, after=7).expand(1, 2, 40, 96),
        among_nan(2, 2, 40, 192)[..., ::2],
        among_nan(1, 2, 96, 40).transpose(2, 3),
        among_nan(2, 40, 96, 2).movedim(3, 1),
        among_nan(2, 40, 2, 96).transpose(1, 2),
    ):
        check(inputs.qkv, layout, bias=bias)


def bias_vectors(bias: Tensor, kv_len: int, slab: int | None = None) -> tuple[bool, bool]:
    """Whether the kernel reads the bias of full tiles, and of partial ones, 16 bytes at once."""
    made: list[Any] = []
    inputs = make_inputs(batch=2, heads=2, q_len=40, kv_len=kv_len, head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "Launch", lambda *given, **options: made.append(given))
        q, k, v = (x.to(DEVICE) for x in inputs.qkv)
        triton_attention.bind(q, k, v, prepare(some_layout(slab, kv_len), DEFAULT), Options(1.0, bias=bias))
    _kernel, _grid, _tensors, _numbers, (config, _use_pdl) = made[0]
    return config.full_bias_vectors, config.partial_bias_vectors


def test_where_biases_are_read_in_vectors() -> None:
    assert bias_vectors(among_nan(1, 2, 40, 96), 96) == (True, True)
    assert bias_vectors(among_nan(1, 2, 40, 104), 104) == (True, True)
    assert bias_vectors(among_nan(1, 2, 40, 96), 96, slab=8) == (True, True)
    assert bias_vectors(among_nan(1, 2, 40, 96), 96, slab=1) == (False, False)
    assert bias_vectors(among_nan(2, 1, 1, 97), 97) == (False, False), "batch entries at multiples of 97"
    assert bias_vectors(among_nan(2, 1, 1, 97, after=7), 97) == (True, False), "the last vector holds one key"
    assert bias_vectors(among_nan(1, 2, 40, 97), 97) == (False, False)
    assert bias_vectors(among_nan(1, 2, 40, 100), 100) == (False, False)
    assert bias_vectors(among_nan(1, 2, 40, 1).expand(1, 2, 40, 96), 96) == (False, False)
    assert bias_vectors(among_nan(1, 2, 96, 40).transpose(2, 3), 96) == (False, False)


@pytest.mark.parametrize("first", [4, 8])
def test_tiles_that_begin_anywhere(first: int) -> None:
    keep = masks.full().to_dense(16, 64) & (torch.arange(64) < 48)
    keep[..., 3, 17] = False
    layout = layout_of(keep, 16, 64, LayoutConfig(16, 16))
    layout = replace(layout, tile_base=layout.tile_base + first)
    check(make_inputs(heads=1, q_len=16, kv_len=64, head_dim=16).qkv, layout, bias=among_nan(1, 1, 16, 64))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("slab", [None, 1, 16])
@pytest.mark.parametrize("modified", [False, True])
def test_keys_nobody_keeps_are_not_read(slab: int | None, bad: float, modified: bool) -> None:
    inputs = make_inputs(heads=2, kv_heads=1, q_len=30, kv_len=100, head_dim=20, dtype=torch.bfloat16)
    keep = torch.rand(1, 1, 30, 100) < 0.2
    keep[..., 32:64] = True  # full tiles between the others
    keep[..., ::3] = False
    keep[:, :, 3] = False
    unseen = ~keep.any((0, 1, 2))
    layout = layout_of(keep, 30, 100, LayoutConfig(16, 16, slab))
    given = {"bias": torch.randn(1, 1, 1, 100)} if modified else {}
    k, v = (x.masked_fill(unseen[:, None], bad) for x in (inputs.k, inputs.v))
    if modified:
        spoilt = {"bias": given["bias"].masked_fill(unseen, bad)}
    config = KernelConfig(split_tiles=4)
    clean = check(inputs.qkv, layout, config, keep, **given)
    assert equal(clean, run((inputs.q, k, v), layout, config, **(spoilt if modified else {})))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_stay_in_the_row_blocks_that_see_them(bad: float) -> None:
    inputs = make_inputs(heads=1, q_len=48, kv_len=64, head_dim=16)
    keep = torch.rand(1, 1, 48, 64) < 0.5
    keep[:, :, 16:, 5] = False
    keep[:, :, 0, 5] = True
    layout = layout_of(keep, 48, 64, LayoutConfig(16, 16))
    clean = run(inputs.qkv, layout, DEFAULT)
    column = torch.arange(64)[:, None] == 5
    for k, v in ((inputs.k, inputs.v.masked_fill(column, bad)), (inputs.k.masked_fill(column, bad), inputs.v)):
        spoilt = run((inputs.q, k, v), layout, DEFAULT)
        assert not bool(spoilt[0][:, :, 0].isfinite().all()), "the row that sees the key must show it"
        assert torch.equal(clean[0][:, :, 16:], spoilt[0][:, :, 16:])
        assert torch.equal(clean[1][:, :, 16:], spoilt[1][:, :, 16:])


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_memory_orders(memory: str) -> None:
    inputs = make_inputs(batch=2, heads=2, q_len=17, kv_len=33, head_dim=16, memory=memory)
    layout = layout_of(masks.causal(), 17, 33, LayoutConfig(16, 16))
    out, _ = check(inputs.qkv, layout)
    assert out.stride() == torch.empty_like(inputs.q).stride()
    bias = spread(torch.randn(2, 2, 17, 33), memory)
    check(inputs.qkv, layout, KernelConfig(split_tiles=1), bias=bias)


@pytest.mark.parametrize(("q_len", "group"), [(1, 1), (1, 4), (2, 3), (5, 8), (16, 2)])
def test_decoding(q_len: int, group: int) -> None:
    """Few query rows against a long cache, heads packed, padded keys, chunks merged."""
    lengths = torch.tensor([700, 1])
    kv_len = 700
    mask = masks.padding(lengths.tolist()) & (masks.sliding_window(300) | masks.sink_tokens(4))
    inputs = make_inputs(batch=2, heads=2 * group, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=32)
    rows = 1 << (q_len - 1).bit_length()
    layout = layout_of(mask, q_len, kv_len, LayoutConfig(rows, 64, 1), 2, 2 * group)
    for pack in (False, True):
        check(inputs.qkv, layout, KernelConfig(pack=pack, split_tiles=3), sinks=torch.randn(2 * group))


def test_what_is_computed_does_not_depend_on_how() -> None:
    """Order of items, side and packing move work about; equal sums in equal order give equal bits."""
    inputs = make_inputs(heads=4, kv_heads=2, q_len=40, kv_len=120, head_dim=16, dtype=torch.float16)
    layout = layout_of(masks.longformer(9, 5), 40, 120, LayoutConfig(16, 16, 1))
    first = check(inputs.qkv, layout, KernelConfig(split_tiles=2))
    for config in (KernelConfig(split_tiles=2, side=3), KernelConfig(split_tiles=2, num_stages=2)):
        assert equal(first, run(inputs.qkv, layout, config))


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_softcap_over_all_sizes(softcap: float, size: float) -> None:
    inputs = make_inputs(heads=1, q_len=16, kv_len=32, head_dim=16)
    layout = layout_of(masks.causal(), 16, 32, LayoutConfig(16, 16))
    # The base-2 exponent rounds scores once more, which shows when they are large.
    check((inputs.q * size, inputs.k, inputs.v), layout, factor=3.0, softcap=softcap)


@pytest.mark.parametrize("split_tiles", [0, 1])
def test_scores_far_apart(split_tiles: int) -> None:
    """Scores of 10^5: exponentials must take differences, and no chunk may overflow when it meets a larger score."""
    inputs = make_inputs(heads=1, q_len=16, kv_len=40, head_dim=16)
    layout = layout_of(masks.full() & ~masks.sliding_window(0, 0), 16, 40, LayoutConfig(16, 16))
    for scale in (1e4, -1e4):
        check(inputs.qkv, layout, KernelConfig(split_tiles=split_tiles), scale=scale)


def far_apart(shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype = torch.float16) -> Tensor:
    """`[1, 1, *shape]` of which rows or columns are far apart; on the CPU untouched pages cost nothing."""
    buffer = torch.empty(0, dtype=dtype, device=DEVICE)
    most = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    buffer.untyped_storage().resize_(most * dtype.itemsize)
    return buffer.as_strided((1, 1, *shape), (0, 0, *strides))


def test_query_offsets_past_31_bits() -> None:
    inputs = make_inputs(heads=1, q_len=3, head_dim=16, dtype=torch.float16)
    q = far_apart((3, 16), (2**30 + 64, 1)).copy_(inputs.q)
    check((q, inputs.k, inputs.v), layout_of(masks.causal(), 3, 3, LayoutConfig(16, 16)))


@pytest.mark.parametrize("slab", [None, 1])
def test_key_offsets_past_31_bits(slab: int | None) -> None:
    """A partial tile and a full one on either side of 2^31; the last columns are partial again."""
    inputs = make_inputs(heads=1, q_len=2, kv_len=37, head_dim=16, dtype=torch.float16)
    both = far_apart((37, 32), (2**27 + 64, 1))
    k, v = both[..., :16].copy_(inputs.k), both[..., 16:].copy_(inputs.v)
    keep = torch.ones(1, 1, 2, 37, dtype=torch.bool)
    keep[:, :, 0, 3:36:30] = False
    for config in (KernelConfig(), KernelConfig(split_tiles=1)):
        check((inputs.q, k, v), layout_of(keep, 2, 37, LayoutConfig(2, 16, slab)), config, keep)


# Rows that are no multiples of 16 bytes, and tensors that begin at none.
@pytest.mark.sampled(5)
@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 5), (31, 5), (5, 31), (80, 5), (128, 24), (72, 40), (64, 16)])
def test_odd_head_dims(head_dim: int, value_dim: int, memory: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        inputs = make_inputs(
            batch=2, heads=2, kv_heads=1, q_len=70, head_dim=head_dim, value_dim=value_dim, dtype=dtype, memory=memory
        )
        layout = layout_of(masks.causal(), 70, 70, LayoutConfig(64, 64))
        out, _ = check(inputs.qkv, layout)
        assert out.shape == (2, 2, 70, value_dim)


@pytest.mark.parametrize("strides", [(1, 2**30 + 64), (2**30 + 64, 1)], ids=["columns", "rows"])
def test_bias_offsets_past_31_bits(strides: tuple[int, int]) -> None:
    inputs = make_inputs(heads=1, q_len=3, head_dim=16, dtype=torch.float16)
    bias = far_apart((3, 3), strides).copy_(torch.randn(1, 1, 3, 3))
    check(inputs.qkv, layout_of(masks.causal(), 3, 3, LayoutConfig(16, 16)), bias=bias)


def test_wide_offsets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64-bit path on everyday tensors: every tile kind and option."""
    inputs = make_inputs(heads=2, kv_heads=1, q_len=40, kv_len=90, head_dim=20, memory="bshd")
    given = {"bias": torch.randn(1, 2, 40, 90), "sinks": torch.randn(2)}
    for slab, order in ((None, None), (1, torch.randperm(40))):
        mask = masks.longformer(40, 5)
        layout = layout_of(mask, 40, 90, LayoutConfig(16, 16, slab), row_order=order)
        for chosen, config in (({}, KernelConfig()), (given, KernelConfig(split_tiles=3))):
            narrow = check(inputs.qkv, layout, config, **chosen)
            with monkeypatch.context() as patch:
                patch.setattr(arguments, "needs_int64_offsets", lambda *tensors: True)
                assert equal(narrow, run(inputs.qkv, layout, config, **chosen))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 72])
@pytest.mark.parametrize(
    "mask", [masks.dilated_window(300, dilation=16), masks.bigbird(40, 20), masks.causal()], ids=str
)
def test_large(mask: Any, head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(batch=2, heads=6, kv_heads=2, q_len=1003, head_dim=head_dim, dtype=dtype, memory="bshd")
    given = {"sinks": torch.randn(6), "softcap": 30.0}
    small = dtype == torch.float32 or head_dim > 128
    for slab in (None, 1):
        layout = layout_of(mask, 1003, 1003, LayoutConfig(32 if small else 64, 16 if small else 64, slab))
        for config in (KernelConfig(num_stages=2), KernelConfig(num_stages=2, split_tiles=5)):
            check(inputs.qkv, layout, config)
            check(inputs.qkv, layout, config, **given)
