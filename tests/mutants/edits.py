"""All one-place changes of a module's source that its tests are expected to notice."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")}
OPPOSITES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
}
# The order of their arguments does not matter, or a wrong one raises wherever the call runs.
UNORDERED = {"allclose", "cast", "equal", "gcd", "getattr", "hasattr", "isinstance", "logical_and", "logical_or", "zip"}
UNORDERED |= OPPOSITES.keys()
# Arguments that change a result on a GPU alone, only speed, or only what happens after a mistake elsewhere.
SILENT_ARGUMENTS = {"device", "non_blocking", "pin_memory", "num_warps", "num_stages", "strict", "stacklevel"}
# What `tl.load` gives where nothing is read: masked once more in most places, and in Triton's interpreter 0 by default.
SILENT_ARGUMENTS |= {"other"}
# Calls whose numbers are how much is computed at once.
CHUNKING = {"split", "chunk"}
# Calls that write text for people, or that only tell Triton's compiler what always holds.
SILENT_CALLS = {"warn", "debug", "info", "warning", "static_assert", "device_assert", "assume", "get_close_matches"}
# A decimal number above this is a limit on sizes or a tuned figure: one more changes no result.
LARGEST_NUMBER = 1000


@dataclass(frozen=True)
class Edit:
    """Replace the bytes `[start, end)` of a source file by `text`."""

    kind: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True)
class Signature:
    """A function of the package, or the constructor of a dataclass."""

    positional: tuple[str, ...]
    defaults: Mapping[str, str]


def signatures_of(tree: ast.Module) -> Iterator[tuple[str, Signature]]:
    """All functions, methods and classes with fields of a module, by their bare names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
            names = [one.target.id for one in fields if isinstance(one.target, ast.Name)]
            values = {name: ast.unparse(one.value) for name, one in zip(names, fields, strict=True) if one.value}
            if fields:
                yield node.name, Signature(tuple(names), values)
        elif isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = dict(zip(reversed([one.arg for one in arguments]), reversed(node.args.defaults), strict=False))
            keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            defaults |= {one.arg: value for one, value in keywords if value is not None}
            names = [one.arg for one in arguments]
            if names[:1] in (["self"], ["cls"]):
                del names[0]
            yield node.name, Signature(tuple(names), {name: ast.unparse(value) for name, value in defaults.items()})


def edits_of(source: bytes, signatures: Mapping[str, list[Signature]]) -> list[Edit]:
    """All edits of a module; `signatures` are those of the whole package."""
    return sorted(
        set(_Finder(source, signatures).of(ast.parse(source))), key=lambda edit: (edit.start, edit.end, edit.text)
    )


def changes_code(edit: Edit, source: bytes) -> bool:
    """Whether the edited module is another one that Python takes: a parenthesis around an argument may go with it."""
    try:
        return ast.dump(ast.parse(edit.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def name_of(function: ast.expr) -> str:
    """The bare name of what is called or used as a decorator."""
    if isinstance(function, ast.Call):
        return name_of(function.func)
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class _Finder:
    def __init__(self, source: bytes, signatures: Mapping[str, list[Signature]]) -> None:
        self.source, self.signatures = source, signatures
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self.line_starts = [0, *itertools.accumulate(lengths)]

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(kind, node.lineno, self.start(node), self.end(node), text)

    def between(self, kind: str, left: ast.expr, right: ast.expr, pattern: str, text: str) -> Iterator[Edit]:
        """The operator between two expressions."""
        first = self.end(left)
        for match in re.finditer(pattern, self.source[first : self.start(right)].decode()):
            start = first + match.start()
            line = 1 + self.source[:start].count(b"\n")
            yield Edit(kind, line, start, first + match.end(), text)
            return

    def of(self, node: ast.AST, key: bool = False) -> Iterator[Edit]:
        """Edits of a node and all below; `key`: what it computes is a cache key."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [name_of(one) for one in node.decorator_list]
            if node.name not in ("__repr__", "__str__") and "overload" not in decorators:
                for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    yield from self.of(default)
                for statement in _run_without_gpu_in(node.body):
                    yield from self.of(statement, "key" in node.name)
            return
        if isinstance(node, ast.ClassDef):
            if not any(name_of(base) == "Protocol" for base in node.bases):
                for statement in node.body:
                    yield from self.of(statement)
            return
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Call) and name_of(node.func) in SILENT_CALLS | CHUNKING:
            return
        if isinstance(node, ast.keyword) and node.arg in SILENT_ARGUMENTS:
            return
        if isinstance(node, ast.Call) and _is_chunk_size(node):
            return
        if isinstance(node, ast.Module):
            for statement in node.body:
                if not _is_named_number(statement):
                    yield from self.of(statement)
            return
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name_of(target) for target in targets]
            if names == ["__all__"]:
                return
            yield from self.here(node, key)
            if node.value is not None:
                yield from self.of(node.value, key or any("key" in name for name in names))
            return
        yield from self.here(node, key)
        for child in _run_without_gpu(node):
            yield from self.of(child, key)

    def here(self, node: ast.AST, key: bool) -> Iterator[Edit]:
        """Edits of a node itself."""
        match node:
            case ast.Compare(left, ops, comparators):
                for (a, b), op in zip(itertools.pairwise([left, *comparators]), ops, strict=True):
                    old, new = COMPARISONS[type(op)]
                    pattern = rf"\b{old}\b" if old[0].isalpha() else re.escape(old)
                    yield from self.between("comparison", a, b, pattern, new)
            case ast.BinOp(a, op, b) if type(op) in ARITHMETIC and not _is_sequence(a) and not _is_sequence(b):
                old, new = ARITHMETIC[type(op)]
                yield from self.between("arithmetic", a, b, re.escape(old), new)
            case ast.AugAssign(a, op, b) if type(op) in ARITHMETIC and not _is_sequence(b):
                old, new = ARITHMETIC[type(op)]
                yield from self.between("arithmetic", a, b, re.escape(old), new)
            # Without a GPU no graph is captured, and one operand is what it always is.
            case ast.BoolOp(op, values) if "capturing" not in ast.unparse(node):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for a, b in itertools.pairwise(values):
                    yield from self.between("and/or", a, b, rf"\b{old}\b", new)
            case ast.UnaryOp(ast.Not(), operand):
                yield self.replace("not", node, self.text(operand))
            case ast.Constant(bool() as value):
                yield self.replace("true/false", node, str(not value))
            case ast.Constant(int() as value):
                decimal = self.text(node).isdigit()
                if not decimal or value <= LARGEST_NUMBER:
                    yield self.replace("number", node, str(value + 1) if decimal else f"{self.text(node)} + 1")
            case ast.Constant(float() as value) if value in (0.0, 1.0):
                yield self.replace("number", node, str(value + 1))
            case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield self.replace("return", value, "None")
            case ast.If(_, [statement]) if not isinstance(statement, ast.Pass):
                yield self.replace("guard", statement, "pass")
            case ast.Tuple(elements, ast.Load()) if key and len(elements) > 1:
                for one, other in itertools.pairwise(elements):
                    yield Edit("cache key", one.lineno, self.start(one), self.start(other), "")
                one, other = elements[-2:]
                yield Edit("cache key", other.lineno, self.end(one), self.end(other), "," if len(elements) == 2 else "")
            case ast.Call():
                yield from self.of_call(node)

    def of_call(self, node: ast.Call) -> Iterator[Edit]:
        name = name_of(node.func)
        if name in OPPOSITES:
            end = self.end(node.func)
            yield Edit("min/max", node.lineno, end - len(name), end, OPPOSITES[name])
        if name not in UNORDERED:
            for a, b in itertools.pairwise(node.args):
                if not any(isinstance(one, ast.Starred) for one in (a, b)) and self.text(a) != self.text(b):
                    between = self.source[self.end(a) : self.start(b)].decode()
                    text = self.text(b) + between + self.text(a)
                    yield Edit("swap", a.lineno, self.start(a), self.end(b), text)
        arguments = sorted([*node.args, *node.keywords], key=self.start)
        for i, argument in enumerate(arguments):
            if self.is_optional(node, name, argument):
                start = self.end(arguments[i - 1]) if i else self.start(argument)
                yield Edit("argument", argument.lineno, start, self.end(argument), "")

    def is_optional(self, call: ast.Call, name: str, argument: ast.expr | ast.keyword) -> bool:
        """Whether the call may leave an argument out, and then does something else."""
        known = self.signatures.get(name)
        if isinstance(argument, ast.keyword):
            if argument.arg is None or argument.arg in SILENT_ARGUMENTS:
                return False
            if known is None:
                return True
            given, value = argument.arg, argument.value
        else:
            # The last positional argument alone: others would change places.
            place = len(call.args) - 1
            if known is None or argument is not call.args[-1] or any(place >= len(one.positional) for one in known):
                return False
            places = {one.positional[place] for one in known}
            if len(places) > 1:
                return False
            given, value = places.pop(), argument
        return all(one.defaults.get(given, ast.unparse(value)) != ast.unparse(value) for one in known)


def _run_without_gpu(node: ast.AST) -> Iterator[ast.AST]:
    """Children of a node without what runs where a tensor is on a GPU alone."""
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.If | ast.IfExp) and _is_gpu(node.test):
            continue
        if name == "body" and isinstance(node, ast.With) and any(_is_gpu(one.context_expr) for one in node.items):
            continue
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and isinstance(value, list):
            count = next((i + 1 for i, one in enumerate(value) if _is_gpu(one)), len(value))
            yield from value[:count]
        elif isinstance(value, list):
            yield from _run_without_gpu_in([one for one in value if isinstance(one, ast.AST)])
        elif isinstance(value, ast.AST):
            yield value


def _run_without_gpu_in(block: list[Any]) -> Iterator[Any]:
    """Statements up to one that leaves when a tensor is not on a GPU."""
    for statement in block:
        yield statement
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue):
            tests = statement.test.values if isinstance(statement.test, ast.BoolOp) else [statement.test]
            if isinstance(getattr(statement.test, "op", ast.Or()), ast.Or) and any(
                _is_gpu(one, False) for one in tests
            ):
                return


def _is_gpu(test: ast.expr, wanted: bool = True) -> bool:
    """Whether an expression is true (or, where not `wanted`, false) on a GPU alone: `device.type == "cuda"`."""
    match test:
        case ast.BoolOp(ast.And(), values):
            return any(_is_gpu(one, wanted) for one in values)
        case ast.Compare(ast.Attribute(_, "type"), [op], [ast.Constant("cuda")]):
            return isinstance(op, ast.Eq if wanted else ast.NotEq)
        case ast.Attribute(_, "is_cuda"):
            return wanted
        case ast.Call(function):
            return wanted and ast.unparse(function).startswith("torch.cuda.")
    return False


def _is_chunk_size(node: ast.Call) -> bool:
    """`max(1, LIMIT // size)`: how much is computed at once."""
    match node:
        case ast.Call(ast.Name("max"), [ast.Constant(1), ast.BinOp(op=ast.FloorDiv())], []):
            return True
    return False


def _is_named_number(statement: ast.stmt) -> bool:
    """`MOST_TILES = 4` in a module: a tuned figure, a limit, or a code that its writers and readers share."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    numbers = (node for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
    return all(name_of(one).isupper() for one in targets) and all(isinstance(one.value, int | float) for one in numbers)


def _is_sequence(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_sequence(node.left) or _is_sequence(node.right)
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
