"""Detects that activation checkpointing recomputes a call after its mask changed, by autograd's sequence numbers."""

from __future__ import annotations

import threading

import torch

from stof.runtime.private import next_node_number, running_node_number

_thread = threading.local()
_SEVERAL = object()


def _this_thread() -> object:
    """A unique object for the current thread; thread identifiers are reused."""
    try:
        return _thread.token
    except AttributeError:
        _thread.token = object()
        return _thread.token


class Changes:
    """Records calls that read some state, and changes of that state: no call may be recomputed after a change.

    Recomputation runs inside an autograd node that the original forward pass made. Sequence numbers of nodes increase
    within a thread. So if one thread makes all calls and the change, a node numbered after the change means that the
    call was made after it. If several threads make calls, each recomputation after a change is refused. A copy of this
    object records nothing yet.
    """

    __slots__ = ("_caller", "_changed_by", "_first_node")

    def __init__(self) -> None:
        self._caller: object = None
        self._changed_by: object = None
        self._first_node = 0

    def __reduce__(self) -> tuple[type[Changes], tuple[()]]:
        return Changes, ()

    def note_change(self) -> bool:
        """Note a change; False, and nothing is noted, in a backward pass.

        A function that is recomputed may have changed it after a call, in its first pass.
        """
        if running_node_number() is not None:
            return False
        if self._caller is not None:
            self._changed_by, self._first_node = _this_thread(), next_node_number()
        return True

    def note_call(self) -> bool:
        """Note a call; False if it may recompute one that was made before the last change."""
        node, thread = running_node_number(), _this_thread()
        if node is None:
            # Calls in inference mode are never differentiated, so not recomputed.
            if self._caller is not thread and not torch.is_inference_mode_enabled():
                self._caller = thread if self._caller is None else _SEVERAL
            return True
        if self._caller is None:
            self._caller = thread
        return self._changed_by is None or (self._changed_by is self._caller and node >= self._first_node)
