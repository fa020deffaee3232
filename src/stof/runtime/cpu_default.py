"""Tensors that stay on the host, whatever device is the default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensors_on_host() -> Iterator[None]:
    """Tensors made without naming a device are on the CPU, also where `torch.set_default_device` names another.

    For lists of jobs and tables, which are made on the host and then copied. Not around mask functions: they may make
    tensors where their author wants them.
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield
