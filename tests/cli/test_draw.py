"""Pictures: every pixel holds exactly the scores it covers, in files and in terminals."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.text import Text
from torch import Tensor

import stof
from stof import LayoutConfig, Plan, masks
from stof.drawing import KINDS, draw_picture, draw_text, rasterize
from stof.drawing import picture as drawn
from stof.drawing.text import COLOURS
from stof.errors import ArgumentError, MissingDependencyError
from stof.layout import orders

CASES = {
    "causal": (masks.causal(), 100, 100),
    "longformer": (masks.longformer(9, 5), 150, 150),
    "strided": (masks.strided(10, 16, 2), 130, 130),
    "dilated": (masks.dilated_window(63, dilation=8), 128, 128),
    "documents": (masks.documents(cu_seqlens=[0, 30, 31, 90]) & masks.causal(), 90, 90),
    "decode": (masks.causal().with_query_offset(60), 3, 63),
    "tall": (masks.causal(), 129, 7),
    "empty": (masks.padding(0), 40, 40),
    "full": (masks.full(), 64, 128),
}


def pooled(scores: Tensor, height: int, width: int) -> Tensor:
    """Mean of the scores in each pixel, score by score: the plain twin of `rasterize`."""
    q_len, kv_len = scores.shape
    total, count = torch.zeros(height, width, dtype=torch.float64), torch.zeros(height, width, dtype=torch.float64)
    y = (torch.arange(q_len) * height // q_len)[:, None].expand(q_len, kv_len)
    x = (torch.arange(kv_len) * width // kv_len).expand(q_len, kv_len)
    total.index_put_((y, x), scores.double(), accumulate=True)
    count.index_put_((y, x), torch.ones_like(scores, dtype=torch.float64), accumulate=True)
    return total / count


def computed_by_kind(plan: Plan) -> Tensor:
    """bool `[4, q_len, kv_len]`, rows in the layout's order: scores computed by tiles of each kind, tile by tile."""
    layout = plan.layout
    out = torch.zeros(4, layout.q_len, layout.kv_len, dtype=torch.bool)
    for tile, block in enumerate(layout.tile_row_block().tolist()):
        kind = 2 * int(layout.tile_base[tile] < 0) + int(layout.tile_bitmap[tile] >= 0)
        columns = layout.tile_columns(torch.tensor([tile]))[0]
        rows = slice(block * layout.config.block_m, (block + 1) * layout.config.block_m)
        out[kind, rows, columns[columns >= 0]] = True
    return out


@pytest.mark.parametrize("slab", [1, 8, None])
@pytest.mark.parametrize("case", CASES)
def test_pixels_hold_the_pooled_mask_and_tiles(case: str, slab: int | None) -> None:
    mask, q_len, kv_len = CASES[case]
    plan = stof.plan(mask, q_len, kv_len, config=LayoutConfig(16, 16, slab))
    dense = mask.to_dense(q_len, kv_len)[0, 0]
    for height, width in ((q_len, kv_len), (7, 11), (1, 1), (500, 500)):
        raster = rasterize(plan.layout, height, width)
        size = min(height, q_len), min(width, kv_len)
        torch.testing.assert_close(raster.kept, pooled(dense, *size), rtol=0, atol=1e-15)
        tiles = torch.stack([pooled(kind, *size) for kind in computed_by_kind(plan)])
        torch.testing.assert_close(raster.tiles, tiles, rtol=0, atol=1e-15)


def test_permuted_rows_show_the_mask_in_either_order() -> None:
    mask, order = masks.dilated_window(63, dilation=8), orders.by_remainder(128, 8)
    plan = stof.plan(mask, 128, config=LayoutConfig(16, 16, 1), row_order=order)
    dense = mask.to_dense(128)[0, 0]
    torch.testing.assert_close(rasterize(plan.layout, 20, 30).kept, pooled(dense, 20, 30))
    permuted = rasterize(plan.layout, 20, 30, permuted=True)
    torch.testing.assert_close(permuted.kept, pooled(dense[order], 20, 30))
    torch.testing.assert_close(permuted.tiles.sum(0), pooled(computed_by_kind(plan).any(0), 20, 30))


def test_each_pattern_is_drawn_on_its_own() -> None:
    each = [masks.causal(), masks.full(), masks.sliding_window(5)]
    plan = stof.plan(masks.per_head(each), 70, heads=3)
    for pattern, mask in enumerate(each):
        raster = rasterize(plan.layout, 70, 70, pattern=pattern)
        assert torch.equal(raster.kept, mask.to_dense(70)[0, 0].double())


@pytest.mark.parametrize("pattern", [-1, 1])
def test_a_pattern_that_does_not_exist_is_refused(pattern: int) -> None:
    with pytest.raises(ArgumentError, match="between 0 and 0"):
        rasterize(stof.plan(masks.causal(), 16).layout, 4, 4, pattern=pattern)


def test_no_pixels_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one pixel"):
        rasterize(stof.plan(masks.causal(), 16).layout, 0, 4)


def _body(text: Text, rows: int) -> list[str]:
    lines = text.plain.splitlines()[2 : 2 + rows]
    return [line[line.index("│") + 1 : line.rindex("│")] for line in lines]


def test_text_without_colour_shows_the_kind_of_every_cell() -> None:
    # A cell is two queries and one key.
    text = draw_text(stof.plan(masks.causal(), 16), 21, style="shades")
    assert _body(text, 8) == [("▓" * (2 * row + 2)).ljust(16) for row in range(8)]
    assert text.plain.splitlines()[0].split() == ["0", "16"]
    assert all(name in text.plain.splitlines()[-1] for name in KINDS)


def test_text_in_colour_has_four_pixels_a_cell() -> None:
    # 32 tokens: a pixel is two queries and one key, so a line of cells ends with a whole cell and one whose upper
    # pixels are past the diagonal.
    rows = _body(draw_text(stof.plan(masks.causal(), 32), 21), 8)
    assert rows == [("█" * (2 * row + 1) + "▄").ljust(16) for row in range(8)]


def test_text_colours_cells_by_kind_and_dims_sparse_ones() -> None:
    plan = stof.plan(masks.longformer(64, 64), 1024)
    styles = Counter(str(span.style) for span in draw_text(plan, 80).spans)
    assert styles[COLOURS[0]] > 0
    assert styles[COLOURS[1]] > 0
    sparse = stof.plan(masks.dilated_window(2047, dilation=16), 512)
    assert any(str(span.style).startswith("dim #") for span in draw_text(sparse, 60).spans)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("style", ["colour", "shades", "ascii"])
def test_text_fits_its_width(case: str, style: str) -> None:
    mask, q_len, kv_len = CASES[case]
    text = draw_text(stof.plan(mask, q_len, kv_len), 40, style=style, legend=False)  # type: ignore[arg-type]
    lines = text.plain.splitlines()
    assert all(len(line) == 40 for line in lines[1:])
    assert len(lines) <= 40 + 3
    assert style != "ascii" or text.plain.isascii()


def test_a_narrow_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least 15"):
        draw_text(stof.plan(masks.causal(), 4096), 14)


def _read(path: Path) -> Tensor:
    from matplotlib.image import imread

    return torch.from_numpy(imread(path))[..., :3]


def _panel(picture: Tensor, number: int) -> Tensor:
    left = drawn.MARGIN_LEFT + number * (drawn.PANEL + drawn.GAP)
    return picture[drawn.MARGIN_TOP : drawn.MARGIN_TOP + drawn.PANEL, left : left + drawn.PANEL]


def test_png_shows_every_score_and_tile_of_1024_tokens(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mask = masks.longformer(64, 64)
    plan = stof.plan(mask, 1024)
    draw_picture(plan, tmp_path / "mask.png")
    picture = _read(tmp_path / "mask.png")
    assert picture.shape == (1454, 2468, 3)
    inside = slice(4, -4)  # the frame covers the outermost pixels
    dark = _panel(picture, 0).mean(-1) < 0.5
    assert torch.equal(dark[inside, inside], mask.to_dense(1024)[0, 0][inside, inside])
    tiles = computed_by_kind(plan)
    shown = _panel(picture, 1)
    for kind, colour in enumerate(COLOURS):
        rgb = torch.tensor([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
        same = (shown - rgb).abs().amax(-1) < 0.01
        # White lines between tiles take some pixels; none has a colour of another kind.
        assert not (same & ~tiles[kind])[inside, inside].any()
        assert not tiles[kind].any() or (same & tiles[kind]).sum() > 0.75 * tiles[kind].sum()
    nothing = (shown == 1).all(-1)
    assert nothing[inside, inside][~tiles.any(0)[inside, inside]].all()


@pytest.mark.parametrize("case", ["decode", "tall", "empty", "dilated"])
def test_png_of_any_shape(case: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mask, q_len, kv_len = CASES[case]
    order = orders.by_remainder(q_len, 8) if case == "dilated" else None
    plan = stof.plan(mask, q_len, kv_len, row_order=order)
    draw_picture(plan.layout, str(tmp_path / "picture"), title="$not mathematics$ " * 20)
    picture = _read(tmp_path / "picture")
    assert picture.shape[1] == 2468
    assert 600 < picture.shape[0] <= 1454
    assert len((picture * 255).long().sum(-1).unique()) > 10


def test_long_masks_are_drawn_without_their_dense_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plan = stof.plan(masks.longformer(64, 16), 8192)
    monkeypatch.setattr(stof.Layout, "to_dense", None)
    monkeypatch.setattr(stof.masks.Mask, "to_dense", None)
    draw_picture(plan, tmp_path / "mask.png")
    draw_text(plan)
    raster = rasterize(plan.layout, 64, 64)
    assert float(raster.kept.mean()) == pytest.approx(plan.statistics().density, rel=1e-12)


def test_pyplot_stays_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw_picture(stof.plan(masks.causal(), 16), tmp_path / "mask.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_missing_matplotlib_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        draw_picture(stof.plan(masks.causal(), 16), tmp_path / "mask.png")


def _differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """The part of the pixels that differ."""
    return float((a != b).any(-1).float().mean())


def test_a_third_panel_shows_the_tiles_before(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mask, order = masks.dilated_window(63, dilation=8), orders.by_remainder(128, 8)
    own, permuted = (stof.plan(mask, 128, config=LayoutConfig(16, 16, 1), row_order=rows) for rows in (None, order))
    for name, plan, before in (("both", permuted, own.layout), ("own", own, None), ("permuted", permuted, None)):
        draw_picture(plan, tmp_path / f"{name}.png", before=before)
    both = _read(tmp_path / "both.png")
    assert both.shape == (1454, 3702, 3)
    inside = (slice(4, -4), slice(4, -4))
    second, third = (_panel(both, number)[inside] for number in (1, 2))
    # Before matplotlib 3.11, a place between two pixels changes the lines on 0.1 % of them.
    assert _differing(second, _panel(_read(tmp_path / "own.png"), 1)[inside]) < 0.002
    assert _differing(third, _panel(_read(tmp_path / "permuted.png"), 1)[inside]) < 0.002
    assert _differing(second, third) > 0.1


def test_masks_and_plans_draw_themselves(tmp_path: Path) -> None:
    """As the file of `draw_picture`, and half as large in a notebook."""
    pytest.importorskip("matplotlib")
    mask = masks.per_head([masks.causal(), masks.full()])
    plan = stof.plan(mask, 100, device="cpu")
    draw_picture(plan, tmp_path / "picture.png", title="a", pattern=1)
    for number, figure in enumerate((plan.draw(title="a", pattern=1), mask.draw(100, title="a", pattern=1))):
        figure.savefig(tmp_path / f"{number}.png", dpi=figure.dpi)
        assert (tmp_path / f"{number}.png").read_bytes() == (tmp_path / "picture.png").read_bytes()
        assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="pattern is between 0 and 1"):
        plan.draw(pattern=2)
