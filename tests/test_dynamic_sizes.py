"""Lists of dynamic plans with more indices, keys or tiles than a program of their fill kernels handles at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stof import masks
from stof.dynamic.mask_buffers import fill_buffers, make_buffers
from tests.kernels.test_work import DEVICE
from tests.test_dynamic import assert_exact, buffers_of

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]


def chosen(count: int, limit: int) -> Tensor:
    return torch.randperm(limit)[:count].sort().values.int().to(DEVICE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("q_len", "kv_len", "block"), [(96, 1548, 64), (20, 70_000, 16)])
def test_vertical_slash_of_many_indices(q_len: int, kv_len: int, block: int) -> None:
    """More columns, distances and table words than a program handles at once; nothing is left of the first mask."""
    buffers = None
    for _ in range(2):
        mask = masks.vertical_slash(chosen(700, kv_len), chosen(400, kv_len)).with_query_offset(kv_len - q_len)
        buffers = buffers or buffers_of(mask, q_len, kv_len, block=block)
        assert_exact(mask, q_len, kv_len, buffers)


@pytest.mark.slow
def test_vertical_slash_of_long_lists() -> None:
    """All of a list is read, and checked, where a program handles 2048 indices at once."""
    slash = chosen(2500, 2600)
    mask = masks.vertical_slash(chosen(5, 2600), slash).with_query_offset(2584)
    buffers = buffers_of(mask, 16, 2600)
    assert_exact(mask, 16, 2600, buffers)
    for place in (7, 2300):
        bad = slash.clone()
        bad[place] = bad[place - 1]
        fill_buffers(buffers, masks.vertical_slash(chosen(5, 2600), bad).with_query_offset(2584))
        assert bool(buffers.flags.all())
        buffers.flags.zero_()


@pytest.mark.parametrize(("kv_len", "k", "block_size"), [(4000, 100, 16), (9000, 120, 64)])
def test_block_topk_of_many_blocks(kv_len: int, k: int, block_size: int) -> None:
    """More tiles of a row block than are written at once."""
    scores = torch.randn(2, -(-64 // block_size), -(-kv_len // block_size)).to(DEVICE)
    mask = masks.block_topk(scores, k, block_size=block_size)
    assert_exact(mask, 64, kv_len, buffers_of(mask, 64, kv_len, block=block_size))


def test_lists_without_a_hopper_gpu() -> None:
    """Lists of the block-wise kernel are filled wherever no Hopper kernel runs, though it could take these masks."""
    mask = masks.block_topk(torch.randn(2, 2), 1, block_size=64)
    buffers = make_buffers(mask, (128, 128), (1, 1), torch.device("cpu"), None)
    assert not buffers.hopper_refusals()
    assert "block_wise" in buffers.filled


@pytest.mark.parametrize("kv_len", [1024, 1025, 2100])
def test_dense_of_many_keys(kv_len: int) -> None:
    keep = torch.rand(2, 40, kv_len) < torch.tensor([0.02, 0.995])[torch.arange(kv_len) % 2]
    mask = masks.from_dense(keep.to(DEVICE))
    assert_exact(mask, 40, kv_len, buffers_of(mask, 40, kv_len))
