"""Arguments of the named masks: which are refused, and which mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stof import masks
from stof.errors import MaskError
from stof.masks import Mask


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.sliding_window(-1),
        lambda: masks.sliding_window(1, -1),
        lambda: masks.sliding_window(1.0),
        lambda: masks.sliding_window(True),
        lambda: masks.sliding_window("4"),
        lambda: masks.sliding_window(None),
        lambda: masks.sliding_window(torch.tensor(2.0)),
        lambda: masks.sliding_window(2**31),
        lambda: masks.dilated_window(4, dilation=0),
        lambda: masks.strided(1, 0),
        lambda: masks.strided(1, 4, 5),
        lambda: masks.strided(-1, 4),
        lambda: masks.global_tokens(-1),
        lambda: masks.global_tokens([]),
        lambda: masks.global_tokens([1, -1]),
        lambda: masks.global_tokens(True),
        lambda: masks.global_tokens(torch.tensor(1.5)),
        lambda: masks.sink_tokens(-2),
        lambda: masks.random_blocks(0),
        lambda: masks.random_blocks(1, block_size=0),
        lambda: masks.random_blocks(1, seed=-1),
        lambda: masks.prefix_lm([]),
        lambda: masks.prefix_lm(-1),
        lambda: masks.padding(torch.tensor([1.0])),
        lambda: masks.padding(torch.ones(2, 2, dtype=torch.int64)),
        lambda: masks.padding([1, True]),
        lambda: masks.padding(np.array([3, 4])),
        lambda: masks.documents(),
        lambda: masks.documents([0, 1], cu_seqlens=[0, 1]),
        lambda: masks.documents([[0], [1]], cu_seqlens=[0, 1]),
        lambda: masks.documents([0, True]),
        lambda: masks.documents([0, [1]]),
        lambda: masks.documents([0, 2**31]),
        lambda: masks.documents(torch.tensor([0, 2**31])),
        lambda: masks.documents(torch.zeros(2, 0, dtype=torch.int64)),
        lambda: masks.documents([]),
        lambda: masks.documents(7),
        lambda: masks.documents("ab"),
        lambda: masks.documents([[0, 1], 2]),
        lambda: masks.documents([[0, 1], [2]]),
        lambda: masks.documents([[]]),
        lambda: masks.documents(torch.zeros(1, 2, 3, dtype=torch.int64)),
        lambda: masks.documents(cu_seqlens=[1, 2]),
        lambda: masks.documents(cu_seqlens=[0, 5, 3]),
        lambda: masks.documents(cu_seqlens=[0]),
        lambda: masks.documents(cu_seqlens=[0, 0]),
        lambda: masks.neighborhood_2d(4, 4, 2),
        lambda: masks.neighborhood_2d(4, 4, (3, 3, 3)),
        lambda: masks.neighborhood_2d(4, 4, None),
        lambda: masks.neighborhood_2d(0, 4, 3),
        lambda: masks.per_head(["causal"]),
        lambda: masks.causal().with_query_offset(-(2**31)),
        lambda: masks.from_dense(torch.ones(4, 4, dtype=torch.bool)).with_query_offset(-1),
        lambda: masks.from_function(lambda b, h, i, j: i >= j).with_query_offset(-1),
        lambda: (masks.causal() & ~masks.neighborhood_2d(2, 2, 1)).with_query_offset(-1),
        lambda: masks.causal().with_query_offset(2**31),
        lambda: masks.causal().with_query_offset(True),
        lambda: masks.causal().with_query_offset(1.5),
        lambda: masks.causal().with_query_offset("3"),
        lambda: masks.causal().with_query_offset(None),
    ],
)
def test_bad_arguments(make: Callable[[], Mask]) -> None:
    with pytest.raises(MaskError, match=r"got|takes|is empty|is an|are odd|exactly one"):
        make()


INTS: dict[str, Callable[[Any], Mask]] = {
    "sliding_window": masks.sliding_window,
    "sliding_window right": lambda x: masks.sliding_window(1, x),
    "dilated_window": lambda x: masks.dilated_window(4, dilation=x),
    "strided local": lambda x: masks.strided(x, 4),
    "strided stride": lambda x: masks.strided(1, x),
    "strided width": lambda x: masks.strided(1, 4, x),
    "sink_tokens": masks.sink_tokens,
    "random_blocks": masks.random_blocks,
    "random_blocks size": lambda x: masks.random_blocks(1, block_size=x),
    "random_blocks seed": lambda x: masks.random_blocks(1, seed=x),
    "longformer": masks.longformer,
    "bigbird": lambda x: masks.bigbird(1, blocks=x),
    "neighborhood_2d": lambda x: masks.neighborhood_2d(x, 5, 3),
}
LISTS: dict[str, Callable[[Any], Mask]] = {
    "padding": masks.padding,
    "prefix_lm": masks.prefix_lm,
    "global_tokens": masks.global_tokens,
    "longformer": lambda x: masks.longformer(1, x),
    "documents": masks.documents,
    "documents of lists": lambda x: masks.documents([x, x]),
    "cu_seqlens": lambda x: masks.documents(cu_seqlens=x),
    "kernel": lambda x: masks.neighborhood_2d(5, 5, x),
}
ODD: dict[str, Any] = {
    "bytes": b"\x00\x03",
    "one byte": b"\x03",
    "bytearray": bytearray(b"\x00\x03"),
    "memoryview": memoryview(b"\x00\x03"),
    "text": "03",
    "bool": True,
    "numpy bool": np.bool_(True),
    "bool tensor": torch.tensor(True),
    "bool tensors": torch.tensor([True, True]),
    "float": 3.0,
    "numpy float": np.float32(3),
    "float tensor": torch.tensor([0.0, 3.0]),
    "complex": 3j,
    "None": [None],
    "a dict": {0: 3},
    "a set": {0, 3},
    "a generator": (n for n in (0, 3)),
    "huge": 10**5000,
    "huge and negative": -(10**5000),
    "huge ones": [0, 10**5000],
    "meta": torch.ones(2, dtype=torch.int64, device="meta"),
    "meta number": torch.ones((), dtype=torch.int64, device="meta"),
    "sparse": torch.ones(2, dtype=torch.int64).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.tensor([0, 3])], layout=torch.jagged),
}


@pytest.mark.parametrize("name", [*INTS, *LISTS])
def test_odd_arguments_are_refused_by_our_errors(name: str) -> None:
    make = {**LISTS, **INTS}[name]
    for kind, odd in ODD.items():
        try:
            made = make(odd)
        except MaskError:
            continue
        pytest.fail(f"{kind} became {made!r}")


def test_other_odd_arguments() -> None:
    for odd in (None, 5, "causal", b"ab", torch.ones(2), 10**5000):
        with pytest.raises(MaskError, match="non-empty list of masks"):
            masks.per_head(odd)
    for odd in (1, 0, "no", None, np.bool_(True)):
        with pytest.raises(MaskError, match="causal is True or False"):
            masks.strided(1, 4, causal=odd)


def test_lists_of_integers_of_other_types_mean_the_same() -> None:
    for some in (
        [3, 5],
        (np.int32(3), 5),
        range(3, 6, 2),
        torch.tensor([3, 5], dtype=torch.uint8),
        [torch.tensor(3), 5],
    ):
        assert masks.padding(some) == masks.padding([3, 5])
        assert masks.global_tokens(some) == masks.global_tokens([3, 5])
        assert masks.documents(some) == masks.documents([3, 5])
        assert masks.neighborhood_2d(5, 5, some if isinstance(some, tuple) else (3, 5)).key.endswith("kernel=[3, 5])")


def test_single_integers_of_other_types_mean_the_same() -> None:
    for one in (5, np.int64(5), torch.tensor(5)):
        assert masks.global_tokens(one) == masks.global_tokens(5)
        assert masks.sliding_window(one) == masks.sliding_window(5)
        assert masks.padding(one) == masks.padding(5)
