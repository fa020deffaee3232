"""Exceptions in one line, and whether a device still answers."""

from __future__ import annotations

import torch


def first_line(error: BaseException, limit: int = 160) -> str:
    """`Type: first line of the message`, for tables and progress lines."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:limit]}" if text else type(error).__name__


def device_problem(device: torch.device) -> str:
    """Why a device no longer answers, "" where it does: after an illegal access all further calls of a process fail."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError as error:
        return first_line(error)
    return ""
