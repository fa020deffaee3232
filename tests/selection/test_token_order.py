"""Which order of the tokens would help: figures that match an independent count, and silence where none does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.calibration.layout_alternatives import better_order, estimated
from stof.layout.orders import by_remainder, by_z_order
from stof.layout.orders.search import RowOrders
from stof.selection import TokenOrder, token_order_search
from stof.selection.mask_geometry import MaskGeometry
from stof.testing.mask_grid import Shape

GRID = masks.neighborhood_2d(32, 64, 13)
Z = by_z_order(32, 64)
SHAPE = Shape(1, 12, 12, 64, 2048, 2048)


def asked(mask: masks.Mask, shape: Shape = SHAPE) -> TokenOrder | None:
    return better_order(mask, shape, torch.float16)


def scores_of(keep: Tensor, tiles: LayoutConfig, whole_tiles: bool = True) -> int:
    """Scores that tiles compute: of each row block the slabs with anything kept, rounded up to tiles on a GPU."""
    slab, found = tiles.slab or tiles.block_n, 0
    for rows in keep.split(tiles.block_m):
        slabs = sum(bool(columns.any()) for columns in rows.split(slab, 1))
        per_row = -(-slabs * slab // tiles.block_n) * tiles.block_n if whole_tiles else slabs * slab
        found += len(rows) * per_row
    return found


@pytest.mark.parametrize("given", [GRID, masks.from_dense(GRID.to_dense(2048)[0, 0])], ids=["pattern", "tensor"])
def test_a_grid_of_tokens_is_better_in_z_order(given: masks.Mask) -> None:
    """Also where nothing but the mask itself tells that there is a grid."""
    found = asked(given)
    assert found is not None
    assert found.order == "Z order of a 32 x 64 grid"
    keep = GRID.to_dense(2048)[0, 0]
    assert found.scores == scores_of(keep[Z][:, Z], found.tiles)
    assert found.scores_now == scores_of(keep, found.tiles)
    assert found.estimate_us_now == estimated(given, SHAPE, torch.float16)[0].estimate_us
    assert found.estimate_us == estimated(masks.reordered(given, Z, Z), SHAPE, torch.float16)[0].estimate_us
    for part in (f"{found.scores_now / found.scores:.1f}x fewer scores", f"est. {found.estimate_us:.1f} us instead of"):
        assert part in str(found)


def test_scores_are_those_of_one_head() -> None:
    mask = masks.per_head([GRID, masks.neighborhood_2d(32, 64, 9)])
    found = asked(mask, Shape(8, 2, 2, 64, 2048, 2048))
    assert found is not None
    keeps = mask.to_dense(2048)[0]
    assert found.scores == sum(scores_of(keep[Z][:, Z], found.tiles) for keep in keeps) // 2
    assert found.scores_now == sum(scores_of(keep, found.tiles) for keep in keeps) // 2


def test_dilated_windows_are_better_by_remainder() -> None:
    mask = masks.dilated_window(1023, dilation=16)
    found = asked(mask)
    assert found is not None
    assert found.order == "order of i % 16"
    order = by_remainder(2048, 16)
    assert found.scores == scores_of(mask.to_dense(2048)[0, 0][order][:, order], found.tiles)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.full(),
        masks.sliding_window(100),
        masks.from_dense(masks.causal().to_dense(2048)[0, 0]),
        masks.longformer(64, 64),
        masks.reordered(GRID, Z, Z),
        masks.from_dense(GRID.to_dense(2048)[0, 0][Z][:, Z].contiguous()),
        masks.neighborhood_2d(2, 1024, 13),
    ],
    ids=["causal", "full", "window", "causal tensor", "longformer", "in Z order", "tensor in Z order", "two lines"],
)
def test_no_order_is_better(mask: masks.Mask) -> None:
    assert asked(mask) is None


def test_what_would_take_long_is_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_order_search._MOST_SCORES, "cpu", 2048**2 - 1)
    monkeypatch.setattr(RowOrders, "regular", None)
    assert asked(GRID) is None
    assert asked(GRID, Shape(1, 12, 12, 64, 1024, 2048)) is None, "not the same tokens"


def test_explain_says_so_and_calls_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 256, 16)
    mask = masks.neighborhood_2d(16, 16, 7)
    plan = stof.plan(mask, 256)
    explained = stof.explain(q, q, q, mask)
    found = explained.token_order
    assert found is not None
    assert found.estimate_us is None
    keep, order = mask.to_dense(256)[0, 0], by_z_order(16, 16)
    assert found.scores == scores_of(keep[order][:, order], plan.layout.config, whole_tiles=False)
    assert found.scores_now == scores_of(keep, plan.layout.config, whole_tiles=False) == plan.statistics().computed
    assert str(explained).splitlines()[-1] == str(found)
    assert "tokens in Z order of a 16 x 16 grid (masks.reordered) would compute 1.2x fewer scores" in str(found)
    for other in (masks.causal(), None, masks.sliding_window(30), masks.reordered(mask, order, order)):
        assert stof.explain(q, q, q, other).token_order is None
    # Row patches compute as little where they are worth it, so tokens in Z order would compute no less.
    grid = masks.neighborhood_2d(32, 32, 5)
    assert stof.plan(grid, 1024).permuted_rows
    assert stof.explain(*[torch.randn(1, 1, 1024, 16)] * 3, grid).token_order is None

    monkeypatch.setattr("stof.plans.plan.better_token_order", None)
    monkeypatch.setattr(RowOrders, "regular", None)
    out = stof.attention(q, q, q, masks.neighborhood_2d(16, 16, 9))
    assert out.shape == q.shape


def test_z_order() -> None:
    assert by_z_order(2, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert by_z_order(4, 2).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sorted(by_z_order(5, 13).tolist()) == list(range(65))
    with pytest.raises(stof.errors.ArgumentError, match="grid sizes are >= 1"):
        by_z_order(0, 4)


def test_tiles_are_counted_in_the_tiles_asked_for() -> None:
    """Whatever was counted before."""
    geometry = MaskGeometry(masks.sliding_window(100, 100), 1024, 1024)
    small, large = LayoutConfig(64, 64), LayoutConfig(128, 128)
    geometry.survey((small,), None)
    geometry.survey((large,), "remainder 2")
    found = geometry.survey((large,), None)
    assert large in found.counts
    assert geometry.survey((large,), None) is found
    assert small in geometry.survey((small,), None).counts
