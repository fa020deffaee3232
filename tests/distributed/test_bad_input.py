"""Wrong arguments are refused before anything is exchanged, and ranks that differ are told how."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import stof
import stof.distributed
from stof import masks
from stof.distributed import Shards
from stof.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HeadCountError,
    MaskError,
    MaskFunctionError,
    RankMismatchError,
    ShapeError,
    StofError,
    UnsupportedError,
)
from tests.distributed.processes import run

LENGTH = 33


def refuse(kind: type[StofError], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert type(caught.value) is kind


def raising(b: Any, h: Any, q: Any, k: Any) -> Any:
    raise RuntimeError("boom")


def check_shard(rank: int, mesh: DeviceMesh) -> None:
    def shard(mask: Any = None, length: Any = LENGTH, mesh: Any = mesh) -> Shards:
        return stof.distributed.shard(mask, length, mesh)

    refuse(ArgumentError, "mesh is a .*DeviceMesh, got int", lambda: shard(mesh=2))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    refuse(ArgumentError, r"got 2 dimensions \['dp', 'sp'\]: give one of", lambda: shard(mesh=grid))
    alone = DeviceMesh("cpu", [0])
    if rank == 1:
        refuse(ArgumentError, r"the ranks \[0\], and this process is none", lambda: shard(mesh=alone))
    refuse(ShapeError, "at least one token, got 1 tokens and 2 ranks", lambda: shard(length=1))
    refuse(ShapeError, "q_len is an int, got float", lambda: shard(length=8.0))
    refuse(ShapeError, "the documents cover 5 tokens", lambda: shard(masks.documents([0] * 5)))
    refuse(ShapeError, r"the dense mask is \[3, 3\]", lambda: shard(torch.ones(3, 3).bool()))
    refuse(MaskError, "a mask is a stof mask", lambda: shard(3))
    refuse(MaskFunctionError, "boom", lambda: shard(raising))

    different = "all ranks of a mesh make the same call, but {} is {} on rank 0 and {} on rank 1"
    text = different.format("length", 33, 34)
    refuse(RankMismatchError, text, lambda: shard(masks.causal(), LENGTH + rank))
    text = different.format("mask", r"sliding_window\(.*\)", r"sliding_window\(.*\)")
    refuse(RankMismatchError, text, lambda: shard(masks.sliding_window(4 + rank)))
    keep = torch.ones(LENGTH, LENGTH).bool()
    shard(keep)
    keep[5, 6 + rank] = False
    text = different.format("hash of the mask's tensors", "[0-9a-f]*", "[0-9a-f]*")
    refuse(RankMismatchError, text, lambda: shard(keep))
    reach = 3 + rank
    text = different.format("hash of the keys kept", "[0-9a-f]*", "[0-9a-f]*")
    refuse(RankMismatchError, text, lambda: shard(lambda b, h, q, k: q - k < reach))
    text = different.format("hash of which keys are kept", "[0-9a-f]*", "[0-9a-f]*")
    refuse(RankMismatchError, text, lambda: shard(lambda b, h, q, k: (k - q) % LENGTH == reach))
    # Which depends on the head is compared where the heads are known.
    of_heads = shard(lambda b, h, q, k: (k - q) % LENGTH == h * reach)
    for shards in (of_heads, stof.distributed.shard(masks.causal(), LENGTH, mesh)):
        q, k = (shards.split(torch.zeros(1, heads, LENGTH, 8), 2) for heads in (2, 1))
        if shards is not of_heads:
            stof.distributed.attention(q, k, k, shards)
            shards = shards.with_mask(of_heads.mask)
        refuse(RankMismatchError, text, lambda q=q, k=k, s=shards: stof.distributed.attention(q, k, k, s))
        stof.distributed.attention(q[:, :1], k, k, shards)
    wrong = masks.documents([0] * (LENGTH if rank == 0 else 5))
    if rank == 0:
        refuse(RankMismatchError, "rank 1 refused the call: ShapeError: the documents cover 5", lambda: shard(wrong))
    else:
        refuse(ShapeError, "the documents cover 5 tokens", lambda: shard(wrong))


def check_attention(rank: int, mesh: DeviceMesh) -> None:
    q, k, v = torch.randn(1, 3, LENGTH, 8), torch.randn(1, 1, LENGTH, 8), torch.randn(1, 1, LENGTH, 8)
    used = stof.distributed.shard(masks.causal(), LENGTH, mesh)
    ready = [used.split(x, 2) for x in (q, k, v)]
    stof.distributed.attention(*ready, used)
    for shards in (used, stof.distributed.shard(masks.causal(), LENGTH, mesh)):  # after a call, and before the first

        def attend(*tensors: Any, shards: Any = shards, **options: Any) -> Any:
            return stof.distributed.attention(*(tensors or ready), shards, **options)

        other = stof.distributed.shard(masks.causal(), LENGTH - 4, mesh)
        split = [other.split(x[:, :, : LENGTH - 4], 2) for x in (q, k, v)]
        refuse(ShapeError, "rank . holds 1. of 33 tokens, q has 1.", lambda a=split, f=attend: f(*a))
        refuse(ShapeError, "q has 33 and k 33; split the", lambda f=attend: f(q, k, v))
        refuse(HeadCountError, '3 query heads do not .*; use way="keys"', lambda f=attend: f(way="heads"))
        refuse(ArgumentError, "way is one of 'heads', 'keys' or None, got 'ring'", lambda f=attend: f(way="ring"))
        refuse(ArgumentError, "scale", lambda f=attend: f(scale=float("nan")))
        refuse(ArgumentError, "softcap", lambda f=attend: f(softcap=-1.0))
        refuse(ShapeError, "sinks", lambda f=attend: f(sinks=torch.zeros(2)))
        refuse(ShapeError, "bias broadcasts to", lambda f=attend: f(bias=torch.zeros(LENGTH, LENGTH)))
        refuse(ArgumentError, "which way=", lambda f=attend: f(bias=torch.zeros(LENGTH), way="heads"))
        spread = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in ready]
        refuse(DtypeError, "takes tensors of this rank, got DTensors", lambda a=spread, f=attend: f(*a))
        refuse(UnsupportedError, "has no dropout", lambda f=attend: f(dropout_p=0.5))
        refuse(DtypeError, "q is a torch.Tensor", lambda f=attend: f(None, k, v))
        refuse(DeviceError, "is on cpu, q, k and v are on meta", lambda f=attend: f(*(x.to("meta") for x in ready)))
        refuse(ArgumentError, "shards is made by", lambda f=attend: f(shards=masks.causal()))
        for full, change in ((q, shards.split), (shards.split(q, 2), shards.join)):
            refuse(ArgumentError, "dim is a dimension of", lambda x=full, f=change: f(x, 4))
            refuse(ArgumentError, "dim is a dimension of", lambda x=full, f=change: f(x, True))
            refuse(ShapeError, "tokens of 33 in its dimension", lambda x=full, f=change: f(x, 1))
            refuse(DtypeError, "is a torch.Tensor, got list", lambda f=change: f([1], 0))

    fresh = stof.distributed.shard(masks.per_head([masks.causal()] * 2 + [masks.full()]), LENGTH, mesh)
    two = [fresh.split(x, 2) for x in (q[:, :2], k, v)]
    refuse(ShapeError, "heads of 3, the inputs have 2", lambda: stof.distributed.attention(*two, fresh, way="keys"))
    refuse(ShapeError, "heads of 3, the inputs have 2", lambda: stof.distributed.attention(*two, fresh, way="heads"))
    scale = 1.0 + rank
    three = [fresh.split(x, 2) for x in (q, k, v)]
    text = "but scale is 1.0 on rank 0 and 2.0 on rank 1"
    refuse(RankMismatchError, text, lambda: stof.distributed.attention(*three, fresh, scale=scale))
    dtype = torch.float64 if rank else torch.float32
    text = "but dtype is torch.float32 on rank 0 and torch.float64"
    refuse(RankMismatchError, text, lambda: stof.distributed.attention(*(x.to(dtype) for x in three), fresh))
    sinks = torch.zeros(3) if rank else None
    text = "but whether there are sinks is False on rank 0 and True"
    refuse(RankMismatchError, text, lambda: stof.distributed.attention(*three, fresh, sinks=sinks))
    stof.distributed.attention(*three, fresh)
    text = "but scale is 1.0 on rank 0 and 2.0 on rank 1"
    refuse(RankMismatchError, text, lambda: stof.distributed.attention(*three, fresh.with_mask(None), scale=scale))


def check_bad_input(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_shard(rank, mesh)
    check_attention(rank, mesh)
    check_death(rank, mesh)


def check_death(rank: int, mesh: DeviceMesh) -> None:
    """The exit code is 0: `spawn` would end the other process as well."""
    shards = stof.distributed.shard(masks.causal(), LENGTH, mesh)
    q, k, v = (shards.split(torch.randn(1, 2, LENGTH, 8), 2) for _ in range(3))
    stof.distributed.attention(q, k, v, shards)
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|peer|timed out"):
        stof.distributed.attention(q, k, v, shards)
    assert time.monotonic() - began < 30
    os._exit(0)  # gloo may abort the process while it takes down a group whose peer is gone


def test_bad_input_and_the_death_of_a_rank_are_errors_of_every_rank() -> None:
    run(check_bad_input, 2)
