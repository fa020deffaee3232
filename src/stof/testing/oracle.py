"""Attention from its definition, one head at a time: in float64 as the oracle, in a lower dtype as the yardstick."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.kernels.dropout import Dropout, dense_kept_weights


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """What `stof.attention` must compute, in float64.

    Args:
        q: `[B, H, Sq, D]`, any floating dtype; the same for k `[B, Hkv, Skv, D]` and v `[B, Hkv, Skv, Dv]`.
        keep: bool, broadcastable to `[B, H, Sq, Skv]`, true where the key is seen; None sees all.
        scale, bias, softcap, sinks: as for `stof.attention`.
        dropout: its probability and what the call draws, see `stof.kernels.dropout`; None for none.

    Returns:
        `(out [B, H, Sq, Dv], lse [B, H, Sq])`, both float64. Rows that keep nothing give 0 and -inf. The lse does not
        count the sinks, nor dropout.
    """
    return plain_attention(
        q, k, v, keep, scale=scale, bias=bias, softcap=softcap, sinks=sinks, dropout=dropout, dtype=torch.float64
    )


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with every step rounded to `dtype`, default q's: its error is what an implementation is measured by."""
    dtype = q.dtype if dtype is None else dtype
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    every = (batch, heads, q_len, kv_len)
    keep = torch.ones(every, dtype=torch.bool, device=q.device) if keep is None else keep.expand(every)
    bias = torch.zeros(1, dtype=dtype, device=q.device).expand(every) if bias is None else bias.to(dtype).expand(every)
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=dtype, device=q.device)
    stay = None if dropout is None else dense_kept_weights(dropout, *every).to(q.device)
    for b in range(batch):
        for h in range(heads):
            key_head = h * kv_heads // heads
            scores = q[b, h].to(dtype) @ k[b, key_head].to(dtype).T
            scores = scores * (head_dim**-0.5 if scale is None else scale)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores + bias[b, h]
            scores = torch.where(keep[b, h], scores, -torch.inf)
            sink = torch.tensor(-torch.inf, dtype=dtype, device=q.device) if sinks is None else sinks[h].to(dtype)
            top = scores.amax(1)
            seen = top > -torch.inf
            # Any finite reference point gives the same softmax; rows that keep nothing are left at 0 and -inf.
            top = torch.where(seen, top, 0.0)
            weights = torch.exp(scores - top[:, None])
            total = weights.sum(1)
            if dropout is not None and stay is not None:
                weights = torch.where(stay[b, h], weights, 0.0) / (1 - dropout.p)
            summed = weights @ v[b, key_head].to(dtype)
            denominator = (total + torch.exp(sink - top))[:, None]
            out[b, h] = torch.where(seen[:, None], summed / torch.where(seen[:, None], denominator, 1.0), 0.0)
            lse[b, h] = torch.where(seen, torch.log(total) + top, -torch.inf)
    return out, lse


@dataclass(frozen=True)
class ErrorBudget:
    """How far a result may be from the oracle.

    Attributes:
        plain: largest absolute error of `plain_attention` in the same dtype.
        allowed: what an implementation may have: `factor * plain`, plus a few roundings of the largest value.
    """

    plain: float
    allowed: float


def error_budget(
    plain: Tensor, expected: Tensor, dtype: torch.dtype, *, factor: float = 2.0, largest: float = 1.0
) -> ErrorBudget:
    """Budget of an implementation in `dtype`, from the plain result and the float64 one.

    Roundings of the largest value are granted on top, because few values can be exact by luck: one for 16-bit dtypes,
    which round once at the end, eight for the others, which accumulate in the dtype itself. Float64 has no wider dtype
    to be measured in: give it float32's plain result, whose error is scaled by the ratio of the roundings. Which values
    are exact by luck differs then, so give `largest` as well: the largest value whose roundings reach the result.
    """
    finite = torch.isfinite(expected)
    if not bool(finite.any()):
        return ErrorBudget(0.0, 0.0)
    eps = torch.finfo(dtype).eps
    # An infinity in the plain result (16-bit overflow) grants nothing.
    errors = (plain.double() - expected)[finite & torch.isfinite(plain)].abs()
    error = float(errors.max()) * eps / torch.finfo(plain.dtype).eps if errors.numel() else 0.0
    roundings = 1 if eps > torch.finfo(torch.float32).eps else 8
    rounding = roundings * eps * max(float(expected[finite].abs().max()), largest)
    return ErrorBudget(error, factor * error + rounding)


def assert_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    factor: float = 2.0,
) -> float:
    """Assert that `out` (and `lse`, unless None) are attention of these inputs, within the error budget.

    Shapes and dtypes are checked, rows that keep nothing must be exactly 0 and -inf, and nothing may be NaN. Python's
    option -O does not turn this off.

    Returns:
        The largest error as a share of its budget, up to 1.

    Raises:
        AssertionError: with the error, the budget and the place of the worst value.
    """
    options = {"scale": scale, "bias": bias, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    expected, expected_lse = oracle_attention(q, k, v, keep, **options)  # type: ignore[arg-type]
    yardstick = torch.float32 if q.dtype == torch.float64 else q.dtype
    narrow = (q.to(yardstick), k.to(yardstick), v.to(yardstick))
    plain, plain_lse = plain_attention(*narrow, keep, **options)  # type: ignore[arg-type]
    empty = expected_lse == -torch.inf
    _require(out.dtype == q.dtype, f"out is {out.dtype}, expected {q.dtype}")
    _require(out.shape == expected.shape, f"out is {list(out.shape)}, expected {list(expected.shape)}")
    _require(bool((out[empty] == 0).all()), "rows that keep nothing are not exactly 0")
    size = score_size(q, k, keep, scale, bias) if q.dtype == torch.float64 else 0.0
    # Scores that are off by d move an average of values up to |v| by d |v| at most; dropout scales what is left of it.
    factors = 1.0 if dropout is None else dropout.scale
    largest = max(size * float(v.abs().max()) * factors, 1.0) if size else 1.0
    budget = error_budget(plain, expected, q.dtype, factor=factor, largest=largest)
    share = _share_of_budget("out", out, expected, budget)
    if lse is None:
        return share
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    _require(lse.dtype == wanted, f"lse is {lse.dtype}, expected {wanted}")
    _require(lse.shape == expected_lse.shape, f"lse is {list(lse.shape)}, expected {list(expected_lse.shape)}")
    _require(torch.equal(lse == -torch.inf, empty), "lse is -inf elsewhere than in the rows that keep nothing")
    budget = error_budget(plain_lse, expected_lse, q.dtype, factor=factor, largest=max(size, 1.0))
    return max(share, _share_of_budget("lse", lse, expected_lse, budget))


def score_size(q: Tensor, k: Tensor, keep: Tensor | None, scale: float | None, bias: Tensor | None) -> float:
    """The largest value that can appear on the way to a score that is kept: `|scale| sum_d |q_d k_d| + |bias|`.

    Sums whose terms cancel, and a softcap, leave small scores with roundings of large partial sums. No order of adding
    has larger ones than this. Roundings of D terms add up like random ones, to about `sqrt(D) / 2` units in the last
    place: up to D = 256 eight of this value cover them even if every partial sum were as large.
    """
    heads, head_dim = q.shape[1], q.shape[3]
    k = k.double().abs().repeat_interleave(heads // k.shape[1], 1)
    sizes = q.double().abs() @ k.mT * abs(head_dim**-0.5 if scale is None else scale)
    if bias is not None:
        sizes = sizes + bias.double().abs()
    seen = torch.isfinite(sizes) if keep is None else torch.isfinite(sizes) & keep
    return float(torch.where(seen, sizes, 0.0).max())


def _share_of_budget(name: str, actual: Tensor, expected: Tensor, budget: ErrorBudget) -> float:
    error = torch.where(torch.isfinite(expected), actual.double() - expected, 0.0).abs()
    worst = int(error.nan_to_num(torch.inf).argmax())
    place = tuple(int(n) for n in torch.unravel_index(torch.tensor(worst), error.shape))
    largest = float(error.flatten()[worst])
    # Not `>` the other way round: a NaN must fail.
    _require(
        largest <= budget.allowed,
        f"{name} is off by {largest:.3e} at {place} (got {float(actual[place]):.6g}, expected "
        f"{float(expected[place]):.6g}); allowed {budget.allowed:.3e}, plain PyTorch has {budget.plain:.3e}",
    )
    return largest / budget.allowed if budget.allowed else 0.0


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
