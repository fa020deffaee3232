"""STOF: attention under any mask, and operator fusion for the rest of the model.

out = stof.attention(q, k, v, stof.masks.sliding_window(256) | stof.masks.global_tokens(64))
"""

from stof import errors, masks
from stof.attention import attention, explain, plan
from stof.dynamic import DynamicPlan, dynamic_plan
from stof.layout import Layout, LayoutConfig
from stof.plans import Plan, plan_cache

__version__ = "0.1.0"

__all__ = [
    "DynamicPlan",
    "Layout",
    "LayoutConfig",
    "Plan",
    "attention",
    "dynamic_plan",
    "errors",
    "explain",
    "masks",
    "plan",
    "plan_cache",
]
