"""Every peer gets the very mask of the grid, in whatever form it takes; those not installed are named."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention.decode import needed_bytes
from benchmarks.peers import PEERS, wheels
from benchmarks.peers.mask_formats import BlockLists, block_lists, intervals, mask_mod
from benchmarks.peers.pytorch import _bias, _repeated
from stof.testing.attention_check import AttentionProblem
from stof.testing.mask_grid import GRID, SQUARE, GridMask, Shape, decode_masks, grid_mask

CPU = torch.device("cpu")
SPARSE = [name for name in GRID if GRID[name].window is None]


def problem(mask: GridMask | str, shape: str = "1,2,16,640", dtype: torch.dtype = torch.float32) -> AttentionProblem:
    grid = grid_mask(mask) if isinstance(mask, str) else mask
    return AttentionProblem.draw(grid, Shape.parse(shape), CPU, dtype)


def decoded_intervals(form: Tensor, kv_len: int) -> Tensor:
    """`[0, F0) u [F1, F2) u ...` of each row, back to a dense mask."""
    column = torch.arange(kv_len)[None]
    keep = column < form[0][:, None]
    for begin, end in zip(form[1::2], form[2::2], strict=True):
        keep |= (begin[:, None] <= column) & (column < end[:, None])
    return keep


def decoded_blocks(lists: BlockLists, keep: Tensor) -> Tensor:
    """What a kernel computes from block lists: all of a full block, the mask inside a partial one, nothing else."""
    out = torch.zeros_like(keep)
    high, wide = lists.block
    for row, (partial, full) in enumerate(zip(lists.partial_count.tolist(), lists.full_count.tolist(), strict=True)):
        rows = slice(row * high, (row + 1) * high)
        for block in lists.partial_index[row, :partial].tolist():
            columns = slice(block * wide, (block + 1) * wide)
            out[rows, columns] = keep[rows, columns]
        for block in lists.full_index[row, :full].tolist():
            out[rows, block * wide : (block + 1) * wide] = True
    return out


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in GRID for shape in ("1,1,8,640", "1,1,1,8,200,456")]
    + [(name, "1,1,8,640") for name in SQUARE],
)
def test_dense_form_is_the_mask(name: str, shape: str) -> None:
    given = problem(name, shape)
    sizes = given.shape
    expected = given.grid_mask.mask(sizes.q_len).to_dense(sizes.q_len, sizes.kv_len)
    assert torch.equal(given.keep, expected)
    rows = torch.tensor([3, 0, 150])
    assert torch.equal(given.grid_mask.dense(sizes, CPU, rows), expected[:, :, rows])
    mod = mask_mod(given.grid_mask, sizes.q_len, sizes.kv_len, CPU)
    zero = torch.zeros((), dtype=torch.int64)
    got = mod(zero, zero, torch.arange(sizes.q_len)[:, None], torch.arange(sizes.kv_len)[None])
    assert torch.equal(got.expand(expected.shape[2:]), expected[0, 0])


@pytest.mark.parametrize("name", GRID | SQUARE)
def test_intervals_are_the_mask(name: str) -> None:
    keep = problem(name).keep[0, 0]
    form = intervals(keep)
    assert form.dtype == torch.int32
    assert form.shape[0] % 2 == 1
    assert bool((form[1:] >= form[:-1]).all())  # what cuDNN's planner demands: sorted, disjoint
    assert bool(((form >= 0) & (form <= 640)).all())
    assert torch.equal(decoded_intervals(form, 640), keep)


def test_intervals_of_odd_rows() -> None:
    torch.manual_seed(0)
    keep = torch.rand(50, 37) < 0.4
    keep[0], keep[1], keep[2] = False, True, False
    keep[2, -1] = True
    assert torch.equal(decoded_intervals(intervals(keep), 37), keep)
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    assert intervals(nothing).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (192, 128)])
def test_block_lists_are_the_mask(name: str, block: tuple[int, int]) -> None:
    keep = problem(name).keep[0, 0]
    lists = block_lists(keep, *block)
    assert lists.partial_count.dtype == lists.partial_index.dtype == torch.int32
    assert lists.partial_index.shape == (-(-640 // block[0]), 640 // block[1])
    assert torch.equal(decoded_blocks(lists, keep), keep)
    for count, index in ((lists.partial_count, lists.partial_index), (lists.full_count, lists.full_index)):
        for row, listed in enumerate(count.tolist()):
            assert index[row, :listed].tolist() == sorted(set(index[row, :listed].tolist()))


@pytest.mark.parametrize("name", [name for name in GRID if GRID[name].window is not None])
def test_flash_windows_are_the_mask(name: str) -> None:
    keep = problem(name).keep[0, 0]
    left, right = GRID[name].window or (None, None)
    distance = torch.arange(640)[:, None] - torch.arange(640)[None]
    expected = torch.ones(640, 640, dtype=torch.bool)
    if left is not None:
        expected &= distance <= left
    if right is not None:
        expected &= distance >= -right
    assert torch.equal(keep, expected)


def test_windows_are_not_used_where_they_mean_something_else() -> None:
    """FlashAttention counts from the last key, the grid from the first."""
    assert wheels._runs_natively(problem("causal"))
    assert not wheels._runs_natively(problem("causal", "1,1,1,8,64,128"))
    assert wheels._runs_natively(problem("full", "1,1,1,8,64,128"))


@pytest.fixture
def cute_masks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The mask functions over torch tensors: their language's names stand for the same operations here."""
    names = ("cutlass", "cutlass.cute", "flash_attn", "flash_attn.cute", "flash_attn.cute.utils")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["cutlass"].Int32 = torch.int32  # type: ignore[attr-defined]
    sys.modules["cutlass.cute"].jit = lambda function: function  # type: ignore[attr-defined]
    sys.modules["flash_attn.cute.utils"].scalar_to_ssa = lambda value, dtype: torch.as_tensor(value).to(dtype)  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "benchmarks.peers.cute_masks", raising=False)
    module = importlib.import_module("benchmarks.peers.cute_masks")
    monkeypatch.delitem(sys.modules, "benchmarks.peers.cute_masks")
    return module


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in GRID if name != "full" for shape in ("1,1,8,640", "1,1,1,8,100,150")]
    + [(name, "1,1,8,640") for name in SQUARE],
)
def test_cute_masks_are_the_mask(name: str, shape: str, cute_masks: ModuleType) -> None:
    given = problem(name, shape)
    function, tables = cute_masks.mask_mod(name, given.shape, CPU)
    columns = torch.arange(given.shape.kv_len, dtype=torch.int32)
    for row in range(given.shape.q_len):
        kept = function(None, None, torch.tensor([row], dtype=torch.int32), columns, None, tables)
        assert torch.equal(kept, given.keep[0, 0, row]), row


def test_cute_tables_reach_past_the_last_row(cute_masks: ModuleType) -> None:
    """A tile of 192 rows looks up rows past the last query."""
    _, tables = cute_masks.mask_mod("bigbird", Shape.parse("1,1,8,512"), CPU)
    assert tables[0].shape == (8 + 8, 3)
    assert tables[0].dtype == torch.int32


def test_flash4_is_told_the_mask(monkeypatch: pytest.MonkeyPatch, cute_masks: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.peers.cute_masks", cute_masks)
    sparsity = ModuleType("flash_attn.cute.block_sparsity")
    sparsity.BlockSparseTensorsTorch = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    told = wheels._flash4_arguments(problem("bigbird"), (64, 64))
    assert told["aux_tensors"][0].shape[1] == 3
    assert told["block_sparse_tensors"].block_size == (64, 64)
    assert told["block_sparse_tensors"].mask_block_idx.shape == (1, 1, 10, 10)
    assert told["block_sparse_tensors"].full_block_cnt.shape == (1, 1, 10)
    assert wheels._flash4_arguments(problem("window512"), (128, 128)) == {"window_size": (511, 0)}
    assert wheels._flash4_arguments(problem("full", "1,1,1,8,64,128"), (128, 128)) == {"window_size": (None, None)}


@pytest.mark.parametrize("name", ["sdpa-cudnn", "flash-2", "flash-4", "cudnn-flex", "flashinfer"])
def test_gpu_peers_refuse_the_cpu(name: str) -> None:
    assert PEERS[name].missing(problem("causal", dtype=torch.float16)) == "runs on CUDA devices only"


@pytest.mark.parametrize(("name", "package"), [("flash-4", "flash-attn-4"), ("cudnn-flex", "nvidia-cudnn-frontend")])
def test_peers_that_are_not_installed_are_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn.cute.interface", "cudnn", "cudnn.flex_attention"):
        monkeypatch.setitem(sys.modules, module, None)
    wheels._import_failure.cache_clear()
    on_gpu = SimpleNamespace(
        device=torch.device("cuda"), half=True, grid_mask=grid_mask("strided"), shape=Shape.parse("1,1,64,128")
    )
    reason = PEERS[name].missing(on_gpu)  # type: ignore[arg-type]
    wheels._import_failure.cache_clear()
    assert reason is not None
    assert reason.startswith(f"{package} is not usable here: ModuleNotFoundError")


@pytest.mark.parametrize("mask", ["bigbird", "full"])
def test_flashinfer_is_told_the_mask(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a batch follow each other, each with blocks of its own keys."""

    class Wrapper:
        def __init__(self, workspace: Tensor) -> None:
            pass

        def plan(self, indptr: Tensor, indices: Tensor, rows: int, columns: int, *sizes: int, **given: Any) -> None:
            height, width, *_ = sizes
            self.keep = torch.zeros(rows // height, columns // width, height, width, dtype=torch.bool)
            inside = given["mask"]
            assert (inside is None) is (mask == "full")
            for row in range(rows // height):
                for at in range(int(indptr[row]), int(indptr[row + 1])):
                    self.keep[row, int(indices[at])] = True if inside is None else inside[at]
            self.keep = self.keep.transpose(1, 2).reshape(rows, columns)

        def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=self.keep, enable_gqa=True)
            return out[0].transpose(0, 1)

    module = ModuleType("flashinfer.sparse")
    module.BlockSparseAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.sparse", module)
    given = problem(mask, "3,4,2,16,640,640")
    torch.testing.assert_close(PEERS["flashinfer"].prepare(given)(), PEERS["sdpa"].prepare(given)())
    assert PEERS["flashinfer"].missing(problem(mask, "1,1,8,100")) == "flashinfer takes whole blocks of 64 alone"


def test_what_flash_3_serves() -> None:
    missing = PEERS["flash-3"].missing
    assert missing(problem("causal", dtype=torch.float16)) == "fa3-fwd was built for bfloat16 alone"
    assert missing(problem("window512", dtype=torch.bfloat16)) == "fa3-fwd was built for full and causal masks alone"
    for name in ("full", "causal"):
        assert missing(problem(name, dtype=torch.bfloat16)) == "runs on CUDA devices only"
    few = problem("causal", "1,1,1,8,64,128", torch.bfloat16)
    assert missing(few) == "fa3-fwd's causal mask counts from the last key"


def test_blocks_are_for_masks_without_a_mode_of_their_own() -> None:
    assert PEERS["flash-4-64"].missing(problem("causal")) == "flash-4 runs this mask without blocks"
    wide = problem("strided", "1,1,128,128", torch.float16)
    assert PEERS["flash-4-192"].missing(wide) == "these blocks need head_dim <= 64"


def test_dense_bias_and_repeated_heads_are_the_mask() -> None:
    given = problem("bigbird", "1,4,2,16,256,256")
    assert torch.equal(_bias(given) == 0, given.keep)
    k, v = _repeated(given)
    expected = PEERS["sdpa"].prepare(given)()
    got = torch.nn.functional.scaled_dot_product_attention(given.q, k, v, attn_mask=_bias(given))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("number", [0, 1])
def test_decode_forms_agree(number: int) -> None:
    shape = Shape.parse("2,4,2,16,1,300")
    grid = decode_masks(shape, 128)[number]
    given = problem(grid, "2,4,2,16,1,300")
    kept = 128 if number == 0 else 300
    assert int(given.keep.sum()) == kept
    assert bool(given.keep[..., -kept:].all())
    assert PEERS["sdpa-sliced"].missing(given) is None
    out = PEERS["sdpa-sliced"].prepare(given)()
    torch.testing.assert_close(PEERS["stof"].prepare(given)(), out)
    torch.testing.assert_close(PEERS["sdpa"].prepare(given)(), out)
    zero = torch.zeros((), dtype=torch.int64)
    got = mask_mod(grid, 1, 300, CPU)(zero, zero, zero, torch.arange(300))
    assert torch.equal(got.expand(300), given.keep[0, 0, 0])
    assert grid.window == ((127, 0) if number == 0 else (None, None))
    assert PEERS["sdpa-sliced"].missing(problem("causal")) is not None


def test_needed_bytes_count_keys_values_queries_and_output() -> None:
    row = SimpleNamespace(batch=2, heads=4, kv_heads=2, head_dim=8, q_len=1, kv_len=100, density=0.5, dtype="float16")
    keys_and_values = 2 * (2 * 2 * 50 * 8) * 2
    assert needed_bytes(row) == keys_and_values + 2 * (2 * 4 * 8) * 2  # type: ignore[arg-type]
