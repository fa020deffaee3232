"""Code that was told strides while Dynamo traced sees the same strides in the rewritten graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stof.fusion.passes.weight_packing import pack_weights
from tests.fusion.graphs import calls, capture, fuse, merged

BATCH, LENGTH, WIDTH, HEADS = 2, 6, 8, 2


@torch.library.custom_op("stof_tests::every_other", mutates_args=())
def every_other(x: Tensor, stride: int) -> Tensor:
    """Reads memory by a stride that it is told, as a kernel does."""
    return x.as_strided((BATCH * LENGTH // 2,), (2 * stride,)).clone()


@every_other.register_fake
def _(x: Tensor, stride: int) -> Tensor:
    return x.new_empty((BATCH * LENGTH // 2,))


class Projections(nn.Module):
    """q, k and v of one tensor, and what `body` makes of them."""

    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self.q_proj(x), self.k_proj(x), self.v_proj(x))


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def windows(x: Tensor) -> Tensor:
    return x.as_strided((BATCH, LENGTH - 2, 3, WIDTH), (x.stride(0), x.stride(1), x.stride(1), x.stride(2)))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v))


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = q.reshape(-1)
    flat.mul_(2)  # and with it q
    return q.sin() + k.sin() + v.sin()


def written_to_a_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = torch.zeros(2, BATCH, LENGTH, WIDTH)
    cache[0], cache[1] = k, v
    return cache + q


# How many GEMMs go into others: none where the middle one, k, stays apart.
BODIES: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "attention": (2, attend),
    "pointwise": (2, lambda q, k, v: (q.sin(), k + v, heads(v).cos())),
    "a buffer": (2, written_to_a_buffer),
    "as_strided": (1, lambda q, k, v: (windows(q).sin(), k.sin(), v.sin())),
    "as_strided of a view": (1, lambda q, k, v: (heads(q)[:, :, 1:].as_strided((3,), (2,)).sin(), k + v)),
    "as_strided later": (0, lambda q, k, v: (windows(heads(k).transpose(1, 2).flatten(2)).sin(), q + v)),
    "strides of a sum": (2, lambda q, k, v: (windows(q + k).sin(), v.sin())),
    "a custom operator": (1, lambda q, k, v: (every_other(v, v.stride(1)), q + k)),
    "a higher-order operator": (1, lambda q, k, v: (checkpoint(windows, v, use_reentrant=False).sin(), q + k)),
    "two": (0, lambda q, k, v: (every_other(q, q.stride(1)), windows(v).sin(), k.sin())),
    "returned": (1, lambda q, k, v: (q, k + v)),
    "a view returned": (0, lambda q, k, v: (heads(k), q + v)),
    "copies returned that were one memory": (0, lambda q, k, v: (k.reshape(-1), k.reshape(-1, 2), q + v)),
    "in place": (1, scaled_in_place),
    "a view that only plain strides have": (1, lambda q, k, v: (q.view(-1).sin(), k + v)),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_products_whose_strides_are_seen_stay_apart(name: str, dynamic: bool) -> None:
    count, body = BODIES[name]
    model, x = Projections(body).eval(), torch.randn(BATCH, LENGTH, WIDTH)
    pack_weights(model)
    run, counts = merged(model, dynamic=dynamic)
    with torch.no_grad():
        check(run(x), model(x))
    assert counts == [count]


def check(out: object, expected: object) -> None:
    outs, wants = (list(one) if isinstance(one, tuple | list) else [one] for one in (out, expected))
    for got, want in zip(outs, wants, strict=True):
        torch.testing.assert_close(got, want)
        assert steps(got) == steps(want)


def steps(x: Tensor) -> list[int]:
    """Strides of dimensions that have more than one place."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


STEPS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "sin": lambda x, a, b: x.sin(),
    "copy": lambda x, a, b: x.contiguous(),
    "turn": lambda x, a, b: x.transpose(a % x.dim(), b % x.dim()),
    "cut": lambda x, a, b: x.narrow(a % x.dim(), x.shape[a % x.dim()] // 2, 1),
    "flatten": lambda x, a, b: x.flatten(0, 1) if x.dim() > 1 else x,
    "reshape": lambda x, a, b: x.reshape(-1, x.shape[-1], 1),
    "unfold": lambda x, a, b: x.unfold(a % x.dim(), 1, 1),
    "double": lambda x, a, b: x.mul_(2),
    "windows": lambda x, a, b: x.as_strided((x.shape[0], 1 + b % 2), (x.stride(0), x.stride(-1))),
    "shifted": lambda x, a, b: x.as_strided((2,), (1,), 0),
    "if contiguous": lambda x, a, b: x.cos() if x.is_contiguous() else x + 1,
}


@pytest.mark.parametrize("seed", range(30))
def test_random_programs(seed: int) -> None:
    draw = random.Random(seed)
    program = [
        (draw.randrange(3), STEPS[draw.choice(list(STEPS))], draw.randrange(4), draw.randrange(4)) for _ in range(5)
    ]
    returned = draw.randrange(3)

    def body(*projections: Tensor) -> list[Tensor]:
        values = list(projections)
        for which, step, a, b in program:
            values[which] = step(values[which], a, b)
        # A result is laid out as before in any case, so most of them are not the values themselves.
        return [*(value + 1 for value in (*projections, *values)), values[returned]]

    model, x = Projections(body).eval(), torch.randn(BATCH, LENGTH, WIDTH)
    pack_weights(model)
    run, counts = merged(model)
    with torch.no_grad():
        check(run(x), model(x))
    assert len(counts) == 1


def test_segments_whose_strides_are_seen_are_left_alone() -> None:
    """Templates write rows; a sum may lie as its first operand does."""
    layer = nn.Linear(WIDTH, WIDTH).eval()
    x, columns = torch.randn(LENGTH, WIDTH), torch.randn(WIDTH, LENGTH).t()

    def read(x: Tensor, columns: Tensor) -> Tensor:
        out = columns + layer(x)
        return out.as_strided((LENGTH * WIDTH,), (1,)).sin()

    def unread(x: Tensor, columns: Tensor) -> Tensor:
        return (columns + layer(x)).sum(0)

    for function, notes, lowered in ((read, 1, []), (unread, 0, ["linear"])):
        gm = capture(function, x, columns)
        assert len(fuse(gm).notes) == notes
        assert calls(gm) == lowered
