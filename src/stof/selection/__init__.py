"""Which implementation runs a call: capabilities declared once, refusals reported together."""

from stof.selection.capabilities import CallSpec, Capabilities
from stof.selection.implementations import IMPLEMENTATIONS, Implementation, PreparedLayout
from stof.selection.select import (
    Candidate,
    candidates,
    choose,
    default_config,
    default_implementation,
    refined_config,
)

__all__ = [
    "IMPLEMENTATIONS",
    "CallSpec",
    "Candidate",
    "Capabilities",
    "Implementation",
    "PreparedLayout",
    "candidates",
    "choose",
    "default_config",
    "default_implementation",
    "refined_config",
]
