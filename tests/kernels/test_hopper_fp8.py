"""What the Hopper kernel for 8-bit operands is launched with, worked through in plain PyTorch: it is attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.fp8.forward import bind
from stof.kernels.hopper.fp8.forward_kernel import GROUPS, D, fp8_forward_kernel
from stof.kernels.hopper.fp8.transpose_v import transpose_v
from stof.kernels.hopper.prepare import prepare_fp8
from stof.kernels.hopper.tile_lists import ACROSS, make_fp8_lists
from stof.kernels.implementation import Options, attend_once
from stof.kernels.quantization import FP8, Scales
from stof.layout import Layout, build_layout
from stof.layout.orders.named import named_order
from stof.runtime.launch import Launch, TensorMap
from stof.testing import MEMORY_LAYOUTS, make_inputs, oracle_attention
from stof.testing.inputs import spread
from tests.interpreter import IN_INTERPRETER
from tests.kernels.test_hopper_jobs import layout_of
from tests.kernels.test_hopper_launch import Twin

WHOLE, COMPACTED_TOO = LayoutConfig(128, 128), LayoutConfig(128, 128, 1, compact_columns=True)
LINES = masks.strided(40, 64, 3)
NEAR = masks.sliding_window(40, 30) | masks.global_tokens(20)


def place_of(keys: int) -> Tensor:
    """Where values of each key lie: in each 16, key `8 h + 2 q + b` at `4 q + 2 h + b`."""
    key = torch.arange(keys)
    return key // ACROSS * ACROSS + key % 8 // 2 * 4 + key % ACROSS // 8 * 2 + key % 2


class EighthsTwin(Twin):
    """The kernel in plain PyTorch, where values are laid across: brought back, it is the one for 16 bits."""

    def __call__(self, launch: Launch, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> None:
        if launch.kernel is not fp8_forward_kernel:
            assert launch.kernel is transpose_v
            self.plain(launch, *tensors, bases=bases)
            return
        a = self.arguments(launch, *tensors, bases=bases)
        vars(a).update(GROUPS=GROUPS.value, D=D.value, Q_STAGES=3, kv_step=1, rows_per_residue=a.q_len)
        vars(a).update(q_residue_stride=a.D, out_residue_stride=a.D, k_residue_stride=0, v_residue_stride=0)
        factors = a.scales_ptr.double()
        a.q_desc = scaled(a.q_desc, factors[..., 0])
        shares = factors.shape[1] // a.v_desc.base.shape[1]
        a.v_desc = scaled(lengthwise(a.v_desc), factors[:, ::shares, 1])
        a.k_slab_desc, a.v_slab_desc = a.k_compacted_desc, None
        if a.v_compacted_desc is not None:
            shares = factors.shape[1] // a.v_compacted_desc.base.shape[1]
            a.v_slab_desc = scaled(lengthwise(a.v_compacted_desc), factors[:, ::shares, 1])
        self.run(launch, a)


def lengthwise(across: TensorMap) -> TensorMap:
    """Tiles of `[keys, D]`, as `across` has them of `[D, keys]`."""
    batch, heads, width, keys = across.shape
    assert across.base.is_contiguous()
    assert across.strides[1:] == list(across.base.stride()[1:])
    values = across.base.mT[:, :, place_of(keys)].contiguous()
    rows, columns = across.block_shape[3], across.block_shape[2]
    return TensorMap(values, [batch, heads, keys, width], list(values.stride()), [1, 1, rows, columns], across.layout)


def scaled(source: TensorMap, factors: Tensor) -> TensorMap:
    """The same boxes with a factor `[B, heads]` on every value, in float64."""
    values = source.base.double() * factors[:, :, None, None]
    moved = torch.empty_strided(source.base.shape, source.base.stride(), dtype=torch.float64)
    return source._replace(base=moved.copy_(values))


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> EighthsTwin:
    stands_in = EighthsTwin()
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors, bases=(): stands_in(launch, *tensors, bases=bases))
    return stands_in


def inputs(**sizes: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Scales]:
    plain: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 330, "kv_len": 333, "head_dim": 128}
    plain |= sizes
    q, k, v = (x.to(FP8) for x in make_inputs(**plain).qkv)
    generator = torch.Generator().manual_seed(1)
    one = [torch.rand(2, heads, generator=generator) + 0.5 for heads in (plain["heads"], *[plain["kv_heads"]] * 2)]
    return (q, k, v), (one[0][: plain["batch"]], one[1][:1], one[2].mT.contiguous().mT[: plain["batch"]])


def check_call(
    layout: Layout, given: tuple[Tensor, Tensor, Tensor], scales: Scales, split_tiles: int = 0, **options: Any
) -> None:
    prepared = prepare_fp8(layout, KernelConfig(4, 4, split_tiles=split_tiles))
    known = {"scale": 128**-0.5, "softcap": 0.0, "sinks": None, **options}
    out, lse = attend_once(bind, *given, prepared, Options(**known, scales=scales))
    wide = [x.double().nan_to_num() * s.double()[:, :, None, None] for x, s in zip(given, scales, strict=True)]
    expected, expected_lse = oracle_attention(
        wide[0], wide[1], wide[2], layout.to_dense(), **known | {"softcap": known["softcap"] or None}
    )
    assert out.dtype == torch.bfloat16
    assert out.stride() == torch.empty_like(given[0]).stride()
    # The twin rounds nothing before the end.
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@IN_INTERPRETER
@pytest.mark.parametrize("config", [WHOLE, COMPACTED_TOO], ids=["whole", "compacted"])
@pytest.mark.parametrize("split_tiles", [0, 1])
def test_values_laid_across(twin: EighthsTwin, config: LayoutConfig, split_tiles: int) -> None:
    check_call(build_layout(LINES, 700, 700, config), *inputs(q_len=700, kv_len=700, batch=1), split_tiles)
    assert twin.constants["SLAB"] == (128 if config.compact_columns else 0)
    assert twin.constants["SPLIT"] == (split_tiles > 0)


@IN_INTERPRETER
@pytest.mark.usefixtures("twin")
def test_lists_of_heads() -> None:
    """Each query head has keys of its own compacted; those of a key head are read where it lies."""
    lines = masks.per_head([masks.strided(9 + h, 64, 2 + h) for h in range(4)])
    layout = build_layout(lines, 700, 700, COMPACTED_TOO, heads=4)
    assert make_fp8_lists(layout).compacted_keys.shape[:2] == (1, 4)
    check_call(layout, *inputs(q_len=700, kv_len=700))


@IN_INTERPRETER
@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("memory", [*MEMORY_LAYOUTS, "wide rows", "unaligned"])
def test_memory(memory: str) -> None:
    given, scales = inputs()
    if memory == "wide rows":
        moved = [torch.nn.functional.pad(x.view(torch.int8), (0, 8)).view(FP8)[..., :-8] for x in given]
    elif memory == "unaligned":
        moved = [x.new_empty(x.numel() + 8)[8:].view(x.shape).copy_(x) for x in given]
    else:
        moved = [spread(x, memory) for x in given]
    check_call(build_layout(NEAR, 330, 333, WHOLE), (moved[0], moved[1], moved[2]), scales)


@IN_INTERPRETER
@pytest.mark.usefixtures("twin")
def test_one_batch_entry_whose_stride_is_none_of_words() -> None:
    """A tensor that is contiguous whatever the strides of its dimensions of size 1 are."""
    given, scales = inputs(batch=1)
    q, k, v = (x.as_strided(x.shape, (1, *x.stride()[1:])) for x in given)
    assert k.is_contiguous()
    check_call(build_layout(NEAR, 330, 333, WHOLE), (q, k, v), scales)


@IN_INTERPRETER
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"scale": -0.3},
        {"softcap": 5.0},
        {"sinks": torch.randn(4)},
        {"softcap": 5.0, "sinks": torch.randn(4).bfloat16(), "scale": 0.5},
    ],
    ids=("no scale", "negative scale", "softcap", "sinks", "all"),
)
def test_options(twin: EighthsTwin, options: dict[str, Any]) -> None:
    keep = NEAR.to_dense(330, 333).clone()
    keep[..., 100:110, :] = False
    check_call(layout_of(keep, None), *inputs(), split_tiles=1, **options)
    assert twin.constants["HAS_SCORE_MOD"] == ("scale" in options or "softcap" in options)


@IN_INTERPRETER
@pytest.mark.usefixtures("twin")
def test_patterns() -> None:
    """A mask of its own for each batch entry and head, one of them empty, rows and keys of odd numbers."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(2, 4, 130, 333, generator=generator) < torch.tensor([0.0, 0.003, 0.3, 1.0]).view(1, 4, 1, 1)
    keep[:, 1:, 60] = True  # each key is seen
    for kept in (keep, keep[:1, 1:2]):
        check_call(layout_of(kept, None), *inputs(q_len=130))


@IN_INTERPRETER
@pytest.mark.usefixtures("twin")
def test_row_blocks_without_a_tile_read_no_values() -> None:
    """Also where the last keys trade places with columns past the end."""
    keep = torch.zeros(1, 1, 200, 132, dtype=torch.bool)
    keep[..., :128, :128] = True
    (q, k, v), scales = inputs(q_len=200, kv_len=132)
    for x in (k, v):
        x[:, :, 128:] = torch.nan
    check_call(layout_of(keep, None), (q, k, v), scales)


def test_layouts_that_do_not_fit() -> None:
    for config in (LayoutConfig(64, 128), LayoutConfig(128, 64), LayoutConfig(128, 128, 8), LayoutConfig(128, 128, 1)):
        with pytest.raises(UnfitLayoutError, match="whole tiles of 128 x 128"):
            make_fp8_lists(build_layout(NEAR, 330, 333, config))
    ordered = build_layout(masks.full(), 256, 256, WHOLE, row_order=named_order("remainder 2", 256))
    with pytest.raises(UnfitLayoutError, match="rows in their own order"):
        make_fp8_lists(ordered)
    shifted = build_layout(masks.full(), 128, 300, WHOLE)
    shifted = replace(shifted, tile_base=shifted.tile_base + 8)
    with pytest.raises(UnfitLayoutError, match="multiples of 16"):
        make_fp8_lists(shifted)
