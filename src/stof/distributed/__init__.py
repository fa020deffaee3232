"""Attention over a sequence that is split over ranks (context parallelism), on public torch.distributed collectives."""

from stof.distributed.context_parallel import attention
from stof.distributed.shards import Shards, shard

__all__ = ["Shards", "attention", "shard"]
