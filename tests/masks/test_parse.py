"""Text and masks: a repr reads back as the same value, and everything else is refused with a helpful error."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import stof
from stof import masks
from stof.errors import MaskError, MaskSyntaxError, StofError, UnknownMaskError
from stof.masks import Mask, parse
from stof.masks.parse import mask_by_key, readable
from tests.strategies import mask_trees

offsets = st.integers(0, 9)


@st.composite
def any_masks(draw: st.DrawFn) -> Mask:
    """Trees with offsets and heads inside and outside."""
    tree = draw(mask_trees(batch=2))
    match draw(st.integers(0, 3)):
        case 1:
            tree = draw(mask_trees(batch=2)).with_query_offset(draw(offsets)) & tree
        case 2:
            parts = draw(st.lists(mask_trees(batch=2, leaves=2), min_size=2, max_size=3))
            tree = masks.per_head(parts) | tree
        case 3:
            tree = ~(~tree).with_query_offset(draw(offsets))
    return tree.with_query_offset(draw(offsets))


@given(mask=any_masks())
def test_repr_round_trip(mask: Mask) -> None:
    again = parse(repr(mask))
    assert again == mask
    assert repr(again) == repr(mask)
    assert mask_by_key(mask.key) == mask
    assert ";" not in mask.key  # separates the masks of an intersection in compiled code
    assert "\n" not in mask.key  # compiled code has keys in its comments


@given(mask=mask_trees())
def test_the_mask_read_back_is_the_same_function(mask: Mask) -> None:
    assert torch.equal(parse(repr(mask)).to_dense(20, 32), mask.to_dense(20, 32))


@given(mask=any_masks())
def test_pickles_and_copies(mask: Mask) -> None:
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert deepcopy(mask) == copy(mask) == mask


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", masks.causal()),
        (" causal() ", masks.causal()),
        ("sliding_window(511) | global_tokens(64)", masks.sliding_window(511) | masks.global_tokens(64)),
        ("causal & full | ~causal", (masks.causal() & masks.full()) | ~masks.causal()),
        ("causal & (full | ~causal)", masks.causal() & (masks.full() | ~masks.causal())),
        ("~~causal", masks.causal()),
        ("longformer(window=64, global_tokens=[1, 2])", masks.longformer(64, [1, 2])),
        ("documents(cu_seqlens=[[0, 3], [0, 1, 3]])", masks.documents(cu_seqlens=[[0, 3], [0, 1, 3]])),
        ("documents([-1, 0, 0])", masks.documents([-1, 0, 0])),
        ("documents([-1, 0], cu_seqlens=[0, 1, 3])", masks.documents([-1, 0, 0])),
        ("per_head([causal, full & causal])", masks.per_head([masks.causal(), masks.full() & masks.causal()])),
        ("(causal | full).with_query_offset(3)", (masks.causal() | masks.full()).with_query_offset(3)),
        ("causal.with_query_offset(offset=3)", masks.causal().with_query_offset(3)),
        ("strided(4, 8, causal=False)", masks.strided(4, 8, causal=False)),
        ("neighborhood_2d(4, 4, (3, 5))", masks.neighborhood_2d(4, 4, (3, 5))),
        ("causal &\nfull", masks.causal() & masks.full()),
    ],
)
def test_text(text: str, mask: Mask) -> None:
    if "\n" in text:
        text = f"({text})"
    assert parse(text) == mask
    assert masks.as_mask(text) == mask


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("casual", "causal"), ("sliding_windw", "sliding_window"), ("big_bird", "bigbird"), ("doc", "documents")],
)
def test_unknown_names_suggest_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownMaskError, match=f"did you mean '{nearest}'"):
        parse(f"causal & {name}(3)")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownMaskError) as caught:
        parse("qqqq")
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in masks.NAMED_MASKS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "causal causal",
        "causal;full",
        "causal - full",
        "-causal",
        "not causal",
        "causal and full",
        "1",
        "'causal'",
        "causal().key",
        "causal()()",
        "masks.causal()",
        "full(1)",
        "sliding_window",
        "sliding_window(1, left=1)",
        "sliding_window(left=1, left=2)",
        "sliding_window(wide=1)",
        "sliding_window(*[1])",
        "sliding_window(**{'left': 1})",
        "sliding_window(2 ** 9)",
        "sliding_window(open('x'))",
        "sliding_window({[]: 1})",
        "sliding_window(__import__('os'))",
        "per_head(causal)",
        "per_head([causal], x=1)",
        "[causal]",
        "lambda: causal",
        "causal if full else causal",
        "(x := causal)",
        "causal\0",
        "(" * 300 + "causal" + ")" * 300,
        "~" * 5000 + "causal",
        "sliding_window(" + "[" * 5000,
        "sliding_window(" + "9" * 5000 + ")",
    ],
)
def test_what_is_not_an_expression(text: str) -> None:
    with pytest.raises(MaskSyntaxError) as caught:
        parse(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [None, 5, b"causal", ["causal"]])
def test_what_is_not_text(value: object) -> None:
    with pytest.raises(MaskSyntaxError, match="is text"):
        parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["sliding_window(-1)", "padding([])", "sliding_window('3')", "per_head([])"])
def test_bad_arguments_keep_their_own_error(text: str) -> None:
    with pytest.raises(MaskError):
        parse(text)


@given(text=st.text(alphabet="causlfgob_tke()[]{}&|~=,.0123456789'\" \n-*:", max_size=40))
def test_any_text_parses_or_raises_our_error(text: str) -> None:
    try:
        mask = parse(text)
    except StofError:
        return
    assert parse(repr(mask)) == mask


def test_keys_of_masks_without_text_name_them_while_they_live() -> None:
    keep = torch.ones(4, 4, dtype=torch.bool)
    mask = masks.from_dense(keep) & masks.causal()
    key = mask.key
    assert mask_by_key(key) is mask
    with pytest.raises(MaskSyntaxError):
        parse(key)
    del mask
    with pytest.raises(MaskError, match="no longer exists"):
        mask_by_key(key)


def test_a_key_lives_as_long_as_any_equal_mask() -> None:
    """A mask made again from the same tensor, and dropped, must not take the first one's key along."""
    keep = torch.ones(4, 4, dtype=torch.bool)
    first = masks.from_dense(keep)
    second = masks.from_dense(keep)
    assert first == second
    del second
    assert mask_by_key(first.key) == first
    third, key = masks.from_dense(keep), first.key
    del first
    assert mask_by_key(key) == third


def test_keys_with_one_hash_are_told_apart() -> None:
    with mock.patch("stof.runtime.registry._number_of", return_value=1):
        clashing = [masks.from_dense(torch.ones(4, 4, dtype=torch.bool)) for _ in range(3)]
        assert len({mask.number for mask in clashing}) == 3
        assert all(mask_by_key(mask.key) is mask for mask in clashing)
        with pytest.raises(MaskError, match="no longer exists"):
            mask_by_key("from_dense(<bool [4, 4] #1>)")


def test_copies_of_tensors_are_other_values() -> None:
    mask = masks.from_dense(torch.ones(4, 4, dtype=torch.bool)) | masks.sliding_window(1)
    for made in (deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert made != mask
        assert torch.equal(made.to_dense(4), mask.to_dense(4))
        assert mask_by_key(made.key) == made


def test_query_offsets_add_up() -> None:
    mask = masks.causal() | masks.global_tokens(3)
    twice = mask.with_query_offset(1).with_query_offset(3)
    assert twice == mask.with_query_offset(4)
    assert twice.with_query_offset(0) is twice
    assert masks.parse(repr(twice)) == twice
    assert torch.equal(twice.to_dense(9, 20), mask.to_dense(13, 20)[:, :, 4:])
    with pytest.raises(MaskError, match="query offset"):
        twice.with_query_offset(2**31 - 2)


def test_readable_texts_name_what_masks_hold() -> None:
    table = torch.arange(40) // 8

    def blocky(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q] == table[kv]

    of_function = masks.from_function(blocky)
    for mask in (of_function, of_function.frozen()):
        assert readable(repr(mask & masks.causal())) == "function 'blocky' & causal()"
    assert readable(repr(masks.from_function(lambda b, h, q, kv: q > kv))) == "function '<lambda>'"
    assert readable(repr(masks.from_dense(torch.ones(4, 4, dtype=torch.bool)))) == "bool tensor [4, 4]"
    block_mask = create_block_mask(blocky, 1, 1, 40, 40, device="cpu")
    assert readable(repr(masks.from_block_mask(block_mask))) == "BlockMask 40x40"
    assert readable("longformer(64, 64)") == "longformer(64, 64)"
    assert "function 'blocky'" in repr(stof.plan(of_function, 40, device="cpu"))
