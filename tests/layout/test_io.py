"""Layouts and plans on disk: read back the same, or refused with `PlanFileError` whatever is wrong."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import stof
from stof import LayoutConfig, masks
from stof.errors import PlanFileError
from stof.layout import build_layout
from stof.layout.io import FORMAT, _digest, load_layout, save_layout
from stof.testing import make_inputs
from tests.examples import examples
from tests.strategies import configs, mask_trees, row_orders

MASK = masks.per_head([masks.longformer(9, 3), masks.causal()])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound plan file of one of the awkward kinds: two patterns, gathered columns, permuted rows."""
    plan = stof.plan(MASK, 70, 90, heads=2, config=LayoutConfig(32, 32, 1), row_order=torch.arange(70).flip(0))
    plan.save(tmp_path / "plan.safetensors")
    return tmp_path / "plan.safetensors"


def contents(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[FORMAT])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def write(path: Path, header: Any, tensors: dict[str, torch.Tensor], *, sign: bool = True) -> None:
    """A file that is well formed; with `sign`, one whose digest is right for its wrong contents."""
    if sign and isinstance(header, dict):
        header = {key: value for key, value in header.items() if key != "digest"}
        header["digest"] = _digest(header, tensors)
    save_file(tensors, path, metadata={FORMAT: json.dumps(header)})


@given(mask=mask_trees(70, batch=2), config=configs, data=st.data())
@examples(30)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, mask: Any, config: LayoutConfig, data: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "round_trip.safetensors"
    layout = build_layout(mask, 33, 70, config, batch=2, row_order=data.draw(row_orders(33)))
    save_layout(layout, file, {"note": "ü\n{}"})
    again, extra = load_layout(file)
    assert extra == {"note": "ü\n{}"}
    assert (again.q_len, again.kv_len, again.config) == (layout.q_len, layout.kv_len, layout.config)
    assert again.tensors().keys() == layout.tensors().keys()
    for name, tensor in layout.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name


def test_a_loaded_plan_computes_the_same(path: Path) -> None:
    inputs = make_inputs(heads=2, q_len=70, kv_len=90).qkv
    plan = stof.Plan.load(path)
    assert plan.mask_text == repr(MASK)
    torch.testing.assert_close(stof.attention(*inputs, plan), stof.attention(*inputs, MASK))


def test_masks_without_text_can_be_saved(tmp_path: Path) -> None:
    keep = torch.rand(20, 30) < 0.5
    stof.plan(keep, 20, 30).save(str(tmp_path / "dense"))
    assert torch.equal(stof.Plan.load(str(tmp_path / "dense")).to_dense()[0, 0], keep)


def test_saving_replaces_whole_files_and_leaves_nothing_behind(path: Path) -> None:
    stof.plan(masks.causal(), 8).save(path)
    assert stof.Plan.load(path).q_len == 8
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failed_save_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        stof.plan(masks.causal(), 8).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no plan file at"):
        stof.Plan.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no plan file at"):
        stof.Plan.load(tmp_path)


@given(data=st.data())
@examples(150)
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Also in a bitmap, where the result would be a sound layout of another mask."""
    file = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    stof.plan(masks.causal() & ~masks.sliding_window(3), 40).save(file)
    raw = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    with pytest.raises(PlanFileError):
        stof.Plan.load(file)


@given(data=st.data())
@examples(60)
def test_any_truncation_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "truncated.safetensors"
    stof.plan(masks.causal(), 40).save(file)
    raw = file.read_bytes()
    kept = data.draw(st.integers(0, len(raw) - 1) | st.integers(0, 20))
    file.write_bytes(raw[:kept])
    with pytest.raises(PlanFileError, match=r"make it again with plan.save"):
        stof.Plan.load(file)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 64,
        b"{}",
        b"PK\x03\x04 a zip file",
        b"\x80\x04\x95 a pickle",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10_000_000_000) + b"x" * 100,
    ],
    ids=["empty", "zeros", "text", "zip", "pickle", "no tensors", "huge header", "long header"],
)
def test_foreign_files(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(PlanFileError):
        stof.Plan.load(path)


def test_safetensors_of_something_else(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(PlanFileError, match="not a plan file"):
        stof.Plan.load(path)


@pytest.mark.parametrize("version", [0, 3, "1", None, 1.5])
def test_other_versions(path: Path, version: Any) -> None:
    header, tensors = contents(path)
    write(path, {**header, "version": version}, tensors)
    with pytest.raises(PlanFileError, match=rf"has format version {version}, this is version 2"):
        stof.Plan.load(path)


def test_contents_without_a_right_digest(path: Path) -> None:
    header, tensors = contents(path)
    write(path, {**header, "extra": {"mask": "full()"}}, tensors, sign=False)
    with pytest.raises(PlanFileError, match="digest"):
        stof.Plan.load(path)
    del header["digest"]
    write(path, header, tensors, sign=False)
    with pytest.raises(PlanFileError, match="digest"):
        stof.Plan.load(path)


@pytest.mark.parametrize("name", [n for n in build_layout(MASK, 8, 8, heads=2).tensors() if n != "row_order"])
def test_missing_tensors(path: Path, name: str) -> None:
    header, tensors = contents(path)
    del tensors[name]
    write(path, header, tensors)
    with pytest.raises(PlanFileError, match=name):
        stof.Plan.load(path)


def test_unknown_tensors(path: Path) -> None:
    header, tensors = contents(path)
    for name in ("surplus", "q_len", "config"):
        write(path, header, {**tensors, name: torch.ones(2)})
        with pytest.raises(PlanFileError, match=name):
            stof.Plan.load(path)


@pytest.mark.parametrize("name", ["tile_base", "bitmaps", "row_order"])
@pytest.mark.parametrize(
    "other", [torch.tensor(5), torch.zeros(0), torch.full((3, 3), -7), torch.ones(2, dtype=torch.bfloat16)], ids=str
)
def test_tensors_of_other_shapes(path: Path, name: str, other: torch.Tensor) -> None:
    header, tensors = contents(path)
    digestible = {**tensors, name: other}
    if other.dtype == torch.bfloat16:
        save_file(digestible, path, metadata={FORMAT: json.dumps(header)})
    else:
        write(path, header, digestible)
    with pytest.raises(PlanFileError):
        stof.Plan.load(path)


def test_files_that_say_aside(path: Path) -> None:
    """Version 0.1 called compacted columns so."""
    layout = build_layout(masks.strided(4, 64), 500, 500, LayoutConfig(64, 64, 1, compact_columns=True))
    save_layout(layout, path)
    header, tensors = contents(path)
    header["aside"] = header.pop("compact_columns")
    write(path, header, tensors)
    again = load_layout(path)[0]
    assert again.config.compact_columns
    assert again.equals(layout)


HEADERS: dict[str, Any] = {
    "block height": {"block_m": 17},
    "block height of no type": {"block_m": None},
    "block width": {"block_n": 10**9},
    "slab": {"slab": 5},
    "slab that does not fit": {"slab": 16},
    "q_len": {"q_len": 69},
    "no q_len": {"q_len": 0},
    "huge q_len": {"q_len": 10**18},
    "infinite q_len": {"q_len": float("inf")},
    "q_len that is no number": {"q_len": "many"},
    "no kv_len": {"kv_len": None},
    "negative kv_len": {"kv_len": -3},
    "huge kv_len": {"kv_len": 2**40},
    "extra that is a list": {"extra": [1]},
    "extra that is text": {"extra": "mask"},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_signed_but_wrong(path: Path, name: str) -> None:
    header, tensors = contents(path)
    write(path, {**header, **HEADERS[name]}, tensors)
    with pytest.raises(PlanFileError):
        stof.Plan.load(path)


@pytest.mark.parametrize("header", [[], "text", 5, None, {}, {"version": 1}])
def test_headers_that_are_none(path: Path, header: Any) -> None:
    _, tensors = contents(path)
    write(path, header, tensors)
    with pytest.raises(PlanFileError):
        stof.Plan.load(path)


def test_files_of_version_1_load(path: Path) -> None:
    """They have the cost of each row block, and an order of the row blocks."""
    expected = stof.Plan.load(path)
    header, tensors = contents(path)
    numbered = len(tensors["partial_count"])
    tensors |= {"cost": torch.ones(numbered), "order": torch.arange(numbered, dtype=torch.int32)}
    write(path, {**header, "version": 1}, tensors)
    assert stof.Plan.load(path) == expected


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "NaN"])
def test_headers_that_are_no_json(path: Path, text: str) -> None:
    _, tensors = contents(path)
    save_file(tensors, path, metadata={FORMAT: text})
    with pytest.raises(PlanFileError, match="not a plan file"):
        stof.Plan.load(path)


def test_layouts_that_do_not_validate_list_why(path: Path) -> None:
    header, tensors = contents(path)
    tensors["tile_base"] = tensors["tile_base"] + 1000
    tensors["partial_count"] = tensors["partial_count"] - 1000
    write(path, header, tensors)
    with pytest.raises(PlanFileError, match=r"2 problem\(s\)") as caught:
        stof.Plan.load(path)
    assert "tile_base is out of range" in str(caught.value)
    assert str(path) in str(caught.value)
