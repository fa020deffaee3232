"""Dataclasses, tuples and dictionaries as JSON, read back by their type annotations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints


def to_text(head: Mapping[str, Any], value: Any) -> str:
    """Return a dataclass as the text of a JSON object that begins with the entries of `head`, a list's values a line.

    Infinity is null, and a dictionary whose keys are not text is a list of pairs.
    """
    text = json.dumps({**head, **_plain(value)}, indent=1)
    return re.sub(r"\[\n[^][{}]*\]", lambda values: re.sub(r"\n\s*", " ", values[0]), text)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(entry) for key, entry in value.items()}
        return [[_plain(key), _plain(entry)] for key, entry in value.items()]
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return None if value == math.inf else value


def from_json(kind: Any, value: Any) -> Any:
    """Return what `to_text` was given, of an annotated type; entries that a dataclass does not have are ignored.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: the value is not of that type.
    """
    if is_dataclass(kind):
        given = {name: from_json(hint, value[name]) for name, hint in get_type_hints(kind).items()}
        return kind(**given)  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is dict:
        pairs = value.items() if arguments[0] is str else value
        return {from_json(arguments[0], key): from_json(arguments[1], entry) for key, entry in pairs}
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(from_json(one, entry) for one, entry in zip(kinds, _checked(list, value), strict=True))
    if type(None) in arguments:
        return None if value is None else from_json(arguments[0], value)
    if kind is float:
        return math.inf if value is None else float(_checked(int | float, value))
    return _checked(kind, value)


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind}, got {value!r}")
    return value
