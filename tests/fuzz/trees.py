"""Random masks of any kind, and masks made of masks."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

from tests.fuzz.functions import block_mask_term, function_term
from tests.fuzz.tensor_terms import TENSORS
from tests.fuzz.terms import Array, Kept, Sizes, Term, named_term


class Masks:
    """Draws masks; names what it defines."""

    def __init__(self, draw: random.Random, heads: int, functions: bool = True) -> None:
        self.draw, self.heads, self.functions = draw, heads, functions
        self._numbers = count()

    def tree(self, sizes: Sizes, depth: int = 2, offset: bool = True) -> Term:
        kind = self.draw.random()
        if depth == 0 or kind < 0.45:
            return self.leaf(sizes)
        if kind < 0.55 and offset:
            return self.moved(sizes, depth)
        if kind < 0.6:
            return self.transposed(sizes, depth)
        if kind < 0.68:
            inner = self.tree(sizes, depth - 1)
            seen = inner.seen
            return replace(_derived(inner), text=f"~({inner.mask()})", seen=lambda *at: ~seen(*at))
        if kind < 0.75 and sizes.heads > 1:
            return self.per_head(sizes, depth)
        return self.pair(sizes, depth)

    def leaf(self, sizes: Sizes) -> Term:
        kind = self.draw.random()
        if kind < 0.5 or (kind >= 0.7 and not self.functions):
            return named_term(self.draw, sizes)
        name = f"m{next(self._numbers)}"
        if kind < 0.7:
            return self.draw.choice(TENSORS)(self.draw, sizes, name)
        # Single calls are slow.
        scores = sizes.q_len * sizes.kv_len * sizes.batch * sizes.heads
        if scores > (2_000 if self.draw.random() < 0.8 else 20_000):
            return named_term(self.draw, sizes)
        # A function within `per_head` may look at the head; a `BlockMask` there may not.
        if kind > 0.97:
            return block_mask_term(self.draw, sizes, name)
        return function_term(self.draw, replace(sizes, heads=self.heads), name)

    def moved(self, sizes: Sizes, depth: int) -> Term:
        offset = self.draw.choice([0, 1, max(0, sizes.kv_len - sizes.q_len), self.draw.randint(0, 20)])
        keys = self.draw.choice([0, 0, self.draw.randint(1, 20)])
        whole = replace(sizes, q_len=sizes.q_len + offset, kv_len=sizes.kv_len + keys)
        inner = self.tree(whole, depth - 1, offset=self.draw.random() < 0.3)
        seen = inner.seen
        again = inner.dynamic
        if again is not None:
            lines, other = again
            more = f"again = masks.as_mask(again).with_query_offset({offset})"
            again = ([*lines, more], lambda b, h, q, kv: other(b, h, q + offset, kv))
        text = f"({inner.mask()}).with_query_offset({offset})"
        if keys:
            text = f"masks.placed({inner.mask()}, {offset}, {keys})"
        return replace(
            _derived(inner),
            text=text,
            seen=lambda b, h, q, kv: seen(b, h, q + offset, kv + keys),
            # A dense mask moved is not one that dynamic plans take.
            dynamic=again if "vertical_slash" in inner.text and not keys else None,
        )

    def transposed(self, sizes: Sizes, depth: int) -> Term:
        inner = self.tree(replace(sizes, q_len=sizes.kv_len, kv_len=sizes.q_len), depth - 1)
        seen = inner.seen
        text = f"masks.transposed({inner.mask()})"
        return replace(_derived(inner), text=text, seen=lambda b, h, q, kv: seen(b, h, kv.T, q.T).T)

    def pair(self, sizes: Sizes, depth: int) -> Term:
        parts = [self.tree(sizes, depth - 1) for _ in range(self.draw.choice([2, 2, 3]))]
        keeps_all = self.draw.random() < 0.5

        def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
            out = parts[0].seen(b, h, q, kv)
            for part in parts[1:]:
                own = part.seen(b, h, q, kv)
                out = out & own if keeps_all else out | own
            return out

        text = (" & " if keeps_all else " | ").join(f"({part.mask()})" for part in parts)
        return _joined(parts, text, seen)

    def per_head(self, sizes: Sizes, depth: int) -> Term:
        """One mask a head; masks that depend on the head are refused within, but for functions."""
        few = [self.tree(replace(sizes, heads=1), depth - 1) for _ in range(self.draw.randint(1, 3))]
        parts = [self.draw.choice(few) for _ in range(sizes.heads)]
        text = f"masks.per_head([{', '.join(part.mask() for part in parts)}])"
        made = _joined(few, text, lambda b, h, q, kv: parts[h].seen(b, h, q, kv))
        return replace(made, by_heads=True)


def _derived(inner: Term) -> Term:
    """What a mask made of one other has from it."""
    return replace(inner, raw="", dynamic=None, writable="", grows=inner.grows)


def _joined(parts: list[Term], text: str, seen: object) -> Term:
    return Term(
        text,
        seen,  # type: ignore[arg-type]
        [line for part in parts for line in part.setup],
        named=all(part.named for part in parts),
        by_batch=any(part.by_batch for part in parts),
        by_heads=any(part.by_heads for part in parts),
        grows=all(part.grows for part in parts),
    )
