"""Attention split over processes equals attention in one, forward and backward, in both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import stof
import stof.distributed
from stof import masks
from stof.distributed import Shards
from stof.errors import ShapeError, UnsupportedError
from stof.masks import Mask
from tests.distributed.processes import run

BATCH, LENGTH, DIM, VALUE_DIM = 2, 61, 8, 6
HEADS, KV_HEADS = 4, 2
DOCUMENTS = [0, 7, 8, 40, 61]
LIMITS = torch.tensor([60, 3, 20, 9])


def random_bools(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.3


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(9),
    "documents": lambda: masks.documents(cu_seqlens=DOCUMENTS) & masks.causal(),
    "documents of a batch": lambda: masks.documents(cu_seqlens=[DOCUMENTS, [0, 30, 61]]),
    "padding": lambda: masks.padding([61, 20]),
    "longformer": lambda: masks.longformer(4, 3),
    "bigbird": lambda: masks.bigbird(4, 2, blocks=2, block_size=4),
    "strided": lambda: masks.strided(4, 8),
    "text": lambda: "sliding_window(5) | sink_tokens(2)",
    "by head": lambda: masks.per_head([masks.causal(), masks.sliding_window(3), masks.full(), masks.strided(4, 8)]),
    "tensor": lambda: masks.from_dense(random_bools(LENGTH, LENGTH)),
    "tensor by batch entry and head": lambda: random_bools(BATCH, HEADS, LENGTH, LENGTH),
    "function": lambda: lambda b, h, q, k: (q - k).abs() <= LIMITS[h],
    "transposed": lambda: masks.transposed(masks.random_blocks(2, block_size=8)) | masks.causal(),
    "nothing": lambda: ~masks.full(),
}


# Run twice: equal calls give equal bits.
REPEATED = ("causal", "documents of a batch", "bigbird")


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor


def inputs(heads: int, kv_heads: int, length: int = LENGTH) -> list[Tensor]:
    """q, k, v, sinks, and weights of the output and the log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, heads, length, DIM),
        (BATCH, kv_heads, length, DIM),
        (BATCH, kv_heads, length, VALUE_DIM),
        (heads,),
        (BATCH, heads, length, VALUE_DIM),
        (BATCH, heads, length),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def loss_of(out: Tensor, lse: Tensor, weights: list[Tensor]) -> Tensor:
    return (out * weights[0]).sum() + torch.where(lse.isfinite(), lse * weights[1], 0.0).sum()


def in_one_process(mask: Any, tensors: list[Tensor]) -> Results:
    q, k, v, sinks = (x.clone().requires_grad_() for x in tensors[:4])
    out, lse = stof.attention(q, k, v, mask, softcap=5.0, sinks=sinks, return_lse=True)
    gradients = torch.autograd.grad(loss_of(out, lse, tensors[4:]), (q, k, v, sinks))
    return Results(out.detach(), lse.detach(), *gradients)


def split_over_ranks(shards: Shards, tensors: list[Tensor], way: str | None) -> Results:
    q, k, v, sinks = (x.clone().requires_grad_() for x in tensors[:4])
    local = [shards.split(x, 2) for x in (q, k, v)]
    out, lse = stof.distributed.attention(*local, shards, way=way, softcap=5.0, sinks=sinks, return_lse=True)
    loss = loss_of(out, lse, [shards.split(x, 2) for x in tensors[4:]])
    gradients = torch.autograd.grad(loss, (q, k, v, sinks))  # this rank's share
    for gradient in gradients:
        dist.all_reduce(gradient)
    return Results(shards.join(out, -2).detach(), shards.join(lse, 2).detach(), *gradients)


def check_masks(rank: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = inputs(HEADS, KV_HEADS)
    for name in names:
        mask = MASKS[name]()
        expected = in_one_process(mask, tensors)
        shards = stof.distributed.shard(mask, LENGTH, mesh)
        assert sum(shards.tokens) == LENGTH
        assert shards.positions.tolist() == shards.split(torch.arange(LENGTH), 0).tolist()
        for way in ("heads", "keys"):
            results = split_over_ranks(shards, tensors, way)
            for field, one, other in zip(Results._fields, expected, results, strict=True):
                torch.testing.assert_close(
                    other, one, atol=1e-12, rtol=1e-11, msg=f"{name} {way} {field}: {one - other}"
                )
            if name in REPEATED:
                again = split_over_ranks(shards, tensors, way)
                assert all(map(torch.equal, results, again)), f"{name} {way}: two equal calls differ"


def check_sizes(rank: int) -> None:
    """Grouped-query attention of any number of heads, odd lengths, and one token for each rank."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    sizes = ((ranks, 8, 8), (ranks + 1, 4, 1), (61, 4, 1), (61, 12, 3), (61, 12, 6), (301, 4, 4))
    for length, heads, kv_heads in sizes:
        shards = stof.distributed.shard(masks.causal(), length, mesh)
        tensors = inputs(heads, kv_heads, length)
        expected = in_one_process(masks.causal(), tensors)
        for way in ("heads", "keys"):
            for one, other in zip(expected, split_over_ranks(shards, tensors, way), strict=True):
                torch.testing.assert_close(other, one, atol=1e-11, rtol=1e-10)
    assert max(map(len, shards.assignment.ranges)) == 2, "early and late rows are paired"
    half = [x.bfloat16() for x in tensors[:3]]
    wide = stof.attention(*(x.float() for x in half), masks.causal())
    for way in ("heads", "keys"):
        out = stof.distributed.attention(*(shards.split(x, 2) for x in half), shards, way=way)
        torch.testing.assert_close(shards.join(out, 2).float(), wide, atol=2e-2, rtol=2e-2)
    # A gradient of the log-sum-exp that float16, the dtype of the output, does not hold.
    one, k, v = (x.half() * scale for x, scale in zip(tensors, (1, 0.1, 1), strict=False))
    one.requires_grad_()
    _, lse = stof.attention(one, k, v, masks.causal(), return_lse=True)
    (expected,) = torch.autograd.grad(1e5 * lse.sum(), one)
    for way in ("heads", "keys"):
        local, *others = (shards.split(x.detach(), 2) for x in (one, k, v))
        local.requires_grad_()
        _, lse = stof.distributed.attention(local, *others, shards, way=way, return_lse=True)
        (gradient,) = torch.autograd.grad(1e5 * lse.sum(), local)
        torch.testing.assert_close(gradient, shards.split(expected, 2), atol=100, rtol=2e-2)


def check_contexts(rank: int) -> None:
    """Activation checkpointing and compiled code compute the same; tensors of any dtype are split and joined."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))["sp"]
    shards = stof.distributed.shard(masks.causal(), LENGTH, mesh)
    assert [len(ranges) for ranges in shards.assignment.ranges] == [1, 2], "early and late rows are paired"
    tensors = inputs(HEADS, KV_HEADS)

    def attend(q: Tensor, k: Tensor, v: Tensor, way: str) -> Tensor:
        return (2 * stof.distributed.attention(q, k, v, shards, way=way)).sin()

    compiled = torch.compile(attend, backend="eager")
    for way in ("heads", "keys"):
        local = [shards.split(x, 2).requires_grad_() for x in tensors[:3]]
        expected = torch.autograd.grad(attend(*local, way).sum(), local)
        for call in (lambda *x: checkpoint(attend, *x, use_reentrant=False), compiled):
            gradients = torch.autograd.grad(call(*local, way).sum(), local)
            assert all(map(torch.equal, gradients, expected))
    torch.compiler.reset()
    with pytest.raises(Exception, match="outside of compiled graphs"):
        torch.compile(attend, backend="eager", fullgraph=True)(*local, "keys")

    mixed = [x.to(dtype) for x, dtype in zip(local, (torch.float32, torch.float32, torch.bfloat16), strict=True)]
    same = [x.detach().bfloat16().requires_grad_() for x in mixed]
    for way in ("heads", "keys"):
        with torch.autocast("cpu", torch.bfloat16):
            out = stof.distributed.attention(*(x.detach().requires_grad_() for x in mixed), shards, way=way)
        wanted = stof.distributed.attention(*same, shards, way=way)
        assert torch.equal(out, wanted)
        out.sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(attend, *mixed, way, use_reentrant=False)
        gradients = torch.autograd.grad(out.sum(), local)
        assert all(gradient.dtype == torch.float64 and gradient.isfinite().all() for gradient in gradients)

    # Each rank differentiates another result.
    holder = shards.join(torch.full((len(shards.positions),), rank), 0)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = stof.attention(*leaves, masks.causal(), return_lse=True)
    expected = torch.autograd.grad(out[:, :, holder == 0].sum() + lse[:, :, holder == 1].sum(), leaves)
    for way in ("heads", "keys"):
        local = [shards.split(x, 2) for x in leaves]
        results = stof.distributed.attention(*local, shards, way=way, return_lse=True)
        for gradient, wanted in zip(torch.autograd.grad(results[rank].sum(), leaves), expected, strict=True):
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=1e-11)

    for dtype in (torch.bool, torch.int64, torch.int32, torch.bfloat16, torch.float16, torch.complex64, torch.uint16):
        x = (torch.arange(3 * LENGTH) % 2).view(3, LENGTH).to(dtype)
        assert torch.equal(shards.join(shards.split(x, -1), 1), x)
    x = (torch.arange(LENGTH) * (1 - 2j))[:, None]
    for view in (x.conj(), x.conj().imag):  # not what lies in memory
        assert torch.equal(shards.join(shards.split(view, 0), 0), view)
    assert torch.equal(shards.join(shards.split(x, 0).conj().imag, 0), x.conj().imag)
    negative = [shards.split(t, 2).to(torch.complex128).mul(1j).conj().imag for t in tensors[:3]]
    assert all(t.is_neg() for t in negative)
    for way in ("heads", "keys"):
        out = shards.join(stof.distributed.attention(*negative, shards, way=way), 2)
        torch.testing.assert_close(out, stof.attention(*(-x for x in tensors[:3]), masks.causal()))
    x = tensors[0].clone().requires_grad_()
    joined = shards.join(shards.split(x, 2).sin(), 2)
    (gradient,) = torch.autograd.grad((joined * tensors[0]).sum() / dist.get_world_size(), x)
    dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, x.cos() * tensors[0])

    window = shards.with_mask(masks.sliding_window(5))
    assert torch.equal(window.positions, shards.positions)
    for one, other in zip(in_one_process(window.mask, tensors), split_over_ranks(window, tensors, "keys"), strict=True):
        torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-11)
    assert "of another mask" in window.explain()

    text = shards.explain(*(x.to("meta") for x in local))
    assert "in up to 2 ranges for each rank" in text
    assert "(taken)" in text
    assert len(text.splitlines()) == 2 + dist.get_world_size() + 2


def check_bias(rank: int) -> None:
    """A bias has this rank's rows and all columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = stof.distributed.shard(masks.causal(), LENGTH, mesh)
    q, k, v, _, weights, _ = inputs(HEADS, KV_HEADS)
    generator = torch.Generator().manual_seed(4)
    for shape in ((HEADS, LENGTH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH), (BATCH, 1, 1, LENGTH), (LENGTH, LENGTH)):
        bias = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        one = stof.attention(*tensors, masks.causal(), bias=bias)
        expected = torch.autograd.grad((one * weights).sum(), (*tensors, bias))
        rows = bias if shape[-2] == 1 else shards.split(bias, -2)
        out = stof.distributed.attention(*(shards.split(x, 2) for x in tensors), shards, bias=rows)
        gradients = torch.autograd.grad((out * shards.split(weights, 2)).sum(), (*tensors, bias))
        torch.testing.assert_close(shards.join(out, 2), one, atol=1e-12, rtol=1e-11)
        for gradient, wanted in zip(gradients, expected, strict=True):
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=1e-11)


def check_two(rank: int) -> None:
    check_bias(rank)
    check_masks(rank, list(MASKS))
    check_contexts(rank)


def check_four(rank: int) -> None:
    check_sizes(rank)
    check_masks(rank, ["documents of a batch", "bigbird", "by head", "function"])


def check_eight(rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    for name in ("causal", "bigbird", "tensor"):
        mask = MASKS[name]()
        shards = stof.distributed.shard(mask, LENGTH, mesh)
        tensors = inputs(16, 2)
        for way in ("heads", "keys"):
            for one, other in zip(in_one_process(mask, tensors), split_over_ranks(shards, tensors, way), strict=True):
                torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize(
    ("check", "ranks"),
    [
        pytest.param(check_two, 2, id="two processes"),
        pytest.param(check_four, 4, id="four processes", marks=pytest.mark.slow),
        pytest.param(check_eight, 8, id="eight processes", marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(check: Callable[[int], None], ranks: int) -> None:
    run(check, ranks)


def test_one_rank_exchanges_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensors = inputs(HEADS, KV_HEADS)
        mask = MASKS["by head"]()
        shards = stof.distributed.shard(mask, LENGTH, mesh)
        assert shards.split(tensors[0], 2) is tensors[0]
        assert shards.join(tensors[0], 2) is tensors[0]
        out = stof.distributed.attention(*tensors[:3], shards)
        assert torch.equal(out, stof.attention(*tensors[:3], mask))
        bias = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
        out = stof.distributed.attention(*tensors[:3], shards, bias=bias)
        assert torch.equal(out, stof.attention(*tensors[:3], mask, bias=bias))
        with pytest.raises(UnsupportedError, match="has no dropout"):
            stof.distributed.attention(*tensors[:3], shards, dropout_p=0.5)
        with pytest.raises(ShapeError, match="rank 0 holds 61 of 61 tokens, q has 60"):
            stof.distributed.attention(*(x[:, :, 1:] for x in tensors[:3]), shards)
        assert isinstance(shards.mask, Mask)
    finally:
        dist.destroy_process_group()
