"""Train a small LLaMA-like decoder on one long sequence that is split over four CPU processes.

Every second layer sees a sliding window, the others everything before. The loss of each step stands beside that of one
process, which has the same weights and sees the whole sequence.

    python examples/long_context.py
    python examples/long_context.py --length 4096 --ranks 2 --steps 20
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stof
import stof.distributed
from stof import masks

VOCABULARY, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 4, 8, 4, 16
LAYER_MASKS = (masks.causal(), masks.sliding_window(63) | masks.sink_tokens(4))

# Attention of q, k, v `[B, H, S, D]` in a layer.
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings of `[B, H, S, D]` at the positions of the whole sequence."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None] * frequencies
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.gate_up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        seen = attention(rotated(q, positions), rotated(k, positions), v, self.number)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.head(x)


def trained(
    steps: int, loss_of: Callable[[Decoder], Tensor], sum_over_ranks: Callable[[Tensor], object]
) -> list[float]:
    """The loss of each step. Every rank computes its share of the loss and of the gradients."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            sum_over_ranks(tensor)
        optimizer.step()
        losses.append(total.item())
    return losses


def process(rank: int, ranks: int, port: int, length: int, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    # A phrase that is repeated: what comes next is far back, and the layers that see everything find it.
    phrase = torch.randint(VOCABULARY, (length // 4 + 1,), generator=torch.Generator().manual_seed(1))
    tokens = phrase.repeat(5)[None, : length + 1]
    ids, labels = tokens[:, :-1], tokens[:, 1:]

    def loss_of(model: Decoder, ids: Tensor, labels: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        logits = model(ids, positions, attention)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / length

    shards = stof.distributed.shard(LAYER_MASKS[0], length, mesh)
    of_layer = (shards, shards.with_mask(LAYER_MASKS[1]))

    def over_ranks(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return stof.distributed.attention(q, k, v, of_layer[layer % 2])

    local = shards.split(ids, 1), shards.split(labels, 1), shards.positions
    split = trained(steps, lambda model: loss_of(model, *local, over_ranks), dist.all_reduce)
    dist.barrier()
    if rank == 0:

        def in_one_process(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return stof.attention(q, k, v, LAYER_MASKS[layer % 2])

        full = ids, labels, torch.arange(length)
        alone = trained(steps, lambda model: loss_of(model, *full, in_one_process), lambda tensor: None)
        print(shards.explain())
        print(f"\n{'step':<6}{f'{ranks} processes':<16}one process")
        for step, (one, other) in enumerate(zip(split, alone, strict=True)):
            print(f"{step:<6}{one:<16.6f}{other:.6f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2000, help="tokens of the sequence")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--steps", type=int, default=10, help="steps of the optimizer")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (options.ranks, port, options.length, options.steps)
    torch.multiprocessing.spawn(process, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
