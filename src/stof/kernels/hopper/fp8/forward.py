"""Calling the Hopper kernel for 8-bit operands: transposed V, tensor maps, the work list, launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stof.kernels.common import empty_output
from stof.kernels.hopper.binding import ROWS, DeviceWork, Window, like_lse, moving_call, multiprocessors, readable
from stof.kernels.hopper.config import ForwardConfig
from stof.kernels.hopper.fp8.forward_kernel import fp8_forward_kernel
from stof.kernels.hopper.fp8.transpose_v import transpose_v
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.tile_lists import TileLists
from stof.kernels.implementation import BoundCall, Options
from stof.kernels.quantization import FP8
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl

# Elements of a head.
_WIDTH = 128
# Stages of Q: one row block is computed, the Q of the next one is being copied.
_Q_STAGES = 2
# Keys whose values are transposed by one program.
_KEYS_PER_PROGRAM = 128


def bind(q: Tensor, k: Tensor, v: Tensor, prepared: PreparedTiles, options: Options) -> BoundCall:
    """The kernel bound to tensors like these: `call(q, k, v, None, sinks, *scales) -> (out, lse)`.

    Args:
        q, k, v: `[B, H, Sq, 128]`, `[B, Hkv, Skv, 128]`, `[B, Hkv, Skv, 128]`; float8_e4m3fn. A call copies what TMA
            cannot read (strides that are no multiples of 16, rows that are not contiguous).
        prepared: tile lists, and stages and `side` of their configuration.
        options: without a bias; its scales may have any strides.

    Returns (the call):
        `out [B, H, Sq, 128]` bfloat16 in q's memory order, `lse [B, H, Sq]` float32.

    Raises:
        KernelError: (the call) the kernel does not compile here.
    """
    lists, config = prepared.lists, prepared.config
    scale, softcap, sinks, scales = options.scale, options.softcap, options.sinks, options.scales
    device = q.device
    _, heads, q_len, _ = q.shape
    kv_heads = k.shape[1]
    out = empty_output(q, v)
    copy_out = not readable(out)
    if copy_out:
        out = out.contiguous()
    copied = [not (readable(x) and _has_words(x)) for x in (q, k, v)]
    q, k, v = (_tight(x) if copy else x for x, copy in zip((q, k, v), copied, strict=True))
    groups = lists.block_m // ROWS
    transposed = _TransposedV(k, v, scales, heads, lists)
    q_window = Window.over(q, ROWS, _WIDTH)
    k_window = Window.over(k, lists.block_n, _WIDTH)
    v_window = Window.over(transposed.like, _WIDTH, lists.block_n)
    k_compacted_window = v_compacted_window = None
    if transposed.compacted is not None:
        k_compacted_window = Window.over(transposed.compacted[0], lists.block_n, _WIDTH)
        v_compacted_window = Window.over(transposed.compacted[1], _WIDTH, lists.block_n)
    out_window = Window.over(out, ROWS, _WIDTH)

    blocks = multiprocessors(device)
    lse_like = like_lse(q)
    work = DeviceWork.of(lists, lse_like, config.side, blocks, _WIDTH)
    has_score_mod = softcap > 0 or scale <= 0
    compiled_config = ForwardConfig(
        groups=groups,
        block_n=lists.block_n,
        width=_WIDTH,
        slab=lists.slab,
        stages=config.num_stages,
        q_stages=_Q_STAGES,
        split=work.chunks > 0,
        has_score_mod=has_score_mod,
        has_softcap=softcap > 0,
        has_sinks=sinks is not None,
        has_full=lists.has_full > 0,
        persistent=work.persistent,
        transposed_v=True,
    )
    ready = Launch(
        fp8_forward_kernel,
        min(blocks, work.count),
        (work.work_list, lists.tile_columns, lists.tile_bitmap, lists.bitmaps),
        (heads, heads // kv_heads, heads // transposed.owners, q_len,
         float(scale if has_score_mod else scale * math.log2(math.e)), float(softcap)),
        (compiled_config, supports_pdl(device)),
        num_warps=4,
        num_stages=config.num_stages,
        windows=(q_window, k_window, v_window, k_compacted_window, v_compacted_window, out_window),
        use_pdl=supports_pdl(device),
        device=device,
    )  # fmt: skip
    moved = moving_call(bind, prepared, options, device)

    def call(
        q: Tensor, k: Tensor, v: Tensor, bias: None, sinks: Tensor | None, *scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        result = out = empty_output(q, v)
        if copy_out:
            out = torch.empty_like(result, memory_format=torch.contiguous_format)
        q, k, v = (_tight(x) if copy else x for x, copy in zip((q, k, v), copied, strict=True))
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:  # what TMA asks of an address
            out, lse = moved(q, k, v, bias, sinks, *scales)
            return result.copy_(out), lse
        lse = torch.empty_like(lse_like)
        chunk_out, chunk_ml, counters = work.memory(lse)
        v_transposed, factors, k_compacted, v_compacted = transposed(k, v, scales)
        bases = (q, k, v_transposed, k_compacted, v_compacted, out)
        ready(lse, lse if sinks is None else sinks, factors, chunk_out, chunk_ml, counters, bases=bases)
        return (result.copy_(out) if copy_out else result), lse

    return call


class _TransposedV:
    """Transposed V, and keys and transposed values of compacted columns, which every call makes anew.

    Attributes:
        like: shape and strides of transposed V, `[B, Hkv, 128, keys]`.
        compacted: the same of the keys of compacted columns, `[B, owners, n, 128]`, and of their values, or None.
        owners: heads with compacted columns of their own, or key heads.
    """

    def __init__(self, k: Tensor, v: Tensor, scales: Sequence[Tensor], heads: int, lists: TileLists) -> None:
        batch, kv_heads, kv_len, _ = k.shape
        mask_batch, mask_heads, count = lists.compacted_keys.shape if lists.compacted_keys.numel() else (1, 1, 0)
        self.owners = heads if mask_heads > 1 else kv_heads
        self._factors = (batch, heads, 2)
        self.like = _meta(batch, kv_heads, _WIDTH, -(-kv_len // 16) * 16)
        sizes = (kv_heads, heads // kv_heads, 0, 0, kv_len)
        self._transpose = _launch(k, v, scales, self.like, sizes, lists.pattern_of, False)
        self.compacted: tuple[Tensor, Tensor] | None = None
        if count:
            self.compacted = _meta(batch, self.owners, count, _WIDTH), _meta(batch, self.owners, _WIDTH, count)
            mask_strides = (int(mask_batch > 1) * mask_heads, int(mask_heads > 1))
            sizes = (self.owners, self.owners // kv_heads, *mask_strides, count)
            self._transpose_compacted = _launch(k, v, scales, self.compacted[1], sizes, lists.compacted_keys, True)

    def __call__(self, k: Tensor, v: Tensor, scales: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Transposed V, factors `[B, H, 2]` of scores and output, compacted keys and values (any tensors if none)."""
        transposed = torch.empty_like(self.like, device=v.device)
        factors = torch.empty(self._factors, dtype=torch.float32, device=v.device)
        words = _words(k), _words(v)
        self._transpose(*words, words[0], _words(transposed), *scales, factors)
        if self.compacted is None:
            return transposed, factors, k, v
        k_compacted, v_compacted = (torch.empty_like(like, device=v.device) for like in self.compacted)
        self._transpose_compacted(*words, _words(k_compacted), _words(v_compacted), *scales, factors)
        return transposed, factors, k_compacted, v_compacted


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=FP8, device="meta")


def _words(x: Tensor) -> Tensor:
    """The same memory, four elements to a word."""
    return x.view(torch.int32)


def _has_words(x: Tensor) -> bool:
    """Whether PyTorch can show the memory of rows that TMA can read so: it asks for strides that TMA does not."""
    return not any(stride % 4 for stride in x.stride()[:3])


def _tight(x: Tensor) -> Tensor:
    """A copy without gaps. To `contiguous()` a dimension of size 1 may have any stride, to `_words` it may not."""
    return x.clone(memory_format=torch.contiguous_format)


def _launch(
    k: Tensor, v: Tensor, scales: Sequence[Tensor], like: Tensor, sizes: tuple[int, ...], keys: Tensor, listed: bool
) -> Launch:
    """The launch that transposes all values, or those of listed keys; `like` is the result, `sizes` the kernel's."""
    words = like.shape[3] // 4
    at_once = _KEYS_PER_PROGRAM // 4
    strides = [stride // 4 for x in (k, v) for stride in x.stride()[:3]]
    scale_strides = [stride * (n > 1) for x in scales for n, stride in zip(x.shape, x.stride(), strict=True)]
    return Launch(
        transpose_v,
        like.shape[0] * like.shape[1] * -(-words // at_once),
        (keys,),
        (*sizes, words, *strides, *scale_strides),
        (listed, 2 ** (sizes[1] - 1).bit_length(), at_once, _WIDTH, supports_pdl(k.device)),
        num_warps=4,
        num_stages=1,
        use_pdl=supports_pdl(k.device),
        device=k.device,
    )
