"""How many random examples a test draws."""

from __future__ import annotations

from hypothesis import settings

# `max_examples` of the profiles "dev" and "ci" in `conftest.py`.
USUAL = 40


def examples(count: int) -> settings:
    """`count` examples in `make test-all`, in other profiles in proportion to their `max_examples`."""
    return settings(max_examples=max(1, count * settings().max_examples // USUAL))
