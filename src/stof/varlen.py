"""Attention of sequences of variable lengths, packed one after the other: FlashAttention's interface."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from stof.attention import attention
from stof.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError, shown
from stof.masks import Mask, as_mask, causal, full, sliding_window
from stof.masks.aligned import aligned_documents
from stof.masks.base import foreign_layout
from stof.runtime.private import break_graph, has_values

# A side of a window that has no end: no distance is larger.
_UNLIMITED = 2**31 - 1


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None, scale: float | None = None, dropout_p: float = 0.0, mask: Mask | str | None = None,
    seqused_k: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None, scale: float | None = None, dropout_p: float = 0.0, mask: Mask | str | None = None,
    seqused_k: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    mask: Mask | str | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences, each to its own keys alone, differentiable in q, k and v.

    The meaning of `flash_attn_varlen_func` of FlashAttention (https://github.com/Dao-AILab/flash-attention). Positions
    are aligned at the lower right corner of each sequence: its last query is as far along as its last key, so query i
    of Sq stands at key `i + Skv - Sq`. The lengths are read on the host in each call, which waits for a GPU that holds
    them; compiled code breaks its graph here.

    Args:
        q: queries `[total_q, H, D]`; float16, bfloat16, float32 or float64; any strides.
        k: keys `[total_k, Hkv, D]`, same dtype and device; `H` is a multiple of `Hkv`.
        v: values `[total_k, Hkv, Dv]`.
        cu_seqlens_q, cu_seqlens_k: where each sequence begins, and the total: `[B + 1]`, of any integer dtype, on any
            device. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: at least the longest lengths; checked, not needed.
        causal: whether a query sees no key after its position; `window_size[1]` is 0 then.
        window_size: (left, right): keys from `left` before to `right` after the position are seen; -1 is no limit.
        softcap: as for `stof.attention`; None and 0.0 are none.
        scale: factor on the scores, default `1 / sqrt(D)`.
        dropout_p: as for `stof.attention`.
        mask: a further mask, which keeps keys by their distance from the query's position in the sequence: `causal`,
            `sliding_window`, `dilated_window` and what `& | ~` make of them, or their text.
        seqused_k: `[B]`, only the first so many keys of each sequence count; the last of them is its last key.
        return_lse: also return the log-sum-exp of the kept scores.

    Returns:
        `out [total_q, H, Dv]` in q's dtype, or `(out, lse)` with lse `[H, total_q]`, as FlashAttention lays it out, in
        float32 (float64 for float64 inputs). Rows that keep no key, as of sequences without keys, give 0 and -inf.

    Raises:
        ShapeError: tensors that are not as above, or lengths that do not add up to them.
        DtypeError, DeviceError: lengths that are no integers, or have no values; and as of `stof.attention`.
        ArgumentError: lengths that decrease or do not begin at 0, a window below -1, more used keys than there are,
            a longest length below that of a sequence.
        MaskError: a mask that looks at more than distances.
        UnsupportedError: under `torch.export`; and as of `stof.attention`.

    Examples:
        >>> q, k, v = torch.randn(5, 8, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
        >>> queries, keys = torch.tensor([0, 2, 5]), torch.tensor([0, 6, 9])  # 2 queries of 6 keys, 3 of 3
        >>> stof.varlen_attention(q, k, v, queries, keys, causal=True).shape
        torch.Size([5, 8, 64])
    """
    if torch.compiler.is_dynamo_compiling():
        break_graph("stof.varlen_attention reads lengths on the host; in compiled code use masks.documents(ids)")
        return torch.compiler.disable(varlen_attention)(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size,
            softcap=softcap, scale=scale, dropout_p=dropout_p, mask=mask, seqused_k=seqused_k, return_lse=return_lse,
        )  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.ndim != 3:
            got = "a nested tensor" if tensor.is_nested else str(list(tensor.shape))
            raise ShapeError(f"{name} is [tokens, heads, head_dim], sequences one after the other, got {got}")
    documents = mask_of_sequences(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size,
        mask=mask, seqused_k=seqused_k,
    )  # fmt: skip
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attention(
        q, k, v, documents, scale=scale, softcap=None if softcap == 0 else softcap,
        dropout_p=dropout_p, return_lse=True,
    )  # fmt: skip
    return (out[0].transpose(0, 1), lse[0]) if return_lse else out[0].transpose(0, 1)


def mask_of_sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, *, causal: bool, window_size: object, mask: Any = None,
    seqused_k: Tensor | None = None,
) -> Mask:  # fmt: skip
    """The mask of a call of `varlen_attention`, whose arguments and errors these are."""
    q_lengths = _lengths("cu_seqlens_q", cu_seqlens_q, "q", q.shape[0], max_seqlen_q)
    kv_lengths = _lengths("cu_seqlens_k", cu_seqlens_k, "k", k.shape[0], max_seqlen_k)
    if len(q_lengths) != len(kv_lengths):
        raise ShapeError(
            f"cu_seqlens_q and cu_seqlens_k tell the same number of sequences, got {len(q_lengths)} and "
            f"{len(kv_lengths)}; a sequence without queries or keys repeats the number before it"
        )
    used = kv_lengths if seqused_k is None else _used(seqused_k, kv_lengths)
    within = _within(causal, window_size, mask)
    return aligned_documents(q_lengths, kv_lengths, used, within) if q.shape[0] and k.shape[0] else full()


def _within(is_causal: bool, window_size: object, mask: Any) -> Mask:
    """The mask of positions within a sequence."""
    sides = list(window_size) if isinstance(window_size, tuple | list) else []
    if len(sides) != 2 or any(type(side) is not int or not -1 <= side <= _UNLIMITED for side in sides):
        raise ArgumentError(
            f"window_size is (left, right), ints of at least 0, or -1 for no limit, got {shown(window_size)}"
        )
    left, right = sides[0], 0 if is_causal else sides[1]
    if (left, right) == (-1, -1):
        return full() if mask is None else as_mask(mask)
    window = sliding_window(*(_UNLIMITED if side == -1 else side for side in (left, right)))
    window = causal() if (left, right) == (-1, 0) else window
    return window if mask is None else window & as_mask(mask)


def _lengths(name: str, cu_seqlens: object, of: str, total: int, longest: int | None) -> tuple[int, ...]:
    """The length of each sequence."""
    ends = _numbers(name, cu_seqlens)
    lengths = tuple(end - begin for begin, end in pairwise(ends))
    if not lengths or ends[0] != 0 or min(lengths) < 0:
        raise ArgumentError(
            f"{name} is where each sequence begins and the last one ends, [B + 1] numbers from 0 that never decrease, "
            f"got {shown(ends)}; of lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) makes them"
        )
    if ends[-1] != total:
        raise ShapeError(f"{name} ends at the number of tokens in {of}, {total}, got {ends[-1]}")
    if longest is not None:
        try:
            stated = operator.index(longest)
        except TypeError:
            stated = -1
        if stated < max(lengths):
            option = name.replace("cu_seqlens", "max_seqlen")
            raise ArgumentError(
                f"{option} is an int of at least the longest sequence in {of}, {max(lengths)}, or None, "
                f"got {shown(longest)}"
            )
    return lengths


def _used(seqused_k: object, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """How many keys of each sequence count."""
    used = tuple(_numbers("seqused_k", seqused_k))
    if len(used) != len(lengths):
        raise ShapeError(f"seqused_k has one number for each of the {len(lengths)} sequences, got {len(used)}")
    for number, (count, length) in enumerate(zip(used, lengths, strict=True)):
        if not 0 <= count <= length:
            raise ArgumentError(
                f"seqused_k is at least 0 and at most the sequence's keys in cu_seqlens_k, {length} of sequence "
                f"{number}, got {count}"
            )
    return used


def _numbers(name: str, values: object) -> list[int]:
    """The numbers of an integer tensor `[n]`, read on the host."""
    if not isinstance(values, Tensor):
        raise DtypeError(f"{name} is an integer tensor, got {type(values).__name__}")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DtypeError(f"{name} is an integer tensor, got {values.dtype}; cast it with .int()")
    layout = foreign_layout(values)
    if values.ndim != 1 or layout is not None:
        raise ShapeError(f"{name} has one dimension, got {layout or list(values.shape)}")
    if values.is_meta:
        raise DeviceError(f"{name} is read on the host, got a meta tensor, which has no values")
    if not has_values(values):
        raise UnsupportedError(
            f"stof.varlen_attention reads {name} on the host, and it has no values while a program is exported; give "
            "stof.attention a mask",
            {},
        )
    numbers: list[int] = values.tolist()
    return numbers
