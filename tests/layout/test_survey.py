"""Surveys: the tiles a layout would have, counted without building it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import ArgumentError
from stof.layout import build_layout, orders
from stof.layout import survey as surveys
from stof.layout.compaction import column_use
from stof.layout.orders.named import named_order
from stof.layout.survey import Survey, survey, survey_of_layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.selection import LayoutGeometry, MaskGeometry
from tests.examples import examples
from tests.strategies import dense_masks, line_masks, mask_trees, row_orders

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def _look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it may pay or not, columns are compacted as a layout would."""
    monkeypatch.setattr(surveys, "is_worthwhile", lambda *tiles: True)


lengths = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 129, 200, 390])
geometries = st.lists(
    st.builds(
        LayoutConfig,
        block_m=st.sampled_from([1, 4, 16, 32, 64, 128, 192]),
        block_n=st.sampled_from([16, 32, 64, 128, 256]),
        slab=st.sampled_from([None, 1, 8, 16]),
    )
    | st.builds(
        LayoutConfig,
        block_m=st.sampled_from([4, 64, 192]),
        block_n=st.sampled_from([16, 64]),
        slab=st.just(1),
        compact_columns=st.just(True),
    ),
    min_size=1,
    max_size=4,
)


def assert_counts(
    found: Survey,
    mask: Mask,
    q_len: int,
    kv_len: int,
    wanted: list[LayoutConfig],
    batch: int = 1,
    heads: int = 1,
    row_order: Tensor | None = None,
) -> None:
    """Every geometry's counts are those of the layout it describes, and rows keep what they keep."""
    assert set(found.counts) == set(wanted)
    for config, counts in found.counts.items():
        layout = build_layout(mask, q_len, kv_len, config, batch=batch, heads=heads, row_order=row_order)
        assert (found.mask_batch, found.mask_heads) == (layout.mask_batch, layout.mask_heads)
        # Counted mask by mask; the layout has each distinct one once.
        pattern = layout.pattern_of.flatten()[: len(counts.partial)].long()
        partial = layout.partial_count.long().view(layout.patterns, -1)[pattern]
        full = layout.row_block_ptr.diff().long().view(layout.patterns, -1)[pattern] - partial
        assert torch.equal(counts.partial, partial), config
        assert torch.equal(counts.full, full), config
        assert counts.partial.dtype == counts.full.dtype == torch.int64
        compacted = survey_of_layout(layout).counts[config].compacted_keys
        assert (
            counts.compacted_keys == compacted
            if layout.pattern_of.numel() == len(pattern)
            else counts.compacted_keys <= compacted
        )
    keep = mask.to_dense(q_len, kv_len, batch=batch, heads=heads).flatten(0, 1)[: len(found.kept)]
    if row_order is not None:
        keep = keep[:, row_order.long()]
    assert torch.equal(found.kept, keep.sum(-1))


@given(data=st.data(), q_len=lengths, kv_len=lengths, wanted=geometries)
@examples(80)
def test_counts_equal_the_layouts(data: st.DataObject, q_len: int, kv_len: int, wanted: list[LayoutConfig]) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    mask_batch, mask_heads = data.draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
    textures = data.draw(st.sampled_from([dense_masks, line_masks]))
    mask = as_mask(data.draw(textures(q_len, kv_len, mask_batch, mask_heads)))
    order = data.draw(row_orders(q_len))
    found = survey(mask, q_len, kv_len, wanted, batch=batch, heads=heads, row_order=order)
    assert_counts(found, mask, q_len, kv_len, wanted, batch, heads, order)


@given(mask=mask_trees(kv_len=64), q_len=st.integers(1, 64), wanted=geometries)
def test_counts_of_expressions(mask: Mask, q_len: int, wanted: list[LayoutConfig]) -> None:
    assert_counts(survey(mask, q_len, 64, wanted), mask, q_len, 64, wanted)


@pytest.mark.parametrize("q_len", [128, 300, 384, 800])
def test_strips_change_nothing(monkeypatch: pytest.MonkeyPatch, q_len: int) -> None:
    """Masks are evaluated as many rows at a time as all heights divide: here 128, and 384."""
    mask, wanted = masks.longformer(20, 3), [LayoutConfig(16, 32), LayoutConfig(64, 16, 1), LayoutConfig(128, 64, 8)]
    monkeypatch.setattr("stof.layout.builders.strips.STRIP_SCORES", 1)
    for heights in (wanted, [*wanted, LayoutConfig(192, 128), LayoutConfig(192, 128, 16)], [LayoutConfig(192, 128)]):
        assert_counts(survey(mask, q_len, 830, heights), mask, q_len, 830, heights)


def test_only_masks_with_something_to_gain_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    looked = []
    monkeypatch.setattr(
        surveys, "column_use", lambda own, height: looked.append((own.b, own.h)) or column_use(own, height)
    )
    compacting = [LayoutConfig(*tile, 1, compact_columns=True) for tile in ((128, 128), (64, 64))]
    wanted = [*compacting, LayoutConfig(64, 64)]
    lines = masks.strided(40, 64, 3)
    for mask, heads in ((masks.causal(), 1), (masks.longformer(64, 64), 1), (masks.per_head([masks.full(), lines]), 2)):
        found = survey(mask, 1024, 1024, wanted, heads=heads)
        assert set(found.counts) == set(wanted)
        assert all(bool(found.counts[geometry].compacted_keys) == (heads == 2) for geometry in compacting)
    assert looked == [(0, 1)]
    # Who asks for nothing else will have it.
    survey(masks.causal(), 1024, 1024, compacting)
    assert looked == [(0, 1), (0, 0)]


def test_many_masks_are_sampled() -> None:
    """The first 8 masks stand for all of them, in the layout's order: batch entries first."""
    keep = torch.rand(3, 5, 20, 40) < torch.linspace(0, 1, 15).view(3, 5, 1, 1)
    found = survey(as_mask(keep), 20, 40, [LayoutConfig(16, 16)], batch=3, heads=5)
    assert (found.mask_batch, found.mask_heads) == (3, 5)
    assert found.kept.shape == (surveys.MASKS_COUNTED, 20)
    assert torch.equal(found.kept, keep.flatten(0, 1)[: surveys.MASKS_COUNTED].sum(-1))


def test_no_geometries_count_rows_only() -> None:
    found = survey(masks.causal(), 30, 40, [])
    assert not found.counts
    assert torch.equal(found.kept, masks.causal().to_dense(30, 40)[0].sum(-1))


@given(data=st.data(), q_len=lengths, kv_len=lengths, wanted=geometries)
@examples(30)
def test_survey_of_a_layout(data: st.DataObject, q_len: int, kv_len: int, wanted: list[LayoutConfig]) -> None:
    heads, config = data.draw(st.integers(1, 3)), wanted[0]
    mask = as_mask(data.draw(dense_masks(q_len, kv_len, 1, heads)))
    layout = build_layout(mask, q_len, kv_len, config, heads=heads)
    found = survey_of_layout(layout)
    assert list(found.counts) == [config]
    assert (found.mask_batch, found.mask_heads) == (layout.mask_batch, layout.mask_heads)
    assert found.kept.shape == (layout.patterns, q_len)
    counts = found.counts[config]
    assert torch.equal(counts.partial.flatten(), layout.partial_count.long())
    assert int((counts.partial + counts.full).sum()) == layout.tiles
    # All scores of a row's tiles: no fewer than it keeps.
    dense = layout.to_dense()[0]
    first = [layout.pattern_of[0].tolist().index(pattern) for pattern in range(layout.patterns)]
    assert bool((found.kept >= dense[first].sum(-1)).all())


def test_named_orders() -> None:
    assert torch.equal(named_order("remainder 16", 100), orders.by_remainder(100, 16))
    assert torch.equal(named_order("patch 8 12 4 4", 96), orders.by_patch(8, 12, 4, 4))
    assert named_order("patch 8 12 4 4", 95) is None


@pytest.mark.parametrize("name", ["remainder", "remainder 1 2", "patch 8 12", "zigzag 3", "remainder 0"])
def test_unknown_orders_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError):
        named_order(name, 96)


@pytest.mark.parametrize(
    ("mask", "q_len"),
    [
        (masks.dilated_window(500, dilation=16), 400),
        (masks.neighborhood_2d(32, 32, (7, 7)), 1024),
        (masks.dilated_window(64, dilation=4) & masks.causal(), 300),
    ],
    ids=str,
)
def test_orders_that_masks_name_fit_and_help(mask: Mask, q_len: int) -> None:
    config = LayoutConfig(64, 64, 1)
    plain = survey(mask, q_len, q_len, [config]).counts[config]
    assert mask.row_orders(q_len, q_len)
    tiles = []
    for name in mask.row_orders(q_len, q_len):
        order = named_order(name, q_len)
        assert order is not None
        assert torch.equal(order.sort().values, torch.arange(q_len))
        counts = survey(mask, q_len, q_len, [config], row_order=order).counts[config]
        tiles.append(int((counts.partial + counts.full).sum()))
    assert min(tiles) < int((plain.partial + plain.full).sum())


def test_geometries_of_plans() -> None:
    """A plan that keeps to one layout knows of its mask what one that looks at the mask does."""
    mask, config = masks.longformer(20, 3), LayoutConfig(64, 32)
    layout = build_layout(mask, 200, 200, config)
    kept = LayoutGeometry(layout).survey((LayoutConfig(16, 16),), "remainder 4")
    looked = MaskGeometry(mask, 200, 200).survey((config,), None)
    assert list(kept.counts) == [config]
    for name in ("partial", "full"):
        assert torch.equal(getattr(kept.counts[config], name), getattr(looked.counts[config], name))
    assert bool((kept.kept >= looked.kept).all())  # of a layout, what its tiles compute
