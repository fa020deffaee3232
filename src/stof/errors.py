"""Every error STOF raises on purpose, in one place.

A message says what was given, what is accepted, and what to do next. All classes derive from
`StofError`, and from the built-in a caller would expect (`ValueError`, `TypeError`, ...), so existing
`except ValueError` code keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shown(value: object) -> str:
    """A value for a message: Python does not print ints of thousands of digits."""
    try:
        text = repr(value)
    except (ValueError, RuntimeError):  # tensors without values cannot be printed either
        return "an int too long to print" if isinstance(value, int) else "values that cannot be printed"
    return text if len(text) <= 80 else text[:77] + "..."


class StofError(Exception):
    """Base of all errors raised by STOF."""


class ShapeError(StofError, ValueError):
    """Tensors, masks or plans whose shapes disagree."""


class DtypeError(StofError, TypeError):
    """A dtype that is not supported, or dtypes that differ where they must agree."""


class DeviceError(StofError, ValueError):
    """Tensors on different devices, or a plan that lives on another device than the inputs."""


class HeadCountError(ShapeError):
    """Query heads that are not a multiple of key/value heads."""


class ArgumentError(StofError, ValueError):
    """A scalar or option outside its range (a NaN scale, a negative window, ...)."""


class MaskError(StofError, ValueError):
    """A mask that cannot be built from the arguments given."""


class MaskFunctionError(MaskError):
    """A user's mask function raised, or returned something that is not a boolean tensor."""


class MaskSyntaxError(MaskError):
    """Text that does not parse as a mask expression."""


class UnknownMaskError(MaskSyntaxError):
    """A name in a mask expression that is no known mask; the message has the nearest valid name."""


class LayoutError(StofError, ValueError):
    """A layout that is inconsistent; lists every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"the layout does not validate ({len(self.problems)} problem(s)):\n{listed}")


class TooLargeError(StofError, RuntimeError):
    """A mask whose tiles cannot be held in memory, or numbered; the message says how many there are."""


class PlanFileError(StofError, ValueError):
    """A plan file that is corrupt, of another version, or does not validate."""


class LockFileError(StofError, ValueError):
    """A lock file that cannot be read, is of another version, or is broken."""


class PlanMismatchError(ShapeError):
    """A plan used with lengths, batch or heads other than those it was made for."""


class RankMismatchError(StofError, ValueError):
    """Ranks that called one function of `stof.distributed` with other arguments; every rank of the mesh raises it."""


class IsolationError(StofError, RuntimeError):
    """A sequence of a packed batch has other outputs when tokens of another sequence change."""


class UnsupportedError(StofError, NotImplementedError):
    """No implementation can run this call; lists every reason of every implementation."""

    def __init__(self, summary: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons = {name: tuple(why) for name, why in reasons.items()}
        listed = "\n".join(f"  - {name}: {'; '.join(why)}" for name, why in self.reasons.items())
        self.args = (f"{summary}\n{listed}",)  # Dynamo, which shows it where a graph may not break, traces no super()


class KernelError(StofError, RuntimeError):
    """A kernel does not compile for a device or needs more of it than there is; another implementation takes over."""


class UnfitLayoutError(KernelError):
    """A kernel cannot read the layout of one plan; another choice takes over for that plan, without a warning.

    Attributes:
        unseen_keys: its tiles hold keys that no query sees.
    """

    def __init__(self, message: str, *, unseen_keys: bool = False) -> None:
        super().__init__(message)
        self.unseen_keys = unseen_keys


class MissingDependencyError(StofError, ImportError):
    """An optional package is needed for this feature; the message says how to install it."""
