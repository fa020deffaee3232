"""The check that packed sequences do not see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stof.errors import ArgumentError, IsolationError, ShapeError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

LENGTHS = (5, 3, 4, 6, 2)


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(rows, -1)
    return {"input_ids": torch.randint(1, models.VOCABULARY, positions.shape), "position_ids": positions}


@pytest.mark.parametrize("build", [models.llama, models.mistral])
def test_sequences_that_are_apart(build: Any) -> None:
    """In stof's attention always; in PyTorch's, transformers finds them if there is no mask."""
    batch = _batch()
    ones = torch.ones_like(batch["input_ids"])
    model = build().train()
    model.lm_head.eval()
    hf.check_isolation(model, batch | {"use_cache": False})
    assert model.training
    assert not model.lm_head.training
    with pytest.raises(IsolationError, match=r"row \d: tokens of sequence \d change outputs of sequence \d"):
        hf.check_isolation(model, batch | {"attention_mask": ones})
    hf.enable(model)
    hf.check_isolation(model, batch)
    hf.check_isolation(model, batch | {"attention_mask": ones})


def test_numbers_of_sequences() -> None:
    batch = _batch(1)
    model = models.llama()
    alone = {"input_ids": batch["input_ids"]}
    with pytest.raises(ArgumentError, match="does not say where sequences begin"):
        hf.check_isolation(model, alone)
    hf.check_isolation(model, alone, torch.zeros_like(batch["input_ids"]))  # one sequence
    with pytest.raises(IsolationError, match="tokens of sequence 0 change outputs of sequence"):
        hf.check_isolation(model, alone, torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None])
    with pytest.raises(ShapeError, match="sequences has shape"):
        hf.check_isolation(model, alone, torch.zeros(3))
    with pytest.raises(ArgumentError, match="are the same"):
        hf.check_isolation(model, {**batch, "input_ids": torch.ones_like(batch["input_ids"])})


@pytest.mark.parametrize("pair", [(0, 4), (4, 0), (1, 3), (2, 3), (3, 1)])
def test_every_pair_is_found(pair: tuple[int, int]) -> None:
    """A model whose sequence `pair[1]` reads a token of sequence `pair[0]`."""
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))

    class Leaks(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            out = input_ids.double()
            source = out[:, numbers == pair[0]].sum(1, keepdim=True)
            return torch.where(numbers == pair[1], out + source, out)[..., None]

    ids = torch.randint(1, 99, (1, len(numbers)))
    expected = f"tokens of sequence {pair[0]} change outputs of sequence {pair[1]}"
    with pytest.raises(IsolationError, match=expected):
        hf.check_isolation(Leaks(), {"input_ids": ids}, numbers[None])


def test_padding_and_boundaries() -> None:
    batch = _batch(1)
    model = hf.enable(models.llama())
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    hf.check_isolation(model, {"input_ids": batch["input_ids"], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends})
    padded = {name: torch.nn.functional.pad(x, (0, 4)) for name, x in batch.items()}
    valid = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (0, 4))
    hf.check_isolation(model, padded | {"attention_mask": valid})
