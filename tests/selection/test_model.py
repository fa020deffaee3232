"""The cost model: physical sense, the packing of programs against brute force, and the packaged constants."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.kernels.config import KernelConfig
from stof.layout.survey import Survey, TileCounts
from stof.selection import CallSpec, KernelChoice, candidates
from stof.selection.cost_model import critical_load, estimate, estimate_tiles, kernel_key
from stof.selection.device_model import DeviceModel, KernelTimes, load_model, model_from_dict, model_to_dict
from stof.selection.gpu_choices import geometries, gpu_choices
from stof.selection.implementations import gpu_of
from stof.selection.resources import head_dim_class, tile_shared_memory
from stof.selection.slot_assignment import last_slot
from tests.examples import examples
from tests.selection.fakes import GPU, Geometry, call_of, fake_gpu

TILES = LayoutConfig(64, 64)
TIMES = KernelTimes(item=3.0, partial=1.0, full=0.8, merge=1.0, collect=0.2, solo=0.6)
MODEL = DeviceModel("test", 132, 233_472, 3.0, 4e6, (2e-4, 1.5e-4), {})


def counted(partial: list[int], full: list[int] | None = None, kept: int = 64) -> Survey:
    """A survey of one mask with these tiles in its row blocks."""
    counts = TileCounts(torch.tensor([partial]), torch.tensor([full or [0] * len(partial)]))
    return Survey({TILES: counts}, torch.full((1, 64 * len(partial)), kept), 1, 1)


def choice_of(**kernel: int) -> KernelChoice:
    return KernelChoice("block_wise", TILES, None, KernelConfig(4, 3, 128, **kernel))  # type: ignore[arg-type]


def cost(survey: Survey, choice: KernelChoice, **call: int) -> float:
    blocks = survey.counts[TILES].partial.shape[1]
    sizes = {"q_len": 64 * blocks, "kv_len": 8192, **call}
    return estimate_tiles(choice, call_of(**sizes), survey, MODEL, TIMES)


tiles = st.lists(st.integers(0, 60), min_size=1, max_size=80)


@given(partial=tiles, factor=st.integers(2, 4), split=st.sampled_from([0, 8]))
def test_more_tiles_are_never_cheaper(partial: list[int], factor: int, split: int) -> None:
    choice = choice_of(split_tiles=split)
    more = [factor * count for count in partial]
    # Longest-first packing is no monotone function of the sizes; it is within a third of one.
    assert cost(counted(more), choice) >= cost(counted(partial), choice) * (0.75 if split else 1 - 1e-9)


@given(partial=tiles, full=tiles)
def test_full_tiles_cost_less_than_partial_ones(partial: list[int], full: list[int]) -> None:
    n = min(len(partial), len(full))
    as_full = cost(counted([0] * n, full[:n]), choice_of())
    assert as_full <= cost(counted(full[:n]), choice_of()) + 1e-9


@given(partial=tiles, batch=st.integers(1, 6))
def test_more_sequences_are_never_cheaper(partial: list[int], batch: int) -> None:
    for choice in (choice_of(), choice_of(split_tiles=8)):
        fewer, more = (cost(counted(partial), choice, batch=n) for n in (batch, 2 * batch))
        assert more >= fewer * (1 - 1e-9)


def test_splitting_helps_one_heavy_row_block() -> None:
    heavy = [128, *[4] * 127]
    whole, split = cost(counted(heavy), choice_of()), cost(counted(heavy), choice_of(split_tiles=16))
    assert split < 0.5 * whole
    # and costs where all are alike and the machine is full
    even = [40] * 128
    assert cost(counted(even), choice_of(split_tiles=16), batch=8) > cost(counted(even), choice_of(), batch=8)


@pytest.mark.parametrize(("rows", "read"), [(64, 8), (128, 3)])
def test_chunks_read_back(rows: int, read: int) -> None:
    """By the last of one warpgroup all of them; those of several meet in pairs, and pairs in pairs."""
    layout = LayoutConfig(rows, 64)
    counts = TileCounts(torch.tensor([[64, 4]]), torch.tensor([[0, 0]]))
    survey = Survey({layout: counts}, torch.full((1, 2 * rows), 64), 1, 1)
    choice = KernelChoice("hopper", layout, None, KernelConfig(4, 3, split_tiles=8))
    load, *_ = critical_load(choice, call_of(q_len=2 * rows, kv_len=4096), survey, MODEL, TIMES)
    assert float(load[4]) == read


def test_memory_is_a_lower_bound() -> None:
    """64 sequences decoded: next to no tiles, but every key is read."""
    call = call_of(batch=64, q_len=1, kv_len=8192)
    survey = Survey({TILES: TileCounts(torch.tensor([[1]]), torch.tensor([[127]]))}, torch.tensor([[8192]]), 1, 1)
    slow = replace(MODEL, bytes_per_us=1e3)
    assert estimate_tiles(choice_of(), call, survey, slow, TIMES) >= 64 * 12 * 8192 * 64 * 2 * 2 / 1e3


def brute_force(each: list[float], copies: list[int], slots: int) -> float:
    """Longest first, always on the slot that is free first."""
    ends = [0.0] * slots
    for cost, number in sorted(zip(each, copies, strict=True), reverse=True):
        for _ in range(number):
            heapq.heappush(ends, heapq.heappop(ends) + cost)
    return max(ends)


@given(
    each=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=12),
    data=st.data(),
    slots=st.integers(1, 40),
)
@examples(200)
def test_packing_against_brute_force(each: list[float], data: st.DataObject, slots: int) -> None:
    copies = [data.draw(st.integers(1, 50)) for _ in each]
    loads = torch.tensor(each, dtype=torch.float64)[:, None]
    load = last_slot(loads, loads[:, 0], torch.tensor(copies, dtype=torch.float64), slots)
    found, best = float(load[0]), brute_force(each, copies, slots)
    total = sum(cost * number for cost, number in zip(each, copies, strict=True))
    # No schedule ends before these.
    assert found >= max(*each, total / slots) * (1 - 1e-9)
    # Ours places programs a wave at a time. Many waves are spread evenly: then one long program more than there are
    # slots counts for little.
    assert 0.5 * best - 1e-9 <= found <= 2 * best + 1e-9


def test_heavy_programs_wait_for_no_light_ones() -> None:
    """Longformer's global rows: while they run, the other slots take the rest."""
    loads = torch.tensor([[64.0], [4.0]], dtype=torch.float64)
    load = last_slot(loads, loads[:, 0], torch.tensor([4.0, 500.0], dtype=torch.float64), 132)
    assert brute_force([64.0, 4.0], [4, 500], 132) == 64.0
    assert float(load[0]) == pytest.approx(64.0, rel=0.05)


def test_the_last_slot_has_whole_programs() -> None:
    """Three programs of one kind and one of another on two slots: 5 + 2 ends last, not 2 + 2."""
    loads = torch.tensor([[5.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    each, copies = torch.tensor([5.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert last_slot(loads, each, copies, 2).tolist() in ([0.0, 6.0], [5.0, 2.0])
    assert last_slot(loads, each, copies, 4).tolist() == [5.0, 0.0]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((16, 16), 64),
        ((64, 64), 64),
        ((65, 64), 128),
        ((64, 65), 128),
        ((128, 8), 128),
        ((129, 8), 256),
        ((8, 256), 256),
    ],
)
def test_head_dim_classes(widths: tuple[int, int], expected: int) -> None:
    assert head_dim_class(*widths) == expected


def test_kernel_keys() -> None:
    call = call_of()
    base = choice_of()
    assert kernel_key(base, call) == "block_wise/64/64x64/contiguous/4w3s128r"
    # How the work is cut does not change the kernel.
    assert kernel_key(choice_of(split_tiles=5, side=3), call) == kernel_key(base, call)
    assert kernel_key(base, replace(call, batch=7, q_len=9)) == kernel_key(base, call)
    others = [
        replace(base, layout=replace(TILES, slab=1)),
        replace(base, layout=LayoutConfig(64, 128)),
        replace(base, layout=LayoutConfig(128, 64)),
        replace(base, implementation="decode"),
        replace(base, row_order="remainder 16"),
        *(replace(base, kernel=kernel) for kernel in (KernelConfig(8, 3, 128), KernelConfig(4, 2, 128))),
        replace(base, kernel=KernelConfig(4, 3, 0)),
    ]
    keys = [kernel_key(choice, call) for choice in (base, *others)]
    assert len(set(keys)) == len(keys)
    assert kernel_key(base, call_of(head_dim=128)) != kernel_key(base, call)
    # TMA copies evenly spaced rows as it does others.
    hopper = replace(base, implementation="hopper")
    assert kernel_key(replace(hopper, row_order="remainder 16"), call) == kernel_key(hopper, call)


def test_permuted_rows_by_the_constants_of_rows_in_order_until_they_were_measured() -> None:
    call, choice, counts = call_of(), choice_of(), counted([1], [2])
    permuted = replace(choice, row_order="remainder 16")
    model = replace(MODEL, kernels={kernel_key(choice, call): TIMES})
    assert estimate(permuted, call, counts, model) == estimate(choice, call, counts, model)
    biased = replace(call, has_bias=True)
    assert estimate(permuted, biased, counts, model) == estimate(choice, biased, counts, model)
    own = replace(model, kernels={**model.kernels, kernel_key(permuted, call): replace(TIMES, full=5.0, partial=5.0)})
    assert estimate(permuted, call, counts, own) > estimate(permuted, call, counts, model)
    assert estimate(permuted, biased, counts, own) > estimate(permuted, biased, counts, model)


@pytest.mark.parametrize(
    ("head_dim", "layout", "stages", "pack", "expected"),
    [
        # bytes of (Q + stages * (K + V) of a tile), and 1 KB the system keeps
        (64, LayoutConfig(64, 64), 3, False, 2 * (64 * 64 + 3 * 64 * 128) + 1024),
        (80, LayoutConfig(64, 64), 2, False, 2 * (64 * 128 + 2 * 64 * 256) + 1024),
        (64, LayoutConfig(1, 64), 2, False, 2 * (16 * 64 + 2 * 64 * 128) + 1024),
        (64, LayoutConfig(16, 64), 2, True, 2 * (16 * 4 * 64 + 2 * 64 * 128) + 1024),
    ],
)
def test_shared_memory(head_dim: int, layout: LayoutConfig, stages: int, pack: bool, expected: int) -> None:
    call = call_of(head_dim=head_dim, heads=12, kv_heads=4)
    assert bytes_of(layout, call, stages, pack) == expected


def bytes_of(layout: LayoutConfig, call: CallSpec, stages: int, pack: bool) -> int:
    return tile_shared_memory(KernelChoice("block_wise", layout, None, KernelConfig(4, stages, pack=pack)), call)


def test_shared_memory_of_a_bias() -> None:
    """Measured at compile time: one tile for each copy under way, and one in 32 bits at least."""
    layout, plain = LayoutConfig(128, 64), call_of(head_dim=128)
    without = bytes_of(layout, plain, 4, False)
    tile = 128 * 64 * 4
    biased = replace(plain, has_bias=True)
    assert [bytes_of(layout, biased, stages, False) - without for stages in (2, 3, 4)] == [
        tile - 2 * 2 * 64 * 256,
        tile - 2 * 64 * 256,
        1.5 * tile,
    ]
    wide = replace(plain, has_bias=True, bias_itemsize=4)
    assert [bytes_of(layout, wide, stages, False) - without for stages in (2, 4)] == [
        tile - 2 * 64 * 256 * 2,
        3 * tile,
    ]


def test_occupancy() -> None:
    call = call_of()
    # 58 KB a program: three in 228 KB, though registers would allow four.
    assert gpu_of(choice_of()).occupancy(choice_of(), call, MODEL.shared_bytes) == 3
    # By registers: 65536 / (168 * 128) = 3 where memory would allow more.
    small = KernelChoice("block_wise", LayoutConfig(64, 16), None, KernelConfig(4, 2, 168))
    assert gpu_of(small).occupancy(small, call, MODEL.shared_bytes) == 3
    # One at least, whatever the estimate says.
    large = KernelChoice("block_wise", LayoutConfig(128, 128), None, KernelConfig(8, 4))
    assert gpu_of(large).occupancy(large, call_of(head_dim=256), MODEL.shared_bytes) == 1
    tiny = KernelChoice("decode", LayoutConfig(1, 16), None, KernelConfig(1, 2, 32))
    assert gpu_of(tiny).occupancy(tiny, call, MODEL.shared_bytes) == 8


def test_row_wise_by_rows_and_keys() -> None:
    choice = KernelChoice("row_wise", LayoutConfig(64, 64, 1))
    call = call_of(q_len=640)
    few, many = (estimate(choice, call, counted([1] * 10, kept=kept), MODEL) for kept in (8, 800))
    assert few is not None
    assert many is not None
    assert few == pytest.approx(3 + 12 * 640 * (2e-4 + 8 * 1.5e-4), rel=1e-3)
    assert many == pytest.approx(3 + 12 * 640 * (2e-4 + 800 * 1.5e-4), rel=1e-3)
    wide = estimate(choice, call_of(q_len=640, head_dim=128), counted([1] * 10, kept=8), MODEL)
    assert wide == pytest.approx(3 + 12 * 640 * (2 * 2e-4 + 2**0.8 * 8 * 1.5e-4), rel=1e-3)
    # A single long row takes its keys in steps of 128, one after the other; a short one in steps of 4.
    alone = estimate(choice, call_of(q_len=1, heads=1, batch=1), counted([1], kept=4000), MODEL)
    assert alone == pytest.approx(3 + 32 * (0.95 + 128 * 0.008), rel=1e-2)
    short = estimate(choice, call_of(q_len=1, heads=1, batch=1), counted([1], kept=17), MODEL)
    assert short == pytest.approx(3 + 5 * (0.95 + 4 * 0.008), rel=1e-3)
    empty = estimate(choice, call_of(q_len=1, heads=1, batch=1), counted([1], kept=0), MODEL)
    assert empty == pytest.approx(3 + 0.95 + 0.008, rel=1e-3)


@pytest.mark.parametrize(
    ("programs", "waves", "filled"),
    [
        (100, 1, 1 / 3),  # alone on their multiprocessors
        (133, 1, 2 / 3),  # one shares its
        (264, 1, 2 / 3),
        (265, 1, 1.0),  # three on one: that is the last to end
        (396, 1, 1.0),
        (400, 2, 4 / 6),  # a full wave, then one program
        (600, 2, 5 / 6),
        (792, 2, 1.0),
    ],
)
def test_programs_share_multiprocessors(programs: int, waves: int, filled: float) -> None:
    """Three of Triton's at a time on each of 132; where fewer do, they run faster."""
    load, share, _ = critical_load(
        choice_of(), call_of(q_len=64 * programs, heads=1), counted([9] * programs), MODEL, TIMES
    )
    assert load[:2].tolist() == [waves, 9 * waves]
    assert share == pytest.approx(filled)


def test_long_work_tiles_of_the_last_round_are_split() -> None:
    """The Hopper kernel ends evenly where chunks are long enough; pairs of row blocks are not split."""
    kernel = KernelChoice("hopper", LayoutConfig(128, 128), None, KernelConfig(4, 4))

    def load(choice: KernelChoice, blocks: int, each: int) -> list[float]:
        counts = TileCounts(torch.full((1, blocks), each), torch.ones(1, blocks, dtype=torch.int64))
        assert choice.layout is not None
        survey = Survey({choice.layout: counts}, torch.full((1, blocks * 128), 64), 1, 1)
        call = call_of(q_len=blocks * 128, kv_len=8192, heads=1)
        return [float(one) for one in critical_load(choice, call, survey, MODEL, TIMES)[0]]

    assert load(kernel, 198, 40) == [1.5, 60, 1.5, 1, 1]
    assert load(kernel, 198, 14) == [2, 28, 2, 0, 0]  # too few tiles
    assert load(kernel, 132, 40) == [1, 40, 1, 0, 0]  # no second round
    assert load(kernel, 33 * 132, 40)[3:] == [0, 0]  # it hardly matters
    paired = replace(kernel, layout=LayoutConfig(64, 64), kernel=KernelConfig(4, 5, paired=True))
    assert load(paired, 396, 20)[3:] == [0, 0]


@given(partial=tiles, heads=st.integers(1, 64), side=st.integers(1, 64))
def test_no_slot_has_less_than_the_average(partial: list[int], heads: int, side: int) -> None:
    """Also where heads run in groups, one after the other."""
    call = call_of(q_len=64 * len(partial), heads=heads, kv_heads=heads)
    load, filled, _ = critical_load(choice_of(side=side), call, counted(partial), MODEL, TIMES)
    work = call.batch * heads * sum(TIMES.item + count for count in partial) / (3 * 132)
    assert float(load @ TIMES.weights()) >= work * (1 - 1e-9)
    assert 0 < filled <= 1 + 1e-9


def test_unknown_kernels_are_guessed() -> None:
    """By their arithmetic: float32 costs more than float16; implementations without a model have no estimate."""
    half, single = (
        estimate(choice_of(), call_of(dtype=dtype), counted([9]), MODEL) for dtype in (torch.float16, torch.float32)
    )
    assert half is not None
    assert single is not None
    assert 0 < half < single
    assert estimate(KernelChoice("batched"), call_of(), counted([1]), MODEL) is None


def test_biases_have_constants_of_their_own_or_cost_more() -> None:
    """Tiles take longer with one; the Hopper kernel has fewer stages then. Worse where it lies scattered."""
    survey, plain, biased = counted([2] * 4000, [9] * 4000), call_of(kv_len=8192), call_of(kv_len=8192, has_bias=True)
    choice = choice_of()
    assert kernel_key(choice, biased) == kernel_key(choice, plain) + "/bias"
    model = replace(MODEL, kernels={kernel_key(choice, plain): TIMES})
    without, more = (estimate(choice, call, survey, model) for call in (plain, biased))
    assert without is not None
    assert more is not None
    assert 1.2 * without < more < 1.6 * without
    own = replace(model, kernels={**model.kernels, kernel_key(choice, biased): replace(TIMES, full=5.0, partial=5.0)})
    assert estimate(choice, plain, survey, own) == without
    assert estimate(choice, biased, survey, own) == pytest.approx(5 * without, rel=0.4)
    scattered = replace(biased, bias_to_copy=2**20)
    # Value by value, which is worse, from rows that do not follow each other, which is worse still.
    assert estimate(choice, scattered, survey, model) == pytest.approx(6.0 * 3.0 / 1.45 * more, rel=0.2)
    hopper = replace(choice, implementation="hopper")
    deeper = replace(hopper, kernel=KernelConfig(4, 4, 128))
    model = replace(MODEL, kernels={kernel_key(deeper, plain): TIMES})
    without, more = estimate(deeper, plain, survey, model), estimate(hopper, biased, survey, model)
    assert without is not None
    assert more is not None
    assert 1.2 * without < more < 2 * without
    copied = estimate(hopper, scattered, survey, model)
    assert copied == pytest.approx(more + MODEL.launch + 4 * 2 * 2**20 / MODEL.bytes_per_us)


def test_models_by_device_name() -> None:
    h200 = load_model("NVIDIA H200")
    assert h200.device == "NVIDIA H200"
    assert h200.multiprocessors == 132
    # A device nobody tuned gets the same constants; its own number of multiprocessors comes from `device_model`.
    other = load_model("NVIDIA Imaginary 9000")
    assert replace(other, stands_in_for="") == h200
    assert h200.notice() == ""
    assert "NVIDIA Imaginary 9000 was never tuned" in other.notice()
    assert "constants of NVIDIA H200" in other.notice()
    assert model_from_dict(json.loads(json.dumps(model_to_dict(h200)))).kernels.keys() == h200.kernels.keys()


def test_a_device_is_tuned_by_the_command_that_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = load_model("NVIDIA H200")
    monkeypatch.setattr("stof.runtime.files.DEVICE_DATA", tmp_path)
    _, _, path = replace(h200, stands_in_for="NVIDIA Imaginary 9001").notice().partition("--output ")
    Path(path.split("`")[0]).write_text(json.dumps(model_to_dict(replace(h200, device="NVIDIA Imaginary 9001"))))
    assert load_model("NVIDIA Imaginary 9001").device == "NVIDIA Imaginary 9001"
    assert load_model("NVIDIA Imaginary 9001").notice() == ""


@pytest.mark.parametrize(("q_len", "implementation"), [(2048, "block_wise"), (1, "decode"), (16, "decode")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_choice_has_an_estimate(head_dim: int, implementation: str, q_len: int, dtype: torch.dtype) -> None:
    """A choice without an estimate comes after all that have one, however slow those are."""
    call = call_of(head_dim=head_dim, q_len=q_len, kv_len=4096, heads=32, kv_heads=8, dtype=dtype)
    geometry = Geometry(masks.full(), q_len, 4096)
    choices = gpu_choices(call, geometry, implementation)
    counted = geometry.survey(geometries(choices), None)
    model = load_model("NVIDIA H200")
    assert all((estimate(choice, call, counted, model) or 0) > 0 for choice in choices)


def test_constants_are_sensible() -> None:
    model = load_model("NVIDIA H200")
    for key, times in model.kernels.items():
        weights: Tensor = times.weights()
        assert bool((weights >= 0).all()), key
        assert 0 < times.solo <= 1.5, key
        # The fit keeps each of a partial and a full tile at half of the other at least; the file rounds to four digits.
        assert 1 / 2.001 <= times.partial / times.full <= 2.001, key


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kv_len", [1024, 16384])
def test_a_bias_does_not_change_how_decoding_is_done(monkeypatch: pytest.MonkeyPatch, kv_len: int, q_len: int) -> None:
    """It was not measured with one; a guess must not go before what was measured without."""
    fake_gpu(monkeypatch)
    geometry, chosen = Geometry(masks.full(), q_len, kv_len), []
    for bias in ({}, {"has_bias": True}, {"has_bias": True, "bias_to_copy": 2 * 32 * kv_len}):
        call = call_of(heads=32, kv_heads=8, head_dim=128, q_len=q_len, kv_len=kv_len, **bias)
        choice = candidates(call, GPU, geometry)[0].choice
        assert choice is not None
        assert choice.kernel is not None
        chosen.append((choice.implementation, choice.layout, choice.kernel.num_stages))
    assert chosen[0] == chosen[1] == chosen[2]
