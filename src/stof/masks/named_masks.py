"""Named masks. Positions are 0-based; `i` is the query position, `j` the key position.

Every function returns a `Mask` value; see `docs/how-to/masks.md` for pictures and recipes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from stof.errors import MaskError, shown
from stof.masks import rules
from stof.masks.aligned import aligned_documents
from stof.masks.base import foreign_layout
from stof.masks.compose import Mask
from stof.masks.per_head import PerHead
from stof.masks.traced import documents_of_tensor
from stof.runtime.private import break_graph, is_traced

Ints = Sequence[int] | Tensor
_LEAST_ID = -(2**31)


def _integer(what: str, value: object, low: int, high: int = 2**31 - 1) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise MaskError(f"{what} is an int, got {type(value).__name__} {shown(value)}")
    if isinstance(value, Tensor):
        value = _tensor(what, value, 0).item()
    try:
        number = operator.index(value)
    except TypeError:
        raise MaskError(f"{what} is an int, got {type(value).__name__} {shown(value)}") from None
    if not low <= number <= high:
        raise MaskError(f"{what} is between {low} and {high}, got {shown(number)}")
    return number


def _tensor(what: str, values: Tensor, *ndim: int) -> Tensor:
    """An integer tensor of one of these numbers of dimensions, checked."""
    layout = foreign_layout(values) or ("meta" if values.is_meta else None)
    if layout is not None:
        raise MaskError(
            f"{what} is read on the host, got a {layout} tensor; give a list, or a strided tensor with values"
        )
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool or values.ndim not in ndim:
        shape = " or ".join(f"{n}-D" for n in ndim)
        raise MaskError(f"{what} is a {shape} integer tensor, got {values.dtype} of shape {list(values.shape)}")
    return values


def _is_list(values: object) -> bool:
    """Whether this is a sequence of values; text and bytes are not."""
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview)


def _integers(what: str, values: object, low: int) -> tuple[int, ...]:
    if isinstance(values, Tensor):
        values = _tensor(what, values, 0, 1).tolist()
    if not _is_list(values):
        values = (values,)
    assert isinstance(values, Sequence)
    if not values:
        raise MaskError(f"{what} is empty; give one value per sequence")
    if set(map(type, values)) == {int} and low <= min(values) and max(values) < 2**31:
        return tuple(values)
    return tuple(_integer(what, value, low) for value in values)


def full() -> Mask:
    """Every query sees every key."""
    return rules.Full()


def causal() -> Mask:
    """Keys at or before the query: `j <= i`.

    For a KV cache add `.with_query_offset(cached)`; `.with_query_offset(kv_len - q_len)` aligns it at the lower right
    corner, also with more queries than keys.
    """
    return rules.Causal()


def sliding_window(left: int, right: int = 0) -> Mask:
    """`i - left <= j <= i + right`, the convention of FlashAttention's `window_size=(left, right)`.

    A causal window of 512 keys counting the query itself is `sliding_window(511)`.
    """
    return rules.SlidingWindow(_integer("left", left, 0), _integer("right", right, 0))


def dilated_window(left: int, right: int = 0, *, dilation: int) -> Mask:
    """Every `dilation`-th key of a window: `i - left <= j <= i + right` and `(i - j) % dilation == 0`.

    Source: Longformer (arXiv 2004.05150), section 3.1, dilated sliding window.
    """
    return rules.DilatedWindow(
        _integer("left", left, 0), _integer("right", right, 0), _integer("dilation", dilation, 1)
    )


def strided(local: int, stride: int, width: int = 1, *, causal: bool = True) -> Mask:
    """The last `local` keys, and the last `width` keys of every `stride` as summaries.

    Causal: `j <= i and (i - j < local or j % stride >= stride - width)`; otherwise `|i - j| < local` or a
    summary key. Source: Sparse Transformers (arXiv 1904.10509), section 4.3, "fixed" attention.
    """
    if not isinstance(causal, bool):
        raise MaskError(f"causal is True or False, got {type(causal).__name__} {shown(causal)}")
    stride = _integer("stride", stride, 1)
    return rules.Strided(_integer("local", local, 0), stride, _integer("width", width, 0, stride), causal)


def global_tokens(tokens: int | Ints) -> Mask:
    """Global tokens see everything and are seen by everyone: the first `tokens`, or the positions listed.

    Positions before 0, which `placed` may make, are none of them.
    """
    if hasattr(tokens, "__index__") and (not isinstance(tokens, Tensor) or tokens.ndim == 0):
        return rules.GlobalTokens(_integer("tokens", tokens, 0))
    return rules.GlobalTokens(tuple(sorted(set(_integers("tokens", tokens, 0)))))


def sink_tokens(tokens: int) -> Mask:
    """The first `tokens` keys, seen by every later query: `j < tokens and j <= i`.

    Combine with a window as `sliding_window(511) | sink_tokens(16)`. Source: StreamingLLM
    (arXiv 2309.17453), section 3.2.
    """
    return rules.SinkTokens(_integer("tokens", tokens, 0))


def random_blocks(blocks: int, *, block_size: int = 64, seed: int = 0) -> Mask:
    """Each block of `block_size` queries sees `blocks` random, distinct key blocks of the same size.

    The choice depends on `seed`, the row block and the number of key blocks alone: it is the same on every
    device. Source: Big Bird (arXiv 2007.14062), section 2.
    """
    return rules.RandomBlocks(
        _integer("blocks", blocks, 1), _integer("block_size", block_size, 1), _integer("seed", seed, 0)
    )


def longformer(window: int, global_tokens: int | Ints = 0) -> Mask:
    """`|i - j| <= window`, plus global tokens. Source: Longformer (arXiv 2004.05150), section 3.1."""
    return sliding_window(window, window) | _global(global_tokens)


def bigbird(
    window: int, global_tokens: int | Ints = 0, *, blocks: int = 3, block_size: int = 64, seed: int = 0
) -> Mask:
    """Longformer's mask plus `random_blocks`. Source: Big Bird (arXiv 2007.14062), section 2."""
    return longformer(window, global_tokens) | random_blocks(blocks, block_size=block_size, seed=seed)


_global = global_tokens  # `longformer` has a parameter of that name


def prefix_lm(prefix: int | Ints) -> Mask:
    """The first `prefix` keys are seen by all, the rest causally; one int, or one per sequence."""
    return rules.PrefixLM(_integers("prefix", prefix, 0))


def padding(lengths: int | Ints) -> Mask:
    """Keys before each sequence's length: `j < lengths[b]`. A length of 0 leaves the sequence empty."""
    return rules.Padding(_integers("lengths", lengths, 0))


def documents(
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    kv_cu_seqlens: Ints | None = None,
    kv_used: Ints | None = None,
    within: Mask | None = None,
) -> Mask:
    """Packed documents: a query sees the keys of its own document only.

    Args:
        ids: document of each token, `[S]` or `[B, S]`; negative ids are padding and see nothing.
        cu_seqlens: cumulative lengths starting at 0, `[n + 1]` (or one such list per sequence), as in
            FlashAttention's variable-length interface. With `ids` too, these are one for each of the n parts, `[n]`:
            `documents([0, 1, -1], cu_seqlens=[0, 5, 9, 16])` has 7 tokens of padding.
        kv_cu_seqlens: `[n + 1]`, those of the keys where queries and keys of a document differ in number; `cu_seqlens`
            are the queries' then, and both are one list. No other mask is combined with such documents: see `within`.
        kv_used: `[n]`, with `kv_cu_seqlens`: only the first so many keys of each document are seen.
        within: with `kv_cu_seqlens`: a mask by distance (`causal`, windows, and what is made of them), of positions
            within each document, whose last query is as far along as its last used key, as in FlashAttention.

    In compiled code, a tensor of ids may be computed there, and changes without another compilation: attention reads
    it on the host. The mask is for `stof.attention` alone then, and combined by `&`.
    """
    if ids is None and cu_seqlens is None:
        raise MaskError("documents() takes ids, cu_seqlens or both, got neither")
    if isinstance(cu_seqlens, Tensor) and is_traced(cu_seqlens):
        break_graph(
            "documents(cu_seqlens=...) reads a tensor on the host; in compiled code give an id for each token: "
            "documents(torch.searchsorted(cu_seqlens, torch.arange(tokens), right=True))"
        )
    if kv_cu_seqlens is not None and cu_seqlens is not None and ids is None:
        return _aligned(cu_seqlens, kv_cu_seqlens, kv_used, full() if within is None else within)
    if any(value is not None for value in (kv_cu_seqlens, kv_used, within)):
        raise MaskError("kv_used and within go with kv_cu_seqlens, and kv_cu_seqlens with cu_seqlens, without ids")
    if cu_seqlens is None:
        if isinstance(ids, Tensor) and is_traced(ids):
            return documents_of_tensor(ids)  # type: ignore[return-value]  # masks that compiled code can hold
        if isinstance(ids, Tensor) and ids.numel():
            return _documents(_runs_of_tensor(ids))
        return _documents([_runs_of_row(_integers("ids", row, _LEAST_ID)) for row in _rows("ids", ids)])
    steps = _steps("cu_seqlens", cu_seqlens)
    if ids is None:
        return _documents([tuple(enumerate(filter(None, lengths))) for lengths in steps])
    parts = [_integers("ids", row, _LEAST_ID) for row in _rows("ids", ids)]
    if list(map(len, parts)) != list(map(len, steps)):
        raise MaskError(
            f"documents() takes one id for each of the parts that cu_seqlens tells, {list(map(len, steps))[:8]} of "
            f"them, got {list(map(len, parts))[:8]} ids"
        )
    return _documents([_merged(zip(*row, strict=True)) for row in zip(parts, steps, strict=True)])


def _steps(what: str, cu_seqlens: object) -> list[tuple[int, ...]]:
    """Lengths of the documents of each sequence, by their cumulative lengths."""
    ends = [_integers(what, row, 0) for row in _rows(what, cu_seqlens)]
    steps = [tuple(map(operator.sub, row[1:], row)) for row in ends]
    for row, lengths in zip(ends, steps, strict=True):
        if len(row) < 2 or row[0] != 0 or min(lengths) < 0:
            raise MaskError(f"{what} must start at 0 and not decrease, got {list(row)[:8]}")
    return steps


def _aligned(cu_seqlens: object, kv_cu_seqlens: object, kv_used: object, within: object) -> Mask:
    """Documents with lengths of queries and of keys."""
    queries, keys = _steps("cu_seqlens", cu_seqlens), _steps("kv_cu_seqlens", kv_cu_seqlens)
    if len(queries) != 1 or len(keys) != 1 or len(queries[0]) != len(keys[0]):
        got = [list(map(len, rows)) for rows in (queries, keys)]
        raise MaskError(f"cu_seqlens and kv_cu_seqlens tell the same number of documents in one list, got {got}")
    if not sum(queries[0]) or not sum(keys[0]):
        raise MaskError("documents() takes documents with some queries and some keys")
    if not isinstance(within, Mask):
        raise MaskError(f"within is a mask, got {type(within).__name__}")
    used = keys[0] if kv_used is None else _integers("kv_used", kv_used, 0)
    if len(used) != len(keys[0]) or any(map(operator.gt, used, keys[0])):
        raise MaskError(f"kv_used is at most each document's number of keys, {shown(keys[0])}, got {shown(used)}")
    return aligned_documents(queries[0], keys[0], used, within)


def _rows(what: str, values: object) -> list[object]:
    if isinstance(values, Tensor):
        values = _tensor(what, values, 1, 2).tolist()
    if not isinstance(values, Sequence) or not _is_list(values) or not values:
        raise MaskError(f"{what} is a non-empty list or integer tensor, got {type(values).__name__} {shown(values)}")
    if type(values[0]) is int:  # what the others are is checked with their values
        return [values]
    nested = [_is_list(row) or (isinstance(row, Tensor) and row.ndim > 0) for row in values]
    if any(nested) and not all(nested):
        raise MaskError(f"{what} is one list, or a list of lists; got a mixture")
    return list(values) if nested[0] else [values]


Runs = tuple[tuple[int, int], ...]


def _runs_of_row(ids: Iterable[int]) -> Runs:
    """Equal neighbours, as an id and their number."""
    return tuple((doc, len(list(group))) for doc, group in groupby(ids))


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs without empty ones, and one in the place of neighbours of one id."""
    present = groupby((run for run in runs if run[1]), operator.itemgetter(0))
    return tuple((doc, sum(length for _, length in group)) for doc, group in present)


def _runs_of_tensor(ids: Tensor) -> list[Runs]:
    """Equal neighbours in each row; only these become Python integers."""
    flat = _tensor("ids", ids, 1, 2).cpu().numpy().reshape(-1)
    begins = np.empty(flat.size, dtype=bool)
    np.not_equal(flat[1:], flat[:-1], out=begins[1:])
    begins[:: ids.shape[-1]] = True
    first = begins.nonzero()[0]
    docs = _integers("ids", flat[first].tolist(), _LEAST_ID)
    counts = np.diff(first, append=flat.size).tolist()
    if ids.ndim == 1:
        return [tuple(zip(docs, counts, strict=True))]
    bounds = np.searchsorted(first, np.arange(ids.shape[0] + 1) * ids.shape[1]).tolist()
    return [tuple(zip(docs[a:b], counts[a:b], strict=True)) for a, b in pairwise(bounds)]


def _documents(runs: Sequence[Runs]) -> Mask:
    lengths = {sum(map(operator.itemgetter(1), row)) for row in runs}
    if len(lengths) != 1 or 0 in lengths:
        raise MaskError(f"every sequence of a documents mask has the same, positive length, got {lengths}")
    return rules.Documents(tuple(runs))


def neighborhood_2d(height: int, width: int, kernel: int | tuple[int, int]) -> Mask:
    """Tokens of a `height x width` grid (row-major) see the `kernel` neighbourhood around them.

    `kernel` is odd, or an odd pair (rows, columns); the neighbourhood is cut at the borders.
    Source: Neighborhood Attention (arXiv 2204.07143), without its shift at the borders.
    """
    pair = tuple(kernel) if isinstance(kernel, Sequence) and _is_list(kernel) else (kernel, kernel)
    if len(pair) != 2:
        raise MaskError(f"kernel is an odd int or a pair of odd ints, got {shown(kernel)}")
    rows, columns = (_integer("kernel", size, 1) for size in pair)
    if rows % 2 == 0 or columns % 2 == 0:
        raise MaskError(f"kernel sizes are odd (they have a centre), got {shown(kernel)}")
    return rules.Neighborhood2D(_integer("height", height, 1), _integer("width", width, 1), (rows, columns))


def per_head(masks: Sequence[Mask]) -> Mask:
    """One mask per query head, in head order; equal masks share one layout."""
    parts = tuple(masks) if isinstance(masks, Iterable) else ()
    if not parts or not all(isinstance(mask, Mask) for mask in parts):
        raise MaskError(f"per_head() takes a non-empty list of masks, one per query head, got {shown(masks)}")
    return parts[0] if len(parts) == 1 else PerHead(parts)
