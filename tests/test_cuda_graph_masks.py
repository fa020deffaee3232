"""What CUDA graphs would not see is refused: what a mask reads, which replays read as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import stof
from stof import masks
from stof.errors import UnsupportedError
from stof.runtime import memory
from stof.runtime.memory import own_capture

BITS = torch.randint(-(2**31), 2**31, (64, 2), generator=torch.Generator().manual_seed(1)).int()
KEEP = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.4
WITH_TENSORS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: KEEP,
    "within another": lambda: masks.causal() & masks.per_head([masks.from_bits(BITS, 64), masks.full()]),
    "function": lambda: masks.from_function(lambda b, h, q, kv: KEEP[q, kv]),
    "block mask": lambda: create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu"),
    "vertical slash": lambda: masks.vertical_slash(torch.tensor([[1, 5]]), torch.tensor([[0, 3]])),
}


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(memory, "capturing", lambda device: True)


@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_masks_with_tensors_are_refused(kind: str, capture: Callable[[], None]) -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    mask = WITH_TENSORS[kind]()
    plan = stof.plan(mask, 64, batch=1, heads=2)
    expected = stof.attention(q, k, v, mask)
    stof.attention(q, k, v, plan)
    capture()
    refused = pytest.raises(UnsupportedError, match="make a plan before the capture")
    with refused:
        stof.attention(q, k, v, mask)
    assert torch.equal(stof.attention(q, k, v, plan), expected)
    if kind == "tensor":  # each replay gets new values for it
        with own_capture(), refused:
            stof.attention(q, k, v, mask)
        return
    with refused:
        stof.plan(mask, 64)
    with own_capture():
        assert torch.equal(stof.attention(q, k, v, mask), expected)


def test_masks_without_tensors_are_captured(capture: Callable[[], None]) -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    every = [
        masks.causal() & masks.padding([50]),
        "sliding_window(5)",
        masks.from_function(lambda b, h, q, k: q > k),
        masks.from_dense(KEEP),
        masks.reordered(masks.causal(), torch.randperm(64)),
    ]
    expected = [stof.attention(q, k, v, mask) for mask in every]
    capture()
    for mask, result in zip(every, expected, strict=True):
        assert torch.equal(stof.attention(q, k, v, mask), result)


@pytest.mark.parametrize("kind", ["function", "within another", "named"])
def test_compiled_code_keeps_them_out_of_inductors_graphs(kind: str) -> None:
    """`stof::varying_attention` has the tag by which Inductor leaves an operator out of its CUDA graphs."""
    torch.compiler.reset()
    mask = masks.causal() if kind == "named" else WITH_TENSORS[kind]()
    called: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called.extend(node.target for node in gm.graph.nodes if "attention" in str(node.target))
        return gm.forward

    x = torch.randn(1, 2, 64, 16)
    compiled = torch.compile(lambda x: stof.attention(x, x, x, mask), backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), stof.attention(x, x, x, mask))
    (operator,) = called
    assert torch.Tag.cudagraph_unsafe in torch.ops.stof.varying_attention.default.tags
    assert ("varying" in str(operator)) == (kind != "named")
