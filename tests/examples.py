"""How many random examples a test draws."""

from __future__ import annotations

from hypothesis import settings

# Of the profiles "dev" and "ci" in `conftest.py`.
USUAL = 40


def examples(count: int) -> settings:
    """`count` examples in `make test-all`; fewer or more where the profile has fewer or more than usual."""
    return settings(max_examples=max(1, count * settings().max_examples // USUAL))
