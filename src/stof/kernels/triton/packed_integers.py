"""`stof.kernels.packed_integers` for kernels, in Triton and in Gluon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from stof.kernels import packed_integers


def _for_kernels(function: Callable[..., Any]) -> Any:
    compiled = triton.jit(function)
    return compiled if isinstance(compiled, triton.JITFunction) else function  # Triton's interpreter runs it as it is


asks_for_nan = _for_kernels(packed_integers.asks_for_nan)
compacted_column = _for_kernels(packed_integers.compacted_column)
compacted_position = _for_kernels(packed_integers.compacted_position)
first_count = _for_kernels(packed_integers.first_count)
is_compacted = _for_kernels(packed_integers.is_compacted)
is_run = _for_kernels(packed_integers.is_run)
nan_row_block = _for_kernels(packed_integers.nan_row_block)
pair_bitmap_row = _for_kernels(packed_integers.pair_bitmap_row)
pair_skipped = _for_kernels(packed_integers.pair_skipped)
run_column = _for_kernels(packed_integers.run_column)
second_count = _for_kernels(packed_integers.second_count)
two_counts = _for_kernels(packed_integers.two_counts)
