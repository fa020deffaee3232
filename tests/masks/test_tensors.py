"""Masks from functions, dense tensors and FlexAttention block masks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks

import stof
from stof import masks
from stof.errors import DeviceError, DtypeError, MaskError, MaskFunctionError, ShapeError
from stof.masks.tensors import DenseMask
from tests.strategies import dense_masks


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 7


LENGTHS = torch.tensor([5, 20])
SLOPES = torch.tensor([3, 30, 1])


def padded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < LENGTHS[b]


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < SLOPES[h]


MODS = {
    "causal": causal,
    "window": window,
    "and": and_masks(causal, window),
    "or": or_masks(causal, window),
    "nested": or_masks(and_masks(causal, padded), and_masks(window, by_head)),
    "padded": padded,
    "by head": by_head,
    "and of none": and_masks(),
    "or of none": or_masks(),
    "everything": noop_mask,
    "partial": functools.partial(causal),
}


@pytest.mark.parametrize("name", MODS)
def test_flex_attention_functions(name: str) -> None:
    """The same function in FlexAttention's own evaluation (vmap over single indices)."""
    mod = MODS[name]
    expected = create_mask(mod, 2, 3, 24, 31, device="cpu")
    mask = masks.from_function(mod)
    assert torch.equal(mask.to_dense(24, 31, batch=2, heads=3).expand(2, 3, 24, 31), expected)


def test_which_dimensions_a_function_depends_on() -> None:
    assert masks.from_function(causal).dims(2, 3) == (1, 1)
    assert masks.from_function(padded).dims(2, 3) == (2, 1)
    assert masks.from_function(by_head).dims(2, 3) == (1, 3)
    both = masks.from_function(padded) & masks.from_function(by_head) & masks.causal()
    assert both.dims(2, 3) == (2, 3)
    plan = stof.plan(both, 24, batch=2, heads=3)
    assert torch.equal(plan.to_dense(), both.to_dense(24, batch=2, heads=3))


def test_functions_are_equal_by_identity() -> None:
    assert masks.from_function(causal) == masks.from_function(causal)
    assert masks.from_function(causal) != masks.from_function(lambda b, h, i, j: i >= j)
    assert masks.as_mask(causal) == masks.from_function(causal)


def raising(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    raise KeyError("missing")


def branching(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx and kv_idx >= 0


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (raising, "raising raised KeyError: 'missing'.*single scores"),
        (branching, "branching raised RuntimeError.*not and / or / if"),
        (lambda b, h, i, j: LENGTHS[b + 2] > j, "raised IndexError"),
        (lambda i, j: i >= j, "raised TypeError"),
        (lambda b, h, i, j: i - j, "returned a torch.int64 tensor; return a torch.bool tensor"),
        (lambda b, h, i, j: (i >= j).float(), "returned a torch.float32 tensor"),
        (lambda b, h, i, j: True, "returned bool"),
        (lambda b, h, i, j: None, "returned NoneType"),
        (lambda b, h, i, j: torch.ones(2, 3, dtype=torch.bool), r"returned shape \[2, 3\] for one score"),
        (masks.causal, "causal raised TypeError"),
    ],
)
def test_functions_that_misbehave(fn: Any, message: str) -> None:
    mask = masks.from_function(fn)
    with pytest.raises(MaskFunctionError, match=message):
        mask.to_dense(8)
    with pytest.raises(MaskFunctionError, match=message):
        stof.plan(mask, 8, batch=1, heads=1)
    with pytest.raises(MaskFunctionError, match=message):
        stof.plan(mask & masks.causal(), 8, batch=1, heads=1)


@pytest.mark.parametrize("value", [5, None, "causal", torch.ones(2, 2, dtype=torch.bool)])
def test_what_is_not_a_function(value: Any) -> None:
    with pytest.raises(MaskError, match="takes a function"):
        masks.from_function(value)


def test_functions_without_weak_references() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return q_idx >= kv_idx

    with pytest.raises(MaskError, match="wrap it in a function"):
        masks.from_function(Slotted())


@given(data=st.data())
def test_dense_of_every_rank(data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    keep = data.draw(dense_masks(9, 14, batch, heads))
    for given_ in (keep, keep[0], keep[0, 0], keep[:, :1], keep[:1]):
        mask = masks.from_dense(given_)
        expected = given_.view((1,) * (4 - given_.ndim) + given_.shape)
        assert torch.equal(mask.to_dense(9, 14), expected)
        assert mask.dims(max(mask.batch, 1), max(mask.heads, 1)) == expected.shape[:2]
        assert torch.equal((~mask).to_dense(9, 14), ~expected)


@given(data=st.data())
def test_one_row_stands_for_all(data: st.DataObject) -> None:
    """As `scaled_dot_product_attention` takes padding, `[B, 1, 1, Skv]`."""
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    row = data.draw(dense_masks(1, 14, batch, heads))
    expected = row.expand(-1, -1, 9, -1)
    for given_ in (row, row[0], row[0, 0]):
        mask, every = masks.from_dense(given_), expected[tuple(slice(1) for _ in range(4 - given_.ndim))]
        assert torch.equal(mask.to_dense(9, 14), every)
        assert torch.equal((mask & masks.causal()).to_dense(9, 14), every & masks.causal().to_dense(9, 14))
        assert torch.equal(mask.with_query_offset(5).to_dense(9, 14), every)
        assert torch.equal(stof.plan(mask, 9, 14, batch=batch, heads=heads).to_dense().expand_as(every), every)
    q, k, v = (torch.randn(batch, heads, length, 16) for length in (9, 14, 14))
    found, lse = stof.attention(q, k, v, row, return_lse=True)
    wanted, lse_wanted = stof.attention(q, k, v, expected.contiguous(), return_lse=True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(lse, lse_wanted)


def test_padding_of_two_dimensions_is_refused() -> None:
    q = torch.randn(3, 2, 9, 16)
    with pytest.raises(ShapeError, match=r"\[3, 9\], the call has q_len 9.*mask\[:, None, None, :\], or masks.padding"):
        stof.attention(q, q, q, torch.ones(3, 9, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\[3, 1, 1, 8\], the call has q_len 9 and kv_len 9$"):
        stof.attention(q, q, q, torch.ones(3, 1, 1, 8, dtype=torch.bool))


@pytest.mark.parametrize("expanded", [False, True])
def test_bytes_that_are_true(expanded: bool) -> None:
    """Any byte but 0 is true in a view of bytes as bool, such as 255 in masks of images; a copy has the byte 1."""
    bytes_ = torch.randint(3, (64, 96), generator=torch.Generator().manual_seed(0)).to(torch.uint8) * 100
    keep = bytes_[:1].expand(64, -1).view(torch.bool) if expanded else bytes_.view(torch.bool)
    mask = masks.from_dense(keep)
    assert isinstance(mask, DenseMask)
    assert torch.equal(mask.keep.view(torch.uint8), (keep.view(torch.uint8) != 0).view(torch.uint8))
    assert masks.from_dense(keep) == mask  # the same copy
    bytes_[0, :7] = 1 - bytes_[0, :7].clamp(max=1)
    assert masks.from_dense(keep) != mask


def test_dense_of_any_strides() -> None:
    keep = torch.rand(2, 3, 9, 14) < 0.5
    views = {
        "transposed": keep.transpose(2, 3).contiguous().transpose(2, 3),
        "batch last": keep.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
        "sliced": torch.stack([keep, ~keep], -1)[..., 0],
        "every second row": keep.repeat_interleave(2, 2)[:, :, ::2],
        "inside a larger one": torch.nn.functional.pad(keep, (3, 4, 5, 6))[:, :, 5:-6, 3:-4],
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        assert torch.equal(masks.from_dense(view).to_dense(9, 14), keep), name
        assert torch.equal(stof.plan(view, 9, 14, batch=2, heads=3).to_dense(), keep), name
    expanded = keep[:1, :1].expand(2, 3, 9, 14)  # whole matrices repeated are harmless
    assert torch.equal(masks.from_dense(expanded).to_dense(9, 14), expanded)


ONES = torch.rand(64, generator=torch.Generator().manual_seed(0)) < 0.5


@pytest.mark.parametrize(
    "keep",
    [
        ONES[:8].expand(8, 8),
        ONES[:8, None].expand(8, 8),
        ONES[3].expand(8, 8),
        ONES.as_strided((8, 8), (1, 1)),
        ONES.as_strided((8, 8), (4, 1)),
        ONES.as_strided((8, 8), (1, 4)),
        ONES.as_strided((2, 8, 8), (1, 2, 1)),
    ],
    ids=lambda keep: str(keep.stride()),
)
def test_dense_views_that_share_memory(keep: torch.Tensor) -> None:
    """Expanded or overlapping, as `scaled_dot_product_attention` takes them."""
    mask, heads = masks.from_dense(keep), keep.shape[0] if keep.ndim > 2 else 1
    assert torch.equal(mask.to_dense(8), keep.reshape(1, heads, 8, 8))
    for config in (None, stof.LayoutConfig(16, 16)):
        assert torch.equal(stof.plan(keep, 8, heads=heads, config=config).to_dense(), keep.reshape(1, heads, 8, 8))
    q, k, v = (torch.randn(1, heads, 8, 4) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep.contiguous())
    torch.testing.assert_close(stof.attention(q, k, v, keep), expected.nan_to_num(0.0))


@pytest.mark.parametrize("shape", [(), (4,), (1, 1, 1, 4, 4)])
def test_dense_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(MaskError, match=r"is \[Sq, Skv\] up to \[B, H, Sq, Skv\]"):
        masks.from_dense(torch.ones(shape, dtype=torch.bool))


def test_dense_dtypes() -> None:
    for dtype in (torch.uint8, torch.int64, torch.int32):
        with pytest.raises(DtypeError, match=r"torch.bool.*integer mask of 1 \(seen\) and 0.*`mask.bool\(\)`"):
            masks.from_dense(torch.zeros(4, 4, dtype=dtype))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DtypeError, match=r"torch.bool.*additive float mask.*`bias=`.*`mask.bool\(\)`"):
            masks.from_dense(torch.zeros(4, 4, dtype=dtype))
    with pytest.raises(MaskError, match=r"takes a torch.Tensor"):
        masks.from_dense([[True]])  # type: ignore[arg-type]


def test_what_the_hint_for_integers_says_is_right() -> None:
    """`mask.bool()` sees what an integer mask of 1 and 0 sees."""
    layout = torch.ones(6, 6, dtype=torch.int64).tril()
    assert torch.equal(masks.from_dense(layout.bool()).to_dense(6), masks.causal().to_dense(6))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda keep: torch.nested.nested_tensor([keep, keep[:2]], layout=torch.jagged), MaskError, "nested"),
        (lambda keep: torch.nested.nested_tensor([keep, keep[:2]]), MaskError, "nested"),
        (lambda keep: keep.to_sparse(), MaskError, "torch.sparse_coo"),
        (lambda keep: keep.float().to_mkldnn(), MaskError, "torch._mkldnn"),
        (lambda keep: keep.to("meta"), DeviceError, "meta tensor"),
    ],
    ids=["jagged", "nested", "sparse", "mkldnn", "meta"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_dense_of_other_kinds(make: Any, error: type[Exception], message: str) -> None:
    given_ = make(torch.ones(4, 4, dtype=torch.bool))
    for call in (masks.from_dense, masks.as_mask, lambda keep: stof.plan(keep, 4)):
        with pytest.raises(error, match=message):
            call(given_)


def test_dense_of_other_lengths() -> None:
    mask = masks.from_dense(torch.ones(4, 6, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\[4, 6\].*q_len 6 and kv_len 4"):
        stof.plan(mask, 6, 4)
    with pytest.raises(ShapeError, match="batch size of 3, the inputs have 2"):
        stof.plan(torch.ones(3, 1, 4, 4, dtype=torch.bool), 4, batch=2)


@pytest.mark.parametrize("block_size", [16, 64, (16, 32), 128])
@pytest.mark.parametrize("name", ["causal", "nested", "window"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 128), (100, 150)])
def test_block_mask(name: str, block_size: Any, q_len: int, kv_len: int) -> None:
    """However coarse its blocks: the exact element mask."""
    mod = MODS[name]
    block_mask = create_block_mask(mod, 2, 3, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size)
    mask = masks.from_block_mask(block_mask)
    expected = create_mask(mod, 2, 3, q_len, kv_len, device="cpu")
    assert torch.equal(mask.to_dense(q_len, kv_len).expand_as(expected), expected)
    plan = stof.plan(block_mask, q_len, kv_len, batch=2, heads=3)
    assert torch.equal(plan.to_dense().expand_as(expected), expected)


def test_block_mask_without_batch_and_heads() -> None:
    block_mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    mask = masks.as_mask(block_mask)
    assert mask.dims(5, 7) == (1, 1)
    assert torch.equal(mask.to_dense(64), masks.causal().to_dense(64))


def blocks(partial: Any, whole: Any, **options: Any) -> BlockMask:
    """A `BlockMask` from lists of key blocks for each row block."""
    made = []
    for rows in (partial, whole):
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        indices = torch.zeros(len(rows), 4, dtype=torch.int32)
        for n, row in enumerate(rows):
            indices[n, : len(row)] = torch.tensor(row, dtype=torch.int32)
        made += [counts[None, None], indices[None, None]]
    return BlockMask.from_kv_blocks(*made, BLOCK_SIZE=16, **options)


def test_block_mask_lists_count() -> None:
    """Full blocks skip the function, unlisted blocks are dropped whatever it says: as FlexAttention computes."""
    block_mask = blocks([[0], [1], [], [2, 3]], [[3], [], [1], [0]], mask_mod=causal)
    dense = masks.from_block_mask(block_mask).to_dense(64)[0, 0]
    full = torch.zeros(4, 4, dtype=torch.bool)
    full[0, 3] = full[2, 1] = full[3, 0] = True
    part = torch.zeros(4, 4, dtype=torch.bool)
    part[0, 0] = part[1, 1] = part[3, 2] = part[3, 3] = True

    def grow(coarse: torch.Tensor) -> torch.Tensor:
        return coarse.repeat_interleave(16, 0).repeat_interleave(16, 1)

    assert torch.equal(dense, grow(full) | (grow(part) & torch.ones(64, 64, dtype=torch.bool).tril()))


def test_a_block_mask_that_changes_is_another_mask() -> None:
    """Its lists in place, or its function: plans of what it was before are not used again."""
    block_mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    q, v = torch.zeros(1, 1, 64, 64), torch.eye(64)[None, None]

    def seen() -> torch.Tensor:
        return stof.attention(q, q, v, block_mask)[0, 0] > 0

    assert torch.equal(seen(), masks.causal().to_dense(64)[0, 0])
    block_mask.mask_mod = window
    assert torch.equal(seen(), masks.from_block_mask(block_mask).to_dense(64)[0, 0])
    block_mask.kv_num_blocks[..., -1].zero_()
    block_mask.full_kv_num_blocks[..., -1].zero_()
    assert not bool(seen()[-16:].any())
    assert bool(seen()[:-16].any(1).all())


def test_block_mask_without_a_function_keeps_its_blocks() -> None:
    block_mask = blocks([[0], [1], [2], [3]], [[], [], [], []])
    expected = torch.block_diag(*[torch.ones(16, 16)] * 4).bool()
    assert torch.equal(masks.from_block_mask(block_mask).to_dense(64)[0, 0], expected)


def test_block_mask_with_short_lists() -> None:
    """Index lists may be shorter than the number of key blocks."""
    indices = torch.tensor([[[[5], [2]]]], dtype=torch.int32)
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(32, 96), compute_q_blocks=False)
    dense = masks.from_block_mask(block_mask).to_dense(32, 96)[0, 0]
    assert int(dense.sum()) == 2 * 16 * 16
    assert dense[0, 80]
    assert dense[16, 32]


def test_block_mask_of_two_dimensions() -> None:
    """Block lists may lack batch and heads."""
    indices = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    counts = torch.tensor([2, 1], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, compute_q_blocks=False)
    dense = masks.from_block_mask(block_mask).to_dense(32)[0, 0]
    assert int(dense.sum()) == 3 * 256
    assert not dense[16, 0]


def test_block_mask_of_another_size() -> None:
    block_mask = create_block_mask(causal, 2, 3, 64, 64, device="cpu")
    mask = masks.from_block_mask(block_mask)
    with pytest.raises(ShapeError, match="made for q_len 64, the call has 32"):
        stof.plan(mask, 32)
    with pytest.raises(ShapeError, match="batch size of 2, the inputs have 4"):
        stof.plan(mask, 64, batch=4, heads=3)
    with pytest.raises(ShapeError, match="number of heads of 3, the inputs have 6"):
        stof.plan(mask & masks.causal(), 64, batch=2, heads=6)


def test_sliced_block_masks_are_refused_with_the_reason() -> None:
    block_mask = create_block_mask(causal, 2, 3, 64, 64, device="cpu")[0]
    with pytest.raises(MaskFunctionError, match="slic"):
        stof.plan(block_mask, 64, batch=1, heads=3)


@pytest.mark.parametrize("value", [None, 3, "x", masks.causal(), torch.ones(2, 2, dtype=torch.bool)])
def test_what_is_not_a_block_mask(value: Any) -> None:
    with pytest.raises(MaskError, match=r"takes torch.nn.attention.flex_attention.BlockMask"):
        masks.from_block_mask(value)


def test_as_mask() -> None:
    assert masks.as_mask(None) == masks.full()
    assert masks.as_mask("causal") == masks.causal()
    keep = torch.ones(4, 4, dtype=torch.bool)
    assert masks.as_mask(keep) == masks.from_dense(keep)
    for value in (3, [True], {"causal": 1}, stof.plan(masks.causal(), 4)):
        with pytest.raises(MaskError, match=f"got {type(value).__name__}"):
            masks.as_mask(value)
