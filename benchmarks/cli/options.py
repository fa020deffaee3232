"""Values of options that several commands take."""

from __future__ import annotations

from stof.errors import ArgumentError, shown

# What a number on a command line may be at most.
_MOST = 2**31 - 1

# Of the attention grid on a GPU, as options write them.
GPU_SHAPES = "1,12,64,512 1,12,64,2048 1,12,64,4096 16,12,64,1024 1,32,128,8192 1,32,128,16384"


def integers(name: str, text: str) -> list[int]:
    """Positive numbers separated by spaces.

    Raises:
        ArgumentError: something else, or none.
    """
    words = text.split()
    if not words or not all(word.isdecimal() and len(word) <= 10 and 0 < int(word) <= _MOST for word in words):
        raise ArgumentError(f"{name} takes numbers from 1 to {_MOST} separated by spaces, got {shown(text)}")
    return [int(word) for word in words]
