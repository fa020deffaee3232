"""Random mask functions in the styles FlexAttention accepts; single calls tell what each keeps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tests.fuzz.terms import Array, Kept, Sizes, Term, tensor_text

# `{L}` is a table's length: every position there is. Names in braces that begin with a capital are tables, written as
# closures; the others are small numbers.
ELEMENTWISE = """
q >= kv
(q - kv).abs() < {n}
(q >= kv) & (q - kv < {n})
(q >= kv) & (q - kv < {n} * (h + 1))
(q >= kv) | (h == 0) & (b > 0)
~(kv > q + {n})
torch.logical_and(q >= kv, kv >= {n})
torch.where(q < {n}, kv <= q, kv % {m} == 0)
torch.where(h % 2 == 0, q - kv, kv - q) >= {n}
(q // {m}) == (kv // {m})
torch.div(q, {m}, rounding_mode="floor") >= torch.div(kv, {m}, rounding_mode="floor")
((q ^ kv) & {n}) == 0
(q * 7 + kv * 13 + h * 3 + b * 5) % {m} < {m} // 2
q.float() / {m} >= kv
q.clamp(max={n}) >= kv
torch.minimum(q, kv) < {n}
(q - kv).remainder({m}) == 0
torch.fmod(q - kv, {m}) == 0
(q & 1) == (kv & 1)
q.to(torch.int32) - kv.to(torch.int32) <= {n}
q.to(torch.int8) >= kv.to(torch.int8)
(q > kv).logical_or(torch.eq(q, kv))
(q == q) & (kv < {n} + 1)
kv < {Lens}[b]
(kv < {Lens}[b]) & (q >= kv)
{Docs}[b, q] == {Docs}[b, kv]
({Docs}[b, q] == {Docs}[b, kv]) & (q >= kv)
{Ids}[q] == {Ids}[kv]
{Table}[q, kv]
{Numbers}[q, kv] != 0
{PerHead}[h, q, kv] > 1
{PerHead}[h][q][kv] > 1
{Table}[q.clamp(max={n}), kv]
{Table}[-1 - q, kv]
torch.isin(kv, {Columns})
torch.isin(q - kv, {Columns}) | (q == kv)
torch.bucketize(q, {Bounds}) == torch.bucketize(kv, {Bounds})
q - kv <= {Scalar}
(q >= kv) & (kv < {Scalar} * (b + 1))
q - kv <= {One}
{One} * q >= kv
(kv <= {FloatScalar}) | (q == kv)
q + {FloatScalar} >= kv
{Widths}[h] > (q - kv).abs()
(q - kv).abs() <= {Widths}[h] * (b + 1)
{Ids}[q] * {Ids}[kv] % {m} != 1
(q >= kv) & {Flag}
(q - kv).sign() >= 0
-q <= -kv
(q - kv) ** 2 <= {n} * {n}
torch.abs(q - kv).le({n})
(q % {m} == 0) ^ (kv % {m} == 0)
torch.ones_like(q, dtype=torch.bool) & (kv != {n})
(kv >= {n}) if {m} > 3 else (kv <= q)
q.sub(kv, alpha=2) <= {n}
torch.full_like(q, {n}) >= kv
torch.bitwise_left_shift(q, 1) >= kv
""".strip().splitlines()

OTHER = """
{Docs}[b][q] == {Docs}[b][kv]
{Table}[q][kv]
({Columns} == kv).any()
({Columns} == q - kv).any() | (q == kv)
({Columns} == kv).sum() > 0
torch.any({Columns} == kv) & (q >= kv)
torch.count_nonzero({Columns} == kv) > 0
({Columns} == kv).any(0, keepdim=True)
torch.stack([q >= kv, (q - kv) < {n}]).all()
torch.stack((q, kv)).max() < {n} + 5
torch.stack([q, kv]).sum() % {m} == 0
torch.dot({Features}[q], {Features}[kv]) > 0
{Features}[q] @ {Features}[kv] >= 0
({Features}[q] * {Features}[kv]).sum() > 0
({Features}[q] == {Features}[kv]).all()
({Features}[q] - {Features}[kv]).abs().amax() < 2
torch.einsum("d,d->", {Features}[q], {Features}[kv]) > 0
{Features}[q].argmax() == {Features}[kv].argmax()
{Features}[kv].mean() > 0
torch.searchsorted({Bounds}, q) == torch.searchsorted({Bounds}, kv)
(torch.arange(5, device=q.device) * {m} == kv).any()
torch.take({Numbers}, q * {K} + kv) > 0
{Numbers}[q].cumsum(0)[kv] > {n}
{Numbers}[q].index_select(0, kv.view(1)).view(()) > 0
{Docs}[b].index_select(0, q.view(1)) == {Docs}[b].index_select(0, kv.view(1))
{Docs}[:, q][b] == {Docs}[b, kv]
({Docs}[b] == {Docs}[b, kv]).sum() > {n}
{Lens}[b].view(1) > kv
({Lens} > kv).all()
torch.cat([q.view(1), kv.view(1)]).prod() % {m} == 0
(q.view(1) >= kv).squeeze(0)
{Features}[q].norm() >= {Features}[kv].norm()
torch.logsumexp({Features}[q], 0) >= torch.logsumexp({Features}[q], 0)
{Ids}[{Ids}[q]] == {Ids}[kv]
{Table}[q].any() & {Table}[q, kv]
{Table}[:, kv].any()
torch.equal(q, kv)
bool(q >= kv)
q.item() >= kv
q >= kv and kv > {n}
q.int() * torch.tensor(2) >= kv
""".strip().splitlines()

BODIES = [
    ["x = (q - kv).abs()", "return x < {n}"],
    ["x = q - kv", "x += 1", "return x > {n}"],
    ["near = (q - kv).abs() <= {n}", "same = {Docs}[b, q] == {Docs}[b, kv]", "return near & same"],
    ["keep = q >= kv", "for c in {Columns}:", "    keep = keep | (kv == c)", "return keep"],
    ["mine, theirs = {Docs}[b, q], {Docs}[b, kv]", "return (mine == theirs) & (mine > 0)"],
    ["return torch.vmap(lambda c: (c == kv).any())({Columns}.view(-1, 1)).any()"],
]


def _table(draw: random.Random, name: str, sizes: Sizes) -> tuple[str, Any]:
    """Dtype and values of a table that a function reads."""
    every = max(sizes.q_len, sizes.kv_len)

    def numbers(low: int, high: int, *shape: int) -> Any:
        if not shape:
            return draw.randint(low, high)
        return [numbers(low, high, *shape[1:]) for _ in range(shape[0])]

    wide = draw.choice(["int64", "int64", "int32"])
    match name:
        case "Lens":
            return wide, numbers(0, sizes.kv_len, sizes.batch)
        case "Docs":
            return wide, [sorted(row) for row in numbers(0, 3, sizes.batch, every)]
        case "Ids":
            return "int64", numbers(0, min(3, every - 1), every)
        case "Table":
            return "bool", numbers(0, 1, sizes.q_len, sizes.kv_len)
        case "Numbers":
            return draw.choice([wide, "float32", "uint8"]), numbers(0, 2, sizes.q_len, sizes.kv_len)
        case "PerHead":
            return wide, numbers(0, 2, sizes.heads, sizes.q_len, sizes.kv_len)
        case "Columns":
            return "int64", numbers(0, every, draw.randint(1, 5))
        case "Bounds":
            return "int64", sorted(numbers(0, every, draw.randint(1, 4)))
        case "Scalar":
            return wide, numbers(0, every)
        case "One":
            return wide, numbers(0, every, 1)
        case "FloatScalar":
            return "float32", numbers(0, every) + 0.5
        case "Widths":
            return wide, numbers(0, every, sizes.heads)
        case "Flag":
            return "bool", draw.random() < 0.8
        case "Features":
            return "float32", numbers(-1, 1, every, 4)  # small integers: any order of adding gives the same
    raise AssertionError(name)


class _Filling(dict[str, Any]):
    """What stands for the names in braces: numbers drawn anew, tables defined by `setup` lines."""

    def __init__(self, draw: random.Random, sizes: Sizes, prefix: str) -> None:
        super().__init__(K=sizes.kv_len)
        self.draw, self.sizes, self.prefix, self.setup = draw, sizes, prefix, []

    def __missing__(self, name: str) -> Any:
        if name in ("n", "m"):
            low, high = (0, self.sizes.kv_len) if name == "n" else (1, 16)
            return self.draw.choice([low, self.draw.randint(low, min(high, 12)), self.draw.randint(low, high)])
        dtype, values = _table(self.draw, name, self.sizes)
        called = f"{self.prefix}_{name.lower()}"
        # Built by arithmetic on the host, moved once: the function may be called where it is built.
        self.setup.append(f"{called} = {tensor_text(values, dtype)}")
        self[name] = called
        return called


def function_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    """A mask function, raw. It keeps what single calls say; None where a single call says nothing."""
    kind = draw.random()
    body = draw.choice(BODIES) if kind < 0.1 else [f"return {draw.choice(ELEMENTWISE if kind < 0.6 else OTHER)}"]
    filling = _Filling(draw, sizes, name)
    lines = [line.format_map(filling) for line in body]
    if draw.random() < 0.3:
        setup = [*filling.setup, "\n    ".join([f"def {name}(b, h, q, kv):", *lines])]
    elif len(lines) == 1 and draw.random() < 0.7:
        setup = [*filling.setup, f"{name} = lambda b, h, q, kv: {lines[0].removeprefix('return ')}"]
    else:
        # A closure: the tables are free variables of the function, not globals.
        given = ", ".join(f"{called}={called}" for called in _called(filling))
        inner = "\n        ".join(["def mask_mod(b, h, q, kv):", *lines])
        setup = [*filling.setup, f"def make({given}):\n    {inner}\n    return mask_mod", f"{name} = make()"]
    text = "\n".join(lines)
    return Term(
        name,
        _single_calls(setup, name),
        setup,
        raw="function",
        by_batch=_reads(text, "b"),
        by_heads=_reads(text, "h"),
    )


def _called(filling: _Filling) -> list[str]:
    return [value for key, value in filling.items() if key != "K" and isinstance(value, str)]


def _reads(text: str, name: str) -> bool:
    import ast

    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(ast.parse(_as_function(text))))


def _as_function(text: str) -> str:
    return "def f():\n" + "\n".join("    " + line for line in text.splitlines())


def _single_calls(setup: list[str], name: str) -> Any:
    space: dict[str, Any] = {"torch": torch, "device": "cpu"}

    def seen(b: int, h: int, q: Array, kv: Array) -> Kept:
        if name not in space:
            exec("\n".join(setup), space)
        fn = space[name]
        rows, columns = ([torch.tensor(int(n)) for n in x.flat] for x in (q, kv))
        fixed = torch.tensor(b), torch.tensor(h)
        out = np.empty((len(rows), len(columns)), dtype=bool)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                found = fn(*fixed, row, column)
                if not isinstance(found, (torch.Tensor, bool)):
                    raise TypeError(f"the function returns {type(found).__name__}")
                out[i, j] = bool(found)
        return out

    return seen


def block_mask_term(draw: random.Random, sizes: Sizes, name: str) -> Term:
    """FlexAttention's `BlockMask` of a function.

    For one head, of a function that does not look at the head: FlexAttention reads lists made for head 0 in every head.
    """
    inner = function_term(draw, sizes, f"{name}_fn")
    while inner.by_heads and sizes.heads == 1:
        inner = function_term(draw, sizes, f"{name}_fn")
    batch, heads = (sizes.batch if inner.by_batch else None), (sizes.heads if inner.by_heads else None)
    size = draw.choice([128, 16, (32, 64)])
    line = (
        f"{name} = create_block_mask({name}_fn, {batch}, {heads}, {sizes.q_len}, {sizes.kv_len}, device=device, "
        f"BLOCK_SIZE={size})"
    )
    return Term(
        name,
        inner.seen,
        [*inner.setup, "from torch.nn.attention.flex_attention import create_block_mask", line],
        raw="block_mask",
        by_batch=inner.by_batch,
        by_heads=inner.by_heads,
    )
