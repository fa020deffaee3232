"""Pictures of masks and their tiles: `draw_text` for a terminal, `draw_png` for a document or a notebook."""

from stof.drawing.png import draw_png
from stof.drawing.raster import KINDS, Raster, rasterize
from stof.drawing.text import DrawStyle, draw_text

__all__ = ["KINDS", "DrawStyle", "Raster", "draw_png", "draw_text", "rasterize"]
