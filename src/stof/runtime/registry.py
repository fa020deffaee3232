"""Objects by number while they live: a compiled graph can hold a number, not an object."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Registry(Generic[T]):
    """Numbers of living objects.

    Objects of equal content share a number, which is the same in every process: compilers then find graphs that have it
    as a constant in their own caches. The number leads to the first of these objects; the others must keep it alive.

    Args:
        content_of: returns the content of an object, None if it has none.
    """

    def __init__(self, content_of: Callable[[T], str | None]) -> None:
        self._content_of = content_of
        self._living: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, value: T, content: str) -> tuple[int, T]:
        """Register `value`; return the number of its content, above 0, and the first living object that has it."""
        number = _number_of(content)
        # Contents with equal hashes have consecutive numbers.
        while (first := self._living.setdefault(number, value)) is not value and self._content_of(first) != content:
            number += 1
        return number, first

    def add_nameless(self, value: T) -> int:
        """Register an object without content; return a random number, which means nothing to another process."""
        number = secrets.randbits(62)
        self._living[number] = value
        return number

    def remove(self, number: int) -> None:
        del self._living[number]

    def get(self, number: int) -> T | None:
        """The living object with this number."""
        return self._living.get(number)

    def find(self, content: str) -> T | None:
        """The living object with this content."""
        number = _number_of(content)
        while (value := self._living.get(number)) is not None and self._content_of(value) != content:
            number += 1
        return value


# Dynamo of PyTorch 2.11 traces this arithmetic, and no function of hashlib. Python divides fastest by less than 2**30.
_PRIMES = (0x15F2B499, 0x1B3D9A5F)


def _number_of(content: str) -> int:
    number = int.from_bytes(content.encode(), "big")
    return number % _PRIMES[0] << 29 | number % _PRIMES[1] or 1
