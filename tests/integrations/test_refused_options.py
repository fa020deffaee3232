"""What `stof.optimize` refuses it refuses before it changes the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stof
from stof import masks
from stof.errors import ArgumentError, LockFileError, MaskError, StofError, UnknownMaskError, UnsupportedError
from tests.integrations import models


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that `stof.optimize` may change in a model."""
    config = getattr(model, "config", None)
    return {
        "modules": [(name, type(part)) for name, part in model.named_modules()],
        "tensors": [(name, id(x), x.data_ptr()) for name, x in (*model.named_parameters(), *model.named_buffers())],
        "training": [part.training for part in model.modules()],
        "hooks": [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules()],
        "masks": [getattr(part, "_stof_sparse_mask", None) for part in model.modules()],
        "forwards": [vars(part).get("forward") for part in model.modules()],
        "config": config.to_dict() if config is not None else None,
        "implementations": [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")],
    }


def _raising(number: int) -> Any:
    return {}[number]


WRONG: dict[str, tuple[type[StofError], dict[str, Any]]] = {
    "float tensor": (MaskError, {"mask": torch.ones(3, 3)}),
    "bool tensor": (MaskError, {"mask": torch.ones(3, 3, dtype=torch.bool)}),
    "number": (MaskError, {"mask": 3}),
    "list": (MaskError, {"mask": [masks.causal()]}),
    "plan": (MaskError, {"mask": stof.plan(masks.causal(), 8)}),
    "pattern that was not called": (MaskError, {"mask": masks.causal}),
    "pattern that would take a number": (MaskError, {"mask": masks.padding}),
    "unknown name": (UnknownMaskError, {"mask": "slidng_window(3)"}),
    "text that is no mask": (MaskError, {"mask": "causal( &"}),
    "mask function": (ArgumentError, {"mask": lambda b, h, q, kv: q >= kv}),
    "function of layers that raises": (ArgumentError, {"mask": _raising}),
    "function of layers that gives no mask": (MaskError, {"mask": lambda number: number}),
    "layer that is none": (ArgumentError, {"mask": {0: masks.causal(), 2: masks.causal()}}),
    "wrong mask of a second layer": (MaskError, {"mask": {0: masks.causal(), 1: 5}}),
    "mask without attention": (ArgumentError, {"mask": masks.causal(), "attention": False}),
    "attention": (ArgumentError, {"attention": "yes"}),
    "pack": (ArgumentError, {"pack": 1}),
    "dynamic": (ArgumentError, {"dynamic": "yes"}),
    "unknown option": (ArgumentError, {"efort": "quick"}),
    "effort": (ArgumentError, {"effort": ["quick"]}),
    "budget_s": (ArgumentError, {"effort": "quick", "budget_s": "60"}),
    "negative budget_s": (ArgumentError, {"effort": "quick", "budget_s": -1}),
    "cuda_graphs": (ArgumentError, {"cuda_graphs": "all"}),
    "report": (ArgumentError, {"report": "file"}),
    "progress": (ArgumentError, {"progress": 1}),
    "store": (ArgumentError, {"store": 5}),
    "lock": (ArgumentError, {"lock": 5}),
    "missing lock": (LockFileError, {"lock": "no-such-file.lock"}),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("make", [models.bert, models.llama])
def test_a_model_is_left_as_it_was(make: Callable[[], Any], name: str) -> None:
    error, options = WRONG[name]
    model = make()
    before = state_of(model)
    with pytest.raises(error) as found:
        stof.optimize(model, **options)
    assert len(str(found.value)) > 20
    assert state_of(model) == before


def test_models_without_attention_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = state_of(model)
    with pytest.raises(UnsupportedError, match="needs model"):
        stof.optimize(model, mask=masks.causal())
    assert state_of(model) == before
    compiled = stof.optimize(model.eval(), mask=masks.causal())
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="no attention was computed"):
        compiled(torch.ones(4))


def test_the_state_tells_a_model_that_was_prepared() -> None:
    model = models.bert()
    before = state_of(model)
    stof.optimize(model, mask={1: masks.causal()})
    after = state_of(model)
    assert {name for name in before if before[name] != after[name]} >= {"tensors", "masks", "hooks"}
    assert [mask for mask in after["masks"] if mask is not None] == [masks.causal()]
