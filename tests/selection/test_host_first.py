"""Where the masks of new plans are evaluated: on the host for small plans of a GPU, as long as that is cheap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stof import LayoutConfig, masks
from stof.layout.builders import host_first
from stof.masks import Mask
from stof.selection import MaskGeometry

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_first, "_evaluated", {})


def host_mask(mask: Mask, length: int, sizes: tuple[int, int] = (1, 1), device: torch.device = CUDA) -> Mask | None:
    return host_first.host_mask(mask, length, length, sizes, device)


def test_masks_with_programs_and_tensors() -> None:
    mask = masks.sliding_window(3) & masks.documents(cu_seqlens=[0, 5, 64])
    assert host_mask(mask, 64) is mask
    dense = masks.from_dense(torch.rand(2, 3, 64, 64) < 0.5)
    found = host_mask(dense, 64, (2, 3))
    assert found is not None
    assert torch.equal(found.to_dense(64, batch=2, heads=3), dense.to_dense(64, batch=2, heads=3))
    assert host_mask(mask, 64, device=torch.device("cpu")) is None
    function = masks.from_function(lambda b, h, i, j: i >= j)
    assert host_mask(function, 64) is function
    table = torch.zeros(64, dtype=torch.int64)
    for function in (
        masks.from_function(lambda b, h, i, j: table[i] == table[j]),  # the table may be on the device
        masks.from_function(lambda b, h, i, j: (i + j) % 3 == 0),  # no kernel serves it, so none is compiled
    ):
        assert host_mask(function, 64) is None
        assert host_mask(masks.per_head([mask, mask, function]), 64, (1, 3)) is None
    assert host_mask(masks.per_head([mask, mask, masks.causal()]), 64, (1, 3)) is not None


def test_the_host_does_so_many_scores() -> None:
    mask = masks.causal()
    length = 2**10
    count = host_first.HOST_SCORES // length**2
    assert [host_mask(mask, length) is mask for _ in range(count + 1)] == [True] * count + [False]
    assert host_mask(mask, length, device=torch.device("cuda", 1)) is mask
    assert host_mask(mask, 2**15) is None


def test_keys_that_lie_together_count_alone() -> None:
    ends = list(range(0, 2**16 + 1, 2**8))
    mask = masks.documents(cu_seqlens=ends)
    geometry = MaskGeometry(mask, 2**16, 2**16, device=CUDA)
    assert not geometry.is_counted_on_device  # 2**24 scores are kept
    assert MaskGeometry(mask | masks.sink_tokens(4), 2**16, 2**16, device=CUDA).is_counted_on_device
    assert MaskGeometry(masks.causal(), 2**16, 2**16, device=CUDA).is_counted_on_device


def test_a_geometry_evaluates_nothing_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of dynamic plans, which CUDA graphs capture, make geometries that nobody asks."""
    asked: list[Any] = []
    monkeypatch.setattr("stof.selection.mask_geometry.host_mask", lambda *given: asked.append(given) or given[0])
    geometry = MaskGeometry(masks.dilated_window(40, dilation=4), 96, 96, device="meta")
    assert geometry.row_orders
    assert not asked
    counted = geometry.survey((LayoutConfig(32, 32),), None)
    assert len(asked) == 1
    assert geometry.row_orders == geometry.orders.names
    assert counted.counts.keys() == {LayoutConfig(32, 32)}
    assert geometry.build(LayoutConfig(32, 32), None).device.type == "meta"


def test_scores_of_masks_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randint(0, 3, (2, 50))
    batched = masks.from_function(lambda b, h, i, j: (table[b, i] == table[b, j]) & (i - j < h + 5))
    cpu = torch.device("cpu")
    for at_once in (2**25, 500):
        monkeypatch.setattr(host_first, "STRIP_SCORES_GPU", at_once)
        for mask, sizes in (
            (batched, (2, 3)),
            (batched & masks.causal(), (2, 3)),
            (~masks.from_dense(table > 1), (1, 1)),
        ):
            q_len, kv_len = (2, 50) if mask.key.startswith("~") else (50, 50)
            scores = host_first.scores_of(mask.frozen(), q_len, kv_len, sizes, cpu)
            assert scores is not None
            assert torch.equal(scores.as_tensor(q_len, kv_len), mask.to_dense(q_len, kv_len, batch=2, heads=3))
    monkeypatch.setattr(host_first, "_MOST_SCORES", 50 * 50 * 6 - 1)
    assert host_first.scores_of(batched.frozen(), 50, 50, (2, 3), cpu) is None
