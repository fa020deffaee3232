"""Layouts: a mask compiled to row blocks, tiles and bitmaps (see `Layout`)."""

from stof.layout import orders
from stof.layout.builders.build import build_layout, in_columns
from stof.layout.config import LayoutConfig
from stof.layout.layout import Layout
from stof.layout.statistics import LayoutStatistics, statistics

__all__ = ["Layout", "LayoutConfig", "LayoutStatistics", "build_layout", "in_columns", "orders", "statistics"]
