"""Pictures of masks and their tiles: `draw_text` for a terminal, `draw_figure` and `draw_picture` with matplotlib."""

from stof.drawing.picture import draw_figure, draw_picture
from stof.drawing.raster import KINDS, Raster, rasterize
from stof.drawing.text import DrawStyle, draw_text

__all__ = ["KINDS", "DrawStyle", "Raster", "draw_figure", "draw_picture", "draw_text", "rasterize"]
