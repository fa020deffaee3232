"""Every row of the tables that users of other libraries read, shown to be right; FlashAttention's: `test_varlen.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, or_masks

import stof
from stof import masks

DOCS = Path(__file__).parents[1] / "docs" / "how-to"
LENGTH = 48
Q, K, V = torch.randn(3, 2, 4, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")


def check(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((q - k) % (h + 3) != 1)


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < 9 + b


def block_mask(function: Callable[..., Tensor]) -> BlockMask:
    return create_block_mask(function, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def flex(function: Callable[..., Tensor], **options: Any) -> Any:
    """FlexAttention's result, uncompiled."""
    return flex_attention(Q, K, V, block_mask=block_mask(function), **options)


def mask_functions() -> None:
    for function in (strided, near):
        check(stof.attention(Q, K, V, masks.from_function(function)), flex(function))


def block_masks() -> None:
    check(stof.attention(Q, K, V, block_mask(strided)), flex(strided))


def plans() -> None:
    check(stof.attention(Q, K, V, stof.plan(strided, LENGTH, LENGTH, batch=2, heads=4)), flex(strided))


def combined() -> None:
    first, second = masks.from_function(strided), masks.from_function(near)
    check(stof.attention(Q, K, V, first & second), flex(and_masks(strided, near)))
    check(stof.attention(Q, K, V, first | second), flex(or_masks(strided, near)))


def bias() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    wanted = flex(strided, score_mod=lambda score, b, h, q, k: score - slopes[h] * (q - k).abs())
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    check(stof.attention(Q, K, V, masks.from_function(strided), bias=-slopes[:, None, None] * distance), wanted)


def softcap() -> None:
    wanted = flex(strided, score_mod=lambda score, *_: 0.7 * torch.tanh(score / 0.7))
    check(stof.attention(Q, K, V, masks.from_function(strided), softcap=0.7), wanted)


def no_score_mod() -> None:
    with pytest.raises(TypeError, match="score_mod"):
        stof.attention(Q, K, V, score_mod=lambda score, *_: score)  # type: ignore[call-overload]


def lse() -> None:
    out, lse = stof.attention(Q, K, V, masks.from_function(strided), return_lse=True)
    scores = (Q @ K.mT / 4).masked_fill(~masks.from_function(strided).to_dense(LENGTH, batch=2, heads=4), -torch.inf)
    check(lse, scores.logsumexp(-1))
    check(out, flex(strided))


def gradients() -> None:
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]

    def of(out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out.square().sum(), inputs))

    first, again = (of(stof.attention(*inputs, masks.from_function(strided))) for _ in range(2))
    keep = masks.from_function(strided).to_dense(LENGTH, batch=2, heads=4)
    # FlexAttention has no gradients on CPUs.
    by_pytorch = of(F.scaled_dot_product_attention(*inputs, keep))
    for one, same, wanted in zip(first, again, by_pytorch, strict=True):
        assert torch.equal(one, same)
        check(one, wanted)


def neighbours(length: int, kernel: int, dilation: int = 1) -> Tensor:
    """NATTEN's 1-D rule: the window moves inside at the borders, among the tokens of the query's residue."""
    keep = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        residue = range(query % dilation, length, dilation)
        first = min(max(query // dilation - kernel // 2, 0), len(residue) - kernel)
        keep[query, [residue[first + n] for n in range(kernel)]] = True
    return keep


def same_inside(mask: masks.Mask, wanted: Tensor, reach: int) -> None:
    """The mask is NATTEN's `reach` tokens from the borders, and nearer to them a part of it."""
    dense = mask.to_dense(len(wanted))[0, 0]
    assert torch.equal(dense[reach:-reach], wanted[reach:-reach])
    assert not (dense & ~wanted).any()
    assert not torch.equal(dense, wanted)


def window() -> None:
    same_inside(masks.sliding_window(3, 3), neighbours(LENGTH, 7), 3)


def dilation() -> None:
    same_inside(masks.dilated_window(9, 9, dilation=3), neighbours(LENGTH, 7, 3), 9)


def grid() -> None:
    height, width, kernel = 10, 12, (3, 5)
    rows, columns = neighbours(height, kernel[0]), neighbours(width, kernel[1])
    wanted = (rows[:, None, :, None] & columns[None, :, None, :]).reshape(height * width, height * width)
    dense = masks.neighborhood_2d(height, width, kernel).to_dense(height * width)[0, 0]
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[1:-1, 2:-2] = True
    assert torch.equal(dense[inside.flatten()], wanted[inside.flatten()])
    assert not (dense & ~wanted).any()


def causal_neighbours() -> None:
    at = torch.arange(LENGTH)
    wanted = (at[:, None] >= at) & (at[:, None] - at < 7)
    assert torch.equal(masks.sliding_window(7 - 1).to_dense(LENGTH)[0, 0], wanted)


def coordinates() -> None:
    """A causal 3-D neighbourhood with a stride of 2, as a function of the coordinates."""
    sizes = 3, 4, 5

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        frame = (q // 20 >= k // 20) & (q // 20 - k // 20 < 2)
        return frame & ((q // 5 % 4 // 2 * 2 - k // 5 % 4).abs() <= 1) & ((q % 5 - k % 5).abs() <= 1)

    at = [torch.arange(60) // 20, torch.arange(60) // 5 % 4, torch.arange(60) % 5]
    assert [int(one.max()) + 1 for one in at] == list(sizes)
    frame = (at[0][:, None] - at[0]).clamp(-1, 2)
    wanted = (frame >= 0) & (frame < 2) & ((at[1][:, None] // 2 * 2 - at[1]).abs() <= 1)
    wanted &= (at[2][:, None] - at[2]).abs() <= 1
    assert torch.equal(masks.from_function(near).to_dense(60)[0, 0], wanted)


def causal() -> None:
    for keys in (LENGTH, 30):
        wanted = F.scaled_dot_product_attention(Q, K[:, :, :keys], V[:, :, :keys], is_causal=True)
        check(stof.attention(Q, K[:, :, :keys], V[:, :, :keys], masks.causal()), wanted)
    check(
        stof.attention(Q[:, :, :9], K, V, masks.causal()),
        F.scaled_dot_product_attention(Q[:, :, :9], K, V, is_causal=True),
    )


def bool_mask() -> None:
    keep = masks.from_function(strided).to_dense(LENGTH, batch=2, heads=4)
    check(stof.attention(Q, K, V, keep), F.scaled_dot_product_attention(Q, K, V, keep))


def float_mask() -> None:
    added = torch.randn(4, LENGTH, LENGTH, dtype=torch.float64)
    check(stof.attention(Q, K, V, bias=added), F.scaled_dot_product_attention(Q, K, V, added))


def grouped() -> None:
    k, v = K[:, :2], V[:, :2]
    check(stof.attention(Q, k, v), F.scaled_dot_product_attention(Q, k, v, enable_gqa=True))


# By page and heading: by the first cell of a row, what shows that the row is right.
TABLES: dict[tuple[str, str], dict[str, Callable[[], None]]] = {
    ("other-libraries.md", "## FlexAttention"): {
        "`flex_attention(q, k, v, block_mask=bm)`": block_masks,
        "a `mask_mod` function": mask_functions,
        "`create_block_mask(mask_mod, B, H, Sq, Skv)`": plans,
        "`and_masks(a, b)`, `or_masks(a, b)`": combined,
        "`score_mod` that adds a bias (ALiBi, relative positions)": bias,
        "`score_mod` with `tanh` (soft-capping)": softcap,
        "any other `score_mod`": no_score_mod,
        "`return_lse=True`": lse,
        "backward pass": gradients,
    },
    ("other-libraries.md", "## NATTEN"): {
        "`na2d(q, k, v, kernel_size=(h, w))`": grid,
        "`na1d(q, k, v, kernel_size=2 * r + 1)`": window,
        "`dilation=d` in 1-D": dilation,
        "`is_causal=True` in 1-D": causal_neighbours,
        "3-D, 2-D dilation, strides": coordinates,
        "backward": gradients,
    },
    ("pytorch.md", "## From `scaled_dot_product_attention`"): {
        "`is_causal=True`": causal,
        "`attn_mask`, bool": bool_mask,
        "`attn_mask`, float": float_mask,
        "`enable_gqa=True`": grouped,
    },
}  # fmt: skip


@pytest.mark.parametrize("page_and_heading", TABLES, ids=lambda key: key[1].strip("# `"))
def test_every_row_is_shown(page_and_heading: tuple[str, str]) -> None:
    page, heading = page_and_heading
    section = (DOCS / page).read_text(encoding="utf-8").split(f"{heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!-)(.*?) \| .* \|$", section, flags=re.MULTILINE)
    assert rows[1:] == list(TABLES[page_and_heading])


@pytest.mark.parametrize(("table", "row"), [(table, row) for table, rows in TABLES.items() for row in rows], ids=str)
def test_rows(table: tuple[str, str], row: str) -> None:
    TABLES[table][row]()
