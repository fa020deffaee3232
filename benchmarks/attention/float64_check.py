"""A call's result and gradients against float64, in memory that does not grow with the square of the length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.peers.mask_formats import MaskMod
from stof.testing.attention_check import TOLERANCE
from stof.testing.mask_grid import Shape

# The largest error of a gradient, relative to the largest value, by bytes of an element.
GRADIENT_TOLERANCE = {2: 3e-2, 4: 1e-3, 8: 1e-10}
# Rows and keys of longer sequences are sampled.
_ALL_ROWS = {"cuda": 8192, "cpu": 1024}
_ROWS, _CLUSTERS, _CLUSTER = 256, 3, 16
# Gradients of q and k are 0 but for rounding where every query sees one key: errors relative to no less than this share
# of the largest value.
_LEAST_SCALE = 1e-2
# Scores computed at a time.
_SCORES = 2**26


class Errors(NamedTuple):
    """Largest errors relative to the largest value; infinite where anything is not finite."""

    out: float
    gradients: float

    def problem(self, dtype: torch.dtype) -> str:
        """Say which error is above its tolerance in results of this dtype; empty if none is."""
        for what, error, tolerance in (
            ("the output", self.out, TOLERANCE[dtype]),
            ("a gradient", self.gradients, GRADIENT_TOLERANCE[dtype.itemsize]),
        ):
            if not error <= tolerance:
                return f"{what} is off by {error:.2g} of the largest"
        return ""


class _Head(NamedTuple):
    """One query head in float64, `[S, D]` each, and its mask."""

    mod: MaskMod
    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor


def errors_of(
    mod: MaskMod, shape: Shape, inputs: Sequence[Tensor], d_out: Tensor, result: Sequence[Tensor], seed: int
) -> Errors:
    """Check one key head of one sequence, chosen by `seed`, with the query heads that read it.

    Args:
        mod: whether the score at (batch, head, query, key) is kept.
        inputs: q, k and v, `[B, H, S, D]`.
        result: the output, or the output and the gradients of q, k and v.
    """
    if not all(bool(torch.isfinite(x).all()) for x in result):
        return Errors(float("inf"), float("inf"))
    q, k, v = inputs
    rng, group, device = random.Random(seed), shape.heads // shape.kv_heads, q.device
    b, kv_head = rng.randrange(shape.batch), rng.randrange(shape.kv_heads)
    rows, keys = _sampled(shape, device, rng)
    errors = [_Largest() for _ in result]
    d_k, d_v = (torch.zeros(x.shape[2:], dtype=torch.float64, device=device) for x in (k, v))
    for h in range(kv_head * group, kv_head * group + group):
        at = torch.tensor(b, device=device), torch.tensor(h, device=device)
        head = _Head(mod, *at, *(x.double() for x in (q[b, h], k[b, kv_head], v[b, kv_head], d_out[b, h])))
        needed = rows if len(result) == 1 or len(keys) == shape.kv_len else _with_readers(head, rows, keys)
        for part in needed.split(max(1, _SCORES // shape.kv_len)):
            for error, actual, expected in zip(errors, result[:2], _add_rows(head, part, d_k, d_v), strict=False):
                error.take(actual[b, h, part], expected)
    for error, actual, expected in zip(errors[2:], result[2:], (d_k, d_v), strict=False):
        error.take(actual[b, kv_head, keys], expected[keys])
    least = _LEAST_SCALE * max(error.value for error in errors)
    out, *gradients = (error.difference / max(error.value, least, 1e-300) for error in errors)
    return Errors(out, max(gradients, default=0.0))


class _Largest:
    """The largest difference and the largest value, over several parts of a tensor."""

    difference = value = 0.0

    def take(self, actual: Tensor, expected: Tensor) -> None:
        self.difference = max(self.difference, float((actual.double() - expected).abs().max()))
        self.value = max(self.value, float(expected.abs().max()))


def _sampled(shape: Shape, device: torch.device, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Rows and keys to check: all of short sequences, else both ends with random rows and some clusters of keys."""
    q_len, kv_len = shape.q_len, shape.kv_len
    if max(q_len, kv_len) <= _ALL_ROWS[device.type]:
        return torch.arange(q_len, device=device), torch.arange(kv_len, device=device)
    end = min(_ROWS, q_len) // 4
    rows = {*range(end), *range(q_len - end, q_len), *rng.sample(range(q_len), 2 * end)}
    first_keys = [rng.randrange(max(1, kv_len - _CLUSTER)) for _ in range(_CLUSTERS)]
    keys = {min(first + n, kv_len - 1) for first in first_keys for n in range(_CLUSTER)}
    return torch.tensor(sorted(rows), device=device), torch.tensor(sorted(keys), device=device)


def _with_readers(head: _Head, rows: Tensor, keys: Tensor) -> Tensor:
    """The rows, and all that see one of the keys: those whose gradients add up to the keys'."""
    every = torch.arange(len(head.q), device=rows.device)
    seeing = head.mod(head.b, head.h, every[:, None], keys).any(1).nonzero()[:, 0]
    return torch.cat((rows, seeing)).unique()


def _add_rows(head: _Head, rows: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of q in some rows, float64 `[R, D]`; their gradients of k and v are added to `d_k`, `d_v`."""
    every = torch.arange(len(head.k), device=rows.device)
    keep = head.mod(head.b, head.h, rows[:, None], every).expand(len(rows), -1)
    columns = keep.any(0).nonzero()[:, 0]
    keep, q, k, v, d_out = keep[:, columns], head.q[rows], head.k[columns], head.v[columns], head.d_out[rows]
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.T * scale).masked_fill_(~keep, -torch.inf)
    # Rows that see nothing have weights of 0.
    weights = scores.softmax(-1).nan_to_num_(0.0)
    out = weights @ v
    d_v.index_add_(0, columns, weights.T @ d_out)
    d_scores = weights * (d_out @ v.T - (d_out * out).sum(-1, keepdim=True))
    d_k.index_add_(0, columns, d_scores.T @ q * scale)
    return out, d_scores @ k * scale
