"""Attention of variable lengths, against a loop over sequences in float64 that uses nothing of STOF."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.errors import ArgumentError, DeviceError, DtypeError, HeadCountError, MaskError, ShapeError, StofError
from stof.masks import Mask
from stof.masks.aligned import AlignedDocuments
from stof.masks.gpu_program import programs_of
from stof.masks.parse import readable
from stof.masks.structure import outline
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("poisoned_memory")

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]


def ends(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def kept(q_len: int, kv_len: int, window: tuple[int, int], dilation: int = 1) -> Tensor:
    """Bool `[q_len, kv_len]`, score by score."""
    keep = torch.zeros(q_len, kv_len, dtype=torch.bool)
    left, right = window
    for i in range(q_len):
        position = i + kv_len - q_len
        for j in range(kv_len):
            near = (left < 0 or position - left <= j) and (right < 0 or j <= position + right)
            keep[i, j] = near and (position - j) % dilation == 0
    return keep


def by_sequence(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], kv_lengths: list[int], used: list[int],
    window: tuple[int, int], *, softcap: float = 0.0, scale: float | None = None, dilation: int = 1,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`out [total_q, H, Dv]` and `lse [H, total_q]`."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for q_s, k_s, v_s, n in zip(q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), used, strict=True):
        keys, values = (x[:n].repeat_interleave(group, 1) for x in (k_s, v_s))
        scores = torch.einsum("ihd,jhd->hij", q_s, keys) * (q.shape[2] ** -0.5 if scale is None else scale)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if slopes is not None:  # ALiBi
            distance = torch.arange(n) - (torch.arange(len(q_s))[:, None] + n - len(q_s))
            scores = scores - slopes[:, None, None] * distance.abs()
        keep = kept(len(q_s), n, window, dilation)
        scores = scores.masked_fill(~keep, -math.inf)
        sees = keep.any(1)
        scores = scores.masked_fill(~sees[:, None], 0.0)
        outs.append(torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1) * sees[:, None], values))
        lse = torch.logsumexp(scores, -1) if n else scores.sum(-1)
        lses.append(lse.masked_fill(~sees, -math.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def tensors(total_q: int, total_k: int, heads: int, kv_heads: int, value_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(total_q + 100 * total_k)
    shapes = (total_q, heads, 8), (total_k, kv_heads, 8), (total_k, kv_heads, value_dim)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]


lengths = st.integers(0, 12) | st.just(0) | st.integers(30, 70)


@examples(120)
@given(
    data=st.data(),
    pairs=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)) | st.just((-1, -1)),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 0.0, 1.5]),
    same=st.booleans(),
    dtype=st.sampled_from(INTEGERS),
)
def test_forward_and_gradients(
    data: st.DataObject, pairs: list[tuple[int, int]], heads: tuple[int, int], window: tuple[int, int], causal: bool,
    softcap: float | None, same: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    kv_lengths = [n for _, n in pairs]
    q_lengths = kv_lengths if same else [n for n, _ in pairs]
    if max(sum(q_lengths), sum(kv_lengths)) > 255:
        dtype = torch.int16
    used = None
    if data.draw(st.booleans()):
        used = [data.draw(st.integers(0, n)) for n in kv_lengths]
    inputs = [
        x.requires_grad_() for x in tensors(sum(q_lengths), sum(kv_lengths), *heads, data.draw(st.sampled_from([8, 5])))
    ]
    scale = data.draw(st.sampled_from([None, 0.3]))
    reference = by_sequence(
        *inputs, q_lengths, kv_lengths, used or kv_lengths, (window[0], 0) if causal else window,
        softcap=softcap or 0.0, scale=scale,
    )  # fmt: skip
    out_and_lse = stof.varlen_attention(
        *inputs, ends(q_lengths, dtype), ends(kv_lengths, dtype), max(q_lengths), max(kv_lengths), causal=causal,
        window_size=window, softcap=softcap, scale=scale, return_lse=True,
        seqused_k=None if used is None else torch.tensor(used, dtype=dtype),
    )  # fmt: skip
    for actual, wanted in zip(out_and_lse, reference, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)
    if not sum(q_lengths) or not sum(kv_lengths):
        return
    upstream = torch.randn_like(reference[0]), torch.randn_like(reference[1])
    upstream[1][reference[1] == -math.inf] = 0.0
    expected = torch.autograd.grad(reference, inputs, upstream)
    for actual, wanted in zip(torch.autograd.grad(out_and_lse, inputs, upstream), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_longer_sequences(dtype: torch.dtype) -> None:
    """Several row blocks and key blocks, with tiles that sequences share."""
    q_lengths, kv_lengths = [1, 300, 0, 90, 7], [500, 33, 20, 90, 130]
    exact = tensors(sum(q_lengths), sum(kv_lengths), 4, 2)
    rounded = [x.to(dtype).requires_grad_() for x in exact]
    wide = [x.detach().double().requires_grad_() for x in rounded]
    reference, _ = by_sequence(*wide, q_lengths, kv_lengths, kv_lengths, (100, 20))
    out = stof.varlen_attention(*rounded, ends(q_lengths), ends(kv_lengths), window_size=(100, 20))
    assert out.dtype == dtype
    assert out.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=tolerance)
    d_out = torch.randn_like(reference)
    gradients = torch.autograd.grad(out, rounded, d_out.to(dtype))
    for actual, wanted in zip(gradients, torch.autograd.grad(reference, wide, d_out), strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=4 * tolerance, rtol=4 * tolerance)


def test_masks_by_distance() -> None:
    q_lengths, kv_lengths = [9, 20, 4], [14, 11, 4]
    inputs = tensors(33, 29, 2, 2)
    cases: list[tuple[Mask | str, dict[str, Any], tuple[int, int], int]] = [
        (masks.causal(), {}, (-1, 0), 1),
        ("causal() & sliding_window(5)", {"window_size": (7, 3)}, (5, 0), 1),
        (masks.dilated_window(9, 9, dilation=3), {}, (9, 9), 3),
        (masks.dilated_window(9, 9, dilation=3), {"causal": True}, (9, 0), 3),
        (masks.per_head([masks.sliding_window(4, 2)] * 2), {}, (4, 2), 1),
        (masks.sliding_window(6, 2) | masks.sliding_window(1, 5) & ~~masks.full(), {}, (6, 5), 1),
    ]
    for mask, options, window, dilation in cases:
        reference, _ = by_sequence(*inputs, q_lengths, kv_lengths, kv_lengths, window, dilation=dilation)
        out = stof.varlen_attention(*inputs, ends(q_lengths), ends(kv_lengths), mask=mask, **options)
        torch.testing.assert_close(out, reference, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "mask",
    [
        masks.sink_tokens(2), masks.global_tokens(1), masks.random_blocks(1), masks.strided(4, 8), masks.prefix_lm(3),
        masks.padding(4), masks.documents([0] * 5), masks.from_dense(torch.ones(5, 5, dtype=torch.bool)),
        masks.from_function(lambda b, h, q, kv: q >= kv), masks.causal() & (masks.full() | masks.sink_tokens(1)),
        masks.neighborhood_2d(1, 5, 3), masks.longformer(2, 1), masks.transposed(masks.sink_tokens(1)),
    ],
    ids=lambda mask: readable(repr(mask)),
)  # fmt: skip
@pytest.mark.parametrize("q_lengths", [[2, 3], [1, 4]], ids=["equal", "unequal"])
def test_masks_that_count_positions_are_refused(mask: Mask, q_lengths: list[int]) -> None:
    with pytest.raises(MaskError, match=r"by their distance.*by packed positions"):
        stof.varlen_attention(*tensors(5, 5, 1, 1), ends(q_lengths), ends([2, 3]), mask=mask)


def test_equal_lengths_are_packed_documents() -> None:
    """One mask, so that plans and kept choices are shared with `documents`; also where some are empty."""
    cu_seqlens = [0, 3, 3, 10]
    both = masks.documents(cu_seqlens=cu_seqlens, kv_cu_seqlens=torch.tensor(cu_seqlens), within=masks.causal())
    assert both == masks.documents(cu_seqlens=cu_seqlens) & masks.causal()
    assert masks.documents(cu_seqlens=cu_seqlens, kv_cu_seqlens=cu_seqlens) == masks.documents(cu_seqlens=cu_seqlens)
    inputs = tensors(10, 10, 2, 1)
    out = stof.varlen_attention(*inputs, ends([3, 0, 7]), ends([3, 0, 7]), causal=True)
    expected = stof.attention(*(x.transpose(0, 1)[None] for x in inputs), both)[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_dropout_is_repeated_by_its_seed() -> None:
    inputs = tensors(12, 16, 2, 1)
    arguments = (*inputs, ends([5, 7]), ends([6, 10]))
    outs = []
    for _ in range(2):
        torch.manual_seed(1)
        outs.append(stof.varlen_attention(*arguments, dropout_p=0.5))
    torch.testing.assert_close(*outs, atol=0, rtol=0)
    assert not torch.equal(outs[0], stof.varlen_attention(*arguments))


def test_compiled_code_breaks_its_graph() -> None:
    inputs = tensors(12, 16, 2, 1)
    arguments = (*inputs, ends([5, 7]), ends([6, 10]))
    compiled = torch.compile(lambda *a: stof.varlen_attention(*a, causal=True) + 1, backend="eager")
    torch.testing.assert_close(compiled(*arguments), stof.varlen_attention(*arguments, causal=True) + 1)
    whole = torch.compile(lambda *a: stof.varlen_attention(*a), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="reads lengths on the host"):
        whole(*arguments)


def aligned(q: list[int], kv: list[int], used: list[int] | None = None, within: Mask | None = None) -> Mask:
    cu_seqlens, kv_cu_seqlens = ends(q).tolist(), ends(kv).tolist()
    return masks.documents(cu_seqlens=cu_seqlens, kv_cu_seqlens=kv_cu_seqlens, kv_used=used, within=within)


MASKS = {
    "causal": (aligned([20, 0, 33, 5], [7, 9, 50, 5], within=masks.causal()), 58, 71),
    "used keys": (aligned([3, 60, 1], [40, 2, 30], [33, 2, 0], masks.sliding_window(9, 4)), 64, 72),
    "documents alone": (aligned([70, 5], [3, 64]), 75, 67),
    "dilated": (aligned([30, 31], [45, 40], within=masks.dilated_window(30, 6, dilation=3)), 61, 85),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_is_a_value(name: str) -> None:
    mask, q_len, kv_len = MASKS[name]
    assert isinstance(mask, AlignedDocuments)
    assert masks.parse(repr(mask)) == mask
    dense = mask.to_dense(q_len, kv_len)
    assert torch.equal(masks.transposed(mask).to_dense(kv_len, q_len), dense.mT)
    assert torch.equal((~mask).to_dense(q_len, kv_len), ~dense)
    assert torch.equal(stof.plan(mask, q_len, kv_len).to_dense(), dense)
    part = masks.placed(mask, 5, 3, q_len=q_len, kv_len=kv_len)
    assert torch.equal(part.to_dense(q_len - 9, kv_len - 5), dense[..., 5:-4, 3:-2])
    with pytest.raises(ShapeError, match=f"the documents have {kv_len} keys, the call has {kv_len + 1}"):
        mask.to_dense(q_len, kv_len + 1)
    for combined in (lambda: mask & masks.causal(), lambda: masks.full() | ~mask):
        with pytest.raises(MaskError, match=r"documents\(..., within=mask\), whose positions"):
            combined()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", ["mask", "transposed", "part", "transposed part"])
def test_kernels_build_the_same_layouts(name: str, form: str) -> None:
    pytest.importorskip("triton")
    from tests.layout.test_device import assert_same

    mask, q_len, kv_len = MASKS[name]
    if "part" in form:
        mask = masks.placed(mask, 5, 3, q_len=q_len, kv_len=kv_len)
        q_len, kv_len = q_len - 9, kv_len - 5
    if "transposed" in form:
        mask, q_len, kv_len = masks.transposed(mask), kv_len, q_len
    assert_same(mask, q_len, kv_len, stof.LayoutConfig(16, 32))


def test_other_lengths_have_one_structure() -> None:
    def structure(q: list[int], kv: list[int], used: list[int] | None = None) -> object:
        mask = aligned(q, kv, used, masks.causal())
        outlined = outline(mask, mask, sum(q), sum(kv), [(0, 0)])
        assert outlined is not None
        assert outlined.is_regular
        return outlined.structure

    first = structure([3, 70], [90, 20])
    assert first == structure([1] * 40, [16] * 40) == structure([9, 80, 0], [9, 7, 3], [1, 0, 2])


def test_bounds_decide_most_tiles() -> None:
    """Documents far from each other, and causal masks within long ones, are not evaluated score by score."""
    mask = aligned([300, 500], [600, 400], within=masks.causal())
    q, kv = torch.arange(0, 800, 16), torch.arange(0, 1000, 16)
    from stof.masks.bounds import Interval
    from stof.masks.index import Index

    index = Index.make(q, kv, q_len=800, kv_len=1000)
    index = Index(
        index.b, index.h, Interval(index.q, index.q + 15), Interval(index.kv, (index.kv + 15).clamp(max=999)), 800, 1000
    )  # type: ignore[arg-type]
    bounds = mask.tile_bounds(index)
    dense = mask.to_dense(800, 1000)[0, 0]
    tiles = torch.nn.functional.pad(dense, (0, 8)).unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).transpose(1, 2)
    kept_any = tiles.flatten(2).any(2)
    assert not (bounds.empty[0, 0] & kept_any).any()
    undecided = ~(bounds.empty | bounds.full)[0, 0]
    assert undecided.float().mean() < 0.1
    assert programs_of(mask, 800, 1000, [(0, 0)]) is not None


Q, K, V = (x.float() for x in tensors(5, 9, 4, 2))
CU_Q, CU_K = ends([2, 3]), ends([6, 3])


def attend(*, q: Any = Q, k: Any = K, v: Any = V, cu_q: Any = CU_Q, cu_k: Any = CU_K, **options: Any) -> Any:
    return stof.varlen_attention(q, k, v, cu_q, cu_k, **options)


CASES: dict[str, tuple[Callable[[], Any], type[StofError], str]] = {
    "no tensor": (lambda: attend(q=[1]), DtypeError, "q is a torch.Tensor, got list"),
    "batched": (lambda: attend(k=K[None]), ShapeError, r"k is \[tokens, heads, head_dim\].*got \[1, 9, 2, 8\]"),
    "nested": (lambda: attend(v=torch.nested.nested_tensor([V], layout=torch.jagged)), ShapeError, "a nested tensor"),
    "heads": (lambda: attend(q=Q[:, :3]), HeadCountError, "got 3 and 2"),
    "list": (lambda: attend(cu_q=[0, 2, 5]), DtypeError, "cu_seqlens_q is an integer tensor, got list"),
    "floats": (lambda: attend(cu_k=CU_K.float()), DtypeError, "cu_seqlens_k is an integer tensor, got torch.float32"),
    "bools": (lambda: attend(cu_k=CU_K.bool()), DtypeError, "got torch.bool"),
    "dimensions": (lambda: attend(cu_q=CU_Q[None]), ShapeError, r"cu_seqlens_q has one dimension, got \[1, 3\]"),
    "meta": (lambda: attend(cu_q=CU_Q.to("meta")), DeviceError, "cu_seqlens_q is read on the host, got a meta tensor"),
    "start": (lambda: attend(cu_q=CU_Q + 1), ArgumentError, r"from 0 that never decrease, got \[1, 3, 6\]"),
    "decrease": (lambda: attend(cu_k=torch.tensor([0, 10, 9])), ArgumentError, r"never decrease, got \[0, 10, 9\]"),
    "no sequence": (lambda: attend(cu_k=torch.tensor([0])), ArgumentError, r"\[B \+ 1\] numbers.*got \[0\]"),
    "no number": (lambda: attend(cu_k=CU_K[:0]), ArgumentError, r"got \[\]"),
    "total": (lambda: attend(cu_k=CU_K[:2]), ShapeError, "cu_seqlens_k ends at the number of tokens in k, 9, got 6"),
    "sequences": (lambda: attend(cu_q=torch.tensor([0, 5])), ShapeError, "same number of sequences, got 1 and 2"),
    "window": (lambda: attend(window_size=(-2, 0)), ArgumentError, r"-1 for no limit, got \(-2, 0\)"),
    "one window": (lambda: attend(window_size=4), ArgumentError, r"window_size is \(left, right\).*got 4"),
    "float window": (lambda: attend(window_size=(1.0, 2)), ArgumentError, r"got \(1.0, 2\)"),
    "longest q": (
        lambda: attend(max_seqlen_q=2), ArgumentError,
        "max_seqlen_q is an int of at least the longest sequence in q, 3, or None, got 2",
    ),
    "longest k": (lambda: attend(max_seqlen_k=5.5), ArgumentError, "max_seqlen_k.* 6, or None, got 5.5"),
    "used": (
        lambda: attend(seqused_k=torch.tensor([6, 4])), ArgumentError,
        "at most the sequence's keys in cu_seqlens_k, 3 of sequence 1, got 4",
    ),
    "used below 0": (lambda: attend(seqused_k=torch.tensor([-1, 3])), ArgumentError, "of sequence 0, got -1"),
    "used of others": (lambda: attend(seqused_k=CU_K), ShapeError, "one number for each of the 2 sequences, got 3"),
    "softcap": (lambda: attend(softcap=-1.0), ArgumentError, "softcap is a finite float above 0"),
    "no mask": (lambda: attend(mask=7), MaskError, "got int"),
    "within alone": (lambda: masks.documents([0], within=masks.full()), MaskError, "go with kv_cu_seqlens"),
    "number of documents": (
        lambda: masks.documents(cu_seqlens=[0, 1], kv_cu_seqlens=[0, 1, 2]), MaskError, "same number of documents"
    ),
    "documents used": (
        lambda: masks.documents(cu_seqlens=[0, 1], kv_cu_seqlens=[0, 2], kv_used=[3]), MaskError, "kv_used is at most"
    ),
    "no keys": (lambda: masks.documents(cu_seqlens=[0, 1], kv_cu_seqlens=[0, 0]), MaskError, "some keys"),
    "text within": (
        lambda: masks.documents(cu_seqlens=[0, 1], kv_cu_seqlens=[0, 2], within="causal"), MaskError,  # type: ignore[arg-type]
        "within is a mask, got str",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_errors(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()


PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "other-libraries.md"
Q_LENGTHS, KV_LENGTHS = [40, 0, 30, 9], [20, 8, 70, 9]
CALL = (*tensors(79, 107, 4, 2), ends(Q_LENGTHS), ends(KV_LENGTHS))


def assert_defined(*, used: list[int] | None = None, window: tuple[int, int] = (-1, -1), **options: Any) -> None:
    """The call with these options of `by_sequence`, given in FlashAttention's way by the keys that are left."""
    defined = {name: options.pop(name) for name in ("scale", "softcap") if name in options}
    reference = by_sequence(*CALL[:3], Q_LENGTHS, KV_LENGTHS, used or KV_LENGTHS, window, **defined)
    out_and_lse = stof.varlen_attention(*CALL, **options, **defined, return_lse=True)
    for actual, wanted in zip(out_and_lse, reference, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


def lengths_of_every_dtype() -> None:
    reference, _ = by_sequence(*CALL[:3], Q_LENGTHS, KV_LENGTHS, KV_LENGTHS, (-1, -1))
    for dtype in INTEGERS:
        out = stof.varlen_attention(*CALL[:3], ends(Q_LENGTHS, dtype), ends(KV_LENGTHS, dtype))
        torch.testing.assert_close(out, reference, atol=1e-12, rtol=1e-12)


def windows() -> None:
    for window in ((5, 3), (-1, 3), (5, -1), (0, 0), (-1, -1)):
        assert_defined(window=window, window_size=window)
    assert_defined(window=(5, 0), window_size=(5, 3), causal=True)


def softcaps() -> None:
    for softcap in (0.7, 0.0):
        assert_defined(softcap=softcap)


def weights_after_dropout() -> None:
    """Values that show the weights: each is 0, or divided by 0.6."""
    q, k, _, *cu_seqlens = CALL
    values = torch.eye(107, dtype=q.dtype)[:, None].expand(-1, 2, -1).contiguous()
    weights = stof.varlen_attention(q, k, values, *cu_seqlens)
    dropped = stof.varlen_attention(q, k, values, *cu_seqlens, dropout_p=0.4)
    stays = dropped != 0
    torch.testing.assert_close(dropped, torch.where(stays, weights / 0.6, 0.0), atol=1e-12, rtol=1e-12)
    assert 0.55 < stays.sum() / (weights != 0).sum() < 0.65


def results_and_bits() -> None:
    inputs = [x.clone().requires_grad_() for x in CALL[:3]]
    outs = [stof.varlen_attention(*inputs, *CALL[3:], causal=True, return_lse=True) for _ in range(2)]
    assert outs[0][1].shape == (4, 79)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out, _ in outs]
    for one, other in zip(outs[0] + gradients[0], outs[1] + gradients[1], strict=True):
        assert torch.equal(one, other)


def alibi() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    reference, _ = by_sequence(*CALL[:3], Q_LENGTHS, KV_LENGTHS, KV_LENGTHS, (-1, 0), slopes=slopes)
    last = torch.cat([torch.arange(q) + end - q for q, end in zip(Q_LENGTHS, accumulate(KV_LENGTHS), strict=True)])
    bias = -slopes[:, None, None] * (last[:, None] - torch.arange(107)).abs()
    mask = aligned(Q_LENGTHS, KV_LENGTHS, within=masks.causal())
    out = stof.attention(*(x.transpose(0, 1)[None] for x in CALL[:3]), mask, bias=bias)
    torch.testing.assert_close(out[0].transpose(0, 1), reference, atol=1e-12, rtol=1e-12)


def no_block_table() -> None:
    with pytest.raises(TypeError, match="block_table"):
        stof.varlen_attention(*CALL, block_table=torch.zeros(4, 1))  # type: ignore[call-overload]


# By the first cell of a row: what shows that the row is right.
ROWS: dict[str, Callable[[], None]] = {
    "`q, k, v, cu_seqlens_q, cu_seqlens_k`": lengths_of_every_dtype,
    "`max_seqlen_q`, `max_seqlen_k`": lambda: assert_defined(max_seqlen_q=40, max_seqlen_k=torch.tensor(99)),
    "`causal=True`": lambda: assert_defined(causal=True, window=(-1, 0)),
    "`window_size=(left, right)`, -1 for no limit": windows,
    "`softcap`, 0.0 for none": softcaps,
    "`softmax_scale`": lambda: assert_defined(scale=0.9),
    "`dropout_p`": weights_after_dropout,
    "`seqused_k`": lambda: assert_defined(seqused_k=torch.tensor([20, 0, 33, 1]), used=[20, 0, 33, 1]),
    "`return_attn_probs=True`": results_and_bits,
    "`deterministic=True`": results_and_bits,
    "`alibi_slopes`": alibi,
    "`block_table` (paged cache)": no_block_table,
}


def test_every_row_of_the_page_is_shown() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## FlashAttention, variable length")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| .* \|$", section, flags=re.MULTILINE)
    assert rows[0] == "`flash_attn_varlen_func`"
    assert rows[1:] == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_the_page(row: str) -> None:
    ROWS[row]()
