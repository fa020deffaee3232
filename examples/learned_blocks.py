"""Learn which blocks of keys attention should read, on a CPU in about a minute.

    python examples/learned_blocks.py

`masks.block_topk(scores, k)` keeps the `k` blocks of keys with the best scores for each block of queries, as in MoBA,
VSA or MSA. The choice has no gradient: scores that are used for nothing else never learn. The script trains a small
retrieval layer in three ways and prints how often its blocks include the right one:

- `nothing`: the scores choose blocks, and receive no gradients.
- `bias`: the scores are also added to the attention scores of the blocks that were kept, so the loss reaches them.
- `distillation`: the scores learn to predict how much attention without a mask gives to each block (a KL divergence).

The task: a sequence has 16 blocks of keys, each with a random address and a random value. Each block of queries holds
an address, transformed by a matrix that the layer does not know, and must return the value that is stored there.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from stof import masks

BLOCKS, BLOCK, WIDTH, KEPT = 16, 16, 32, 3
LENGTH = BLOCKS * BLOCK


def of_tokens(blocks: Tensor) -> Tensor:
    """Values of blocks as values of their tokens: `[B, BLOCKS, n]` to `[B, 1, LENGTH, n]`."""
    return blocks.repeat_interleave(BLOCK, 1)[:, None]


class Retrieval(nn.Module):
    """One head of attention over the blocks that an indexer chooses."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.query, self.key = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        # The indexer: the score of a pair of blocks is the product of their projected means.
        self.index_query, self.index_key = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, asked: Tensor, stored: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output `[B, 1, LENGTH, WIDTH]`, scores of blocks `[B, 1, BLOCKS, BLOCKS]`, and a loss of the scores.

        Args:
            asked, stored, values: tokens of queries, keys and values, `[B, 1, LENGTH, WIDTH]`.
        """
        q, k = self.query(asked), self.key(stored)
        means = (x.unflatten(2, (BLOCKS, BLOCK)).mean(3) for x in (asked, stored))
        of_queries, of_keys = (project(x) for project, x in zip((self.index_query, self.index_key), means, strict=True))
        scores = of_queries @ of_keys.mT / WIDTH**0.5
        mask = masks.block_topk(scores.detach(), KEPT, block_size=BLOCK)
        bias = None
        if self.way == "bias":
            bias = scores.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
        out = stof.attention(q, k, values, mask, bias=bias)
        loss = torch.zeros(())
        if self.way == "distillation":
            with torch.no_grad():
                weights = torch.softmax(q @ k.mT / WIDTH**0.5, -1)
                of_blocks = weights.unflatten(2, (BLOCKS, BLOCK)).mean(3).unflatten(3, (BLOCKS, BLOCK)).sum(4)
            loss = F.kl_div(torch.log_softmax(scores, -1), of_blocks, reduction="batchmean") / BLOCKS
        return out, scores, loss


def draw(batch: int, transform: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens of queries, keys and values, the wanted output, and the number of the right block, `[B, BLOCKS]`."""
    addresses = F.normalize(torch.randn(batch, BLOCKS, WIDTH, generator=generator), dim=-1) * WIDTH**0.5
    values = torch.randn(batch, BLOCKS, WIDTH, generator=generator)
    right = torch.stack([torch.randperm(BLOCKS, generator=generator) for _ in range(batch)])
    row = torch.arange(batch)[:, None]
    noise = (0.1 * torch.randn(batch, 1, LENGTH, WIDTH, generator=generator) for _ in range(2))
    asked, stored = (
        of_tokens(x) + e for x, e in zip((addresses[row, right] @ transform, addresses), noise, strict=True)
    )
    return asked, stored, of_tokens(values), of_tokens(values[row, right]), right


def train(way: str, steps: int, batch: int) -> tuple[float, float]:
    """The share of queries whose blocks include the right one, before and after training."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    transform = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    layer = Retrieval(way)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)

    def recall() -> float:
        asked, stored, values, _, right = draw(32, transform, torch.Generator().manual_seed(2))
        with torch.no_grad():
            _, scores, _ = layer(asked, stored, values)
        return float((scores[:, 0].topk(KEPT).indices == right[..., None]).any(-1).float().mean())

    before = recall()
    for _ in range(steps):
        asked, stored, values, wanted, _ = draw(batch, transform, generator)
        out, _, loss = layer(asked, stored, values)
        (F.mse_loss(out, wanted) + loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, recall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    print(f"{KEPT} of {BLOCKS} blocks are kept; by chance {KEPT / BLOCKS:.0%} of them include the right one")
    for way in ("nothing", "bias", "distillation"):
        before, after = train(way, options.steps, options.batch)
        print(f"{way:12} {before:.0%} before training, {after:.0%} after")


if __name__ == "__main__":
    main()
