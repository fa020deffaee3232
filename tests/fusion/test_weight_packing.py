"""Packed weights: the model computes the same, state dicts keep their names, and everything can be taken back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stof.fusion.passes.horizontal_fusion import merge_gemms
from stof.fusion.passes.weight_packing import PackedMemory, Packing, pack_weights, unpack_weights
from tests.fusion.graphs import capture, merged


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


def packed(*layers: nn.Linear) -> bool:
    """Whether weights, and biases, lie one after the other in one memory."""
    columns = [[layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]]
    return all(
        b.data_ptr() == a.data_ptr() + a.nbytes and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for column in columns
        for a, b in pairwise(column)
    )


@pytest.mark.parametrize("bias", [True, False])
def test_packing_changes_nothing_but_the_weights_place(bias: bool) -> None:
    model, x = Attention(bias=bias), torch.randn(3, 8)
    layers, held = list(model.children()), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, state = model(x, x), copy.deepcopy(model.state_dict())
    done = pack_weights(model)
    assert done.packed == [("q_proj", "k_proj", "v_proj")]
    assert done.skipped == []
    assert packed(model.q_proj, model.k_proj, model.v_proj)
    assert pack_weights(model) == Packing()
    assert all(torch.equal(a, b) for a, b in zip(model(x, x), expected, strict=True))
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert list(map(id, model.children())) == list(map(id, layers))
    assert list(map(id, model.parameters())) == list(map(id, held))
    assert all(type(layer) is nn.Linear for layer in layers)
    sum(out.sum() for out in model(x, x)).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert not any(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    state = copy.deepcopy(model.state_dict())
    assert unpack_weights(model) == 3
    assert unpack_weights(model) == 0
    assert not packed(model.q_proj, model.k_proj)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert list(map(id, model.parameters())) == list(map(id, held))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made", [torch.enable_grad, torch.inference_mode])
def test_weights_of_any_mode_are_packed_in_any_mode(made: Any, mode: Any) -> None:
    with made():
        model = Attention()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x, x)
    with mode():
        assert pack_weights(model).skipped == []
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(x, x), expected, strict=True))
        if made is torch.enable_grad:
            model.q_proj.weight.mul_(2)
    with mode():
        assert unpack_weights(model) == 3
    with torch.no_grad():
        assert torch.equal(model(x, x)[1], expected[1])


def test_copies_and_loaded_states_are_those_of_plain_layers() -> None:
    model, other = Attention(), Attention()
    kept = [model.k_proj, model.v_proj]  # in a plain list, which no module search finds
    pack_weights(model)
    twin = copy.deepcopy(model).double()
    assert twin.q_proj.weight.dtype == torch.float64
    assert pack_weights(twin).packed == [("q_proj", "k_proj", "v_proj")]
    again = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    model.load_state_dict(other.state_dict())
    assert packed(model.q_proj, model.k_proj, model.v_proj)
    assert torch.equal(kept[0].weight, other.k_proj.weight)
    assert torch.equal(kept[1].bias, other.v_proj.bias)
    model.load_state_dict(other.state_dict(), assign=True)
    assert not packed(model.q_proj, model.k_proj)


def test_weights_that_were_moved_are_packed_again() -> None:
    model = Attention()
    pack_weights(model)
    new = torch.randn_like(model.k_proj.weight)
    model.k_proj.weight.data = new
    assert not packed(model.q_proj, model.k_proj)
    assert pack_weights(model).packed == [("q_proj", "k_proj", "v_proj")]
    assert packed(model.q_proj, model.k_proj, model.v_proj)
    assert torch.equal(model.k_proj.weight, new)


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


def tie_memory(model: Attention) -> None:
    model.k_proj.weight.data = model.v_proj.weight.data


def view(model: Attention) -> None:
    model.q_proj.weight.data = torch.randn(9, 8)[1:]


def transpose(model: Attention) -> None:
    model.q_proj.weight.data = torch.randn(8, 8).t()


def share(model: Attention) -> None:
    model.q_proj.share_memory()


def replace_forward(model: Attention) -> None:
    before = model.q_proj.forward
    model.q_proj.forward = lambda x: before(x) + 1  # type: ignore[method-assign, assignment]


def offload(model: Attention) -> None:
    model.q_proj.to("meta")


def parametrize(model: Attention) -> None:
    nn.utils.parametrize.register_parametrization(model.q_proj, "weight", nn.Identity())


def extend(model: Attention) -> None:
    model.q_proj.register_parameter("lora", nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (tie, "tied"),
        *((partial(hook, when=when), "hooks") for when in HOOKS),
        (tie_memory, "lies in one memory"),
        (view, "a view of other memory"),
        (transpose, "a view of other memory"),
        (share, "shared with other processes"),
        (replace_forward, "holds 'forward'"),
        (offload, "has no memory (it is on meta)"),
        (parametrize, "a ParametrizedLinear is"),
        (extend, "holds 'lora'"),
        (mix, "biases differ"),
        (widen, "widths differ"),
        (specialise, "a Special is"),
    ],
)
def test_what_cannot_be_packed_says_why(spoil: object, reason: str) -> None:
    model = Attention()
    spoil(model)  # type: ignore[operator]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    done = pack_weights(model)
    assert done.packed == []
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    (line,) = done.skipped
    assert line.startswith("q_proj, k_proj, v_proj: ")
    assert reason in line


def test_marks_that_libraries_set_are_no_reason() -> None:
    model = Attention()
    model.q_proj._is_hf_initialized = True  # type: ignore[assignment]
    assert pack_weights(model).skipped == []


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_products_of_one_tensor_are_merged(bias: bool, same: bool) -> None:
    model, x, memory = Attention(bias=bias), torch.randn(3, 8), torch.randn(3, 8)
    pack_weights(model)
    inputs = (x, x) if same else (x, memory)
    run, counts = merged(lambda *given: [out.sin() for out in model(*given)])
    with torch.no_grad():
        for out, want in zip(run(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(out, want.sin())
    assert counts == [2 if same else 1]


def test_a_weight_that_others_read_as_well_stays_what_it_is() -> None:
    model, x, memory = Attention(), torch.randn(3, 8), torch.randn(5, 8)
    pack_weights(model)

    def forward(x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        q, k, v = model(x, x)
        other = model.q_proj(memory), model.k_proj(memory)
        return *(one.sin() for one in (q, k, v, *other)), model.q_proj.weight.sum(), model.v_proj(x + 1)

    run, counts = merged(forward)
    with torch.no_grad():
        for out, want in zip(run(x, memory), forward(x, memory), strict=True):
            torch.testing.assert_close(out, want)
    assert counts == [3]


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "in place through data": lambda layer: layer.weight.data.mul_(2),
    "other data": lambda layer: setattr(layer.weight, "data", torch.randn_like(layer.weight)),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
    "a parameter of the same memory": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.data)),
    "a bias": lambda layer: setattr(layer.bias, "data", torch.randn_like(layer.bias)),
    "a loaded state": lambda layer: layer.load_state_dict(nn.Linear(8, layer.out_features).state_dict()),
    "an assigned state": lambda layer: layer.load_state_dict(
        nn.Linear(8, layer.out_features).state_dict(), assign=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_merged_products_read_the_weights_of_each_call(change: str, name: str) -> None:
    model, x = Attention(), torch.randn(3, 8)
    pack_weights(model)
    run, counts = merged(lambda x: [out.sin() for out in model(x, x)])
    with torch.no_grad():
        run(x)
        CHANGES[change](getattr(model, name))
        apart = not packed(model.q_proj, model.k_proj, model.v_proj)
        with pytest.warns(RuntimeWarning, match="copied together") if apart else nullcontext():
            out = run(x)
        for got, want in zip(out, model(x, x), strict=True):
            torch.testing.assert_close(got, want.sin())
        run(x)  # warns once
        pack_weights(model)
        for got, want in zip(run(x), model(x, x), strict=True):
            torch.testing.assert_close(got, want.sin())
    assert counts == [2]


def test_neighbours_of_separate_memories_are_not_read_as_one() -> None:
    memory = torch.arange(12.0)
    own = torch.empty(0).set_(memory.untyped_storage()[: 4 * 6], 0, (2, 3))  # as an allocator may place them
    other = memory[6:].view(2, 3)
    place = PackedMemory.of([(2, 3), (2, 3)], 4)
    assert place.view([own, other]) is None
    assert place.view([memory[:6].view(2, 3), memory[6:].view(2, 3)]).tolist() == memory.view(4, 3).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["x", "weight"])
def test_a_write_between_the_products_keeps_them_apart(what: str) -> None:
    model, x = Attention(), torch.randn(3, 8)
    pack_weights(model)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        k = model.k_proj(x)
        (x if what == "x" else model.v_proj.weight).mul_(2)
        return k.sin(), model.v_proj(x).sin()

    with torch.no_grad():
        assert merge_gemms(capture(forward, x)) == 0


def test_written_weights_are_not_packed_inputs() -> None:
    model, x = Attention(), torch.randn(3, 8)
    pack_weights(model)

    def forward(x: Tensor) -> list[Tensor]:
        out = [one.sin() for one in model(x, x)]
        model.k_proj.weight.mul_(2)
        return out

    assert merge_gemms(capture(forward, x)) == 0


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
