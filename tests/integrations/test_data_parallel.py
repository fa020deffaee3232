"""Two processes that train with stof's attention get the gradients of one: DDP and FSDP2 on gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

WORLD = 2


def _model() -> Any:
    from tests.integrations import models

    torch.manual_seed(0)
    return models.llama(attention_dropout=0.0).double().train()


def _batch() -> torch.Tensor:
    from tests.integrations import models

    return torch.randint(1, models.VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids).logits * torch.linspace(-1, 1, 61, dtype=torch.float64)).sin().mean()


def _worker(rank: int, kind: str, port: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import stof.integrations.transformers as hf
    from stof import masks

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        plain = hf.enable(_model())
        hf.sparsify(plain, masks.sliding_window(6))
        model: nn.Module = plain
        if kind == "DDP":
            model = nn.parallel.DistributedDataParallel(plain)
        else:
            for layer in plain.model.layers:
                fully_shard(layer)
            fully_shard(plain)
        _loss(model, _batch().chunk(WORLD)[rank]).backward()
        gradients = {}
        for name, parameter in plain.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if rank == 0:
            torch.save(gradients, folder)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_gradients_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    import stof.integrations.transformers as hf
    from stof import masks

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = str(tmp_path / "gradients")
    torch.multiprocessing.spawn(_worker, (kind, port, file), nprocs=WORLD)
    model = hf.enable(_model())
    with hf.sparsify(model, masks.sliding_window(6)):
        _loss(model, _batch()).backward()
    found = torch.load(file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-12, rtol=1e-9)
