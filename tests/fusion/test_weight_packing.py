"""Packed weights: the model computes the same, state dicts keep their names, and everything can be taken back."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stof.fusion.graph.fx_utils import propagate
from stof.fusion.passes.horizontal_fusion import merge_gemms
from stof.fusion.passes.weight_packing import PackedLinear, pack_weights, unpack_weights
from tests.fusion.graphs import capture


class Attention(nn.Module):
    """Query reads one tensor, key and value another one unless it is the same."""

    def __init__(self, width: int = 8, heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width // 2, bias=bias)
        self.v_proj = nn.Linear(width, width // 2, bias=bias)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(x).view(*x.shape[:-1], self.heads, -1)
        return q, self.k_proj(memory), self.v_proj(memory)


@pytest.mark.parametrize("bias", [True, False])
def test_packing_changes_nothing_but_the_weights_place(bias: bool) -> None:
    model, x = Attention(bias=bias), torch.randn(3, 8)
    expected, state = model(x, x), copy.deepcopy(model.state_dict())
    done = pack_weights(model)
    assert done.packed == [("q_proj", "k_proj", "v_proj")]
    assert done.skipped == []
    assert pack_weights(model).packed == []
    assert all(torch.equal(a, b) for a, b in zip(model(x, x), expected, strict=True))
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert len(list(model.parameters())) == 1 + bias
    assert unpack_weights(model) == 3
    assert all(type(layer) is nn.Linear for layer in model.children())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_packed_weights_follow_to_dtypes_copies_and_loaded_states() -> None:
    model, other = Attention(), Attention()
    pack_weights(model)
    twin = copy.deepcopy(model).double()
    assert twin.q_proj.packed_weight is twin.v_proj.packed_weight
    assert twin.q_proj.weight.dtype == torch.float64
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.k_proj.weight, other.k_proj.weight)
    assert torch.equal(model.k_proj.bias, other.k_proj.bias)


def test_states_that_do_not_fit_are_refused() -> None:
    model = Attention()
    pack_weights(model)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for q_proj\.weight"):
        model.load_state_dict(state | {"q_proj.weight": torch.zeros(3, 8)})
    with pytest.raises(RuntimeError, match=r"Missing key.*k_proj.bias"):
        model.load_state_dict({name: value for name, value in state.items() if name != "k_proj.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj.gain"):
        model.load_state_dict(state | {"q_proj.gain": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="unpack_weights first"):
        model.load_state_dict(state, assign=True)


def tie(model: Attention) -> None:
    model.k_proj.weight = model.v_proj.weight


HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


def hook(model: Attention, when: str) -> None:
    getattr(model.q_proj, f"register_{when}_hook")(lambda *_: None)


def mix(model: Attention) -> None:
    model.q_proj.bias = None


def widen(model: Attention) -> None:
    model.q_proj = nn.Linear(9, 8)


def specialise(model: Attention) -> None:
    class Special(nn.Linear):
        pass

    model.k_proj = Special(8, 4)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (tie, "tied"),
        *((partial(hook, when=when), "hooks") for when in HOOKS),
        (mix, "biases differ"),
        (widen, "widths differ"),
        (specialise, "a Special is"),
    ],
)
def test_what_cannot_be_packed_says_why(spoil: object, reason: str) -> None:
    model = Attention()
    spoil(model)  # type: ignore[operator]
    done = pack_weights(model)
    assert done.packed == []
    (line,) = done.skipped
    assert line.startswith("q_proj, k_proj, v_proj: ")
    assert reason in line
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_one_tensor_are_merged(bias: bool) -> None:
    model, x, memory = Attention(bias=bias), torch.randn(3, 8), torch.randn(3, 8)
    pack_weights(model)
    for inputs, left in (((x, x), 1), ((x, memory), 2)):
        with torch.no_grad():
            expected = model(*inputs)
        gm = capture(model, *inputs)
        assert merge_gemms(gm.graph) == 3 - left
        assert propagate(gm) == ""
        gm.recompile()
        values = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
        real = {tuple(v.shape): v for v in (model.q_proj.packed_weight, model.q_proj.packed_bias) if v is not None}
        seen = iter(inputs if inputs[1] is memory else (x,))
        args = [real[tuple(v.shape)] if tuple(v.shape) in real else next(seen) for v in values]
        with torch.no_grad():
            for out, want in zip(gm(*args), expected, strict=True):
                torch.testing.assert_close(out, want)


def test_a_write_between_the_products_keeps_them_apart() -> None:
    model, x = Attention(), torch.randn(3, 8)
    pack_weights(model)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        k = model.k_proj(x)
        x.mul_(2)
        return k, model.v_proj(x)

    assert merge_gemms(capture(forward, x).graph) == 0


def test_layers_that_several_modules_hold_are_left_alone() -> None:
    """Packed apart they would be two copies, and a change of one no change of the other."""
    model = nn.ModuleList([Attention(), Attention()])
    model[1].q_proj = model[0].q_proj
    done = pack_weights(model)
    assert done.packed == []
    assert all("tied" in reason for reason in done.skipped)
    assert len(done.skipped) == 2
    assert model[0].q_proj is model[1].q_proj


class Wrapper(nn.Module):
    """Has the attributes of the module that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_layers_of_a_wrapped_module_are_packed_where_they_are() -> None:
    model = Wrapper()
    names = set(model.state_dict())
    assert pack_weights(model).packed == [("inner.q_proj", "inner.k_proj", "inner.v_proj")]
    assert set(model.state_dict()) == names
    assert unpack_weights(model) == 3
