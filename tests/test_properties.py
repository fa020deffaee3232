"""Any mask under any combination of options: the layout is the mask exactly, and attention is right.

The fast subset runs everywhere; `STOF_HYPOTHESIS_PROFILE=thorough pytest -m slow tests/test_properties.py` draws
thousands.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.layout import build_layout, orders
from stof.layout.orders.cluster import cluster_rows
from stof.layout.orders.search import find_order
from stof.layout.survey import survey
from stof.masks import Mask
from stof.selection import IMPLEMENTATIONS, CallSpec, candidates
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.selection.fakes import GPU, Geometry, call_of, fake_gpu
from tests.strategies import configs, dense_masks

pytestmark = pytest.mark.usefixtures("poisoned_memory")

lengths = st.sampled_from([1, 2, 16, 17, 63, 65, 100, 130, 200])
IMPLS = [name for name, impl in IMPLEMENTATIONS.items() if impl.capabilities.devices != ("cuda",)]


@st.composite
def some_order(draw: st.DrawFn, keep: Tensor) -> Tensor | None:
    """No order, one of a name, a random one, that of the search, or clusters whether they pay or not."""
    q_len, kv_len = keep.shape[-2:]
    kind = draw(st.sampled_from(["own", "remainder", "patch", "random", "found", "clustered"]))
    match kind:
        case "remainder":
            return orders.by_remainder(q_len, draw(st.integers(1, 20)))
        case "patch":
            height = draw(st.sampled_from([n for n in range(1, q_len + 1) if q_len % n == 0]))
            return orders.by_patch(height, q_len // height, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        case "random":
            return torch.randperm(q_len, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        case "found":
            found = find_order(masks.from_dense(keep), q_len, kv_len, batch=keep.shape[0], heads=keep.shape[1])
            return None if found is None else found[1]
        case "clustered":
            return cluster_rows(keep.transpose(1, 2).flatten(2)[0], draw(st.sampled_from([8, 64])))
    return None


def check_any_layout(data: st.DataObject) -> None:
    """One mask, one combination of options: round trip, counts and attention."""
    q_len, kv_len = data.draw(lengths), data.draw(lengths)
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    keep = data.draw(dense_masks(q_len, kv_len, batch, heads))
    config, order = data.draw(configs), data.draw(some_order(keep))
    sizes: dict[str, Any] = {"batch": batch, "heads": heads, "row_order": order}
    layout = build_layout(masks.from_dense(keep), q_len, kv_len, config, **sizes)
    layout.validate()
    assert torch.equal(layout.to_dense(), keep)
    counted = survey(masks.from_dense(keep), q_len, kv_len, [config], **sizes).counts[config]
    tiles = layout.row_block_ptr.diff().view(layout.patterns, -1)[layout.pattern_of.flatten().long()]
    assert torch.equal(counted.partial + counted.full, tiles.long())
    inputs = make_inputs(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, head_dim=16).qkv
    # Without options, the planner's own choice: the named orders, the search, other heights.
    plan = stof.plan(keep, q_len, kv_len, config=config, **sizes) if data.draw(st.booleans()) else keep
    out, lse = stof.attention(*inputs, plan, return_lse=True, implementation=data.draw(st.sampled_from(IMPLS)))
    assert_attention(out, lse, *inputs, keep)


@given(data=st.data())
@examples(120)
def test_any_layout(data: st.DataObject) -> None:
    check_any_layout(data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=max(600, 4 * settings().max_examples))
def test_any_layout_thousands(data: st.DataObject) -> None:
    check_any_layout(data)


def pathological(length: int) -> dict[str, Tensor]:
    """Masks made to defeat a layout."""
    i = torch.arange(length)
    noise = torch.rand(length, length, generator=torch.Generator().manual_seed(0))
    return {
        "empty": noise < 0,
        "one column": (i == length // 2).expand(length, length).clone(),
        "one row": (i == length // 2)[:, None].expand(length, length).clone(),
        "checkerboard": (i[:, None] + i) % 2 == 0,
        "anti-diagonal": i[:, None] + i == length - 1,
        "one score": i[:, None] * length + i == length // 2,
        "half": noise < 0.5,
        "one in 50": noise < 0.02,
        "all but one in 50": noise < 0.98,
    }


@pytest.mark.parametrize("length", [1, 17, 300])
def test_pathological_masks_are_computed(length: int) -> None:
    inputs = make_inputs(heads=2, q_len=length, kv_len=length, head_dim=16).qkv
    for keep in pathological(length).values():
        out, lse = stof.attention(*inputs, keep, return_lse=True)
        assert_attention(out, lse, *inputs, keep)


def fastest(call: CallSpec, mask: Mask) -> float:
    estimated = candidates(call, GPU, Geometry(mask, call.q_len, call.kv_len))[0].estimate_us
    assert estimated is not None
    return estimated


@pytest.mark.parametrize("sizes", [{}, {"heads": 32, "head_dim": 128}, {"batch": 8}], ids=str)
@pytest.mark.parametrize("length", [1, 17, 300, 1024])
def test_pathological_masks_are_estimated_below_twice_the_dense_kernel(
    monkeypatch: pytest.MonkeyPatch, length: int, sizes: dict[str, int]
) -> None:
    """On an H200, by the cost model: where no layout helps, whole tiles with a bitmap each are the last resort."""
    fake_gpu(monkeypatch)
    call = call_of(q_len=length, kv_len=length, **sizes)
    dense = fastest(call, masks.full())
    for name, keep in pathological(length).items():
        assert fastest(call, masks.from_dense(keep)) < 2 * dense, name
