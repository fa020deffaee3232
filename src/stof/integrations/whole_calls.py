"""Whole calls of a model as CUDA graphs, one for each combination of argument shapes: what `cuda_graphs="whole"` does.

A compiled model spends time on the host in every call, most of it on Dynamo's guards and the wrappers around its
graph, before anything is launched. With few tokens the GPU computes for about as long. Here the call is recorded from
outside all of that. What guards would have noticed is looked at directly, as far as it is quick: arguments, modes, and
where the weights lie.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Combinations of shapes that are kept; each holds its inputs and results, and all share the memory in between.
MOST_RECORDED = 32

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device)

Replay = Callable[[Sequence[Tensor]], Any]
Recorder = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Replay]


class WholeCalls:
    """A callable that runs the first call of each kind as it is, records the second as a CUDA graph, and replays it.

    Results are copies, so they stay valid after the next call. Calls are passed on unrecorded if an argument is neither
    a CUDA tensor nor None, a number, text, a dtype or a device; if gradients are recorded for an argument; in training
    mode; while another capture or compilation goes on; and if recording failed once, with a warning.

    Noticed between calls: other shapes, strides, dtypes and values of arguments; grad, inference and autocast mode;
    training mode of the model; parameters and buffers that were replaced or moved, with `frozen` also new values of
    them. Not noticed is what else changes the model's Python code: hooks, attributes, configurations.

    Args:
        call: the compiled model's call.
        module: whose parameters and buffers it reads.
        frozen: whether something computed from weights is kept, so that new values need a new recording.
        recorder: makes a recording; on a GPU `CudaRecorder`.
        device_type: of the tensors whose calls are recorded.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        *,
        frozen: bool = False,
        recorder: Recorder | None = None,
        device_type: str = "cuda",
    ) -> None:
        self._call, self._module = call, module
        self._weights = _Weights(module, frozen)
        self._recorder, self._device_type = recorder or CudaRecorder(), device_type
        self._met: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, Replay] = OrderedDict()
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        key, tensors = signature(args, kwargs, self._device_type)
        if key is None or self._module.training or torch.compiler.is_compiling() or _capturing(tensors[0]):
            return self._call(*args, **kwargs)
        with self._lock:
            if self._weights.changed():
                self._forget()
            replay = self._recorded.get(key)
            if replay is None and key in self._met:
                replay = self._second(key, args, kwargs)
            if replay is not None:
                self._recorded.move_to_end(key)
                return replay(tensors)
        out = self._call(*args, **kwargs)
        if key not in self._failed:
            if len(self._met) >= 8 * MOST_RECORDED:  # an argument that is different in every call
                self._met.clear()
            self._met.add(key)
        return out

    def _second(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replay | None:
        """A new recording; None, for good, if there cannot be one."""
        self._met.discard(key)
        if len(self._recorded) >= MOST_RECORDED:
            self._recorded.popitem(last=False)
        try:
            self._recorded[key] = self._recorder(self._call, args, kwargs)
        except Exception as error:  # whatever a model does that cannot be captured: it synchronises, copies, ...
            self._failed.add(key)
            reason = f"a call cannot be recorded as a CUDA graph and runs unrecorded: {error}"
            warnings.warn(reason, RuntimeWarning, stacklevel=4)
            return None
        return self._recorded[key]

    def _forget(self) -> None:
        self._recorded.clear()
        self._met.clear()
        self._failed.clear()


class CudaRecorder:
    """Records calls as CUDA graphs that share their memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.last: torch.cuda.Stream | None = None

    def __call__(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replay:
        """See `Recording`."""
        return Recording(self, call, args, kwargs)


class Recording:
    """A recorded call; called with new tensors it copies them in, replays, and returns copies of the results.

    Raises:
        RuntimeError: the call cannot be captured, writes to its arguments, or returns what cannot be copied.
    """

    def __init__(
        self, recorder: CudaRecorder, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        given = (*args, *kwargs.values())
        inputs = [_like(x) for x in given]
        named = dict(zip(kwargs, inputs[len(args) :], strict=True))
        self._recorder = recorder
        self._inputs = [_memory(x) for x in inputs if isinstance(x, Tensor)]
        self._device = self._inputs[0].device
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            recorder.pool = recorder.pool or torch.cuda.graph_pool_handle()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate workspaces for a stream on first use
                call(*inputs[: len(args)], **named)
            torch.cuda.synchronize()
            if not all(_same(new, old) for new, old in zip(inputs, given, strict=True)):
                raise RuntimeError("it writes to its arguments")
            # Other threads may go on using the GPU while this one captures.
            with torch.cuda.graph(self._graph, pool=recorder.pool, stream=side, capture_error_mode="thread_local"):
                out = call(*inputs[: len(args)], **named)
        self._leaves, self._spec = pytree.tree_flatten(out)
        for leaf in self._leaves:
            if not isinstance(leaf, (*_PLAIN, float, Tensor)):
                raise RuntimeError(f"it returns a {type(leaf).__name__}, whose tensors cannot be copied")
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                raise RuntimeError(f"it returns a tensor on {leaf.device}")

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._recorder.last not in (None, stream):  # which may still read what this replay writes
                stream.wait_stream(self._recorder.last)
            self._recorder.last = stream
            for kept, new in zip(self._inputs, tensors, strict=True):
                kept.copy_(_memory(new))
            self._graph.replay()
            leaves = [x.clone() if isinstance(x, Tensor) else x for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def signature(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> tuple[Hashable, list[Tensor]]:
    """What a recording depends on, and the tensors among the arguments; (None, []) for what cannot be recorded."""
    key: list[Hashable] = [len(args), *kwargs]
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor or type(value) is nn.Parameter:
            if value.device.type != device_type or value.requires_grad or value.layout is not torch.strided:
                return None, []
            key.append((value.shape, value.stride(), value.dtype, value.device, value.is_inference()))
            tensors.append(value)
        elif isinstance(value, float):
            key.append(value.hex())  # tells -0.0 from 0.0, and knows a NaN again
        elif isinstance(value, _PLAIN):
            key.append((type(value), value))
        else:
            return None, []
    if not tensors or any(x.device != tensors[0].device for x in tensors):
        return None, []
    key += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    if torch.is_autocast_enabled(device_type):
        key.append(torch.get_autocast_dtype(device_type))
    return tuple(key), tensors


class _Weights:
    """Where the parameters and buffers of a module lie, to see whether they are still there.

    They are looked up by name in their modules, so that one put in another's place is seen too.
    """

    def __init__(self, module: nn.Module, frozen: bool) -> None:
        self._module, self._frozen = module, frozen
        self._owners: list[Mapping[str, Tensor]] = []
        self._names: list[str] = []
        self._seen: tuple[int, ...] | None = None

    def changed(self) -> bool:
        """Whether they are others than in the call before; True for the first."""
        try:
            now = list(map(operator.getitem, self._owners, self._names))
            seen = tuple(map(Tensor.data_ptr, now))
        except (KeyError, TypeError):  # one is gone
            self._seen = None
        if self._seen is None:
            now = self._look()
            seen = tuple(map(Tensor.data_ptr, now))
        if self._frozen:
            seen += tuple(x._version for x in now if not x.is_inference())
        changed, self._seen = seen != self._seen, seen
        return changed

    def _look(self) -> list[Tensor]:
        self._owners, self._names = [], []
        for part in self._module.modules():
            for owner in (part._parameters, part._buffers):
                for name in (name for name, value in owner.items() if value is not None):
                    self._owners.append(owner)  # type: ignore[arg-type]
                    self._names.append(name)
        return list(map(operator.getitem, self._owners, self._names))


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _like(value: Any) -> Any:
    """A tensor's copy with its strides, an inference tensor if it is one; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(value.is_inference()):
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        _memory(new).copy_(_memory(value))
    return new


def _memory(x: Tensor) -> Tensor:
    """A view of every element that lies in memory once: an expanded tensor's before it was expanded."""
    if 0 not in x.stride():
        return x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _same(new: Any, old: Any) -> bool:
    """Whether two tensors have the same bits; anything else is not looked at."""
    if not isinstance(new, Tensor):
        return True
    a, b = (_memory(x).contiguous().flatten().view(torch.uint8) for x in (new, old))
    return torch.equal(a, b)
