"""STOF, and the peers that come with PyTorch: scaled_dot_product_attention's backends and FlexAttention."""

from __future__ import annotations

import shutil
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import stof
from benchmarks.peers.interface import Call, Peer, always
from benchmarks.peers.mask_formats import mask_mod
from stof.testing.attention_check import AttentionProblem


def _prepare_stof(problem: AttentionProblem) -> Call:
    shape = problem.shape
    stof.plan_cache.clear()  # build_us is the cost of a new mask
    plan = stof.plan(problem.grid_mask.mask(shape.q_len), shape.q_len, shape.kv_len, device=problem.device)
    return lambda: stof.attention(problem.q, problem.k, problem.v, plan)


def _native(problem: AttentionProblem) -> bool:
    """Whether SDPA computes this mask without a mask tensor."""
    return problem.grid_mask.unmasked or (problem.grid_mask.causal and problem.shape.q_len == problem.shape.kv_len)


def _native_missing(problem: AttentionProblem) -> str | None:
    return None if _native(problem) else "serves only full and causal masks"


def _bias(problem: AttentionProblem) -> Tensor:
    """The mask as what SDPA's kernels add to the scores, so that no call has to convert it: `[1, 1, Sq, Skv]`."""
    return torch.zeros_like(problem.keep, dtype=problem.q.dtype).masked_fill_(~problem.keep, float("-inf"))


def _repeated(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """K and V with one head for every query head, for kernels that know no grouped heads; made once, untimed."""
    group = problem.shape.heads // problem.shape.kv_heads
    return problem.k.repeat_interleave(group, 1), problem.v.repeat_interleave(group, 1)


def _prepare_sdpa(problem: AttentionProblem) -> Call:
    if problem.device.type == "cpu":
        keep, grouped = problem.keep, problem.grouped
        return lambda: F.scaled_dot_product_attention(
            problem.q, problem.k, problem.v, attn_mask=keep, enable_gqa=grouped
        )
    bias = _bias(problem)
    k, v = _repeated(problem) if problem.grouped else (problem.k, problem.v)
    return lambda: F.scaled_dot_product_attention(problem.q, k, v, attn_mask=bias)


def _prepare_native(problem: AttentionProblem) -> Call:
    causal, grouped = problem.grid_mask.causal, problem.grouped
    return lambda: F.scaled_dot_product_attention(problem.q, problem.k, problem.v, is_causal=causal, enable_gqa=grouped)


def _kept_tail(problem: AttentionProblem) -> int | None:
    """How many of the last keys every query sees and no others, for queries at the end of a cache."""
    window = problem.grid_mask.window
    if problem.shape.q_len != 1 or window is None or not problem.aligned:
        return None
    return problem.shape.kv_len if window[0] is None else min(window[0] + 1, problem.shape.kv_len)


def _sliced_missing(problem: AttentionProblem) -> str | None:
    return None if _kept_tail(problem) else "serves only one query at the end of a cache"


def _prepare_sliced(problem: AttentionProblem) -> Call:
    first, grouped = problem.shape.kv_len - (_kept_tail(problem) or 0), problem.grouped
    k, v = problem.k[:, :, first:], problem.v[:, :, first:]
    return lambda: F.scaled_dot_product_attention(problem.q, k, v, enable_gqa=grouped)


def _half_on_cuda(problem: AttentionProblem) -> str | None:
    if problem.device.type != "cuda":
        return "runs on CUDA devices only"
    return None if problem.half else "takes float16 and bfloat16 only"


def _flash_missing(problem: AttentionProblem) -> str | None:
    return _half_on_cuda(problem) or _native_missing(problem)


def _prepare_flash(problem: AttentionProblem) -> Call:
    causal, grouped = problem.grid_mask.causal, problem.grouped

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(problem.q, problem.k, problem.v, is_causal=causal, enable_gqa=grouped)

    return call


def _prepare_cudnn(problem: AttentionProblem) -> Call:
    causal = _native(problem) and problem.grid_mask.causal
    bias = None if _native(problem) else _bias(problem)

    def attend(k: Tensor, v: Tensor, grouped: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(problem.q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped)

    if problem.grouped:
        try:
            attend(problem.k, problem.v, True)
        except RuntimeError:  # this backend refuses grouped heads in some releases and with a bias
            return partial(attend, *_repeated(problem), False)
    return partial(attend, problem.k, problem.v, problem.grouped)


def _flex_missing(problem: AttentionProblem) -> str | None:
    if problem.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        return "FlexAttention on the CPU needs a C++ compiler"
    return None


def _autotuned_missing(problem: AttentionProblem) -> str | None:
    return None if problem.device.type == "cuda" else "there is nothing to tune on the CPU"


def _small_blocks_missing(problem: AttentionProblem) -> str | None:
    if problem.device.type != "cuda":
        return "block sizes are fixed on the CPU"
    return "the same as flex without a mask" if problem.grid_mask.unmasked else None


def _prepare_flex(problem: AttentionProblem, block: int = 128, mode: str | None = None) -> Call:
    from torch.nn.attention.flex_attention import FlexKernelOptions, create_block_mask, flex_attention

    shape, block_mask = problem.shape, None
    if not problem.grid_mask.unmasked:
        keep = mask_mod(problem.grid_mask, shape.q_len, shape.kv_len, problem.device)
        block_mask = create_block_mask(
            keep, None, None, shape.q_len, shape.kv_len, device=problem.device, BLOCK_SIZE=block
        )
    # Tiles must divide the mask's blocks, and the default ones are 128 rows high.
    options: FlexKernelOptions | None = {"BLOCK_M": block, "BLOCK_N": block} if block < 128 else None
    grouped = problem.grouped
    # One compiled function per problem: a shared one would reach Dynamo's recompile limit on a grid.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)

    def call() -> Tensor:
        return compiled(
            problem.q, problem.k, problem.v, block_mask=block_mask, enable_gqa=grouped, kernel_options=options
        )

    return call


TORCH_PEERS = (
    Peer("stof", "stof.attention with a ready plan", always, _prepare_stof),
    Peer("sdpa", "scaled_dot_product_attention with the dense mask, PyTorch's choice of kernel", always, _prepare_sdpa),
    Peer(
        "sdpa-native",
        "scaled_dot_product_attention without a mask tensor (full; causal by is_causal)",
        _native_missing,
        _prepare_native,
    ),
    Peer(
        "sdpa-sliced",
        "scaled_dot_product_attention on the slice of the cache that one query sees",
        _sliced_missing,
        _prepare_sliced,
    ),
    Peer("sdpa-cudnn", "PyTorch's cuDNN attention; dense bias unless full or causal", _half_on_cuda, _prepare_cudnn),
    Peer("flash-2", "PyTorch's FlashAttention-2; full and causal masks", _flash_missing, _prepare_flash),
    Peer("flex", "FlexAttention, torch.compile(dynamic=False), 128x128 blocks", _flex_missing, _prepare_flex),
    Peer("flex-64", "FlexAttention with 64x64 blocks", _small_blocks_missing, partial(_prepare_flex, block=64)),
    Peer(
        "flex-autotuned",
        "FlexAttention, max-autotune-no-cudagraphs, 128x128 blocks",
        _autotuned_missing,
        partial(_prepare_flex, mode="max-autotune-no-cudagraphs"),
    ),
)
