"""Which implementation runs a call and how: capabilities declared once, refusals reported together, times estimated."""

from stof.selection.capabilities import CallSpec, Capabilities
from stof.selection.default_layout import best_layout, default_config
from stof.selection.gpu_choices import gpu_choices, reads_unseen_too
from stof.selection.implementations import IMPLEMENTATIONS, Implementation
from stof.selection.kernel_choice import KernelChoice
from stof.selection.mask_geometry import Geometry, LayoutGeometry, MaskGeometry
from stof.selection.select import (
    Candidate,
    Explanation,
    candidates,
    choose,
    default_implementation,
    failures,
    first_of,
    refusals,
    weighed,
)
from stof.selection.token_order import TokenOrder
from stof.selection.token_order_search import better_token_order

__all__ = [
    "IMPLEMENTATIONS",
    "CallSpec",
    "Candidate",
    "Capabilities",
    "Explanation",
    "Geometry",
    "Implementation",
    "KernelChoice",
    "LayoutGeometry",
    "MaskGeometry",
    "TokenOrder",
    "best_layout",
    "better_token_order",
    "candidates",
    "choose",
    "default_config",
    "default_implementation",
    "failures",
    "first_of",
    "gpu_choices",
    "reads_unseen_too",
    "refusals",
    "weighed",
]
