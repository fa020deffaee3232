"""`stof.attention` of DTensors equals that of full tensors, forward and backward, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import stof
from stof import masks
from stof.errors import DtypeError, PlanMismatchError, ShapeError, StofError, UnsupportedError
from tests.distributed.processes import run

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 4, 8, 4, 21, 6
# On a mesh of one dimension, and of two.
LINE: list[tuple[Placement, ...]] = [(Shard(0),), (Shard(1),), (Replicate(),)]
GRID: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
    (Shard(0), Shard(0)),
]


def bools(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < 0.4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BY_HEAD = masks.per_head([masks.sliding_window(n) for n in range(HEADS)])
BY_BATCH = masks.padding([3, 21, 9, 0])
FUNCTION = masks.from_function(lambda b, h, q, k: (q - k) % (h + 2) <= b)
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "sliding_window(5) | sink_tokens(2)",
    "by head": lambda: BY_HEAD,
    "by batch entry": lambda: BY_BATCH,
    "by both": lambda: BY_HEAD & BY_BATCH,
    "function": lambda: FUNCTION,
    "plain function": lambda: lambda b, h, q, k: (q * 3 + k) % (h + b + 2) == 0,
    "tensor": lambda: bools(LENGTH, LENGTH),
    "tensor by head": lambda: bools(HEADS, LENGTH, LENGTH),
    "tensor by both": lambda: bools(BATCH, HEADS, 1, LENGTH),
    "plan": lambda: stof.plan(masks.causal(), LENGTH),
    "plan by head": lambda: stof.plan(BY_HEAD, LENGTH),
    "plan by both": lambda: stof.plan(BY_HEAD & BY_BATCH, LENGTH, batch=BATCH, heads=HEADS),
    "plan of any sizes": lambda: stof.plan(FUNCTION, LENGTH),
}
BIASES = {
    "by head": (HEADS, LENGTH, LENGTH),
    "by batch entry": (BATCH, 1, 1, LENGTH),
    "for all": (LENGTH, LENGTH),
    "by both": (BATCH, HEADS, LENGTH, LENGTH),
}


def inputs() -> list[Tensor]:
    shapes = [(BATCH, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]


def results(tensors: list[Tensor], mask: Any, weights: list[Tensor], bias: Any, sinks: Any) -> list[Tensor]:
    """Output, LSE and gradients, as full tensors."""
    leaves = [x for x in (*tensors, bias, sinks) if x is not None]
    out, lse = stof.attention(*tensors, mask, softcap=5.0, bias=bias, sinks=sinks, return_lse=True)
    finite = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))
    loss = (out * weights[0]).sum() + (finite * weights[1]).sum()
    gradients = torch.autograd.grad(loss, leaves)
    if isinstance(out, DTensor):
        assert out.placements == lse.placements == tensors[0].placements
        for x, gradient in zip(leaves, gradients, strict=True):
            assert gradient.placements == x.placements
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in (out.detach(), lse.detach(), *gradients)]


def check_equal(rank: int, grid: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2) if grid else (2,))
    every, first = (GRID, [Replicate()]) if grid else (LINE, [])
    plain = inputs()
    weights = [numbers(BATCH, HEADS, LENGTH, DIM, seed=8), numbers(BATCH, HEADS, LENGTH, seed=9)]

    def spread(x: Tensor, placements: Any) -> DTensor:
        return distribute_tensor(x, mesh, placements).requires_grad_()

    biases = list(BIASES.values())
    for n, (name, make) in enumerate(MASKS.items()):
        bias = numbers(*biases[n % len(biases)], seed=5)
        sinks = numbers(HEADS, seed=6)
        leaves = [x.clone().requires_grad_() for x in (*plain, bias, sinks)]
        expected = results(leaves[:3], make(), weights, *leaves[3:])
        chosen = every if grid or name == "by both" else [every[n % 2]]
        for m, placements in enumerate(chosen):
            spread_weights = [distribute_tensor(x, mesh, placements) for x in weights]
            tensors = [spread(x, placements) for x in plain]
            # Biases and sinks follow, wherever they are.
            extras = [spread(x, (*first, [Replicate(), Shard(0)][m % 2])) for x in (bias, sinks)]
            of_dtensors = results(tensors, make(), spread_weights, *extras)
            for one, other in zip(expected, of_dtensors, strict=True):
                torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-11, msg=f"{name} {placements}")

    keep = bools(BATCH, HEADS, LENGTH, LENGTH)
    one = stof.attention(*plain, keep)
    for placements in every:
        tensors = [distribute_tensor(x, mesh, placements) for x in plain]
        for of_mask in ((*first, Replicate()), (*first, Shard(3)), placements):
            out = stof.attention(*tensors, distribute_tensor(keep, mesh, of_mask))
            torch.testing.assert_close(out.full_tensor(), one)

    # As a linear layer makes them: sums that are still to be exchanged, and exchanges that still run.
    sums = [DTensor.from_local(x / mesh.size(), mesh, [Partial()] * mesh.ndim) for x in plain]
    parts = [x.redistribute(mesh, every[0]) for x in sums]
    torch.testing.assert_close(stof.attention(*parts, keep).full_tensor(), one)

    # As rotary embeddings leave them under autocast.
    mixed = [x.to(dtype) for x, dtype in zip(plain, (torch.float32, torch.float32, torch.bfloat16), strict=True)]
    spread_mixed = [spread(x.detach(), every[1]) for x in mixed]
    with torch.autocast("cpu", torch.bfloat16):
        of_full = stof.attention(*(x.requires_grad_() for x in mixed), BY_HEAD)
        out = stof.attention(*spread_mixed, BY_HEAD)
    of_full.float().square().sum().backward()
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.full_tensor(), of_full, atol=2e-2, rtol=2e-2)
    for x, y in zip(spread_mixed, mixed, strict=True):
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, atol=5e-2, rtol=5e-2)

    @torch.compile(backend="eager")
    def compiled(*x: Tensor) -> Tensor:
        return stof.attention(*x, BY_HEAD) * 2

    tensors = [spread(x, every[1]) for x in plain]
    torch.testing.assert_close(compiled(*tensors).full_tensor(), 2 * stof.attention(*plain, BY_HEAD))


def refuse(kind: type[StofError], message: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=message) as caught:
        stof.attention(*arguments, **options)
    assert type(caught.value) is kind


def check_refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2))
    plain = inputs()

    def spread(*placements: Placement) -> list[DTensor]:
        return [distribute_tensor(x, mesh, placements) for x in plain]

    heads = spread(Replicate(), Shard(1))
    q, k, v = heads
    refuse(UnsupportedError, "stof.distributed.attention", *spread(Replicate(), Shard(2)))
    refuse(UnsupportedError, r"got S\(3\)|got Shard\(dim=3\)", *spread(Shard(3), Replicate()))
    partial = [DTensor.from_local(x, mesh, (Partial(), Replicate())) for x in plain]
    refuse(UnsupportedError, "redistribute q, k and v", *partial)
    refuse(UnsupportedError, "with equal placements", q, *spread(Replicate(), Replicate())[1:])
    refuse(DtypeError, "all are; got others for k, v", q, *plain[1:])
    refuse(DtypeError, "all are; got others for q, k, v", *plain, distribute_tensor(bools(LENGTH, LENGTH), mesh))
    refuse(DtypeError, "all are; got others for sinks", q, k, v, sinks=numbers(HEADS))
    refuse(DtypeError, "all are; got others for bias", q, k, v, bias=numbers(LENGTH, LENGTH))
    refuse(UnsupportedError, "takes no dropout_p", q, k, v, dropout_p=0.5)
    one_head = (plain[0], plain[1][:, :1], plain[2][:, :1])
    sizes = [distribute_tensor(x, mesh, (Replicate(), Shard(1))) for x in one_head]
    refuse(ShapeError, "k has 1 heads, which do not divide among 2 ranks", *sizes)
    three = [distribute_tensor(x[:3], mesh, (Replicate(), Shard(0))) for x in plain]
    refuse(ShapeError, "q has 3 batch entries, which do not divide among 2", *three)
    refuse(ShapeError, "number of heads of 4, the inputs have 8", q, k, v, bools(HEADS // 2, LENGTH, LENGTH))
    other = distribute_tensor(bools(HEADS // 2, LENGTH, LENGTH), mesh, (Replicate(), Shard(0)))
    refuse(ShapeError, "a mask is a bool tensor of up to", q, k, v, other)
    one = init_device_mesh("cpu", (2,))
    refuse(UnsupportedError, "q and sinks are on one mesh", q, k, v, sinks=distribute_tensor(numbers(HEADS), one))
    local = stof.plan(masks.per_head([masks.causal(), masks.full()] * 2), LENGTH)
    refuse(PlanMismatchError, "made for heads=4; the inputs have 8", q, k, v, local)
    dynamic = stof.dynamic_plan(bools(HEADS, LENGTH, LENGTH), LENGTH, heads=HEADS)
    refuse(PlanMismatchError, "give the mask in place of the plan", q, k, v, dynamic)


def check_two(rank: int) -> None:
    check_equal(rank, grid=False)
    check_refusals(rank)


def test_dtensors_compute_as_full_tensors_or_are_refused() -> None:
    run(check_two, 2)


@pytest.mark.slow
def test_every_mask_with_every_placement_on_a_grid() -> None:
    run(check_equal, 4, True)
