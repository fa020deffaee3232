"""What backward passes must not compute again: calls whose mask changed since, and tensors that are saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stof.runtime.private import next_node_number, recomputes_saved_values, running_node_number

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


def _save_everything(*call: Any, **options: Any) -> CheckpointPolicy:
    del call, options
    return CheckpointPolicy.MUST_SAVE


def saved_in_forward(make: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`make(*arguments)`, one tensor, which compiled backward passes read as the forward pass made it.

    PyTorch's partitioner computes it again under `aggressive_recomputation`, and under an `activation_memory_budget`
    below 1, unless selective checkpointing says to save it. A budget of 0 ignores that.
    """
    if not torch.compiler.is_dynamo_compiling() or not recomputes_saved_values():
        return make(*arguments)
    contexts = partial(create_selective_checkpoint_contexts, _save_everything)
    saved: Tensor = checkpoint(make, *arguments, use_reentrant=False, context_fn=contexts)
    return saved
