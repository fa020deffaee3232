"""The Hopper kernel on a real GPU. Run with `pytest -m gpu` on a machine with compute capability 9.0."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.errors import UnsupportedError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import padded_width
from stof.kernels.implementation import BoundCall, Options
from stof.layout import Layout, build_layout
from stof.layout.orders.named import named_order
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS, failures
from stof.selection.gpu_candidates import _HOPPER_BIAS_TILES, _HOPPER_TILES
from stof.testing import MEMORY_LAYOUTS, assert_attention, make_inputs
from stof.testing.mask_grid import grid_mask
from tests.examples import examples
from tests.strategies import dense_masks

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

# The oracle's matrix products under PyTorch's deterministic mode, which poisons memory.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Stages by tile, for heads up to 64, 128 and 256 wide.
STAGES, BIAS_STAGES = (
    {width: {(rows, columns): n for rows, columns, n in tiles} for width, tiles in table.items()}
    for table in (_HOPPER_TILES, _HOPPER_BIAS_TILES)
)
GRID = ("full", "causal", "window512", "longformer", "bigbird", "strided", "dilated")
HALVES = (torch.float16, torch.bfloat16)
# Heavy first rows, to be split; columns that slabs pick.
HEAVY = masks.longformer(32, 64)
SCATTERED = masks.longformer(64, 30) | masks.strided(16, 64, 8)
UNSEEN = "keys that no query sees"


@pytest.fixture(autouse=True)
def _no_failures() -> Iterator[None]:
    failures.clear()
    yield
    failures.clear()


def random_inputs(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    plain: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 1003, "head_dim": 64, "device": "cuda"}
    return make_inputs(**plain | {"dtype": torch.float16} | sizes).qkv


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> None:
    """Through the public operator, in the layout that the selector thinks fastest."""
    out, lse = stof.attention(q, k, v, mask, return_lse=True, implementation="hopper", **options)
    keep = mask.to_dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], device="cuda")
    assert_attention(out, lse, q, k, v, keep, **options)


def layout_of(
    mask: Mask,
    q: Tensor,
    k: Tensor,
    slab: int | None,
    order: str | None = None,
    tile: tuple[int, int] = (128, 128),
) -> Layout:
    row_order = None if order is None else named_order(order, q.shape[2])
    config, sizes = LayoutConfig(*tile, slab), {"batch": q.shape[0], "heads": q.shape[1]}
    return build_layout(mask, q.shape[2], k.shape[2], config, **sizes, device="cuda", row_order=row_order)


def bound(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, split_tiles: int = 0, side: int = 0, **options: Any
) -> BoundCall:
    """The kernel on a layout of the test's choice, row blocks split or not."""
    hopper, tile = IMPLEMENTATIONS["hopper"], (layout.config.block_m, layout.config.block_n)
    stages = (STAGES if options.get("bias") is None else BIAS_STAGES)[padded_width(q.shape[3])][tile]
    prepared = hopper.prepare(layout, KernelConfig(4, stages, split_tiles=split_tiles, side=side))
    given = {"scale": q.shape[3] ** -0.5, "softcap": 0.0, "bias": None, "sinks": None, **options}
    return hopper.bind(q, k, v, prepared, Options(**given))


def check_layout(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, split_tiles: int = 0, side: int = 0, **options: Any
) -> None:
    call = bound(layout, q, k, v, split_tiles, side, **options)
    out, lse = call(q, k, v, options.get("bias"), options.get("sinks"))
    assert_attention(out, lse, q, k, v, layout.to_dense(), **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", GRID)
def test_grid_masks(name: str, head_dim: int, dtype: torch.dtype) -> None:
    for length in (2048, 1003):
        check(*random_inputs(q_len=length, head_dim=head_dim, dtype=dtype), grid_mask(name).mask(length))


@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("slab", [None, 16, 8])
@pytest.mark.parametrize("tile", STAGES[64], ids=str)
@pytest.mark.parametrize("name", GRID)
def test_every_layout(name: str, tile: tuple[int, int], slab: int | None, split_tiles: int) -> None:
    q, k, v = random_inputs(q_len=1501)
    check_layout(layout_of(grid_mask(name).mask(1501), q, k, slab, tile=tile), q, k, v, split_tiles, side=3)


@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("slab", [None, 16, 8])
@pytest.mark.parametrize("tile", STAGES[256], ids=str)
@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_wide_heads(head_dim: int, tile: tuple[int, int], slab: int | None, split_tiles: int) -> None:
    """From jobs of one tile, which a thread block does several of, to long ones; with options and without."""
    for q_len, kv_len, heads in ((1, 1, 2), (333, 65, 6), (6001, 130, 6), (1501, 1531, 4)):
        q, k, v = random_inputs(q_len=q_len, kv_len=kv_len, heads=heads, head_dim=head_dim, memory="bshd")
        layout = layout_of(SCATTERED | masks.sink_tokens(1), q, k, slab, tile=tile)
        check_layout(layout, q, k, v, split_tiles)
        options: dict[str, Any] = {"softcap": 20.0, "sinks": torch.randn(heads, device="cuda"), "scale": 0.1}
        check_layout(layout, q, k, v, split_tiles, side=3, **options)


@pytest.mark.parametrize("with_options", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(8, (192, 128)), (64, (192, 128)), (64, (64, 128)), (40, (64, 64)), (96, (64, 64))],
    ids=str,
)
def test_one_and_three_warpgroups(head_dim: int, tile: tuple[int, int], with_options: bool) -> None:
    """Odd lengths, grouped heads, options; from one row block that is not full to several for each thread block."""
    options: dict[str, Any] = {}
    if with_options:
        options = {"scale": 0.1, "softcap": 20.0, "sinks": torch.randn(6, device="cuda")}
    for q_len, kv_len, slab, split_tiles in ((1, 1, None, 0), (65, 777, 16, 1), (9001, 1531, None, 3)):
        sizes = {"heads": 6, "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim, "memory": "bshd"}
        q, k, v = random_inputs(**sizes)
        layout = layout_of(SCATTERED | masks.sink_tokens(1), q, k, slab, tile=tile)
        check_layout(layout, q, k, v, split_tiles, **options)


@pytest.mark.parametrize("memory", ["bhsd", "bshd", "packed", "transposed"])
@pytest.mark.parametrize("split_tiles", [0, 1])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [
        (64, (128, 128)), (128, (128, 128)), (64, (192, 128)), (64, (64, 128)), (128, (64, 64)),
        (256, (128, 64)), (256, (64, 64)),
    ],
    ids=str,
)  # fmt: skip
def test_evenly_spaced_rows_and_columns(head_dim: int, tile: tuple[int, int], split_tiles: int, memory: str) -> None:
    mask = masks.dilated_window(900, dilation=5)
    q, k, v = random_inputs(q_len=10 * tile[0], head_dim=head_dim, memory=memory)
    check_layout(layout_of(mask, q, k, 1, "remainder 5", tile), q, k, v, split_tiles)


def test_row_blocks_of_two_remainders() -> None:
    """Where all rows see the same keys; the last row block is not full."""
    q, k, v = random_inputs(q_len=640)
    check_layout(layout_of(masks.full(), q, k, 1, "remainder 2", (192, 128)), q, k, v, 2)


def test_dilated_with_heads_narrower_than_tiles() -> None:
    """Boxes of evenly spaced rows would reach into the next row."""
    for head_dim in (40, 80, 192):
        check(*random_inputs(q_len=2048, head_dim=head_dim), masks.dilated_window(2047, dilation=16))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 120, 128, 192, 256])
def test_sizes_and_options(head_dim: int) -> None:
    """Odd lengths, grouped heads, every option."""
    q, k, v = random_inputs(heads=6, q_len=777, kv_len=1531, head_dim=head_dim, memory="bshd")
    check(q, k, v, SCATTERED)
    check(q, k, v, SCATTERED, scale=0.1, sinks=torch.randn(6, device="cuda"), softcap=20.0)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"scale": -0.3},
        {"softcap": 0.5},
        {"sinks": "float32"},
        {"sinks": "float16"},
        {"sinks": "strided"},
    ],
    ids=str,
)
def test_each_option(options: dict[str, Any]) -> None:
    sinks = {
        "float32": torch.randn(4, device="cuda"),
        "float16": torch.randn(4, device="cuda", dtype=torch.float16),
        "strided": torch.randn(8, device="cuda")[::2],
    }
    if "sinks" in options:
        options = {"sinks": sinks[options["sinks"]]}
    check(*random_inputs(q_len=300, kv_len=900), SCATTERED, **options)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 777), (2, 129), (63, 64), (64, 1), (129, 5), (128, 128)])
def test_short_lengths(q_len: int, kv_len: int) -> None:
    for heads, kv_heads in ((4, 4), (8, 1)):
        q, k, v = random_inputs(heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len)
        check(q, k, v, masks.full())
        check(q, k, v, as_mask(readable(torch.rand(1, heads, q_len, kv_len, device="cuda") < 0.5)))


@pytest.mark.parametrize("split_tiles", [0, 1])
@pytest.mark.parametrize("slab", [None, 8])
@pytest.mark.parametrize("tile", STAGES[64], ids=str)
def test_rows_and_heads_that_keep_nothing(tile: tuple[int, int], slab: int | None, split_tiles: int) -> None:
    """Whole row blocks, single rows and whole heads: output 0, log-sum-exp -inf."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(2, 4, 500, 700, generator=generator) < torch.tensor([0.0, 0.01, 0.3, 1.0]).view(1, 4, 1, 1)
    keep[:, 1:, 60] = True  # each key is seen
    keep[:, :, 130:400] = False
    keep[:, :, ::7] &= torch.arange(500)[::7, None] == 60
    q, k, v = random_inputs(q_len=500, kv_len=700)
    for kept in (keep, keep[:, 2:3], keep[:1], keep & False):
        layout = layout_of(as_mask(kept.cuda()), q, k, slab, tile=tile)
        check_layout(layout, q, k, v, split_tiles, sinks=torch.randn(4, device="cuda"))


def test_masks_by_head_and_sequence() -> None:
    q, k, v = random_inputs()
    check(q, k, v, masks.per_head([masks.causal(), masks.full(), masks.causal(), masks.sliding_window(9)]))
    check(q, k, v, masks.padding([1003, 896]) & masks.causal())
    check(q, k, v, ~masks.full())


def test_keys_that_no_query_sees() -> None:
    """The unused end of a cache may hold anything, and so may all of it: no NaN comes through."""
    mask = masks.padding([1000, 0, 512])
    q, k, v = random_inputs(batch=3, kv_len=1000)
    unseen = ~mask.to_dense(1003, 1000, batch=3, device="cuda").any(2)[:, :, :, None]
    stale_k, stale_v = (x.masked_fill(unseen, torch.nan) for x in (k, v))
    out, lse = stof.attention(q, stale_k, stale_v, mask, return_lse=True, implementation="hopper")
    assert_attention(out, lse, q, k, v, mask.to_dense(1003, 1000, batch=3, device="cuda"))
    mask = masks.padding([1000, 0, 500])  # no slab ends there: zeros stand for what is unseen
    keep = mask.to_dense(1003, 1000, batch=3, device="cuda")
    stale_k, stale_v = (x.masked_fill(~keep.any(2)[:, :, :, None], torch.nan) for x in (k, v))
    out, lse = stof.attention(q, stale_k, stale_v, mask, return_lse=True, implementation="hopper")
    assert_attention(out, lse, q, k, v, keep)
    bias = torch.zeros(1, 1, 1003, 1000, device="cuda", dtype=q.dtype)
    with pytest.raises(UnsupportedError, match=UNSEEN):
        stof.attention(q, k, v, mask, bias=bias, implementation="hopper")


def readable(keep: Tensor) -> Tensor:
    """The mask with one row more in each head that keeps every key, so that none is unseen; empty heads stay so."""
    keep = keep.clone()
    keep[:, :, -1] |= keep.flatten(2).any(2)[:, :, None]
    return keep


@given(data=st.data())
@examples(40)
def test_random_masks_and_shapes(data: st.DataObject) -> None:
    q_len, kv_len = (data.draw(st.sampled_from([1, 63, 129, 300, 641])) for _ in range(2))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (1, 8)]))
    batch, heads = data.draw(st.integers(1, 3)), kv_heads * group
    memory = data.draw(st.sampled_from(MEMORY_LAYOUTS))
    q, k, v = random_inputs(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=data.draw(st.sampled_from([64, 80, 96, 128, 192, 256])),
        dtype=data.draw(st.sampled_from(HALVES)),
        memory=memory,
        seed=data.draw(st.integers(0, 2**31 - 1)),
    )
    sizes = (data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads])))
    keep = data.draw(dense_masks(q_len, kv_len, *sizes)).cuda()
    options: dict[str, Any] = data.draw(st.sampled_from([{}, {}, {"softcap": 5.0}, {"scale": -0.2}]))
    if data.draw(st.booleans()):
        options = {**options, "sinks": torch.randn(heads, device="cuda")}
    clean = k.clone(), v.clone()
    alike = kv_heads == heads or keep.shape[1] == 1  # the queries of a key head see the same keys
    if alike and memory != "expanded":  # else a key that one head does not see is another's
        for x in (k, v):
            x[(~keep.any(2)[:, :, :, None]).expand_as(x)] = torch.nan
    try:
        out, lse = stof.attention(q, k, v, keep, return_lse=True, implementation="hopper", **options)
    except UnsupportedError:
        assert not alike, "one copy of the keys, with zeros for those unseen, serves all heads"
        assert not bool(keep.any(2).all()), "only keys that no query sees make a mask unfit"
        keep = readable(keep)
        out, lse = stof.attention(q, k, v, keep, return_lse=True, implementation="hopper", **options)
    assert_attention(out, lse, q, *clean, keep, **options)


# Settings that are compiled in: dtype, head_dim and tile, heads of a key head, columns of a slab, chunks, option.
FAMILIES = list(
    itertools.product(
        HALVES,
        [
            *itertools.product((40, 64), STAGES[64]),
            *itertools.product((80, 128), STAGES[128]),
            *itertools.product((192, 256), STAGES[256]),
        ],
        (1, 3),
        (None, 16, 8),
        (0, 1, 3),
        ("plain", "softcap", "sinks", "scale"),
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("family", range(25))
def test_a_thousand_random_calls(family: int) -> None:
    """Few kernels, many masks and shapes: compiling is what takes time."""
    chance = random.Random(family)
    dtype, (head_dim, tile), group, slab, split_tiles, option = chance.choice(FAMILIES)
    for number in range(40):
        batch, kv_heads = chance.randint(1, 3), chance.randint(2, 3)
        # No multiples of 16, for which there would be kernels of their own.
        q_len, kv_len = 16 * chance.randint(0, 40) + chance.randint(2, 15), chance.randint(1, 900)
        heads = kv_heads * group
        q, k, v = random_inputs(
            batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype,
            memory=chance.choice(["bhsd", "bshd", "packed"]), seed=40 * family + number,
        )  # fmt: skip
        keep = readable(random_keep(chance, batch, heads, q_len, kv_len, 40 * family + number))
        by_name: dict[str, dict[str, Any]] = {
            "plain": {},
            "softcap": {"softcap": 8.0},
            "sinks": {"sinks": torch.randn(heads, device="cuda")},
            "scale": {"scale": -0.25},
        }
        layout = layout_of(as_mask(keep), q, k, slab, tile=tile)
        try:
            check_layout(layout, q, k, v, split_tiles, chance.randint(0, 4), **by_name[option])
        except AssertionError as error:
            raise AssertionError(f"call {number}: {list(keep.shape)}") from error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "given"),
    [
        ("longformer", (1, 12, 12, 64, 4096), ()),
        ("longformer", (1, 32, 8, 128, 8192), ()),
        ("longformer", (1, 12, 12, 64, 2048), ("sinks", "softcap")),
        ("bigbird", (1, 32, 32, 128, 8192), ()),
        ("dilated", (1, 32, 32, 128, 8192), ()),
        ("strided", (1, 32, 32, 128, 16384), ()),
        ("window512", (16, 12, 12, 64, 1024), ()),
        ("causal", (1, 16, 16, 256, 4096), ()),
        ("causal", (2, 12, 12, 64, 1000), ("bias",)),
    ],
)
def test_a_thousand_repetitions(name: str, sizes: tuple[int, ...], given: tuple[str, ...]) -> None:
    """Bit for bit, whoever takes which job and comes last to a split row block."""
    batch, heads, kv_heads, head_dim, length = sizes
    q, k, v = random_inputs(batch=batch, heads=heads, kv_heads=kv_heads, q_len=length, head_dim=head_dim)
    every: dict[str, Any] = {"sinks": torch.randn(heads, device="cuda"), "softcap": 20.0}
    if "bias" in given:
        every["bias"] = torch.randn(1, heads, length, length, dtype=q.dtype, device="cuda")
    plan = stof.plan(grid_mask(name).mask(length), length, batch=batch, heads=heads, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        options = {option: every[option] for option in given}
        return stof.attention(q, k, v, plan, return_lse=True, implementation="hopper", **options)

    out, lse = call()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again, lse_again = call()
        different += ~((again == out).all() & (lse_again == lse).all())
    assert int(different) == 0


def random_keep(chance: random.Random, batch: int, heads: int, q_len: int, kv_len: int, seed: int) -> Tensor:
    """Bool `[1 or batch, 1 or heads, q_len, kv_len]` of one of several textures."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (chance.choice([1, batch]), chance.choice([1, heads]), q_len, kv_len)
    noise = torch.rand(shape, generator=generator, device="cuda")
    rows, columns = torch.arange(q_len, device="cuda")[:, None], torch.arange(kv_len, device="cuda")[None, :]
    density = chance.choice([0.0, 0.002, 0.03, 0.5, 0.98, 1.0])
    textures = {
        "scores": noise < density,
        "rows": noise[..., :1].expand(shape) < density,
        "columns": noise[..., :1, :].expand(shape) < density,
        "band": ((rows - columns).abs() < chance.randint(1, 200)) & (noise < 0.9),
        "causal": ((columns <= rows + kv_len - q_len) & (noise[..., :1] < 0.95)).expand(shape),
        "strips": ((columns // chance.choice([8, 16, 24])) % 5 == rows // 40 % 5).expand(shape),
    }
    return textures[chance.choice(sorted(textures))]


def test_long_rows_split() -> None:
    for head_dim, tile in ((128, (128, 128)), (128, (64, 64)), (64, (192, 128)), (256, (128, 64))):
        q, k, v = random_inputs(batch=1, q_len=300, kv_len=20_000, head_dim=head_dim)
        for split_tiles in (8, 64, 1000):
            check_layout(layout_of(HEAVY, q, k, None, tile=tile), q, k, v, split_tiles)
        check(q, k, v, HEAVY)
