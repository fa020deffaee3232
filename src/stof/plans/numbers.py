"""Numbers by which compiled code finds plans: a graph can hold a number, not a plan."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any
from weakref import WeakValueDictionary

from stof.errors import ArgumentError

_BY_NUMBER: WeakValueDictionary[int, Numbered] = WeakValueDictionary()


class Numbered:
    """Has a number while it lives.

    Attributes:
        number: random, so that it means nothing to another process, until `name_after`.
    """

    number: int
    _content: str | None
    _first: Numbered | None

    def _take_number(self) -> None:
        """Take a new random number."""
        self.number, self._content, self._first = secrets.randbits(62), None, None
        _BY_NUMBER[self.number] = self

    def name_after(self, content: str) -> None:
        """Take a number that objects of the same content have in every process.

        Graphs with a constant number are then found in the compilers' own caches.
        """
        self._content = content
        number = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=7).digest(), "big")
        while (first := _BY_NUMBER.setdefault(number, self)) is not self and first._content != content:
            number += 1
        del _BY_NUMBER[self.number]
        self.number = number
        self._first = None if first is self else first  # found by this number for as long as either lives

    @staticmethod
    def by_number(number: int) -> Any:
        """The living plan with this number.

        Raises:
            ArgumentError: it is gone; a compiled graph outlived its plan.
        """
        found = _BY_NUMBER.get(number)
        if found is None:
            raise ArgumentError(f"plan {number} is gone; keep the plan alive as long as code compiled with it runs")
        return found
