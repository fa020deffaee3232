"""Packed integers: every value comes back, and no two forms of one field meet."""

from __future__ import annotations

import torch

from stof.kernels import packed_integers as packed

NUMBERS = torch.cat([torch.arange(100), torch.tensor([2**15, 2**16 - 1, 2**28 - 1])]).int()


def test_row_blocks() -> None:
    numbers = torch.cat([NUMBERS, torch.tensor([2**31 - 3])]).int()
    fields = packed.nan_row_block(numbers)
    assert torch.equal(packed.nan_row_block(fields), numbers)
    assert bool(packed.asks_for_nan(fields).all())
    assert not bool(packed.asks_for_nan(torch.cat([numbers, torch.tensor([-1])])).any())


def test_columns() -> None:
    runs, compacted = packed.run_column(NUMBERS), packed.compacted_column(NUMBERS)
    assert torch.equal(packed.run_column(runs), NUMBERS)
    assert torch.equal(packed.compacted_position(compacted), NUMBERS)
    for entries, is_run, is_compacted in ((NUMBERS, False, False), (runs, True, False), (compacted, False, True)):
        assert bool((packed.is_run(entries) == is_run).all())
        assert bool((packed.is_compacted(entries) == is_compacted).all())


def test_bitmaps_of_pairs() -> None:
    for skipped in range(8):
        entries = packed.pair_bitmap(NUMBERS, skipped)
        assert bool((entries >= 0).all())
        assert torch.equal(packed.pair_bitmap_row(entries), NUMBERS)
        assert bool((packed.pair_skipped(entries) == skipped).all())


def test_two_counts() -> None:
    first, second = torch.tensor([[0, 1, 1, 32765], [1, 0, 1, 32765]]).int()
    sums = packed.two_counts(first, second).cumsum(0).int()
    assert torch.equal(packed.first_count(sums), first.cumsum(0).int())
    assert torch.equal(packed.second_count(sums), second.cumsum(0).int())
