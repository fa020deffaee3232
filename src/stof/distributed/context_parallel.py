"""The public operator: attention of queries whose keys are on other ranks too."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, overload

import torch
from torch import Tensor

from stof.attention import attention as local_attention
from stof.dispatch import under_autocast
from stof.distributed.agreement import agree
from stof.distributed.exchange import GatherKeys, HeadsToTokens, TokensToHeads
from stof.distributed.shards import Shards
from stof.distributed.ways import WAYS, Sizes, check_way, key_head_repeats
from stof.dtensors import is_dtensor
from stof.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StofError, UnsupportedError, shown
from stof.plans.plan import Plan
from stof.runtime.private import break_graph
from stof.validation import check_bias, check_scale, check_scales, check_sinks, check_softcap, check_tensors


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    *,
    way: str | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    *,
    way: str | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    *,
    way: str | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of all ranks under the mask of `shards`; differentiable.

    Every rank of the mesh calls it with its tokens, and differentiates the same calls in the same order: backward
    passes exchange too. With one rank it is `stof.attention`. Two equal calls give equal bits, in the backward pass
    too. Under `torch.compile` the graph breaks here.

    Args:
        q: queries of this rank's tokens, `[B, H, S_local, D]`; float16, bfloat16, float32 or float64.
        k: keys of the same tokens, `[B, Hkv, S_local, D]`; `H` is a multiple of `Hkv`.
        v: their values `[B, Hkv, S_local, Dv]`.
        shards: made by `stof.distributed.shard`.
        way: "heads": an all-to-all gives each rank all tokens of some heads, another one brings the output back
            (Ulysses, arXiv 2309.14509); `H` is a multiple of the number of ranks. "keys": queries stay, keys and values
            of all ranks are gathered. Default: the one that `shards.explain(q, k, v)` estimates to be faster.
        scale, softcap: as for `stof.attention`.
        bias: rows of this rank's tokens, columns of all: broadcastable to `[B, H, S_local, S]`. It takes way "keys".
            Where it is the same on all ranks, its gradient is this rank's share.
        sinks: `[H]`, the same on every rank. Its gradient is this rank's share: the sum over ranks is the gradient.
        dropout_p: 0; others are refused.
        return_lse: also return the log-sum-exp of the kept scores.

    Returns:
        `out [B, H, S_local, Dv]` of this rank's tokens, or `(out, lse)` with lse `[B, H, S_local]`; dtypes and rows
        without keys as of `stof.attention`.

    Raises:
        ShapeError, HeadCountError, DtypeError, DeviceError, ArgumentError: before anything is exchanged; heads that do
            not divide, or tensors of another number of tokens than the shard's, among them.
        UnsupportedError: dropout.
        RankMismatchError: at the first call with these shards, if another rank refuses it, or calls with other sizes or
            options. Later calls are checked by each rank alone, because an exchange would wait for the device: the
            other ranks of one that refuses wait until the process group's timeout.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shards = stof.distributed.shard(masks.causal(), 100, init_device_mesh("cpu", (1,)))
        >>> q, k, v = (shards.split(torch.randn(1, 4, 100, 16), dim=2) for _ in range(3))
        >>> stof.distributed.attention(q, k, v, shards).shape
        torch.Size([1, 4, 100, 16])
        >>> dist.destroy_process_group()
    """
    if torch.compiler.is_dynamo_compiling():
        break_graph("stof.distributed.attention exchanges tensors between ranks outside of compiled graphs")
        return torch.compiler.disable(attention)(
            q, k, v, shards, way=way, scale=scale, bias=bias, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
            return_lse=return_lse,
        )  # fmt: skip
    if not isinstance(shards, Shards):
        raise ArgumentError(f"shards is made by stof.distributed.shard, got {type(shards).__name__}")
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if shards.ranks == 1 and way in (None, *WAYS) and not dropout_p and _has_tokens(q, k, shards.length):
        out, lse = local_attention(q, k, v, shards.mask, bias=bias, sinks=sinks, **options, return_lse=True)
        return (out, lse) if return_lse else out
    q, k, v = under_autocast(q, k, v)
    error: StofError | None = None
    facts: dict[str, object] = {}
    try:
        if any(map(is_dtensor, (q, k, v, bias, sinks))):
            raise DtypeError("stof.distributed.attention takes tensors of this rank, got DTensors; give x.to_local()")
        _check(q, k, v, shards, way, scale, softcap, sinks, dropout_p)
        bias = check_bias(bias, q, shards.length)
        if bias is not None and way == "heads":
            raise ArgumentError('a bias has the rows of this rank, which way="heads" does not; leave way out')
        sizes = Sizes.of(q, k, v)
        taken = way or ("keys" if bias is not None else shards.way_for(sizes))
        check_way(taken, sizes.heads, shards.ranks)
        plan = shards.plan(taken, sizes, q.device, sorted_keys=bias is not None)
        if not shards.agreed:
            facts = {"dtype": q.dtype, **asdict(sizes), "way": taken, "scale": scale, "softcap": softcap}
            facts |= {"whether there is a bias": bias is not None, "whether there are sinks": sinks is not None}
            facts |= shards.facts(sizes)
    except StofError as refused:
        error = refused
    if not shards.agreed:
        agree(shards.exchange.group, facts, error)
        shards.agreed = True
    if error is not None:
        raise error
    if taken == "heads":
        out, lse = _by_heads(q, k, v, shards, plan, sinks, options, return_lse)
    else:
        k, v = GatherKeys.apply(shards.exchange, k, v)
        if bias is not None:  # its columns are in the order of the sequence
            k, v = shards.in_sequence_order(k, 2), shards.in_sequence_order(v, 2)
        out, lse = local_attention(q, k, v, plan, bias=bias, sinks=sinks, **options, return_lse=True)
    return (out, lse) if return_lse else out


def _has_tokens(q: Tensor, k: Tensor, tokens: int) -> bool:
    return all(isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] == tokens for x in (q, k))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    way: str | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
) -> None:
    if dropout_p:
        raise UnsupportedError(
            "stof.distributed.attention has no dropout: which weights it drops would follow from positions in the "
            "shard, so ranks would drop alike and otherwise than one process; leave dropout_p out",
            {},
        )
    check_tensors(q, k, v)
    check_scales(None, q, k)
    check_scale(scale, q.shape[-1])
    check_softcap(softcap)
    check_sinks(sinks, q)
    if way is not None and way not in WAYS:
        raise ArgumentError(f"way is one of {', '.join(map(repr, WAYS))} or None, got {shown(way)}")
    if q.device != shards.device:
        raise DeviceError(f"the mesh of these shards is on {shards.device}, q, k and v are on {q.device}")
    local = shards.exchange.local
    if not _has_tokens(q, k, local):
        raise ShapeError(
            f"rank {shards.rank} holds {local} of {shards.length} tokens, q has {q.shape[2]} and k {k.shape[2]}; split "
            "the sequence by the shards of this call"
        )


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    plan: Plan,
    sinks: Tensor | None,
    options: dict[str, Any],
    needs_lse: bool,
) -> tuple[Tensor, Tensor]:
    """All tokens of this rank's heads under the mask of these heads; `lse` is exchanged if it is needed."""
    repeats = key_head_repeats(Sizes.of(q, k, v), shards.ranks)
    if repeats > 1:
        # By expansion, whose gradient is a sum in a fixed order; that of `repeat_interleave` is not on a GPU.
        k, v = (x[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for x in (k, v))
    q, k, v = TokensToHeads.apply(shards.exchange, q, k, v)
    if sinks is not None:
        sinks = sinks.tensor_split(shards.ranks)[shards.rank]
    out, lse = local_attention(q, k, v, plan, sinks=sinks, **options, return_lse=True)
    if not needs_lse:
        (out,) = HeadsToTokens.apply(shards.exchange, out)
        return out, lse
    # By one function, so that every rank exchanges both gradients, though it may differentiate one result alone.
    out, column = HeadsToTokens.apply(shards.exchange, out, lse[..., None])
    return out, column[..., 0]
