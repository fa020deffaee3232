"""The cells of the paper's experiments that a command line asks for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch

from benchmarks.paper import attention, motivation, search, selector
from benchmarks.paper import models as whole
from benchmarks.paper.experiment import Cell, Report
from stof.errors import ArgumentError, shown


def cells_of(parts: Sequence[str], models: str, device: torch.device, report: Report) -> list[Cell]:
    """The cells of some parts, in the order in which they are measured. On the CPU tiny ones."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    names = known_words("--models", models, list(whole.MODELS))
    listed: list[Cell] = []
    if {"fig9", "fig10", "order"} & set(parts):
        listed += attention.cells(device, dtype, report)
    if {"fig11", "fig12"} & set(parts):
        listed += whole.cells(names, device, dtype)
    if {"fig3", "fig4"} & set(parts):
        listed += motivation.cells(device, dtype)
    if {"fig13", "table4"} & set(parts):
        listed += search.cells(names, device, dtype)
    if "selector" in parts:
        listed += selector.cells(device, dtype)
    if "unseen" in parts:
        listed += selector.unseen_cells(device, dtype)
    return [cell for cell in listed if set(cell.parts) & set(parts)]


def known_words(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Words separated by spaces or commas, all that are known for none.

    Raises:
        ArgumentError: an unknown one; names the nearest.
    """
    words = re.split(r"[\s,]+", text.strip()) if text.strip() else list(known)
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1, 0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ArgumentError(f"{option}: there is no {shown(word)}; {hint}There are {', '.join(known)}")
    return list(dict.fromkeys(words))
