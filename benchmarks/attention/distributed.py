"""`python -m benchmarks distributed`: attention over a sequence split over all GPUs of this host, through NCCL.

Each way is checked against `stof.attention` of the whole sequence before it is timed; a time is that of the slowest
rank, of one call among several in a row. "gather" and "ulysses" are what a user writes in a few lines: contiguous
shards whose keys are gathered, and three exchanges of tensors before the attention and one after it. "torch" is
PyTorch's context parallelism with FlexAttention.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

import stof
import stof.distributed as context_parallel
from benchmarks.failures import first_line
from benchmarks.peers.mask_formats import WrittenMask, documents_mod, mask_mod
from stof import masks
from stof.testing.mask_grid import document_ends

WAYS = ("stof", "stof-heads", "stof-keys", "gather", "ulysses", "torch")
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_WINDOW, _SINKS = 4096, 4
_TOLERANCE = 2e-2
_ROUNDS = 5
# Calls in a row, as in the layers of a model, so that the host's work is done while the GPUs compute.
_CALLS = 8


@dataclass(frozen=True)
class DistributedRow:
    """One way of one problem.

    Attributes:
        mask, tokens: the mask, and tokens of one GPU.
        ranks: GPUs.
        way: a name of `WAYS`.
        forward_ms, both_ms: of the slowest rank, median; None where it failed. `both_ms` has the backward pass in it,
            and is None for ways without one.
        note: why there is no time.
    """

    mask: str
    tokens: int
    ranks: int
    way: str
    forward_ms: float | None = None
    both_ms: float | None = None
    note: str = ""


def _documents(length: int) -> list[int]:
    return document_ends(length, typical=1100)


# Causal masks: whole, of documents with log-normal lengths, of a window and sinks.
MASKS = {
    grid.name: grid
    for grid in (
        WrittenMask("causal", lambda s: masks.causal(), dense_like=True, mod=lambda s, d: lambda b, h, q, k: q >= k),
        WrittenMask(
            "documents",
            lambda s: masks.documents(cu_seqlens=_documents(s)) & masks.causal(),
            dense_like=False,
            mod=lambda s, d: documents_mod(_documents(s), d),
        ),
        WrittenMask(
            "window",
            lambda s: masks.causal() & (masks.sliding_window(_WINDOW - 1, 0) | masks.sink_tokens(_SINKS)),
            dense_like=False,
            mod=lambda s, d: lambda b, h, q, k: (q >= k) & ((q - k < _WINDOW) | (k < _SINKS)),
        ),
    )
}


def run(
    mask_names: Sequence[str], tokens: Sequence[int], ways: Sequence[str], folder: Path
) -> Iterator[DistributedRow]:
    """Start a process for each GPU, and yield what the first of them writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = folder / "rows.jsonl"
    ranks = torch.cuda.device_count()
    processes = spawn(_rank, (ranks, port, list(mask_names), list(tokens), list(ways), str(path)), ranks, join=False)
    seen, ended = 0, False
    while not ended:
        ended = processes.join(timeout=1)
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[seen:]:
            yield DistributedRow(**json.loads(line))
        seen = len(lines)


def _rank(rank: int, ranks: int, port: int, names: list[str], tokens: list[int], ways: list[str], path: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    mesh = init_device_mesh("cuda", (ranks,))
    for each in tokens:
        for name in names:
            for row in _rows(name, each, ways, mesh, device):
                if rank == 0:
                    with open(path, "a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
    dist.destroy_process_group()


def _rows(name: str, tokens: int, ways: Sequence[str], mesh: Any, device: torch.device) -> Iterator[DistributedRow]:
    ranks, rank = mesh.size(), mesh.get_local_rank()
    length = tokens * ranks
    named = MASKS[name]
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, _HEAD_DIM, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    expected = stof.attention(q, k, v, named.mask(length))
    for way in ways:
        row = partial(DistributedRow, name, tokens, ranks, way)
        try:
            make = _stof if way.startswith("stof") else {"gather": _gather, "ulysses": _ulysses, "torch": _torch}[way]
            attend, local, wanted = make(way, named, length, mesh, (q, k, v, expected), rank)
            error = float((attend(*local) - wanted).abs().max() / expected.abs().max())
            if not error <= _TOLERANCE:
                raise ValueError(f"wrong: off by {error:.2g} of the largest")
            forward = _milliseconds(partial(attend, *local))
            both = None
            if way.startswith(("stof", "torch")):
                leaves = [x.detach().requires_grad_() for x in local]
                d_out = torch.randn_like(wanted)
                both = _milliseconds(partial(_both, attend, leaves, d_out))
            yield row(forward, both)
        except Exception as problem:  # a peer may refuse, on every rank: a row of the table
            yield row(note=first_line(problem))


def _both(attend: Callable[..., Tensor], leaves: list[Tensor], d_out: Tensor) -> object:
    return torch.autograd.grad(attend(*leaves), leaves, d_out)


def _milliseconds(call: Callable[[], object]) -> float:
    """Of one call among calls in a row: median over rounds, of the slowest rank in each."""
    times = []
    for _ in range(_ROUNDS + 2):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / _CALLS)
    slowest = torch.tensor(times[2:], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())


def _stof(
    way: str, named: WrittenMask, length: int, mesh: Any, whole: Sequence[Tensor], rank: int
) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    shards = context_parallel.shard(named.mask(length), length, mesh)
    *local, wanted = (shards.split(x, 2).contiguous() for x in whole)
    chosen = None if way == "stof" else way.removeprefix("stof-")
    return lambda q, k, v: context_parallel.attention(q, k, v, shards, way=chosen), local, wanted


def _gather(
    way: str, named: WrittenMask, length: int, mesh: Any, whole: Sequence[Tensor], rank: int
) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    *local, wanted = (x.chunk(mesh.size(), 2)[rank].contiguous() for x in whole)
    tokens = length // mesh.size()
    rows = masks.placed(named.mask(length), rank * tokens)
    plan = stof.plan(rows, tokens, length, batch=1, heads=_HEADS, device=whole[0].device)

    def every(x: Tensor) -> Tensor:
        out = x.new_empty(mesh.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out.unflatten(0, (mesh.size(), -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    return lambda q, k, v: stof.attention(q, every(k), every(v), plan), local, wanted


def _ulysses(
    way: str, named: WrittenMask, length: int, mesh: Any, whole: Sequence[Tensor], rank: int
) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    ranks = mesh.size()
    *local, wanted = (x.chunk(ranks, 2)[rank].contiguous() for x in whole)
    plan = stof.plan(named.mask(length), length, length, batch=1, heads=_HEADS // ranks, device=whole[0].device)

    def to_heads(x: Tensor) -> Tensor:
        parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # [ranks, 1, heads, tokens, D]
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts)
        return out.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def to_tokens(x: Tensor) -> Tensor:
        parts = x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts)
        return out.transpose(0, 1).flatten(1, 2)

    return lambda q, k, v: to_tokens(stof.attention(to_heads(q), to_heads(k), to_heads(v), plan)), local, wanted


def _torch(
    way: str, named: WrittenMask, length: int, mesh: Any, whole: Sequence[Tensor], rank: int
) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """PyTorch's context parallelism with FlexAttention: keys are gathered, each rank has an early and a late part."""
    from torch.nn.attention.flex_attention import flex_attention

    parallel = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    balancer = importlib.import_module("torch.distributed.tensor.experimental._context_parallel")._HeadTailLoadBalancer
    torch.compiler.reset()
    balance = balancer(length, mesh.size(), mesh.device_type)
    block_mask = parallel._create_cp_block_mask(
        mask_mod(named, length, length, whole[0].device), 1, 1, length, length, mesh, load_balancer=balance
    )
    *local, wanted = parallel._context_parallel_shard(mesh, list(whole), [2] * len(whole), load_balancer=balance)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    style = parallel._ContextParallel(2, parallel._ContextParallel.AttentionType.FLEX)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q, k, v), _ = style.flex_input_fn(None, (q, k, v), {}, mesh)
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out

    return attend, [x.contiguous() for x in local], wanted
