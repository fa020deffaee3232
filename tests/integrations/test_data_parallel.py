"""Two processes that train with stof's attention get the gradients of one: DDP and FSDP2 on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

import stof.integrations.transformers as stof_hf
from stof import masks
from tests.distributed.processes import run
from tests.integrations import models

RANKS = 2


def make() -> Any:
    torch.manual_seed(0)
    model = stof_hf.enable(models.llama(attention_dropout=0.0).double().train())
    stof_hf.sparsify(model, masks.sliding_window(6))
    return model


def batch() -> torch.Tensor:
    return torch.randint(1, models.VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids).logits * torch.linspace(-1, 1, 61, dtype=torch.float64)).sin().mean()


def train(rank: int, kind: str, file: str) -> None:
    plain = make()
    model: nn.Module = plain
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(plain)
    else:
        for layer in plain.model.layers:
            fully_shard(layer)
        fully_shard(plain)
    loss_of(model, batch().chunk(RANKS)[rank]).backward()
    gradients = {}
    for name, parameter in plain.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    if rank == 0:
        torch.save(gradients, file)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_gradients_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    file = str(tmp_path / "gradients")
    run(train, RANKS, kind, file)
    model = make()
    loss_of(model, batch()).backward()
    gradients = torch.load(file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=1e-9)
