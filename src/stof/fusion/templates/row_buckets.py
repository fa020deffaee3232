"""Buckets of rows: calls of one bucket share a configuration, and thereby a compiled kernel.

The number of rows of a GEMM over tokens changes from call to call, and every kernel takes any number. The fastest
configuration depends on it, so configurations are chosen by the number of rows rounded up to a power of two.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from stof.errors import ArgumentError

# The smallest tile has 16 rows.
SMALLEST = 16


def bucket_of(rows: int) -> int:
    """Return the bucket of a number of rows: the next power of two, 16 at least."""
    return max(SMALLEST, 1 << max(0, rows - 1).bit_length())


def format_table(configs: Mapping[int, str]) -> str:
    """Return the configurations of several buckets as one text, such as `16=16x32x128,4w,3s,tile;4096=`."""
    return ";".join(f"{bucket}={config}" for bucket, config in sorted(configs.items()))


def in_bucket(text: str, rows: int) -> str:
    """Return the configuration in a text for a number of rows; "" for a bucket that the text does not list.

    Text without buckets is a configuration for any number of rows.

    Raises:
        ArgumentError: buckets that are none.
    """
    return table(text).get(bucket_of(rows), "") if "=" in text else text


def nearest_first(text: str, rows: int) -> list[str]:
    """Return the configurations in a text by their buckets' distance from a number of rows, nearest first.

    Of two buckets at equal distance the larger comes first. Text without buckets gives an empty list.
    """
    configs = table(text) if "=" in text else {}
    bits = bucket_of(rows).bit_length()
    return [configs[bucket] for bucket in sorted(configs, key=lambda one: (abs(one.bit_length() - bits), -one))]


@functools.lru_cache(maxsize=1024)
def table(text: str) -> Mapping[int, str]:
    """Return the configurations in a text with buckets, by bucket.

    Raises:
        ArgumentError: buckets that are none.
    """
    entries = [entry.partition("=") for entry in text.split(";")]
    configs = {int(bucket): config for bucket, _, config in entries if bucket.isdecimal()}
    if len(configs) != len(entries) or any(bucket != bucket_of(bucket) for bucket in configs):
        raise ArgumentError(
            f"{text!r} names no configurations of buckets; expected ROWS=CONFIGURATION separated by ';', "
            f"with ROWS powers of two from {SMALLEST} up"
        )
    return configs
