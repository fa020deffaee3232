"""Patch embeddings become products, and results stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from stof.fusion.nodes import name_of
from tests.fusion.graphs import fuse


class Embedding(nn.Module):
    """As Vision Transformers do it."""

    def __init__(self, patch: tuple[int, int] = (4, 8), bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 16, patch, **{"stride": patch, "bias": bias} | options)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.projection(x).flatten(2).transpose(1, 2))


def convolutions(module: nn.Module, image: Tensor) -> int:
    """Those that are left in the graph, which computes what the module does."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        assert not fuse(gm).notes
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(module, backend=backend)(image)
        torch.testing.assert_close(found, module(image), atol=1e-4, rtol=1e-4)
    (gm,) = graphs
    return sum(name_of(node) == "conv2d" for node in gm.graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("patch", [(4, 8), (2, 2), (16, 16)])
def test_a_patch_embedding_is_a_product(patch: tuple[int, int], bias: bool) -> None:
    assert convolutions(Embedding(patch, bias), torch.randn(2, 3, 32, 48)) == 0


def test_any_number_of_images() -> None:
    images = torch.randn(3, 3, 32, 48)
    torch._dynamo.mark_dynamic(images, 0)
    assert convolutions(Embedding(), images) == 0


def test_images_of_any_size_stay() -> None:
    images = torch.randn(3, 3, 32, 48)
    torch._dynamo.mark_dynamic(images, 2)
    assert convolutions(Embedding(), images) == 1


def test_padding_by_name() -> None:
    assert convolutions(Embedding((4, 4), padding="valid"), torch.randn(2, 3, 32, 48)) == 0


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (Embedding((4, 4), stride=(2, 4)), (32, 48)),  # patches overlap
        (Embedding((4, 4), stride=(8, 4)), (32, 48)),  # or leave something out
        (Embedding((4, 4), padding=2), (32, 48)),
        (Embedding((4, 4), dilation=2, stride=4), (32, 48)),
        (Embedding((4, 4)), (33, 48)),  # the last rows are left out
        (Embedding((1, 1)), (8, 8)),
    ],
)
def test_other_convolutions_stay(module: nn.Module, size: tuple[int, int]) -> None:
    assert convolutions(module, torch.randn(2, 3, *size)) == 1


class Image(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.projection(x))


def test_what_is_read_as_an_image_stays() -> None:
    """Its channels would lie last."""
    assert convolutions(Image((4, 4)), torch.randn(2, 3, 32, 48)) == 1
