"""What masks of one structure share, and the statistics that tell them apart."""

from __future__ import annotations

import random

import pytest
import torch

from stof import masks
from stof.masks import Mask
from stof.masks.structure import Outline, dense_statistics, outline

S = 512


def cuts(count: int, seed: int = 0, length: int = S) -> list[int]:
    return [0, *sorted(random.Random(seed).sample(range(1, length), count - 1)), length]


def outlined_of(mask: Mask, q_len: int = S, kv_len: int = S, sizes: tuple[int, int] = (1, 1)) -> Outline | None:
    """The outline of a mask, of all its batch entries and heads."""
    dims = mask.dims(*sizes)
    return outline(mask, mask, q_len, kv_len, [(b, h) for b in range(dims[0]) for h in range(dims[1])])


def structure_of(mask: Mask) -> object:
    outlined = outlined_of(mask, sizes=(2, 4))
    return outlined and outlined.structure


SAME = [
    (masks.sliding_window(5), masks.sliding_window(200, 3)),
    (masks.padding([3]), masks.padding([500, 7])),
    (masks.prefix_lm(3), masks.prefix_lm([400, 1])),
    (masks.documents(cu_seqlens=cuts(3)), masks.documents(cu_seqlens=cuts(90))),
    (masks.documents(cu_seqlens=cuts(3)), masks.documents(cu_seqlens=[cuts(3, 1), cuts(9, 2)])),
    (masks.documents(cu_seqlens=cuts(3)) & masks.causal(), masks.documents(cu_seqlens=cuts(9)) & masks.causal()),
    (
        masks.documents(cu_seqlens=[0, 9, S], kv_cu_seqlens=[0, 300, S], within=masks.causal()),
        masks.documents(cu_seqlens=[0, S, S], kv_cu_seqlens=[0, 1, S], kv_used=[1, 7], within=masks.causal()),
    ),
    (masks.longformer(3, 4), masks.longformer(100, 40)),
    (masks.global_tokens([3, 77]), masks.global_tokens([1, 2, 3, 4, 5])),
    (masks.dilated_window(30, dilation=4), masks.dilated_window(300, dilation=4)),
    (masks.random_blocks(1, block_size=64), masks.random_blocks(3, block_size=64, seed=5)),
    (masks.causal().with_query_offset(3), masks.causal().with_query_offset(0)),
    (masks.per_head([masks.causal(), masks.full()] * 2), masks.per_head([masks.full(), masks.causal()] * 2)),
    (masks.from_dense(torch.ones(S, S, dtype=torch.bool)), masks.from_dense(torch.zeros(2, 4, S, S, dtype=torch.bool))),
]
DIFFERENT = [
    (masks.documents(cu_seqlens=cuts(3)), masks.documents([0] * 100 + [1] * 100 + [0] * (S - 200))),
    (masks.causal(), ~masks.causal()),
    (masks.causal(), masks.full()),
    (masks.sliding_window(5) & masks.padding([30]), masks.sliding_window(5) | masks.padding([30])),
    (masks.dilated_window(30, dilation=4), masks.dilated_window(30, dilation=8)),
    (masks.strided(32, 16), masks.strided(32, 64)),
    (masks.random_blocks(3, block_size=64), masks.random_blocks(3, block_size=32)),
    (masks.neighborhood_2d(16, 32, kernel=(5, 5)), masks.neighborhood_2d(32, 16, kernel=(5, 5))),
    (masks.per_head([masks.causal(), masks.full()] * 2), masks.per_head([masks.causal()] * 4)),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_masks_of_one_structure(one: Mask, other: Mask) -> None:
    assert structure_of(one) is not None
    assert structure_of(one) == structure_of(other)
    assert hash(structure_of(one)) == hash(structure_of(other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_masks_of_different_structures(one: Mask, other: Mask) -> None:
    assert structure_of(one) is not None
    assert structure_of(one) != structure_of(other)


def test_masks_without_a_structure() -> None:
    function = masks.from_function(lambda b, h, i, j: (i + j) % 3 == 0)
    for mask in (function, function & masks.causal(), masks.from_dense(torch.ones(S, S).bool()) & masks.causal()):
        assert outlined_of(mask) is None


@pytest.mark.parametrize("seed", range(30))
def test_kept_keys_are_about_those_that_the_mask_keeps(seed: int) -> None:
    """Exact for windows, lengths and documents; within a factor of 2.5 where masks are composed."""
    draw = random.Random(seed)
    q_len, kv_len = draw.randint(1, 200), draw.randint(200, 400)
    window = masks.sliding_window(draw.randint(0, 300), draw.randint(0, 90)).with_query_offset(draw.randint(0, 200))
    documents = masks.documents(cu_seqlens=cuts(draw.randint(2, 20), seed, kv_len))
    exact = [window, masks.transposed(window), ~window, masks.padding([draw.randint(1, kv_len)]), masks.full()]
    near = masks.sliding_window(draw.randint(0, 300))
    for n, mask in enumerate([*exact, documents, documents & masks.causal(), near & documents, near | documents]):
        lengths = (q_len, kv_len) if n < len(exact) else (kv_len, kv_len)
        kept = float(mask.to_dense(*lengths).sum()) / lengths[0]
        outlined = outlined_of(mask, *lengths)
        assert outlined is not None
        assert outlined.statistics is not None
        known = 2.0 ** outlined.statistics[1]
        if n <= len(exact):
            assert known == pytest.approx(max(1.0, kept), abs=1e-6)
        else:
            assert kept / 2.5 <= known <= kept * 2.5


@pytest.mark.parametrize("shape", [(200, 300), (1, 2, 130, 100), (3, 1, 20, 70), (1, 50)])
def test_statistics_of_dense_masks(shape: tuple[int, ...]) -> None:
    """Of all rows where there are few row blocks; more scattered keys are in more slabs and tiles."""
    keep = torch.rand(shape) < 0.1
    q_len, kv_len = shape[-2:]
    queries, kept, columns, slabs, tiles = (2.0**x for x in dense_statistics(masks.from_dense(keep), q_len, kv_len))
    assert queries == pytest.approx(q_len)
    rows = keep.view(-1, q_len, kv_len)[:2, : max(q_len, q_len // 64 * 64)]
    if q_len < 64:
        assert kept == pytest.approx(max(1.0, float(rows.sum(-1).double().mean())))
        assert columns == pytest.approx(max(1.0, float(rows.any(1).sum(1).double().mean())))
    assert kept <= columns + 1e-6 <= slabs + 2e-6 <= tiles + 3e-6
    window = torch.ones(512, 512, dtype=torch.bool).tril().triu(-31)
    shuffled = window[:, torch.randperm(512)]
    local, scattered = (dense_statistics(masks.from_dense(x), 512, 512) for x in (window, shuffled))
    assert local[:3] == pytest.approx(scattered[:3])
    assert scattered[4] > local[4] + 1


def test_functions_made_anew_have_one_structure() -> None:
    """With other tensors in them; what they keep is measured in their scores."""

    def same_document(lengths: list[int]) -> Mask:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return masks.from_function(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]))

    def outlined(mask: Mask) -> Outline:
        found = outline(mask, masks.from_dense(mask.to_dense(64)), 64, 64, [(0, 0)])
        assert found is not None
        return found

    one, other = outlined(same_document([10, 20, 34])), outlined(same_document([40, 24]))
    assert one == other
    assert one.is_regular
    keep = torch.rand(64, 64) < 0.5
    mixed = outlined(masks.from_dense(keep) & masks.causal())
    assert mixed == outlined(masks.from_dense(~keep) & masks.causal()) != one
    assert not mixed.is_regular


def test_structures_that_whole_tiles_suit() -> None:
    regular = [
        masks.causal(),
        masks.sliding_window(5, 5),
        masks.documents(cu_seqlens=[0, 10, 64]) & masks.causal(),
        masks.padding([10, 64]) & masks.sliding_window(9),
    ]
    others = [
        masks.dilated_window(8, dilation=2),
        masks.longformer(4, 2),
        masks.sliding_window(5) | masks.sink_tokens(2),
        masks.bigbird(4, 2, blocks=1, block_size=16),
    ]
    for mask in (*regular, *others):
        found = outlined_of(mask, sizes=(2, 1))
        assert found is not None
        assert found.is_regular == (mask in regular)
