"""Whether activation checkpointing recomputes a call with what the call had: a rule, checked by autograd's numbers."""

from __future__ import annotations

import threading

import torch

from stof.runtime.private import next_node_number, running_node_number

_thread = threading.local()
_SEVERAL = object()


def _this_thread() -> object:
    """An object for the current thread; identifiers of threads are used again."""
    try:
        return _thread.name
    except AttributeError:
        _thread.name = object()
        return _thread.name


class Changes:
    """The calls and changes of something that calls read: they may not be recomputed after a change.

    A backward pass that recomputes a function runs a node of autograd that the function made in its first pass, or that
    stands for the function. A thread numbers its nodes in order. So the recomputed call is later than the last change
    if the node is, where one thread makes the change and all calls. Copies have had no calls yet.
    """

    __slots__ = ("_caller", "_changed_by", "_first_node")

    def __init__(self) -> None:
        self._caller: object = None
        self._changed_by: object = None
        self._first_node = 0

    def __reduce__(self) -> tuple[type[Changes], tuple[()]]:
        return Changes, ()

    def change(self) -> bool:
        """Note a change; False, and nothing is noted, in a backward pass.

        A function that is recomputed may have changed it after a call, in its first pass.
        """
        if running_node_number() is not None:
            return False
        if self._caller is not None:
            self._changed_by, self._first_node = _this_thread(), next_node_number()
        return True

    def call(self) -> bool:
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
