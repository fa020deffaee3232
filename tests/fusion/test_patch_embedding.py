"""Patch embeddings become GEMMs, and results stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from stof.fusion.graph.nodes import op_name
from tests.fusion.graphs import fuse


class Embedding(nn.Module):
    """As Vision Transformers do it."""

    def __init__(self, patch: tuple[int, int] = (4, 8), bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 16, patch, **{"stride": patch, "bias": bias} | options)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.projection(x).flatten(2).transpose(1, 2))


def convolutions(module: nn.Module, image: Tensor, dtype: torch.dtype = torch.bfloat16, notes: int = 0) -> int:
    """Those that are left in the graph, which computes what the module does."""
    graphs: list[fx.GraphModule] = []
    module, image = module.to(dtype), _as(image, dtype)

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        assert len(fuse(gm).notes) == notes
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(module, backend=backend)(image)
        torch.testing.assert_close(found, module(image), atol=0.03, rtol=0.03)
        assert found.stride() == module(image).stride() or not notes
    (gm,) = graphs
    return sum(op_name(node) == "conv2d" for node in gm.graph.nodes)


def _as(image: Tensor, dtype: torch.dtype) -> Tensor:
    """Sizes that are marked as dynamic stay so."""
    marks = getattr(image, "_dynamo_dynamic_indices", set())
    image = image.to(dtype)
    for dim in marks:
        torch._dynamo.mark_dynamic(image, dim)
    return image


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


def test_32_bits_stay() -> None:
    """Convolutions may be rounded to TF32 where GEMMs are not, and the other way round."""
    assert convolutions(Embedding((4, 4)), torch.randn(2, 3, 32, 48), torch.float32) == 1


class Sequence(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x).flatten(2)


def test_results_keep_their_strides() -> None:
    """What a graph returns may be viewed by code outside it."""
    assert convolutions(Sequence((4, 4)), torch.randn(2, 3, 32, 48), notes=1) == 1
