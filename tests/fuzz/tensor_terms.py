"""Random masks made of tensors: dense ones in every memory order, bitmaps, index lists, block scores, BlockMasks."""

from __future__ import annotations

import random

import numpy as np

from tests.fuzz.terms import Array, Kept, Seen, Sizes, Term, named_term, tensor_text

STRIDES = ("plain", "plain", "transposed", "sliced", "expanded", "offset", "last", "flipped")


def _leading(draw: random.Random, sizes: Sizes) -> tuple[int, int]:
    return draw.choice([(1, 1), (1, 1), (sizes.batch, 1), (1, sizes.heads), (sizes.batch, sizes.heads)])


def table_seen(table: Kept) -> Seen:
    """Look scores up in `[B | 1, H | 1, Sq | 1, Skv]`."""

    def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
        own = table[b if table.shape[0] > 1 else 0, h if table.shape[1] > 1 else 0]
        return own[q if own.shape[0] > 1 else np.zeros_like(q), kv]

    return seen


def _texture(draw: random.Random, shape: tuple[int, ...]) -> tuple[str, Kept]:
    """Text of a bool tensor, and its values: arithmetic, since PyTorch and NumPy draw other random numbers."""
    a, b, m = draw.randint(1, 97), draw.randint(1, 97), draw.choice([2, 5, 11, 97])
    keep = draw.choice([0, 1, m // 2, m - 1, m])
    size = int(np.prod(shape))
    n = np.arange(size)
    values = (n * a + (n // 7) * b + (n * n) // 13) % m < keep
    text = f"n = torch.arange({size}); keep = ((n * {a} + n // 7 * {b} + n * n // 13) % {m} < {keep})"
    return text, values.reshape(shape)


def dense_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    """`masks.from_dense` of a tensor, which may also be passed as it is."""
    batch, heads = _leading(draw, sizes)
    rows = draw.choice([1, sizes.q_len, sizes.q_len, sizes.q_len])
    shape = (batch, heads, rows, sizes.kv_len)
    text, values = _texture(draw, shape)
    stride = draw.choice(STRIDES)
    made = f"keep.view{shape}.to(device)"
    match stride:
        case "transposed":
            made = f"{made}.mT.contiguous().mT"
        case "sliced":
            made = f"torch.nn.functional.pad({made}, (3, 2, 1, 0), value=1)[..., 1:, 3:-2]"
        case "last":
            made = f"torch.stack([{made}, ~{made}], -1)[..., 0]"
        case "offset":
            made = f"torch.cat([keep.new_ones(3), keep]).to(device)[3:].view{shape}"
        case "expanded":
            values = np.broadcast_to(values[:, :, :1], shape)
            made = f"{made}[:, :, :1].expand{shape}"
        case "flipped":
            values = values[:, :, ::-1, ::-1]
            made = f"{made}.flip(2, 3).permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)"
    kept = np.ascontiguousarray(values)
    drop = 0 if batch > 1 else draw.randint(0, 2 if heads == 1 else 1)
    setup = [text, f"{name} = {made}{'[0]' * drop}"]
    other, other_values = _texture(draw, shape)
    again = ([other, f"again = keep.view{shape}.to(device){'[0]' * drop}"], table_seen(other_values))
    return Term(
        name,
        table_seen(kept),
        setup,
        raw="dense",
        by_batch=batch > 1,
        by_heads=heads > 1,
        dynamic=again if rows > 1 or sizes.q_len == 1 else None,
        writable=name if stride != "expanded" else "",
    )


def bits_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    """`masks.from_bits`; bits past the last key are random."""
    batch, heads = _leading(draw, sizes)
    words = -(-sizes.kv_len // 32)

    def drawn(target: str) -> tuple[list[str], Seen]:
        text, values = _texture(draw, (batch, heads, sizes.q_len, words * 32))
        packed = f"(keep.view({batch}, {heads}, {sizes.q_len}, {words}, 32).long() << torch.arange(32)).sum(-1)"
        kept = values[..., : sizes.kv_len]
        return [text, f"{target} = {packed}.to(torch.int32).to(device)"], table_seen(kept)

    setup, seen = drawn(name)
    lines, other = drawn("bits")
    again = ([*lines, f"again = masks.from_bits(bits, {sizes.kv_len})"], other)
    text = f"masks.from_bits({name}, {sizes.kv_len})"
    return Term(text, seen, setup, by_batch=batch > 1, by_heads=heads > 1, dynamic=again)


def slash_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    batch, heads = _leading(draw, sizes)
    columns, distances = draw.randint(1, 6), draw.randint(1, 6)

    def drawn(names: tuple[str, str], dtype: str) -> tuple[list[str], Seen]:
        lists = []
        for length, limit in ((columns, sizes.kv_len), (distances, sizes.q_len)):
            rows = []
            for _ in range(batch * heads):
                chosen = sorted(draw.sample(range(limit), min(limit, draw.randint(0, length))))
                rows.append(chosen + [-1] * (length - len(chosen)))
            lists.append(rows)

        def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
            at = (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)
            vertical, slash = ([n for n in lists[i][at] if n >= 0] for i in (0, 1))
            return (kv <= q) & (np.isin(kv, vertical) | np.isin(q - kv, slash))

        views = [f"{tensor_text(rows, dtype)}.view({batch}, {heads}, -1)" for rows in lists]
        return [f"{n} = {view}" for n, view in zip(names, views, strict=True)], seen

    dtype = draw.choice(["int32", "int64"])
    setup, seen = drawn((f"{name}c", f"{name}d"), dtype)
    lines, other = drawn(("columns", "distances"), dtype)
    again = ([*lines, "again = masks.vertical_slash(columns, distances)"], other)
    text = f"masks.vertical_slash({name}c, {name}d)"
    return Term(text, seen, setup, by_batch=batch > 1, by_heads=heads > 1, dynamic=again)


def topk_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    batch, heads = _leading(draw, sizes)
    size, causal = draw.choice([16, 32, 64]), draw.random() < 0.5
    rows, columns = -(-sizes.q_len // size), -(-sizes.kv_len // size)
    k = draw.randint(1, columns)

    def drawn(target: str, dtype: str) -> tuple[list[str], Seen]:
        # Few values, so that equal scores are common; the first of them win.
        scores = [draw.choice([-float("inf"), 0.0, 0.5, 1.0, -2.0]) for _ in range(batch * heads * rows * columns)]
        table = np.array(scores).reshape(batch, heads, rows, columns)
        chosen = np.zeros(table.shape, dtype=bool)
        for at in np.ndindex(batch, heads, rows):
            own = [(-score, c) for c, score in enumerate(table[at]) if not (causal and c > at[2])]
            for score, c in sorted(own)[:k]:
                chosen[(*at, c)] = score < float("inf")

        def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
            own = chosen[b if batch > 1 else 0, h if heads > 1 else 0]
            return own[q // size, kv // size] & ((kv <= q) | (not causal))

        shown = repr(scores).replace("-inf", "-torch.inf")
        made = f"{target} = torch.tensor({shown}, dtype=torch.{dtype}, device=device)"
        return [f"{made}.view({batch}, {heads}, {rows}, {columns})"], seen

    dtype = draw.choice(["float32", "float16", "bfloat16"])
    setup, seen = drawn(name, dtype)
    lines, other = drawn("scores", dtype)
    settings = f"{k}, block_size={size}, causal={causal}"
    again = ([*lines, f"again = masks.block_topk(scores, {settings})"], other)
    text = f"masks.block_topk({name}, {settings})"
    return Term(text, seen, setup, by_batch=batch > 1, by_heads=heads > 1, dynamic=again)


def reordered_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    """A named mask over tokens in another order."""
    inner = named_term(draw, sizes)
    rows = draw.sample(range(sizes.q_len), sizes.q_len)
    columns = draw.sample(range(sizes.kv_len), sizes.kv_len)
    to_rows, to_columns = np.array(rows), np.array(columns)
    setup = [f"{name}r = {tensor_text(rows, 'int64')}", f"{name}c = {tensor_text(columns, 'int64')}"]
    which = draw.choice(["both", "rows", "columns"])
    given = {"both": f"{name}r, {name}c", "rows": f"{name}r", "columns": f"columns={name}c"}[which]

    def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
        q = to_rows[q] if which != "columns" else q
        return inner.seen(b, h, q, to_columns[kv] if which != "rows" else kv)

    text = f"masks.reordered({inner.mask()}, {given})"
    return Term(text, seen, inner.setup + setup, by_batch=inner.by_batch)


TENSORS = [dense_term, dense_term, dense_term, bits_term, slash_term, topk_term, reordered_term]
