"""Draw the mask gallery: one small SVG for each mask that `gallery.md` names, and its table of costs.

    python docs/draw_gallery.py            # writes docs/images/gallery/*.svg, prints the table's rows

Pictures show 512 tokens in tiles of 32 x 32; costs are those of `LENGTH` tokens in tiles of 64 x 64.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

import stof
from stof.drawing import KINDS, rasterize
from stof.layout import Layout, LayoutConfig

FOLDER = Path(__file__).parent
LENGTH = 4096
DRAWN, PIXELS, GAP = 512, 128, 12
# A grid has as many tokens as the picture.
DRAWN_AS = {"grid": "neighborhood_2d(16, 32, 7)"}
INK = ("#FFFFFF", "#B9CBDB", "#7FA3C4", "#456986", "#12283D")
COLOURS = dict(zip(KINDS, ("#0072B2", "#E69F00", "#56B4E9", "#D55E00"), strict=True))
BAR = "&#124;"  # "|" within a table
ROW = re.compile(
    r"^\| !\[[^]]*\]\(images/gallery/(?P<name>[\w-]+)\.svg\) \| <code>(?P<mask>[^<]+)</code> \| (?P<figures>.*) \|$"
)


def layout_of(mask: str, length: int, block: int) -> Layout:
    return stof.plan(mask, length, device="cpu", config=LayoutConfig(block, block)).layout


def figures(mask: str) -> str:
    """Kept scores, full and partial tiles, and computed over kept scores, as the table has them."""
    found = stof.plan(mask, LENGTH, device="cpu", config=LayoutConfig(64, 64)).statistics()
    return (
        f"{100 * found.density:.2f} % | {found.full_tiles} | {found.partial_tiles} | {found.computed_over_needed:.2f}"
    )


def runs(pixels: Tensor, left: int) -> str:
    """An SVG path of the true pixels, one rectangle for each horizontal run."""
    out = []
    for y, row in enumerate(pixels.tolist()):
        x = 0
        while x < len(row):
            end = x
            while end < len(row) and row[end]:
                end += 1
            if end > x:
                out.append(f"M{left + x} {y}h{end - x}v1h{x - end}z")
            x = max(end, x + 1)
    return "".join(out)


def picture(mask: str) -> str:
    raster = rasterize(layout_of(mask, DRAWN, 32), PIXELS, PIXELS)
    shade = (raster.kept * (len(INK) - 1)).ceil().long()
    paths = [(INK[level], runs(shade == level, 0)) for level in range(1, len(INK))]
    kind = torch.where(raster.tiles.sum(0) > 0, raster.tiles.argmax(0), -1)
    paths += [(colour, runs(kind == number, PIXELS + GAP)) for number, colour in enumerate(COLOURS.values())]
    width, height = 2 * PIXELS + GAP + 2, PIXELS + 2
    frames = "".join(f'<rect x="{x}" width="{PIXELS}" height="{PIXELS}"/>' for x in (0, PIXELS + GAP))
    drawn = "".join(f'<path fill="{colour}" d="{path}"/>' for colour, path in paths if path)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width} {height}" '
        f'width="{2 * width}" height="{2 * height}" '
        f'shape-rendering="crispEdges"><g fill="#FFF" stroke="#5B6670">{frames}</g>{drawn}</svg>\n'
    )


def rows() -> list[tuple[str, str, str]]:
    """Name, mask and figures of each row of the gallery's table."""
    lines = (FOLDER / "gallery.md").read_text(encoding="utf-8").splitlines()
    found = filter(None, map(ROW.match, lines))
    return [(row["name"], row["mask"].replace(BAR, "|"), row["figures"]) for row in found]


def main() -> None:
    for name, mask, _ in rows():
        (FOLDER / "images" / "gallery" / f"{name}.svg").write_text(picture(DRAWN_AS.get(name, mask)), encoding="utf-8")
        text = mask.replace("|", BAR)
        print(f"| ![{name}](images/gallery/{name}.svg) | <code>{text}</code> | {figures(mask)} |")


if __name__ == "__main__":
    main()
