"""Buckets of rows: calls of one bucket share a configuration, and so a compiled kernel.

A GEMM over tokens has as many rows as a request has, and every kernel takes any number of them. What suits 16 rows
does not suit 4096, so a configuration is chosen by the power of two that the number of rows is rounded up to.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from stof.errors import ArgumentError

# The smallest tile has 16 rows.
SMALLEST = 16


def bucket_of(rows: int) -> int:
    """The bucket of a number of rows: the power of two it is rounded up to, 16 at least."""
    return max(SMALLEST, 1 << max(0, rows - 1).bit_length())


def format_table(configs: Mapping[int, str]) -> str:
    """One text for the configurations of several buckets, such as `16=16x32x128,4w,3s,tile;4096=`."""
    return ";".join(f"{bucket}={config}" for bucket, config in sorted(configs.items()))


def in_bucket(text: str, rows: int) -> str:
    """The configuration for a number of rows in what operators are given; "" for a bucket that the text leaves out.

    Text without buckets is a configuration for any number of rows.

    Raises:
        ArgumentError: buckets that are none.
    """
    return table(text).get(bucket_of(rows), "") if "=" in text else text


def nearest_first(text: str, rows: int) -> list[str]:
    """The configurations that a text has for buckets, those of the buckets nearest to a number of rows first.

    None for text without buckets. Of two buckets equally far the larger comes first.
    """
    found = table(text) if "=" in text else {}
    own = bucket_of(rows).bit_length()
    return [found[bucket] for bucket in sorted(found, key=lambda one: (abs(one.bit_length() - own), -one))]


@functools.lru_cache(maxsize=1024)
def table(text: str) -> Mapping[int, str]:
    """The configurations in text with buckets, by bucket.

    Raises:
        ArgumentError: buckets that are none.
    """
    entries = [entry.partition("=") for entry in text.split(";")]
    found = {int(bucket): config for bucket, _, config in entries if bucket.isdecimal()}
    if len(found) != len(entries) or any(bucket != bucket_of(bucket) for bucket in found):
        raise ArgumentError(
            f"{text!r} names no configurations of buckets; expected ROWS=CONFIGURATION separated by ';', "
            f"with ROWS powers of two from {SMALLEST} up"
        )
    return found
