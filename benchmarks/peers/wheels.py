"""Peers that need their own wheels: FlashAttention-3 and -4, cuDNN frontend's FlexAttention, FlashInfer.

All want heads behind the sequence; their inputs are copied to that layout once, untimed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.failures import first_line
from benchmarks.peers.interface import Call, Peer
from benchmarks.peers.mask_formats import block_lists, intervals
from stof.testing.attention_check import AttentionProblem

# A call on q, k and v, differentiable.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@cache
def _import_failure(module: str, package: str) -> str | None:
    """Why `module` of the distribution `package` cannot be used, or None; tried once."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a half-installed peer may raise anything; the race goes on and names the reason
        return f"{package} is not usable here: {first_line(error)}"
    return None


def _unusable(problem: AttentionProblem, module: str, package: str) -> str | None:
    if problem.device.type != "cuda":
        return "runs on CUDA devices only"
    if not problem.half:
        return "takes float16 and bfloat16 only"
    return _import_failure(module, package)


def _sequence_major(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (problem.q, problem.k, problem.v))
    return q, k, v


def _flash3_missing(problem: AttentionProblem) -> str | None:
    if problem.q.dtype != torch.bfloat16:
        return "fa3-fwd was built for bfloat16 alone"
    if not (problem.grid_mask.unmasked or problem.grid_mask.causal):
        return "fa3-fwd was built for full and causal masks alone"
    if not (problem.grid_mask.unmasked or problem.aligned):
        return "fa3-fwd's causal mask counts from the last key"
    return _unusable(problem, "fa3_fwd_interface", "fa3-fwd")


def _prepare_flash3(problem: AttentionProblem) -> Call:
    attend = importlib.import_module("fa3_fwd_interface").flash_attn_func
    q, k, v = _sequence_major(problem)

    def call() -> Tensor:
        out: Tensor = attend(q, k, v, causal=problem.grid_mask.causal)
        return out.transpose(1, 2)

    return call


def _flash4_missing(problem: AttentionProblem) -> str | None:
    return _unusable(problem, "flash_attn.cute.interface", "flash-attn-4")


def _runs_natively(problem: AttentionProblem) -> bool:
    return problem.grid_mask.unmasked or (problem.grid_mask.window is not None and problem.aligned)


def _flash4_blocks_missing(problem: AttentionProblem, head_dims: int = 256) -> str | None:
    if _runs_natively(problem):
        return "flash-4 runs this mask without blocks"
    if problem.shape.head_dim > head_dims:
        return f"these blocks need head_dim <= {head_dims}"
    return _flash4_missing(problem)


def _flash4_arguments(problem: AttentionProblem, block: tuple[int, int]) -> dict[str, Any]:
    """How FlashAttention-4 is told this mask: its own window arguments, else a mask_mod with lists of blocks."""
    if _runs_natively(problem):
        return {"window_size": problem.grid_mask.window or (None, None)}
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
    masks = importlib.import_module("benchmarks.peers.cute_masks")
    mask_mod, aux_tensors = masks.mask_mod(problem.grid_mask.name, problem.shape, problem.device)
    lists = block_lists(problem.keep[0, 0], *block)
    tensors = sparsity.BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count[None, None],
        mask_block_idx=lists.partial_index[None, None],
        full_block_cnt=lists.full_count[None, None],
        full_block_idx=lists.full_index[None, None],
        block_size=lists.block,
    )
    return {"mask_mod": mask_mod, "aux_tensors": aux_tensors, "block_sparse_tensors": tensors}


def _prepare_flash4(problem: AttentionProblem, block: tuple[int, int] = (128, 128)) -> Call:
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    arguments = _flash4_arguments(problem, block)
    q, k, v = _sequence_major(problem)

    def call() -> Tensor:
        out: Tensor = attend(q, k, v, **arguments)[0]
        return out.transpose(1, 2)

    return call


def flash4_with_gradients(problem: AttentionProblem, deterministic: bool = False) -> Attend:
    """FlashAttention-4 on `[B, S, H, D]`, in blocks of 128 x 128 where it has no window for the mask."""
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    block = (128, 128)
    arguments = _flash4_arguments(problem, block)
    if "block_sparse_tensors" in arguments:
        sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
        # The backward pass reads the lists of each block of keys.
        lists = block_lists(problem.keep[0, 0].T, *block[::-1])
        arguments["block_sparse_tensors_bwd"] = sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=lists.partial_count[None, None],
            mask_block_idx=lists.partial_index[None, None],
            full_block_cnt=lists.full_count[None, None],
            full_block_idx=lists.full_index[None, None],
            block_size=block,
        )
    return lambda q, k, v: attend(q, k, v, deterministic=deterministic, **arguments)[0]


def cudnn_flex_with_gradients(problem: AttentionProblem, deterministic: bool = False) -> Attend:
    """cuDNN frontend's FlexAttention on `[B, S, H, D]`."""
    api = importlib.import_module("cudnn.flex_attention")
    plan = _interval_plan(problem, build_backward=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = api.flex_attn_func(q, k, v, mask_plan=plan, deterministic=deterministic)
        return out

    return attend


def _interval_plan(problem: AttentionProblem, *, build_backward: bool) -> Any:
    api = importlib.import_module("cudnn.flex_attention")
    rows = intervals(problem.keep[0, 0])  # [F, Sq], the same for every sequence
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the time of every compilation
        return api.create_mask_plan(
            rows.repeat(1, problem.shape.batch)[None].contiguous(), *_sequence_major(problem),
            build_backward=build_backward,
        )  # fmt: skip


def _cudnn_missing(problem: AttentionProblem) -> str | None:
    return _unusable(problem, "cudnn.flex_attention", "nvidia-cudnn-frontend")


def _prepare_cudnn_flex(problem: AttentionProblem) -> Call:
    api = importlib.import_module("cudnn.flex_attention")
    plan = _interval_plan(problem, build_backward=False)
    q, k, v = _sequence_major(problem)

    def call() -> Tensor:
        out: Tensor = api.flex_attn_func(q, k, v, mask_plan=plan)
        return out.transpose(1, 2)

    with contextlib.redirect_stdout(io.StringIO()):  # the last compilations
        call()
    return call


_FLASHINFER_BLOCK = 64


def _flashinfer_missing(problem: AttentionProblem) -> str | None:
    if problem.shape.q_len % _FLASHINFER_BLOCK or problem.shape.kv_len % _FLASHINFER_BLOCK:
        return f"flashinfer takes whole blocks of {_FLASHINFER_BLOCK} alone"
    return _unusable(problem, "flashinfer.sparse", "flashinfer-python")


def _prepare_flashinfer(problem: AttentionProblem) -> Call:
    """It takes one sequence: those of a batch follow each other, with blocks on the diagonal of the sequences."""
    shape, size = problem.shape, _FLASHINFER_BLOCK
    blocks = problem.keep[0, 0].unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2)
    some = blocks.any(-1).any(-1)
    inside, columns = blocks[some], some.nonzero()[:, 1].int()
    sequences = torch.arange(shape.batch, dtype=torch.int32, device=problem.device)[:, None]
    ends = some.sum(1).repeat(shape.batch).cumsum(0, dtype=torch.int32)
    workspace = torch.empty(2**28, dtype=torch.uint8, device=problem.device)
    wrapper = importlib.import_module("flashinfer.sparse").BlockSparseAttentionWrapper(workspace)
    wrapper.plan(
        torch.nn.functional.pad(ends, (1, 0)),
        (columns + sequences * some.shape[1]).flatten(),
        shape.batch * shape.q_len,
        shape.batch * shape.kv_len,
        size,
        size,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        mask=None if bool(inside.all()) else inside.repeat(shape.batch, 1, 1),
        q_data_type=problem.q.dtype,
        o_data_type=problem.q.dtype,
    )
    q, k, v = (x.flatten(0, 1) for x in _sequence_major(problem))

    def call() -> Tensor:
        out: Tensor = wrapper.run(q, k, v)
        return out.unflatten(0, (shape.batch, -1)).transpose(1, 2)

    return call


WHEEL_PEERS = (
    Peer("flash-3", "FlashAttention-3 by fa3-fwd: bfloat16, full and causal", _flash3_missing, _prepare_flash3),
    Peer(
        "flash-4",
        "FlashAttention-4: its own causal and window modes, else mask_mod with 128x128 block sparsity",
        _flash4_missing,
        _prepare_flash4,
    ),
    Peer(
        "flash-4-64",
        "FlashAttention-4, mask_mod with 64x64 block sparsity",
        _flash4_blocks_missing,
        partial(_prepare_flash4, block=(64, 64)),
    ),
    Peer(
        "flash-4-192",
        "FlashAttention-4, mask_mod with 192x128 block sparsity (its default tile up to head_dim 64)",
        partial(_flash4_blocks_missing, head_dims=64),
        partial(_prepare_flash4, block=(192, 128)),
    ),
    Peer(
        "cudnn-flex",
        "cuDNN frontend's FlexAttention with interval masks",
        _cudnn_missing,
        _prepare_cudnn_flex,
    ),
    Peer(
        "flashinfer",
        "FlashInfer's block-sparse kernel, blocks of 64x64 with masks inside; compiles with nvcc",
        _flashinfer_missing,
        _prepare_flashinfer,
    ),
)
