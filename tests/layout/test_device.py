"""Layouts built by Triton kernels are those built by torch, bit for bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.layout import Layout, build_layout
from stof.layout.compaction import column_use
from stof.layout.fill import layouts as device_build
from stof.layout.fill import mask_input as device_source
from stof.layout.fill.layouts import LayoutFill, device_layout
from stof.layout.fill.slab_counts import device_columns, device_counts
from stof.layout.head_mask import HeadMask
from stof.layout.survey import survey, tiles_of_slabs
from stof.masks import Mask
from stof.masks.gpu_program import DEPTH, programs_of
from stof.masks.per_head import for_batch, for_heads
from stof.masks.reorder import in_ranges
from tests.examples import examples
from tests.strategies import dense_masks, mask_trees

tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Triton's interpreter runs on the CPU
configs = st.builds(LayoutConfig, st.sampled_from([16, 64, 192]), st.sampled_from([16, 32, 128]))


def on_device(
    mask: Mask, q_len: int, kv_len: int, config: LayoutConfig, batch: int = 1, heads: int = 1
) -> Layout | None:
    dims = mask.dims(batch, heads)
    return device_layout(mask, q_len, kv_len, config, dims, device=DEVICE)


def by_torch(mask: Mask, q_len: int, kv_len: int, config: LayoutConfig, **sizes: int) -> Layout:
    with mock.patch("stof.layout.builders.build.device_layout", return_value=None):
        return build_layout(mask, q_len, kv_len, config, device=DEVICE, **sizes)


def assert_same(mask: Mask, q_len: int, kv_len: int, config: LayoutConfig, **sizes: int) -> None:
    layout, expected = on_device(mask, q_len, kv_len, config, **sizes), by_torch(mask, q_len, kv_len, config, **sizes)
    assert layout is not None
    assert (layout.q_len, layout.kv_len, layout.config) == (q_len, kv_len, config)
    for name, tensor in expected.tensors().items():
        own = layout.tensors()[name]
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(own, tensor), name


@pytest.fixture
def tall_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows at once than a GPU's registers hold: the interpreter takes as long for each piece."""
    monkeypatch.setattr(device_source, "_SCORES_RUN", 2**16)


@pytest.mark.slow
@pytest.mark.usefixtures("tall_pieces")
@given(data=st.data(), config=configs)
@examples(15)
def test_expressions(data: st.DataObject, config: LayoutConfig) -> None:
    length, offset = data.draw(st.sampled_from([48, 75])), data.draw(st.sampled_from([0, 0, 29]))
    batch = data.draw(st.sampled_from([1, 1, 2]))
    mask = data.draw(mask_trees(length, batch, leaves=3)).with_query_offset(offset)
    assert_same(mask, length - offset, length, config, batch=batch)


TABLE = torch.tensor([0, 3, 1, 3, 7], device=DEVICE).repeat_interleave(30)
BLOCKS = (torch.rand(10, 7, generator=torch.Generator().manual_seed(4)) < 0.3).to(DEVICE)
MANY = (torch.rand(150, generator=torch.Generator().manual_seed(3)) < 0.4).to(DEVICE)
PATTERNS = {
    "everything": masks.full(),
    "nothing": ~masks.full(),
    "window and sinks": masks.sliding_window(20) | masks.sink_tokens(3),
    "longformer": masks.longformer(5, 9),
    "listed tokens": masks.longformer(3, [0, 17, 18, 40]),
    "dilated": masks.dilated_window(30, 7, dilation=5),
    "strided": masks.strided(8, 11, 3),
    "strided both ways": masks.strided(3, 9, 2, causal=False),
    "documents": masks.causal() & masks.documents(cu_seqlens=[0, 20, 33, 90]),
    "documents in parts": masks.documents([3] * 20 + [-1] * 17 + [3] * 30 + [5] * 23),
    "random blocks": masks.random_blocks(2, block_size=7) & ~masks.sliding_window(3, 3),
    "prefix": masks.prefix_lm(25) & masks.padding(80),
    "neighbourhood": masks.neighborhood_2d(9, 10, (3, 5)),
    "per head": masks.per_head([masks.causal() | masks.padding(9)]),
    "function of tables": masks.from_function(lambda b, h, q, kv: (TABLE[q] == TABLE[kv]) & (kv < TABLE[0] + 60)),
    "function of blocks": masks.from_function(lambda b, h, q, kv: BLOCKS[q // 16, kv // 24] & (q >= kv) | (kv < 2)),
    "function of most blocks": masks.from_function(lambda b, h, q, kv: ~BLOCKS[q // 16, kv // 24]),
    "function of a grid": masks.from_function(
        lambda b, h, q, kv: ((q // 9 - kv // 9).abs() <= 1) & (q % 9 - kv % 9 <= 2) | (q % 7 == 3)
    ),
    "function of distances": masks.from_function(
        lambda b, h, q, kv: (
            ((q - kv + 2) % 5 == 1) & ((q - kv) % 6 < 4) & (kv - q < 30) | ~(kv % 4 < 3) & (q // 8 >= kv // 8)
        )
    ),
    "function of a remainder": masks.from_function(lambda b, h, q, kv: ((q - kv - 3) % 7 >= 2) & ((q - kv) % 7 < 6)),
    "function of tokens": masks.from_function(lambda b, h, q, kv: MANY[q] ^ (MANY[kv] | (q > kv))),
    "negated composition": ~(masks.causal() & ~(masks.sliding_window(9) | masks.padding(40))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str) -> None:
    """Queries at the end of a cache, in a shape that no tile divides."""
    assert_same(PATTERNS[name].with_query_offset(13), 77, 90, LayoutConfig(32, 16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name, mask in PATTERNS.items() if mask.allows_negative_queries])
def test_queries_before_the_first_key(name: str) -> None:
    """Tables of documents and blocks begin at position 0: such masks are left to torch."""
    mask = PATTERNS[name].with_query_offset(-40)
    if "documents" in name or "blocks" in name:
        assert programs_of(mask, 77, 90, [(0, 0)]) is None
    else:
        assert_same(mask, 77, 90, LayoutConfig(32, 16))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", PATTERNS)
def test_transposed_patterns(name: str) -> None:
    """Keys of a cache as queries; and a part of that, from some query and key on."""
    mask = masks.transposed(PATTERNS[name].with_query_offset(13))
    assert_same(mask, 90, 77, LayoutConfig(32, 16))
    assert_same(masks.placed(mask, 21, 9), 69, 68, LayoutConfig(16, 32))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", PATTERNS)
def test_keys_at_an_offset(name: str) -> None:
    mask = masks.placed(PATTERNS[name], 5, 18)
    assert_same(mask, 85, 72, LayoutConfig(32, 16))
    if PATTERNS[name].allows_negative_keys:
        mask = masks.placed(PATTERNS[name], -3, -35)
        if "documents" in name:
            assert programs_of(mask, 80, 125, [(0, 0)]) is None
        else:
            assert_same(mask, 80, 125, LayoutConfig(32, 16))


@pytest.mark.slow
@pytest.mark.usefixtures("tall_pieces")
@given(data=st.data(), config=configs)
@examples(15)
def test_transposed_expressions(data: st.DataObject, config: LayoutConfig) -> None:
    length, offset, cached = (
        data.draw(st.sampled_from([48, 75])),
        *data.draw(st.sampled_from([(0, 0), (29, 0), (7, 31)])),
    )
    mask = masks.placed(data.draw(mask_trees(length, 2, leaves=3)), offset, cached)
    assert_same(masks.transposed(mask), length - cached, length - offset, config, batch=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("blocks", [(1, 3), (20, 4), (3, 40)])
def test_transposed_random_blocks(blocks: tuple[int, int]) -> None:
    """Blocks smaller and larger than a word of 32 keys, and more than are compared one by one."""
    mask = masks.placed(masks.random_blocks(blocks[0], block_size=blocks[1]), 13, 5)
    assert_same(masks.transposed(mask), 60, 90, LayoutConfig(64, 128))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["random blocks", "bigbird", "transposed", "by head", "by batch"])
def test_parts_that_end_early(name: str) -> None:
    """Blocks are drawn from the keys of the mask that the part is of."""
    drawn = masks.random_blocks(2, block_size=16)
    mask = {
        "random blocks": drawn,
        "bigbird": masks.bigbird(5, 2, blocks=1, block_size=32),
        "transposed": masks.transposed(drawn) | masks.placed(drawn, 3, 4),
        "by head": for_heads(masks.per_head([masks.full(), drawn, masks.causal()]), 1, 2, 3),
        "by batch": for_batch(masks.prefix_lm([1, 40, 99]), 1, 2, 3) & drawn,
    }[name]
    sizes = {"batch": 2 if name == "by batch" else 1, "heads": 2 if name == "by head" else 1}
    part = masks.placed(mask, 21, 9, q_len=150, kv_len=170)
    assert programs_of(part, 69, 68, [(0, 0)]) is not None
    assert_same(part, 69, 68, LayoutConfig(16, 32), **sizes)
    assert_same(masks.transposed(part), 68, 69, LayoutConfig(16, 32), **sizes)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", PATTERNS)
def test_ranges_in_another_order(name: str) -> None:
    """Keys in ranges that begin between words have a program; others are left to torch."""
    mask = in_ranges(PATTERNS[name], [(40, 75), (3, 20)], [(0, 32), (50, 82), (64, 71)], 90, 90)
    assert programs_of(mask, 52, 71, [(0, 0)]) is not None
    assert_same(mask, 52, 71, LayoutConfig(16, 128))
    assert programs_of(masks.transposed(mask), 71, 52, [(0, 0)]) is None
    mask = in_ranges(PATTERNS[name], [(40, 72), (3, 20)], [(50, 75), (0, 32), (33, 40)], 90, 90)
    assert programs_of(masks.transposed(mask), 64, 49, [(0, 0)]) is not None
    assert_same(masks.transposed(mask), 64, 49, LayoutConfig(32, 32))
    assert programs_of(mask & masks.causal(), 49, 64, [(0, 0)]) is None


MOST = 2**31 - 1
EXTREME = {
    "window": masks.sliding_window(MOST, MOST),
    "window of nothing before": masks.sliding_window(0, MOST) | masks.sink_tokens(MOST),
    "dilated": masks.dilated_window(MOST, MOST, dilation=33),
    "strided": masks.strided(1, MOST, MOST - 40, causal=False),
    "nothing of every stride": masks.strided(0, MOST, 0, causal=False) | masks.strided(0, 1, 0, causal=False),
    "everything of every stride": masks.strided(0, MOST, MOST),
    "one wide block": masks.random_blocks(3, block_size=MOST),
    "listed": masks.global_tokens([0, 31, 32, 74, MOST]),
    "wide grid": masks.neighborhood_2d(1, 75, (MOST, MOST)),
    "prefix": masks.prefix_lm(MOST),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offset", [0, 2**30, MOST - 700, 700 - MOST])
@pytest.mark.parametrize("name", EXTREME)
def test_numbers_that_hardly_fit(name: str, offset: int) -> None:
    mask = EXTREME[name]
    if offset < 0 and name in ("one wide block", "wide grid"):
        pytest.skip("without a program")
    if offset and name in ("dilated", "wide grid"):
        offset = max(-(2**30), min(2**30, offset)) if name == "dilated" else 10
    assert_same(mask.with_query_offset(offset), 40, 75, LayoutConfig(64, 128))
    assert_same(masks.transposed(mask.with_query_offset(offset)), 75, 40, LayoutConfig(64, 128))


@pytest.mark.slow
@given(
    st.integers(1, 70), st.integers(0, 70), st.integers(0, 40), st.integers(1, 70), st.integers(0, 90), st.booleans()
)
@examples(25)
def test_periods(stride: int, width: int, local: int, dilation: int, offset: int, inverted: bool) -> None:
    """Runs of keys that repeat within a word, or not at all."""
    mask = masks.strided(local, stride, min(width, stride), causal=False) | masks.dilated_window(
        70, 9, dilation=dilation
    )
    mask = (~mask if inverted else mask).with_query_offset(offset)
    assert_same(mask, 20, 150, LayoutConfig(32, 256))


@given(data=st.data(), config=configs)
@examples(10)
def test_dense(data: st.DataObject, config: LayoutConfig) -> None:
    """Rows of 96 columns are read four columns at a time, the others one by one."""
    q_len, kv_len = data.draw(st.sampled_from([1, 33, 70])), data.draw(st.sampled_from([96, 96, 50]))
    batch, heads = data.draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]))
    keep = data.draw(dense_masks(data.draw(st.sampled_from([q_len, q_len, 1])), kv_len, batch, heads))
    layout = data.draw(st.sampled_from(["contiguous", "transposed", "wider", "other bytes"]))
    if layout == "transposed":
        keep = keep.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "wider":
        keep = torch.nn.functional.pad(keep, (0, 16), value=True)[..., :kv_len]
    elif layout == "other bytes":  # true in memory is any byte but 0
        keep = (keep.to(torch.uint8) * 0x90).view(torch.bool)
    assert_same(masks.from_dense(keep.to(DEVICE)), q_len, kv_len, config, batch=batch, heads=heads)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="changes what the interpreter runs")
@pytest.mark.parametrize("few", [4, 8])
def test_bitmaps_are_numbered_in_pieces(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """Few bitmaps are compared with each other; for more, all tiles are gone through."""
    from stof.layout.fill import bitmap_kernels

    monkeypatch.setattr(bitmap_kernels, "_SCANNED", tl.constexpr(16))
    monkeypatch.setattr(bitmap_kernels, "_FEW", tl.constexpr(few))
    monkeypatch.setattr(bitmap_kernels, "_COMPARED_AT_ONCE", tl.constexpr(4))
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(6, 8, 1, 1, generator=generator) < 0.6
    kinds = torch.rand(5, 16, 16, generator=generator) < 0.5
    which = torch.randint(5, (6, 8), generator=generator)
    keep = (kinds[which] & coarse).transpose(1, 2).reshape(96, 128)
    assert_same(masks.from_dense(keep.to(DEVICE)), 96, 128, LayoutConfig(16, 16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["longformer", "random blocks", "documents in parts"])
def test_of_many_tiles_more_are_looked_at_together(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device_build, "_MANY", 1)
    assert_same(PATTERNS[name].with_query_offset(13), 77, 90, LayoutConfig(64, 16))
    assert_same(masks.longformer(9, 20), 40, 600, LayoutConfig(16, 16))


@st.composite
def surveyed(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """A mask of two sequences, or two sequences and heads, and its lengths."""
    q_len, kv_len = draw(st.sampled_from([(40, 75), (33, 260), (70, 264)]))
    if draw(st.booleans()):
        rows = draw(st.sampled_from([q_len, q_len, 1]))
        return masks.from_dense(draw(dense_masks(rows, kv_len, 2, 2)).to(DEVICE)), q_len, kv_len
    mask = draw(mask_trees(kv_len, 2, leaves=2)).with_query_offset(draw(st.sampled_from([0, kv_len - q_len])))
    return mask, q_len, kv_len


@pytest.mark.slow
@pytest.mark.usefixtures("tall_pieces")
@given(problem=surveyed())
@example(problem=(masks.causal().with_query_offset(240), 70, 300))  # 256 keys that all rows see
@examples(8)
def test_survey(problem: tuple[Mask, int, int]) -> None:
    """Tiles counted by a kernel are those counted strip by strip."""
    mask, q_len, kv_len = problem
    sizes = ((16, 16, None), (16, 64, 1), (64, 256, None), (64, 128, 16), (192, 64, 8))
    wanted = [LayoutConfig(*size) for size in sizes]
    with mock.patch("stof.layout.survey.device_counts", return_value=None):
        expected = survey(mask, q_len, kv_len, wanted, batch=2, heads=mask.heads, device=DEVICE)
    shape = (expected.mask_batch, expected.mask_heads)
    entries = list(range(shape[0] * shape[1]))
    counted = device_counts(mask, q_len, kv_len, [16, 64, 192], shape[1], entries, device=DEVICE)
    assert counted is not None
    assert torch.equal(counted.kept.long(), expected.kept)
    for geometry in wanted:
        partial, full = tiles_of_slabs(counted, geometry)
        assert torch.equal(full, expected.counts[geometry].full), geometry
        assert torch.equal(partial, expected.counts[geometry].partial), geometry
    b, h = divmod(entries[-1], shape[1])
    own = HeadMask(mask, q_len, kv_len, b, h, None, DEVICE)
    columns = device_columns(own, 64)
    assert columns is not None
    with mock.patch("stof.layout.compaction.device_columns", return_value=None):
        seen = column_use(own, 64)
    assert torch.equal(columns[0], seen.some)
    assert torch.equal(columns[1], seen.every)


SEVERAL = {
    "some alike": masks.padding([50, 20, 50]) & masks.causal(),
    "all alike": masks.padding([50, 50, 50]) & masks.causal(),
    # Told apart by their key, but the sinks end before either length.
    "alike in what they keep": masks.padding([50, 30, 40]) & masks.sink_tokens(4),
    "heads": masks.per_head([masks.causal(), masks.strided(5, 8), masks.causal(), masks.prefix_lm(0)]),
    "both": masks.per_head([masks.random_blocks(2, block_size=9), masks.padding([60, 64, 20])]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_patterns(name: str) -> None:
    mask = SEVERAL[name]
    assert_same(mask, 40, 64, LayoutConfig(16, 16), batch=3, heads=mask.heads)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="changes what the interpreter runs")
@pytest.mark.parametrize("tiles", [4, pytest.param(140, marks=pytest.mark.slow)])
def test_bitmaps_with_half_a_hash_in_common_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    """Few bitmaps are numbered in one way, more of them in another."""
    from stof.layout.fill import count_kernels

    keep = torch.rand(16, 16 * tiles, generator=torch.Generator().manual_seed(0)) < 0.5
    mask, config = masks.from_dense(keep.to(DEVICE)), LayoutConfig(16, 16)
    assert on_device(mask, 16, 16 * tiles, config) is not None
    same = masks.from_dense(keep[:, :16].repeat(1, tiles).to(DEVICE))
    original = count_kernels.hashed.fn

    def half(words: object, at: object) -> tuple[object, object]:
        key, other = original(words, at)
        return key * 0 + 1, other

    monkeypatch.setattr(count_kernels, "hashed", half)
    assert on_device(mask, 16, 16 * tiles, config) is None
    assert on_device(same, 16, 16 * tiles, config) is not None


@pytest.mark.parametrize(
    "mask",
    [
        masks.from_function(lambda b, h, q, k: (q + k) % 3 == 0),
        masks.causal() & masks.from_function(lambda b, h, q, k: (q + k) % 3 == 0),
        masks.sliding_window(5).with_query_offset(2**31 - 20),
        masks.sliding_window(5).with_query_offset(20 - 2**31),
        masks.dilated_window(5, dilation=2**31 - 5),
        masks.dilated_window(5, dilation=2**20).with_query_offset(-(2**31 - 2**20 + 100)),
    ],
    ids=["function", "composed", "far positions", "far positions before", "far lift", "both together far"],
)
def test_masks_without_a_program(mask: Mask) -> None:
    assert programs_of(mask, 64, 64, [(0, 0)]) is None
    assert on_device(mask, 64, 64, LayoutConfig(16, 16)) is None


def test_free_mailboxes_of_builds_that_fail_are_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may still be writing to them."""
    config, in_use = LayoutConfig(16, 16), set(device_source._in_use)
    on_device(masks.causal(), 40, 40, config)
    assert device_source._in_use == in_use

    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LayoutFill, "row_tensors", fail)
    with pytest.raises(torch.OutOfMemoryError):
        on_device(masks.causal(), 40, 40, config)
    (mailbox,) = device_source._in_use - in_use
    assert mailbox not in device_source._free_mailboxes
    device_source._in_use.discard(mailbox)


def test_parts_that_need_most_of_the_stack_come_first() -> None:
    mask: Mask = masks.causal()
    for reach in range(10, 22):
        mask = masks.sliding_window(reach) & ~(masks.padding(30 + reach) & mask)
    assert_same(mask, 64, 64, LayoutConfig(32, 32))


def test_programs_are_written_once() -> None:
    mask = masks.documents(cu_seqlens=[[0, 10, 32], [0, 32, 32], [0, 10, 32]]) & masks.causal()
    first = programs_of(mask, 32, 32, [(0, 0), (1, 0)])
    assert programs_of(mask, 32, 32, [(0, 0), (1, 0)]) is first
    for entries in ([(0, 0)], [(1, 0)], [(0, 0)]):
        again = masks.parse(mask.key)
        assert programs_of(mask, 32, 32, entries) == programs_of(again, 32, 32, entries)
    assert programs_of(mask, 16, 32, [(0, 0)]) == programs_of(masks.parse(mask.key), 16, 32, [(0, 0)])


def test_programs_that_need_a_deep_stack() -> None:
    def tree(levels: int, reach: int) -> Mask:
        if levels == 0:
            return masks.sliding_window(reach)
        left, right = tree(levels - 1, 2 * reach), tree(levels - 1, 2 * reach + 1)
        return left & right if levels % 2 else left | right

    assert programs_of(tree(DEPTH, 1), 64, 64, [(0, 0)]) is None
    assert_same(tree(DEPTH - 1, 1), 64, 64, LayoutConfig(32, 32))


def test_problems_left_to_torch() -> None:
    mask, config = masks.causal(), LayoutConfig(16, 16)
    assert on_device(mask, 64, 64, LayoutConfig(16, 16, 8)) is None
    assert on_device(mask, 2**15, 2**15, config) is None
    assert device_counts(mask, 2**20, 2**20, [16], 1, [0], device=DEVICE) is None
    function = masks.from_function(lambda b, h, q, k: (q + k) % 3 == 0)
    assert device_counts(function, 64, 64, [16], 1, [0], device=DEVICE) is None
