"""Processes on this machine that exchange over gloo, each of them bounded in time."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Exchanges take milliseconds; a rank that waits longer waits for one that never comes.
EXCHANGE_SECONDS = 60
PROCESS_SECONDS = 240


def run(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in so many processes of one gloo group, and raise what one of them raises."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.spawn(_process, (function, ranks, port, arguments), nprocs=ranks, join=False)
    deadline = time.monotonic() + PROCESS_SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"a process ran for more than {PROCESS_SECONDS} seconds"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _process(rank: int, function: Callable[..., None], ranks: int, port: int, arguments: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=EXCHANGE_SECONDS))
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
    # Models and meshes in reference cycles keep process groups alive, whose threads may crash the interpreter's exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
