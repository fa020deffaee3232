"""Validation: a change of any tensor that makes a layout unsafe to run, or ambiguous, is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, Plan, masks
from stof.errors import LayoutError
from stof.layout import Layout, build_layout
from stof.testing import assert_attention, make_inputs
from tests.examples import examples

MASK = masks.per_head([masks.strided(9, 11, 3), masks.longformer(12, 3)])
CONTIGUOUS = build_layout(MASK, 100, 110, LayoutConfig(32, 32), heads=2)
GATHERED = build_layout(MASK, 100, 110, LayoutConfig(32, 32, 1), heads=2, row_order=torch.arange(100).flip(0))
SLABS = build_layout(MASK, 100, 110, LayoutConfig(32, 32, 8), heads=2)
LAYOUTS = {"contiguous": CONTIGUOUS, "gathered": GATHERED, "slabs": SLABS}
FIELDS = tuple(GATHERED.tensors())


def changed(layout: Layout, **tensors: Tensor) -> Layout:
    return replace(layout, **tensors)


def at(tensor: Tensor, place: int | tuple[int, ...], value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


@pytest.mark.parametrize("name", LAYOUTS)
def test_sound_layouts_pass(name: str) -> None:
    LAYOUTS[name].validate()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "mutate",
    [
        lambda t: t.double(),
        lambda t: t.to(torch.int16),
        lambda t: t[None],
        lambda t: t.flatten()[0],
        lambda t: t[:0],
        lambda t: t[:-1],
        lambda t: torch.cat([t, t]),
        lambda t: t.to("meta"),
    ],
    ids=["float64", "int16", "extra dim", "scalar", "nothing", "one less", "twice", "device"],
)
def test_shapes_dtypes_devices(field: str, mutate: Callable[[Tensor], Tensor], request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.id
    if field in ("bitmaps", "gathered") and "twice" in kind:
        changed(GATHERED, **{field: mutate(GATHERED.tensors()[field])}).validate()  # unused rows are harmless
        return
    if field == "pattern_of" and "twice" in kind:
        changed(GATHERED, pattern_of=mutate(GATHERED.pattern_of)).validate()  # the same patterns for two sequences
        return
    with pytest.raises(LayoutError):
        changed(GATHERED, **{field: mutate(GATHERED.tensors()[field])}).validate()


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "bitmaps"])
@pytest.mark.parametrize("value", [-(2**31), -(2**30), 2**30, 2**31 - 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_indices_far_out_of_range(name: str, value: int, field: str) -> None:
    layout = LAYOUTS[name]
    tensor = layout.tensors().get(field)
    if tensor is None or not tensor.numel():
        return
    for place in (0, tensor.numel() // 2, tensor.numel() - 1):
        flat = at(tensor.flatten(), place, value)
        with pytest.raises(LayoutError):
            changed(layout, **{field: flat.view(tensor.shape)}).validate()


PARTIAL = int((GATHERED.tile_bitmap >= 0).nonzero()[0, 0])
WITH_FULL = build_layout(masks.causal() | masks.full(), 64, 110, LayoutConfig(32, 32))
MUTATIONS: dict[str, tuple[Layout, str]] = {
    "pointers do not start at 0": (
        changed(GATHERED, row_block_ptr=at(GATHERED.row_block_ptr, 0, 1)),
        "does not start at 0",
    ),
    "pointers end early": (
        changed(GATHERED, row_block_ptr=GATHERED.row_block_ptr.clamp(max=GATHERED.tiles - 1)),
        "does not end at the number of tiles",
    ),
    "pointers decrease": (
        changed(GATHERED, row_block_ptr=at(GATHERED.row_block_ptr, 2, 0)),
        "row_block_ptr decreases|column twice",
    ),
    "pointers wrap around int32": (
        changed(
            WITH_FULL,
            row_block_ptr=torch.tensor([0, 2**31 - 1, WITH_FULL.tiles], dtype=torch.int32),
        ),
        "decreases",
    ),
    "partial count negative": (changed(GATHERED, partial_count=at(GATHERED.partial_count, 0, -1)), "partial_count"),
    "partial count too large": (changed(GATHERED, partial_count=GATHERED.partial_count + 99), "partial_count"),
    "partial count off by one": (
        changed(CONTIGUOUS, partial_count=at(CONTIGUOUS.partial_count, 0, CONTIGUOUS.partial_count[0] - 1)),
        "not the partial ones",
    ),
    "unknown pattern": (changed(GATHERED, pattern_of=GATHERED.pattern_of + 1), "pattern that is not there"),
    "tile past the keys": (
        changed(CONTIGUOUS, tile_base=at(CONTIGUOUS.tile_base, 0, 110)),
        "tile_base is out of range",
    ),
    "gathered row missing": (
        changed(GATHERED, gathered=GATHERED.gathered[:-1]),
        "tile_base is out of range",
    ),
    "bitmap missing": (changed(GATHERED, bitmaps=GATHERED.bitmaps[:-1]), "tile_bitmap is out of range"),
    "gathered column past the keys": (
        changed(GATHERED, gathered=at(GATHERED.gathered, (0, 0), 110)),
        "gathered has columns out of range",
    ),
    "gathered column negative": (
        changed(GATHERED, gathered=at(GATHERED.gathered, (0, 0), -2)),
        "gathered has columns out of range",
    ),
    "slab not aligned": (changed(SLABS, gathered=at(SLABS.gathered, (0, 0), 3)), "multiples of 8"),
    "gathered column twice": (
        changed(GATHERED, gathered=at(GATHERED.gathered, (0, 0), int(GATHERED.gathered[0, 1]))),
        "same column twice",
    ),
    "two tiles share gathered columns": (
        changed(
            GATHERED,
            tile_base=torch.where(GATHERED.tile_base < 0, -1, GATHERED.tile_base).int(),
        ),
        "share one row",
    ),
    "column twice": (
        changed(WITH_FULL, tile_base=at(WITH_FULL.tile_base, 1, int(WITH_FULL.tile_base[0]))),
        "same column twice",
    ),
    "overlapping tiles": (
        changed(WITH_FULL, tile_base=at(WITH_FULL.tile_base, 1, int(WITH_FULL.tile_base[0]) + 5)),
        "same column twice|do not exist",
    ),
    "partial tile made full": (
        changed(GATHERED, tile_bitmap=at(GATHERED.tile_bitmap, PARTIAL, -1)),
        "not the partial ones",
    ),
    "full tile made partial": (
        changed(WITH_FULL, tile_bitmap=at(WITH_FULL.tile_bitmap, int((WITH_FULL.tile_bitmap < 0).nonzero()[0, 0]), 0)),
        "not the partial ones",
    ),
    "partial tiles last": (
        changed(
            WITH_FULL,
            tile_bitmap=WITH_FULL.tile_bitmap.flip(0),
            tile_base=WITH_FULL.tile_base.flip(0),
        ),
        "do not come first",
    ),
    "full tile past the keys": (
        changed(
            WITH_FULL,
            tile_base=at(WITH_FULL.tile_base, int((WITH_FULL.tile_bitmap < 0).nonzero()[0, 0]), 100),
        ),
        "reaches past kv_len|same column twice",
    ),
    "bits past the keys": (
        changed(CONTIGUOUS, bitmaps=torch.full_like(CONTIGUOUS.bitmaps, -1)),
        "rows or columns that do not exist",
    ),
    "bits past the rows": (
        changed(GATHERED, bitmaps=GATHERED.bitmaps.index_fill(1, torch.tensor([31]), 1)),
        "rows or columns that do not exist",
    ),
    "bits in unused slots": (
        changed(GATHERED, bitmaps=torch.full_like(GATHERED.bitmaps, -1)),
        "rows or columns that do not exist",
    ),
    "row order repeats": (changed(GATHERED, row_order=torch.zeros_like(GATHERED.row_order)), "not a permutation"),
    "no query": (replace(GATHERED, q_len=0), "lengths are between"),
    "negative keys": (replace(GATHERED, kv_len=-1), "lengths are between"),
    "keys beyond int32": (replace(GATHERED, kv_len=2**31), "lengths are between"),
    "fewer queries": (replace(GATHERED, q_len=60), "multiple|row_order"),
    "more queries": (replace(CONTIGUOUS, q_len=500), "not a multiple of 16 row blocks"),
    "fewer keys": (replace(CONTIGUOUS, kv_len=90), "out of range|do not exist|past kv_len"),
    "other block height": (replace(CONTIGUOUS, config=LayoutConfig(64, 32)), "bitmaps is"),
    "other block width": (replace(CONTIGUOUS, config=LayoutConfig(32, 128)), "bitmaps is"),
    "other slab": (replace(SLABS, config=LayoutConfig(32, 32, 16)), "gathered is"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations(name: str) -> None:
    layout, message = MUTATIONS[name]
    with pytest.raises(LayoutError, match=message):
        layout.validate()


def test_all_problems_are_listed() -> None:
    broken = changed(
        GATHERED,
        row_order=torch.zeros_like(GATHERED.row_order),
        partial_count=-1 - GATHERED.partial_count,
        pattern_of=GATHERED.pattern_of + 5,
    )
    with pytest.raises(LayoutError) as caught:
        broken.validate()
    assert len(caught.value.problems) == 3
    assert all(problem in str(caught.value) for problem in caught.value.problems)


@given(data=st.data())
@examples(150)
def test_whatever_passes_is_safe_to_run(data: st.DataObject) -> None:
    """Any single number anywhere replaced by any other: refused, or a layout that runs and is self-consistent."""
    layout = data.draw(st.sampled_from(list(LAYOUTS.values())))
    field = data.draw(st.sampled_from([name for name, t in layout.tensors().items() if t.numel()]))
    tensor = layout.tensors()[field]
    place = data.draw(st.integers(0, tensor.numel() - 1))
    value = data.draw(st.integers(-5, 130) | st.integers(-(2**31), 2**31 - 1))
    broken = changed(layout, **{field: at(tensor.flatten(), place, value).view(tensor.shape)})
    try:
        broken.validate()
    except LayoutError:
        return
    keep = broken.to_dense()
    inputs = make_inputs(heads=2, q_len=100, kv_len=110).qkv
    for implementation in ("row_block", "batched", "reference"):
        out, lse = stof.attention(*inputs, Plan.of_layout(broken, ""), return_lse=True, implementation=implementation)
        assert_attention(out, lse, *inputs, keep)
