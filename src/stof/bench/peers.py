"""The implementations a benchmark can time, STOF among them, each in its best known configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import stof
from stof.bench.grid import GridMask, Shape
from stof.errors import ArgumentError

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Problem:
    """One cell of the grid: a mask, a shape, and the inputs everyone gets."""

    grid_mask: GridMask
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device


@dataclass(frozen=True)
class Peer:
    """One implementation under test.

    Attributes:
        name: the `impl` of its JSON rows.
        summary: one line for `stof bench --help` and tables.
        missing: why it cannot run this problem here, or None.
        prepare: everything done once per mask and shape (timed as `build_us`); returns the call to time.
    """

    name: str
    summary: str
    missing: Callable[[Problem], str | None]
    prepare: Callable[[Problem], Call]


def _always(problem: Problem) -> str | None:
    del problem
    return None


def _prepare_stof(problem: Problem) -> Call:
    shape, device = problem.shape, problem.device
    mask = problem.grid_mask.mask(shape.q_len)
    stof.plan_cache.clear()  # build_us is the cost of a new mask
    plan = stof.plan(mask, shape.q_len, shape.kv_len, device=device)
    return lambda: stof.attention(problem.q, problem.k, problem.v, plan)


def _prepare_sdpa(problem: Problem) -> Call:
    shape = problem.shape
    keep = problem.grid_mask.mask(shape.q_len).to_dense(shape.q_len, shape.kv_len, device=problem.device)
    grouped = shape.heads != shape.kv_heads
    return lambda: F.scaled_dot_product_attention(problem.q, problem.k, problem.v, attn_mask=keep, enable_gqa=grouped)


def _native_missing(problem: Problem) -> str | None:
    if problem.grid_mask.unmasked or (problem.grid_mask.causal and problem.shape.q_len == problem.shape.kv_len):
        return None
    return "serves only full and causal masks"


def _prepare_native(problem: Problem) -> Call:
    causal, grouped = problem.grid_mask.causal, problem.shape.heads != problem.shape.kv_heads
    return lambda: F.scaled_dot_product_attention(problem.q, problem.k, problem.v, is_causal=causal, enable_gqa=grouped)


def _flex_missing(problem: Problem) -> str | None:
    if problem.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        return "FlexAttention on the CPU needs a C++ compiler"
    return None


def _prepare_flex(problem: Problem) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = problem.shape
    mask_mod = problem.grid_mask.mask_mod(shape.q_len, problem.device)
    block_mask = create_block_mask(mask_mod, None, None, shape.q_len, shape.kv_len, device=problem.device)
    grouped = shape.heads != shape.kv_heads
    # One compiled function per problem: a shared one would reach Dynamo's recompile limit on a grid.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(problem.q, problem.k, problem.v, block_mask=block_mask, enable_gqa=grouped)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("stof", "stof.attention with a ready plan", _always, _prepare_stof),
        Peer("sdpa", "scaled_dot_product_attention with the dense bool mask", _always, _prepare_sdpa),
        Peer(
            "sdpa-native",
            "scaled_dot_product_attention without a mask tensor (full; causal by is_causal)",
            _native_missing,
            _prepare_native,
        ),
        Peer("flex", "FlexAttention, torch.compile(dynamic=False), 128x128 blocks", _flex_missing, _prepare_flex),
    )
}


def peer(name: str) -> Peer:
    """The implementation of that name.

    Raises:
        ArgumentError: no such implementation; lists those there are.
    """
    if name not in PEERS:
        raise ArgumentError(f"unknown implementation {name!r}; there are {', '.join(PEERS)}")
    return PEERS[name]
