"""Private names of PyTorch and Triton, each behind a function that says why and what happens without it.

Checked with torch 2.11, 2.13 and 2.15, and Triton 3.6.0, 3.7.1 and 3.9.0. Two are elsewhere: Gluon's `_reinterpret` in
`kernels/hopper/intrinsics.py`, and `cache_keys.py` hashes functions of Triton's by `hash`, `cache_key` and `fn`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.utils import _device
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "FORWARD_HOOKS",
    "DispatchMode",
    "FakeTensor",
    "HigherOrderOperator",
    "Launcher",
    "OpOverload",
    "OpOverloadPacket",
    "break_graph",
    "copy_all",
    "copy_sources",
    "dispatch_modes",
    "efficient_attention_cuda",
    "encode_tensor_map",
    "end_failed_capture",
    "entries_of",
    "fake_context",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "has_hooks",
    "has_values",
    "hooks_are_set",
    "inductor",
    "init_triton_cache",
    "is_dual_level",
    "is_exporting",
    "is_intercepted",
    "is_jit_tracing",
    "is_mutable",
    "is_plain",
    "is_traced",
    "launcher_of",
    "next_node_number",
    "outside_tracing",
    "past_modes",
    "pytree",
    "raw_stream",
    "recomputes_random_numbers",
    "recomputes_saved_values",
    "running_node_number",
    "storage_id",
    "takes_derivatives",
    "tensors_have_no_values",
    "version_of",
    "versions_of",
    "vmap_enabled",
    "without_encoding",
    "without_hooks",
]

P = ParamSpec("P")
T = TypeVar("T")

# Types of what graphs and calls hold, used elsewhere under these names. `FakeTensor`, `HigherOrderOperator`: without
# them, fusion cannot tell fake values and wrapped subgraphs. `pytree`: results that are dataclasses of transformers
# could not be copied.

_PLAIN = (Tensor, nn.Parameter)
_INFERENCE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
# The dispatch keys that a thread adds to those of tensors where nobody intercepts operators, in and out of inference
# mode.
_USUAL_KEYS = (
    _INFERENCE_KEYS.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr(),
    _INFERENCE_KEYS.raw_repr(),
)
# Every eager call asks these; looked up once.
_thread_keys, _function_modes = torch._C._dispatch_tls_local_include_set, torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled


# Dispatch


def is_plain(*tensors: Tensor | None, differentiated: bool = False) -> bool:
    """Whether an implementation may be called straight, past the operator and its host time.

    Only where nobody intercepts operators, and for tensors of PyTorch's own types whose gradient is not asked for
    (unless `differentiated`): all others are for the operator, which autograd and PyTorch's dispatcher see. The
    dispatcher also negates tensors that are only marked as negated (`z.conj().imag`), whose memory kernels would read
    as it is.

    A mode of `__torch_dispatch__`, a transform of torch.func, a tracer (`torch.jit.trace`, `make_fx`) and
    functionalization each add a dispatch key of their own to the thread.

    `torch._C._dispatch_tls_local_include_set`, `DispatchKeySet`, `_len_torch_function_stack`,
    `forward_ad._current_level`: PyTorch tells by no public name whether anyone intercepts operators. Without them every
    eager call would take the operator.
    """
    if (
        _thread_keys().raw_repr() not in _USUAL_KEYS
        or forward_ad._current_level >= 0
        or (_function_modes() and _has_function_mode())
    ):
        return False
    grad = not differentiated and _grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (grad and tensor.requires_grad) or tensor.is_neg()):
            return False
    return True


def _has_function_mode() -> bool:
    """Whether a mode of `__torch_function__` is active, other than default devices, which change no tensor's operator.

    `_device.DeviceContext`: without it, calls under a default device would take the operator.
    """
    return any(type(mode) is not _device.DeviceContext for mode in _active_function_modes())


def has_function_mode(mode: type) -> bool:
    """Whether a mode of `__torch_function__` of this type is active."""
    return any(type(one) is mode for one in _active_function_modes())


def _active_function_modes() -> list[object]:
    """The active modes of `__torch_function__`: `torch._C._get_function_stack_at`, which has no public name."""
    return [torch._C._get_function_stack_at(n) for n in range(_function_modes())]


def is_intercepted() -> bool:
    """Whether tensors may be more than they seem, or somebody looks at each operator."""
    return not is_plain()


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` runs: `torch._C._is_tracing`, which the undocumented `torch.jit.is_tracing` asks."""
    return torch._C._is_tracing()


def is_dual_level() -> bool:
    """Whether a level of forward-mode AD is open: `forward_ad._current_level`; outside of one, no tensor is dual."""
    return forward_ad._current_level >= 0


def takes_derivatives() -> bool:
    """Whether torch.func's `grad` or `jvp` runs, also around other transforms.

    `get_interpreter_stack`, `TransformType`: without them, PyTorch's own error there is about its autograd functions.
    """
    levels = torch._C._functorch.get_interpreter_stack() or ()
    kinds = torch._C._functorch.TransformType
    return any(level.key() in (kinds.Grad, kinds.Jvp) for level in levels)


class DispatchMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` Dynamo may see, so that PyTorch does not import Dynamo to hide it (1 to 2 s).

    `_should_skip_dynamo`: without it, the first mask function of a process takes that much longer.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def past_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose results are kept for later calls: its operators pass by the modes that are active.

    A mode of `__torch_dispatch__` or `__torch_function__` may record operators, and replay them by their order, as
    selective activation checkpointing does. It must not see operators that only a first call runs. Fake and functional
    tensors stay what they are, and so does the default device.

    `_disable_current_modes`, `torch.overrides._pop_mode_temporarily`: no public function leaves a mode. Without them,
    gradients under selective checkpointing would be those of shifted values.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling() or is_plain() or tensors_have_no_values():
            return function(*args, **kwargs)
        default = torch.get_default_device()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for _ in range(_function_modes()):
                stack.enter_context(torch.overrides._pop_mode_temporarily())
            stack.enter_context(torch.device(default))
            return function(*args, **kwargs)

    return called


def recomputes_saved_values() -> bool:
    """Whether compiled backward passes may compute again what PyTorch's partitioner saves as a rule.

    `torch._functorch.config`, whose settings PyTorch documents. Without it, compiled backward passes would draw another
    dropout seed, and read a bool mask again.
    """
    config = torch._functorch.config
    return config.aggressive_recomputation or config.activation_memory_budget < 1


def recomputes_random_numbers() -> bool:
    """Whether compiled backward passes draw all random numbers again: `torch._functorch.config`, as above."""
    return torch._functorch.config.activation_memory_budget == 0


def dispatch_modes() -> list[Any]:
    """The modes that look at each operator now.

    `_get_current_dispatch_mode_stack`: without it, a FlopCounterMode made before the first call counts no attention.
    """
    return list(_get_current_dispatch_mode_stack())


def break_graph(reason: str) -> None:
    """End the graph that Dynamo is tracing; `fullgraph=True` fails with the reason.

    `torch._dynamo.graph_break`, which PyTorch documents under this name. Without it, compiled code could not be told
    why it cannot hold a mask function.
    """
    torch._dynamo.graph_break(msg=reason)


def is_traced(tensor: Any) -> bool:
    """Whether a compiler or exporter traces the call that has this tensor.

    `torch.compiler.is_compiling` alone is also true while another thread compiles or exports. Only Dynamo traces calls
    whose tensors are PyTorch's own.
    """
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and type(tensor) not in _PLAIN)


def has_values(tensor: Tensor) -> bool:
    """Whether a call on this tensor computes: it may be a user's subclass, but is none that stands for values.

    `FakeTensor`, `FunctionalTensor`: without them, calls that are traced would make plans that the trace outlives.
    """
    return not isinstance(tensor, (FakeTensor, FunctionalTensor)) and not tensors_have_no_values()


def tensors_have_no_values() -> bool:
    """Whether a mode makes new tensors fake or functional: `FakeTensorMode`, `FunctionalTensorMode`."""
    return any(isinstance(mode, (FakeTensorMode, FunctionalTensorMode)) for mode in dispatch_modes())


def running_node_number() -> int | None:
    """The number of the node that autograd runs in this thread, -1 if it is not known, None outside of backward passes.

    Threads number their nodes in the order in which they make them. `torch._C._current_graph_task_id`,
    `_current_autograd_node` (None under compiled autograd), `Node._sequence_nr`; no public function says so. Without
    them, calls that activation checkpointing recomputes look like first ones.
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def next_node_number() -> int:
    """The number of the next node that autograd makes in this thread.

    `torch._C._autograd._get_sequence_nr`: without it, each change of a mask would need a node of its own, to read its
    number.
    """
    return int(torch._C._autograd._get_sequence_nr())


def is_exporting() -> bool:
    """Whether torch.export traces, in any thread.

    `torch.compiler._is_exporting_flag`: the public `torch.compiler.is_exporting` is always true where Dynamo of PyTorch
    2.11 traces. Without it, programs would hold numbers of masks that mean nothing to the process that loads them.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


@contextmanager
def vmap_enabled() -> Iterator[None]:
    """Let `torch.vmap` work where it is off: inside an operator that runs under a `TorchDispatchMode`.

    The first call of code that AOTAutograd compiled runs custom operators so. `torch._C.DispatchKey`,
    `_SetExcludeDispatchKeyGuard`: without them, mask functions fail in that call.
    """
    key = torch._C.DispatchKey
    keys = (key.FuncTorchDynamicLayerFrontMode, key.FuncTorchDynamicLayerBackMode, key.FuncTorchBatched)
    with contextlib.ExitStack() as stack:
        for one in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(one, False))
        yield


def storage_id(x: Tensor) -> int:
    """A number that tensors of one memory share, fake tensors too, which have no address: `UntypedStorage._cdata`."""
    return x.untyped_storage()._cdata


# Attention with log-sum-exp. The public operator returns none, by which results of row blocks are merged.


def flash_attention_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of PyTorch's fused CPU attention: `aten._scaled_dot_product_flash_attention_for_cpu`."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return out, lse


def flash_attention_cpu_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of PyTorch's fused CPU attention: `aten._scaled_dot_product_flash_attention_for_cpu_backward`.

    It takes the log-sum-exp and the output of whole rows with some of their keys; autograd of the public operator
    takes only its own. Without it, gradients on the CPU come from matmuls, which are slower.
    """
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def efficient_attention_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of PyTorch's memory-efficient CUDA attention: `aten._scaled_dot_product_efficient_attention`."""
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return out, lse


# Streams and Triton's launcher


def raw_stream(device: int) -> int:
    """The current stream of a device, as launchers take it.

    `torch._C._cuda_getCurrentRawStream`: `torch.cuda.current_stream(device).cuda_stream` makes an object in every call.
    """
    return torch._C._cuda_getCurrentRawStream(device)


def hooks_are_set() -> bool:
    """Whether a profiler listens to Triton's launches: its hooks are chains, empty as a rule, never None.

    `knobs.runtime.launch_enter_hook.calls`: without it, profilers would miss the launches that bypass Triton's path.
    """
    runtime = _runtime_knobs()
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@functools.cache
def _runtime_knobs() -> Any:
    from triton import knobs  # every launch asks, and an import statement takes a while

    return knobs.runtime


class Launcher(NamedTuple):
    """Triton's launcher of a compiled kernel: `run(grid, 1, 1, stream, function, metadata, None, None, None, *args)`.

    Its arguments are flat, and none is a compile-time constant. `kinds` are those of the kernel's parameters, nested as
    they are; "constexpr" for a constant.

    `run`, `function`, `packed_metadata` of `triton.compiler.CompiledKernel`. The public `compiled[grid](*args)` makes
    launch metadata in every call, and encodes all tensor maps.
    """

    run: Callable[..., None]
    function: int
    metadata: Any
    kinds: tuple[Any, ...]


def launcher_of(compiled: Any) -> Launcher:
    """The launcher of what `kernel[grid](...)` returned.

    `src.signature`, `metadata`: the launcher that Triton made is made once more, for the parameters of the machine
    code. Triton's own takes constants and named tuples too, and unpacks them in every launch: 1.5 times as long (3.6).
    """
    known = _launchers.get(compiled)
    if known is not None:
        return known
    kinds = tuple(compiled.src.signature.values())
    flat = {str(place): kind for place, kind in enumerate(passed(kinds, kinds))}
    run = type(compiled.run)(SimpleNamespace(signature=flat, constants={}), compiled.metadata)
    _launchers[compiled] = made = Launcher(run, compiled.function, compiled.packed_metadata, kinds)
    return made


# By compiled kernel: making one takes a millisecond, and calls of other shapes may run the same machine code.
_launchers: WeakKeyDictionary[Any, Launcher] = WeakKeyDictionary()


def passed(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield those of the values of parameters that the machine code takes."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from passed(kind, value)
        elif kind != "constexpr":
            yield value


def without_encoding(run: Any) -> tuple[Callable[..., None], list[Any] | None]:
    """Triton's launcher behind its encoding of tensor maps, and the metadata of each map; `run, None` where unknown.

    Triton has no name for the inner launcher: it is what the outer one, a closure, calls `launcher`. A Triton that is
    built otherwise encodes all tensor maps in every launch.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    inside = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
    launcher, metadata = inside.get("launcher"), inside.get("tensordesc_meta")
    known = make_tensordesc_arg.__code__.co_argcount in (2, 3)
    if launcher is None or not metadata or None in metadata or not known:
        return run, None
    direct = copy.copy(run)
    direct.launch = launcher
    return direct, metadata


def encode_tensor_map(tensor_map: Any, metadata: Any) -> list[Any]:
    """What Triton's launcher makes of a tensor map in every call: the map itself, its shape and strides.

    `triton.backends.nvidia.driver.make_tensordesc_arg`, used where `without_encoding` found the inner launcher. Since
    Triton 3.8 it has a third parameter, the launch's arguments, which only the encoder for AMD GPUs reads.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    unread = [None] * (make_tensordesc_arg.__code__.co_argcount - 2)
    arguments: list[Any] = make_tensordesc_arg(tensor_map, metadata, *unread)
    return arguments


# torch.compile
#
# Fusion needs the names that graphs are rewritten and compiled with; without one of them the backend fails when it is
# first used, and attention does not.

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


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """How often each was written to, as far as PyTorch counts that; 0 for inference tensors."""
    return tuple([0 if x.is_inference() else version_of(x) for x in tensors])


def entries_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's own children, parameters and buffers: public iterators leave out None and what comes twice."""
    return module._modules, module._parameters, module._buffers


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs before or after a module's forward or backward."""
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or backward)


@contextmanager
def without_hooks(model: nn.Module, keep: tuple[str, ...]) -> Iterator[None]:
    """Run no forward hooks of a model's modules in this block, but those defined in the packages `keep`.

    There is no public way to call a module without its hooks. Without this, the hooks of users see calls that they did
    not make.
    """
    changed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    try:
        for module in model.modules():
            for name in FORWARD_HOOKS:
                hooks = getattr(module, name)
                dropped = [number for number, hook in hooks.items() if _package_of(hook) not in keep]
                if dropped:
                    changed.append((hooks, dict(hooks)))
                    for number in dropped:
                        del hooks[number]
        yield
    finally:
        for hooks, before in changed:
            # Hooks registered in the block stay: transformers registers those that collect outputs in a first call.
            added = {number: hook for number, hook in hooks.items() if number not in before}
            hooks.clear()
            hooks.update(before | added)


def _package_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of functools.partial
    return str(getattr(function, "__module__", "")).partition(".")[0]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors by one kernel, after which a graph begins sooner than after copies of memory."""
    torch._foreach_copy_(list(targets), list(sources))


def end_failed_capture(pool: Any) -> None:
    """Tell the allocator that a capture of the current device is over, which PyTorch omits where a capture fails."""
    with suppress(RuntimeError, AttributeError):  # PyTorch did it, or has no such function
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
