"""Random named masks: the text that builds each, and which scores it keeps by its definition in docs/how-to/masks.md.

Nothing of `stof.masks` is used here: what a mask keeps is written a second time, in NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Kept = NDArray[np.bool_]
# `(b, h, q [n, 1], kv [1, m]) -> [n | 1, m | 1]`
Seen = Callable[[int, int, Array, Array], Kept]


@dataclass
class Sizes:
    """What a mask is drawn for.

    Attributes:
        batch, heads: of the call; heads is 1 within `per_head`.
        q_len: query positions there are: `q_len` of the call, and the query offset.
        kv_len: keys.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int


@dataclass
class Term:
    """A mask.

    Attributes:
        text: Python expression of the mask; of a function or tensor where `raw`.
        seen: what it keeps.
        setup: lines that define what the text names.
        raw: not a mask yet: a function, a bool tensor or a `BlockMask`, which the text of a larger mask wraps.
        named: text that `masks.parse` reads.
        by_batch, by_heads: whether it may differ between batch entries and heads.
        dynamic: lines that define `again`, a mask of the same kind and shapes for `DynamicPlan.update`, and what that
            keeps; None for a mask that a dynamic plan does not take.
        writable: name of a bool tensor which is all there is to the mask.
        grows: also a mask of fewer queries and keys.
    """

    text: str
    seen: Seen
    setup: list[str] = field(default_factory=list)
    raw: str = ""
    named: bool = False
    by_batch: bool = False
    by_heads: bool = False
    dynamic: tuple[list[str], Seen] | None = None
    writable: str = ""
    grows: bool = False

    def mask(self) -> str:
        """Text of a mask, also where it is raw."""
        return f"masks.from_{self.raw}({self.text})" if self.raw else self.text


def tensor_text(values: object, dtype: str) -> str:
    return f"torch.tensor({values!r}, dtype=torch.{dtype}, device=device)"


def dense(term: Term, batch: int, heads: int, q_len: int, kv_len: int) -> Kept:
    """Bool `[batch or 1, heads or 1, q_len, kv_len]`."""
    q, kv = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    out = np.empty((batch if term.by_batch else 1, heads if term.by_heads else 1, q_len, kv_len), dtype=bool)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            out[b, h] = term.seen(b, h, q, kv)
    return out


def one_of(values: list[int], at: int) -> int:
    """The value of a batch entry, where there may be one for all."""
    return values[at] if len(values) > 1 else values[0]


def per_batch(draw: random.Random, sizes: Sizes, low: int, high: int) -> list[int]:
    count = draw.choice([1, sizes.batch])
    return [draw.choice([low, high, draw.randint(low, high), draw.randint(low, high)]) for _ in range(count)]


def small(draw: random.Random, sizes: Sizes) -> int:
    """A width: mostly below the lengths, at times 0 or beyond them."""
    return draw.choice([0, 1, draw.randint(0, 8), draw.randint(0, sizes.kv_len + 3)])


def full(draw: random.Random, sizes: Sizes) -> Term:
    return Term("masks.full()", lambda b, h, q, kv: np.ones((1, 1), dtype=bool), named=True, grows=True)


def causal(draw: random.Random, sizes: Sizes) -> Term:
    return Term("masks.causal()", lambda b, h, q, kv: kv <= q, named=True, grows=True)


def sliding_window(draw: random.Random, sizes: Sizes) -> Term:
    left, right = small(draw, sizes), draw.choice([0, small(draw, sizes)])
    text = f"masks.sliding_window({left}, {right})"
    return Term(text, lambda b, h, q, kv: (q - left <= kv) & (kv <= q + right), named=True, grows=True)


def dilated_window(draw: random.Random, sizes: Sizes) -> Term:
    left, right, d = small(draw, sizes), draw.choice([0, small(draw, sizes)]), draw.choice([1, 2, 3, 7, 16])
    return Term(
        f"masks.dilated_window({left}, {right}, dilation={d})",
        lambda b, h, q, kv: (q - left <= kv) & (kv <= q + right) & ((q - kv) % d == 0),
        named=True,
        grows=True,
    )


def strided(draw: random.Random, sizes: Sizes) -> Term:
    local, stride = small(draw, sizes), draw.choice([1, 2, 5, 16, 64, draw.randint(1, 40)])
    width, backwards = draw.randint(0, min(stride, 5)), draw.random() < 0.5

    def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
        summary = kv % stride >= stride - width
        if backwards:
            return (kv <= q) & ((q - kv < local) | summary)
        return (np.abs(q - kv) < local) | summary

    text = f"masks.strided({local}, {stride}, {width}, causal={backwards})"
    return Term(text, seen, named=True, grows=True)


def _global(draw: random.Random, sizes: Sizes) -> tuple[str, Callable[[Array], Kept]]:
    if draw.random() < 0.5:
        n = small(draw, sizes)
        return str(n), lambda x: x < n
    chosen = [draw.randint(0, sizes.kv_len + 1) for _ in range(draw.randint(1, 4))]
    return str(chosen), lambda x: np.isin(x, chosen)


def global_tokens(draw: random.Random, sizes: Sizes) -> Term:
    text, is_global = _global(draw, sizes)
    return Term(
        f"masks.global_tokens({text})", lambda b, h, q, kv: is_global(q) | is_global(kv), named=True, grows=True
    )


def sink_tokens(draw: random.Random, sizes: Sizes) -> Term:
    n = small(draw, sizes)
    return Term(f"masks.sink_tokens({n})", lambda b, h, q, kv: (kv < n) & (kv <= q), named=True, grows=True)


def _hash(x: int) -> int:
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        x = ((x ^ (x >> 16)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 15)


def drawn_blocks(row: int, count: int, blocks: int, seed: int) -> set[int]:
    """The key blocks of a row block, by Floyd's sampling with the hash that makes them the same on every device."""
    chosen: set[int] = set()
    for turn, top in enumerate(range(count - min(blocks, count), count)):
        key = row * 1_000_003 + turn * 7_919 + seed * 104_729
        number = _hash((_hash(key & 0x7FFFFFFF)) + 0x9E3779B) % (top + 1)
        chosen.add(top if number in chosen else number)
    return chosen


def _random_blocks(draw: random.Random, sizes: Sizes) -> tuple[str, Callable[[Array, Array], Kept]]:
    n, size, seed = draw.randint(1, 4), draw.choice([1, 3, 16, 64]), draw.randrange(2**31)
    count = -(-sizes.kv_len // size)

    def seen(q: Array, kv: Array) -> Kept:
        rows = [drawn_blocks(int(row), count, n, seed) for row in np.unique(q // size)]
        table = np.zeros((len(rows), count), dtype=bool)
        for row, chosen in zip(table, rows, strict=True):
            row[list(chosen)] = True
        number = np.unique(q // size, return_inverse=True)[1].reshape(q.shape)
        return table[number, kv // size]

    return f"blocks={n}, block_size={size}, seed={seed}", seen


def random_blocks(draw: random.Random, sizes: Sizes) -> Term:
    text, seen = _random_blocks(draw, sizes)
    return Term(f"masks.random_blocks({text})", lambda b, h, q, kv: seen(q, kv), named=True)


def longformer(draw: random.Random, sizes: Sizes) -> Term:
    window, (text, is_global) = small(draw, sizes), _global(draw, sizes)
    return Term(
        f"masks.longformer({window}, {text})",
        lambda b, h, q, kv: (np.abs(q - kv) <= window) | is_global(q) | is_global(kv),
        named=True,
        grows=True,
    )


def bigbird(draw: random.Random, sizes: Sizes) -> Term:
    window, (text, is_global), (blocks, in_block) = (
        small(draw, sizes),
        _global(draw, sizes),
        _random_blocks(draw, sizes),
    )
    return Term(
        f"masks.bigbird({window}, {text}, {blocks})",
        lambda b, h, q, kv: (np.abs(q - kv) <= window) | is_global(q) | is_global(kv) | in_block(q, kv),
        named=True,
    )


def prefix_lm(draw: random.Random, sizes: Sizes) -> Term:
    prefix = per_batch(draw, sizes, 0, sizes.kv_len + 2)
    return Term(
        f"masks.prefix_lm({prefix})",
        lambda b, h, q, kv: (kv < one_of(prefix, b)) | (kv <= q),
        named=True,
        by_batch=len(prefix) > 1,
        grows=True,
    )


def padding(draw: random.Random, sizes: Sizes) -> Term:
    lengths = per_batch(draw, sizes, 0, sizes.kv_len)
    return Term(
        f"masks.padding({lengths})",
        lambda b, h, q, kv: kv < one_of(lengths, b),
        named=True,
        by_batch=len(lengths) > 1,
    )


def documents(draw: random.Random, sizes: Sizes) -> Term:
    """Ids of documents whose parts may lie apart, or cumulative lengths; queries past the last key see nothing."""
    count, length = draw.choice([1, sizes.batch]), sizes.kv_len
    rows, ends = [], []
    cumulative = draw.random() < 0.5
    for _ in range(count):
        cuts = sorted([0, length, *(draw.randint(0, length) for _ in range(draw.randint(0, 4)))])
        ends.append(cuts)
        row: list[int] = []
        for number, (start, stop) in enumerate(pairwise(cuts)):
            row += [number if cumulative else draw.randint(-1, 3)] * (stop - start)
        rows.append(row)
    tables = np.array(rows)

    def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
        ids = tables[b if count > 1 else 0]
        own = np.where(q < length, ids[np.minimum(q, length - 1)], -1)
        return (own == ids[kv]) & (own >= 0)

    shown = f"cu_seqlens={ends if count > 1 else ends[0]}" if cumulative else f"{rows if count > 1 else rows[0]}"
    return Term(f"masks.documents({shown})", seen, named=True, by_batch=count > 1)


def neighborhood_2d(draw: random.Random, sizes: Sizes) -> Term:
    tokens = sizes.kv_len
    height = draw.choice([n for n in range(1, tokens + 1) if tokens % n == 0])
    width, kernel = tokens // height, (draw.choice([1, 3, 5]), draw.choice([1, 3, 7]))

    def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
        rows, columns = np.abs(q // width - kv // width), np.abs(q % width - kv % width)
        return (rows <= kernel[0] // 2) & (columns <= kernel[1] // 2)

    return Term(f"masks.neighborhood_2d({height}, {width}, {kernel})", seen, named=True)


NAMED: list[Callable[[random.Random, Sizes], Term]] = [
    full,
    causal,
    causal,
    sliding_window,
    sliding_window,
    dilated_window,
    strided,
    global_tokens,
    sink_tokens,
    random_blocks,
    longformer,
    bigbird,
    prefix_lm,
    padding,
    documents,
    neighborhood_2d,
]


def named_term(draw: random.Random, sizes: Sizes) -> Term:
    """One named mask that fits the sizes."""
    fits = sizes.q_len <= sizes.kv_len
    made = draw.choice([one for one in NAMED if fits or one not in (documents, neighborhood_2d)])
    return made(draw, sizes)
