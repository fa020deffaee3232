"""Mutants change what they say they change, and the tests of a module are found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.draw import draw_mutants
from tests.mutants.edits import Signature, changes_code, edits_of, signatures_of
from tests.mutants.reach import Imports
from tests.mutants.run import ROOT, copied, failed_tests, reaching_tests

EXAMPLES = [
    ("comparison", "a = (b) < c", ["a = (b) <= c"]),
    ("comparison", "a = b is not c not in d", ["a = b is c not in d", "a = b is not c in d"]),
    ("arithmetic", "a = 'é', b + c // d", ["a = 'é', b - c // d", "a = 'é', b + c * d"]),
    ("arithmetic", "a = f'{b + c}' + d", []),
    ("and/or", "a = b and c or d", ["a = b or c or d", "a = b and c and d"]),
    ("not", "a = not b", ["a = b"]),
    ("number", "a = b[-1] & 0xFF", ["a = b[-2] & 0xFF", "a = b[-1] & 0xFF + 1"]),
    ("number", "a = f(b, num_stages=1)\nMOST = 4\nraise E(5)", []),
    (
        "number",
        "if a.is_cuda and b[1]:\n    c = 1\nelse:\n    c = 2",
        ["if a.is_cuda and b[1]:\n    c = 1\nelse:\n    c = 3"],
    ),
    ("number", "def f():\n    if device.type != 'cuda':\n        return\n    a = 1", []),
    ("true/false", "a = f(b, c=True)", ["a = f(b, c=False)"]),
    ("min/max", "a = min(b, c)", ["a = max(b, c)"]),
    ("min/max", "a = max(1, b)\nc = max(1, LIMIT // d)", ["a = min(1, b)\nc = max(1, LIMIT // d)"]),
    ("return", "def f(a: int):\n    return a", ["def f(a: int):\n    return None"]),
    ("guard", "if a:\n    raise E", ["if a:\n    pass"]),
    ("guard", "if TYPE_CHECKING:\n    import a", []),
    ("cache key", "key = (a, b)", ["key = (b)", "key = (a,)"]),
    (
        "argument",
        "known(a, 1)\nknown(b, 2)\nknown(c, size=3)",
        ["known(a, 1)\nknown(b)\nknown(c, size=3)", "known(a, 1)\nknown(b, 2)\nknown(c)"],
    ),
    ("swap", "a = f(b, c) + max(d, e)", ["a = f(c, b) + max(d, e)"]),
]


@pytest.mark.parametrize(
    ("kind", "source", "expected"), EXAMPLES, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(EXAMPLES)]
)
def test_edits(kind: str, source: str, expected: list[str]) -> None:
    known = {"known": [Signature(("what", "size"), {"size": "1"})]}
    edits = edits_of(source.encode(), known)
    assert [edit.apply(source.encode()).decode() for edit in edits if edit.kind == kind] == expected


def test_signatures() -> None:
    source = "class A:\n    x: int\n    y: int = 2\n\n    def f(self, a, b=1, *, c, d=(3,)): ...\n"
    found = dict(signatures_of(ast.parse(source)))
    assert found == {"A": Signature(("x", "y"), {"y": "2"}), "f": Signature(("a", "b"), {"b": "1", "d": "(3,)"})}


def test_the_copy_has_all_sources() -> None:
    with copied() as root:
        for folder in ("src", "tests"):
            own, there = ({path.relative_to(top) for path in (top / folder).rglob("*.py")} for top in (ROOT, root))
            assert own == there


@pytest.mark.slow
def test_a_seed_draws_the_same_mutants() -> None:
    drawn = draw_mutants(ROOT, 5, 8)
    assert drawn == draw_mutants(ROOT, 5, 8)
    assert drawn[:4] == draw_mutants(ROOT, 5, 4)
    assert all(changes_code(mutant.edit, (ROOT / mutant.path).read_bytes()) for mutant in drawn)


@pytest.mark.slow
def test_tests_of_a_module() -> None:
    imports = Imports(ROOT)
    distances = reaching_tests(imports, Path("src/stof/layout/orders/cluster.py"))
    assert distances["tests/layout/test_search.py"] == 0
    assert distances["tests/masks/test_numbers.py"] == 1.5  # through stof.layout.orders.search
    assert list(distances.values()) == sorted(distances.values())
    # By its name in the list of implementations.
    assert "tests/kernels/test_hopper_bias.py" in reaching_tests(imports, Path("src/stof/kernels/hopper/forward.py"))
    # By a name of the package: stof.masks.sliding_window.
    assert reaching_tests(imports, Path("src/stof/masks/named_masks.py"))["tests/masks/test_named_masks.py"] == 0


def test_failures_are_read_from_the_summary() -> None:
    output = "FAILED tests/a.py::test_b[c d - e] - assert 1 - 2\nERROR tests/d.py\n1 failed"
    assert failed_tests(1, output) == ["tests/a.py::test_b[c d - e]", "tests/d.py"]
    assert failed_tests(4, "ImportError") == ["no test in particular: pytest ended with 4"]
