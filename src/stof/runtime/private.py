"""Everything private of PyTorch and Triton that the library uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _device
from torch.utils import _pytree as pytree

__all__ = [
    "FORWARD_HOOKS",
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "copy_all",
    "copy_sources",
    "end_failed_capture",
    "entries_of",
    "fake_context",
    "has_hooks",
    "inductor",
    "init_triton_cache",
    "is_intercepted",
    "is_mutable",
    "is_plain",
    "outside_tracing",
    "pytree",
    "version_of",
]


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether an implementation may be called straight, past the operator and its host time.

    The operator must be seen by autograd when an input requires a gradient, and by whoever wraps tensors or intercepts
    operators (fake tensors, functorch transforms, tracing).
    """
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (grad and tensor.requires_grad)):
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


_PLAIN = (Tensor, torch.nn.Parameter)


# torch.compile
#
# Read in torch 2.11 and 2.13, Triton 3.6 and 3.7. Fusion needs the names that graphs are rewritten and compiled with;
# without one of them the backend fails when it is first used, and attention does not.

# The type of a public value each.
OpOverload, OpOverloadPacket = type(torch.ops.aten.add.default), type(torch.ops.aten.add)


def is_mutable(overload: Any) -> bool:
    """Whether an operator of torch.library writes to an argument; only its schema says so."""
    return bool(overload._schema.is_mutable)


def inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], mark: str = "") -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, as backend "inductor" does: it has no public entry that takes a graph.

    Args:
        patches: entries of Inductor's configuration.
        mark: enters the keys of Inductor's caches, as the identity of a pass that changes nothing.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class CacheMark(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            """Nothing: the graph was rewritten before it came to Inductor."""

        def uuid(self) -> str:
            return mark

    if mark:
        patches = patches | {"post_grad_custom_post_pass": CacheMark()}
    compiled: Callable[..., Any] = compile_fx(gm, list(inputs), config_patches=patches)
    return compiled


def outside_tracing() -> AbstractContextManager[Any]:
    """Hide the graph that Dynamo is tracing: a graph compiled meanwhile would otherwise take over its fake tensors."""
    return torch._guards.tracing(None)


@contextmanager
def fake_context(mode: Any) -> Iterator[None]:
    """Run operators on the fake values of a mode, as Dynamo does.

    Composite operators run in Python. Their C++ versions in torch 2.11 (`linear`, `matmul`) read sizes as integers,
    which specializes every symbolic size.
    """
    with torch.no_grad(), enable_python_dispatcher(), mode:
        yield


def copy_sources(old: fx.Node | fx.GraphModule, new: fx.Node | fx.GraphModule) -> None:
    """Copy Dynamo's notes on where placeholders come from, by which Inductor recognizes parameters."""
    for name in ("_dynamo_source", "_param_name_to_source"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def init_triton_cache(device: torch.device) -> None:
    """Point Triton at the ptxas and the cache folder that Inductor uses, before any kernel is compiled or looked for.

    Inductor sets both when it first compiles a Triton kernel of its own. A process that measures compiles earlier than
    that: without these two names, later processes would look elsewhere and compile its kernels again.
    """
    with suppress(ImportError, AttributeError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
        from torch._inductor.runtime.runtime_utils import triton_cache_dir

        _set_triton_ptxas_path()
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))


# Models and CUDA graphs

# Functions that run before and after a module's forward; public iterators over them do not exist.
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# How often a tensor was written to; not of inference tensors.
version_of = attrgetter("_version")


def entries_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's own children, parameters and buffers: public iterators leave out None and what comes twice."""
    return module._modules, module._parameters, module._buffers


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs before or after a module's forward or backward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def is_intercepted() -> bool:
    """Whether tensors may be more than they seem (torch.func, forward AD), or a mode looks at each operator.

    `torch.set_default_device` is a mode as well, and changes nothing for tensors that are there.
    """
    modes = torch._C._len_torch_function_stack() - (_device.CURRENT_DEVICE is not None)
    watched = modes > 0 or torch._C._len_torch_dispatch_stack() > 0
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0 or watched


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors by one kernel, after which a graph begins sooner than after copies of memory."""
    torch._foreach_copy_(list(targets), list(sources))


def end_failed_capture(pool: Any) -> None:
    """Tell the allocator that a capture of the current device is over, which PyTorch omits where a capture fails."""
    with suppress(RuntimeError, AttributeError):  # PyTorch did it, or has no such function
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
