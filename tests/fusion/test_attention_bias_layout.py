"""Biases that kernels cannot read in rows are laid out once in a graph, and results stay what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

import stof
from stof import masks
from stof.fusion.graph.nodes import argument, op_name
from stof.fusion.passes import attention_bias_layout
from stof.kernels.tma_bias import has_aligned_rows
from tests.fusion.graphs import capture, fuse


@pytest.fixture(autouse=True, params=[(9, 0), (8, 0)], ids=str)
def _gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bias_layout, "_capability", lambda bias: request.param)


def inputs(keys: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (and values), and numbers that a bias of 3 heads is made of, heads last."""
    q, k = torch.randn(2, 3, 24, 16), torch.randn(2, 3, keys, 16)
    return q.half(), k.half(), torch.randn(24, keys, 3).half()


def layers(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    """Two layers that share a bias, as T5's do."""
    bias = table.mul(2).permute(2, 0, 1).unsqueeze(0)
    for _ in range(2):
        q = stof.attention(q, k, k, masks.full(), bias=bias)
    return q


def in_order(gm: fx.GraphModule, **given: Tensor) -> list[Tensor]:
    """Dynamo's graphs take what they are given in the order of its use."""
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return [given[name.lower().removeprefix("l_").removesuffix("_")] for name in names]


def laid(function: Callable[..., Tensor], q: Tensor, k: Tensor, table: Tensor) -> tuple[int, list[bool]]:
    """Copies that were put into the graph, and which layers' biases lie in rows now; results are as before."""
    gm = capture(function, q, k, table)
    given = in_order(gm, q=q, k=k, table=table)
    expected = gm(*given)
    fuse(gm)
    torch.testing.assert_close(gm(*given), expected, equal_nan=True)
    found = [node for node in gm.graph.nodes if op_name(node) == "stof.masked_attention"]
    values = [argument(node, 4, "bias").meta["example_value"] for node in found]
    clones = sum(op_name(node) == "clone" for node in gm.graph.nodes)
    return clones, [has_aligned_rows(value) for value in values]


@pytest.mark.parametrize("keys", [40, 39, 1])
def test_one_copy_serves_all_layers(keys: int) -> None:
    assert laid(layers, *inputs(keys)) == (1, [True, True])


@pytest.mark.parametrize("keys", [40, 39])
def test_a_bias_that_is_given(keys: int) -> None:
    """A copy comes after all that is given."""

    def layer(q: Tensor, bias: Tensor, k: Tensor) -> Tensor:
        return stof.attention(q, k, k, masks.full(), bias=bias)

    q, k, table = inputs(keys)
    bias = table.permute(2, 0, 1)[None]
    gm = capture(layer, q, bias, k)
    given = in_order(gm, q=q, bias=bias, k=k)
    fuse(gm)
    assert len(in_order(gm, q=q, bias=bias, k=k)) == 3
    assert all(node.op == "placeholder" for node in list(gm.graph.nodes)[:3])
    assert sum(op_name(node) == "clone" for node in gm.graph.nodes) == 1
    torch.testing.assert_close(gm(*given)[0], layer(q, bias, k))


def test_what_is_left_as_it_is() -> None:
    """What lies in rows, is of a dtype that no such kernel reads, or is written to after it was made."""

    def readable(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return stof.attention(q, k, k, masks.full(), bias=table.permute(2, 0, 1)[None].contiguous())

    def wide(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return stof.attention(q, k, k, masks.full(), bias=table.permute(2, 0, 1)[None].double())

    def single(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return stof.attention(q, k, k, masks.full(), bias=table.permute(2, 0, 1)[None].float())

    def written(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        bias = table.mul(2).permute(2, 0, 1)[None]
        q = stof.attention(q, k, k, masks.full(), bias=bias)
        bias.add_(1)
        return stof.attention(q, k, k, masks.full(), bias=bias)

    assert laid(readable, *inputs()) == (0, [True])
    assert laid(wide, *inputs()) == (0, [False])
    assert laid(single, *inputs()) == (1, [True])
    assert laid(written, *inputs()) == (0, [False, False])


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert laid(layers, *inputs()) == (0, [False, False])


@pytest.mark.parametrize("form", ["all heads", "queries", "batch"])
def test_what_is_shared_is_copied_once(form: str) -> None:
    """Strides of 0 stay."""

    def layer(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        bias = table.mul(2).permute(2, 0, 1).unsqueeze(0)
        if form == "all heads":
            bias = bias[:, :1].expand(1, 3, 24, -1)
        elif form == "queries":
            bias = bias[:, :, :1].expand(1, 3, 24, -1)
        else:
            bias = bias.expand(2, 3, 24, -1)
        return stof.attention(q, k, k, masks.full(), bias=bias)

    q, k, table = inputs(39)
    gm = capture(layer, q, k, table)
    given = in_order(gm, q=q, k=k, table=table)
    expected = gm(*given)
    fuse(gm)
    torch.testing.assert_close(gm(*given), expected)
    (clone,) = [node for node in gm.graph.nodes if op_name(node) == "clone"]
    sizes = {"all heads": (1, 1, 24, 39), "queries": (1, 3, 1, 39), "batch": (1, 3, 24, 39)}
    assert tuple(clone.meta["example_value"].shape) == sizes[form]


def test_lengths_stay_open() -> None:
    """One graph for all of them, with a bias of any dtype, on any device."""
    graphs = 0

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        fuse(gm)
        return gm.forward

    def layer(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        return stof.attention(q, k, k, masks.full(), bias=bias)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend)
    k, bias = torch.randn(2, 3, 40, 16).half(), torch.randn(2, 40, 1, 1).half().permute(0, 2, 3, 1)[..., :40]
    for length in (24, 25, 26, 27, 28):
        q = torch.randn(2, 3, length, 16).half()
        torch._dynamo.mark_dynamic(q, 2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, bias), layer(q, k, bias))
    assert graphs == 1


def test_other_kernels_business_is_left() -> None:
    """Queries in 64 bits, few of them, and a kernel that was asked for."""

    def layer(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return stof.attention(q, k, k, masks.full(), bias=table.mul(2).permute(2, 0, 1)[None])

    def forced(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        bias = table.mul(2).permute(2, 0, 1)[None]
        return stof.attention(q, k, k, masks.full(), bias=bias, implementation="batched")

    q, k, table = inputs()
    for function, given in (
        (layer, (q.double(), k.double(), table)),
        (layer, (q[:, :, :16], k, table[:16])),
        (forced, (q, k, table)),
    ):
        gm = capture(function, *given)
        fuse(gm)
        assert not [node for node in gm.graph.nodes if op_name(node) == "clone"]
