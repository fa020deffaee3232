"""Fewer variants of a kernel that still have every shape of it, and every other property, each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from stof.selection.resources import head_dim_class

if TYPE_CHECKING:
    from tests.kernels.compile_kernels import Case

# What stands in the names of cases that are not the selector's alone.
KINDS = ("made at run time", "one job each", "compacted keys", "few keys a row")


def covering(cases: Iterable[Case]) -> Iterator[Case]:
    """Those that have what none before has.

    Every shape (tile, width, bias), and for each number of rows every way to copy tiles, options, dtypes, chunks and
    what makes the jobs. It is their combinations that are left out.
    """
    seen: set[tuple[object, ...]] = set()
    for case in cases:
        layout, kernel, call = case.choice.layout, case.choice.kernel, case.call
        assert layout is not None
        assert kernel is not None
        rows, width = layout.block_m, head_dim_class(call.head_dim, call.value_dim)
        found = {
            ("bound on spills", case.group),
            (case.choice.implementation, rows, layout.block_n, width, call.has_bias),
            ("copies", rows, layout.slab, layout.compact_columns, case.choice.row_order),
            ("options", rows, call.has_softcap),
            ("dtype", rows, call.dtype),
            ("jobs", rows, kernel.split_tiles > 0, *(kind in case.name for kind in KINDS)),
            ("everything else", rows, replace(kernel, split_tiles=0)),
        }
        if not found <= seen:
            yield case
        seen |= found
