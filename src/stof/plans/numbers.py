"""Numbers by which compiled code finds plans."""

from __future__ import annotations

from typing import Any

from stof.errors import ArgumentError
from stof.runtime.registry import Registry

_PLANS: Registry[Numbered] = Registry(lambda plan: plan._content)


class Numbered:
    """Has a number while it lives.

    Attributes:
        number: random until `name_after` is called, then that of the content.
    """

    number: int
    _content: str | None
    _first: Numbered | None

    def _take_number(self) -> None:
        """Take a new random number."""
        self._content = self._first = None
        self.number = _PLANS.add_nameless(self)

    def name_after(self, content: str) -> None:
        """Take the number that objects of this content have in every process."""
        nameless, self._content = self.number, content
        self.number, first = _PLANS.add(self, content)
        _PLANS.remove(nameless)
        self._first = None if first is self else first  # found by this number for as long as either lives

    @staticmethod
    def by_number(number: int) -> Any:
        """The living plan with this number.

        Raises:
            ArgumentError: it is gone; a compiled graph outlived its plan.
        """
        plan = _PLANS.get(number)
        if plan is None:
            raise ArgumentError(f"plan {number} is gone; keep the plan alive as long as code compiled with it runs")
        return plan
