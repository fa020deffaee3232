"""Plans in files: the layout, with the text of its mask and the sizes it serves."""

from __future__ import annotations

import os

import torch

from stof.errors import PlanFileError
from stof.layout import Layout
from stof.layout.io import load_layout, save_layout
from stof.plans.calls import CallSizes


def write_plan(path: str | os.PathLike[str], layout: Layout, mask_text: str, call_sizes: CallSizes) -> None:
    """Write one safetensors file, atomically."""
    batch, heads = call_sizes
    save_layout(layout, path, {"mask": mask_text, "batch": str(batch), "heads": str(heads)})


def read_plan(path: str | os.PathLike[str], device: torch.device) -> tuple[Layout, str, CallSizes]:
    """What `write_plan` was given.

    Raises:
        PlanFileError: the file does not validate.
    """
    layout, extra = load_layout(path, device)
    expected = {"batch": layout.mask_batch, "heads": layout.mask_heads}
    for name, size in expected.items():
        if extra.get(name) not in (("None", str(size)) if size == 1 else (str(size),)):
            raise PlanFileError(
                f"{os.fspath(path)} does not say for which {name} its mask serves (it has {extra.get(name)!r}); "
                "it was written by an earlier version: make it again with plan.save(path)"
            )
    batch, heads = (None if extra[name] == "None" else int(extra[name]) for name in expected)
    return layout, extra.get("mask", ""), (batch, heads)
