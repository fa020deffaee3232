"""Whole-model CUDA graphs, one for each combination of argument shapes: `cuda_graphs="whole"`.

In every call, a compiled model spends host time on Dynamo's guards and on the wrappers around its graph before it
launches anything. With few tokens that takes about as long as the GPU computes. Here the model's call is captured as a
whole, guards and wrappers included, so a replay skips them. The runner itself compares what the guards would have
checked, as far as that is quick: arguments, modes, attributes of modules, masks, and the addresses of weights.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stof.errors import UnsupportedError
from stof.integrations.torch.module_state import Attributes, Weights
from stof.masks import Mask
from stof.plans.replaced_masks import ReplacedMask, replacing
from stof.plans.used_masks import UsedMask, noting_masks
from stof.runtime.autocast import no_autocast_cache
from stof.runtime.locks import ForkSafeLock
from stof.runtime.memory import record_streams
from stof.runtime.private import copy_all, is_intercepted, pytree, raw_stream, versions_of
from stof.tuning.capture import captured

# Most graphs kept. Each has buffers for its inputs and results; all share the memory of intermediate tensors.
MOST_RECORDED = 32

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device)

# With the tensors of a call, and what to run before the graph on its stream, if anything.
Replay = Callable[..., Any]
Recorder = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Replay]


class CudaGraphRunner:
    """A callable that runs the first call of each kind as it is, records the second as a CUDA graph, and replays it.

    Results are copies, so they stay valid after the next call. Calls are passed on unrecorded if an argument is neither
    a CUDA tensor nor None, a number, text, a dtype or a device; if gradients are recorded for an argument or a result;
    in training mode; while another capture or compilation goes on, or a transformation (`torch.func`) or a dispatch
    mode is active; if the call before, unrecorded, wrote to a parameter or a buffer, which recording would do twice;
    and if recording failed once, with a warning.

    The cache key covers shapes, strides, dtypes and values of arguments; grad, inference and autocast mode, default
    dtype and deterministic algorithms. A change of these discards all recordings: training mode of the model and its
    modules; modules, parameters and buffers that were replaced, added, removed or moved (with `folded_weights` also
    their values, but not through `.data`); other attributes of modules, such as sparse masks, configurations and
    forward hooks (`Attributes`); values of a tensor that is a mask. Neither the key nor these checks cover global names
    and closures that the model's Python code reads, nor objects nested inside attributes.

    Args:
        call: the compiled model's call.
        module: whose parameters and buffers it reads.
        folded_weights: whether something computed from weights is kept, so that new values need a new recording.
        recorder: makes a recording; on a GPU `CudaRecorder`.
        device_type: of the tensors whose calls are recorded.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        *,
        folded_weights: bool = False,
        recorder: Recorder | None = None,
        device_type: str = "cuda",
    ) -> None:
        self._call, self._module = call, module
        self._weights, self._attributes = Weights(module, folded_weights), Attributes(module)
        self._recorder, self._device_type = recorder or CudaRecorder(), device_type
        self._seen: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._lock = ForkSafeLock(reentrant=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        return self._run(None, args, kwargs)

    def call_with_mask(self, mask: Mask, **kwargs: Any) -> Any:
        """The result of `call(mask=mask, **kwargs)`, whose attention is under documents that differ from call to call.

        Each replay fills the lists of its mask; see `replaced_masks`.
        """
        return self._run(mask, (), kwargs)

    def _run(self, mask: Mask | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, tensors = signature(args, kwargs, self._device_type)
        call = self._call if mask is None else partial(self._call, mask=mask)
        if key is None or self._module.training or torch.compiler.is_compiling() or _capturing(tensors[0]):
            return call(*args, **kwargs)
        key = mask is None, key
        with self._lock:
            recorded = self._recorded.get(key)
            # The replay starts before the comparison, so that the host compares weights while the GPU computes. Memory
            # that it reads stays allocated, and its result is dropped if anything changed.
            out = None if recorded is None else recorded.replayed(mask, tensors)
            changed = self._changed(recorded)
            mask_is_filled = recorded is None or recorded.mask_is_filled()
            if changed:
                self._forget()
            elif recorded is not None:
                self._recorded.move_to_end(key)
                if mask_is_filled:
                    return out
                # The lists cannot hold this mask: the call runs unrecorded, under a plan of its mask.
            elif key in self._seen and (recorded := self._record(key, call, mask, args, kwargs)) is not None:
                out = recorded.replayed(mask, tensors)
                if recorded.mask_is_filled():
                    return out
        versions = self._weights.versions()
        out = call(*args, **kwargs)
        if key not in self._failed and versions == self._weights.versions() and not _records_gradients(out):
            if len(self._seen) >= 8 * MOST_RECORDED:  # some argument differs in every call
                self._seen.clear()
            self._seen.add(key)
        return out

    def _changed(self, recorded: _Recorded | None) -> bool:
        """Whether the model is another than in the call before, or a mask than when it was recorded."""
        weights, attributes = self._weights.changed(), self._attributes.changed()
        masks = () if recorded is None else recorded.masks
        return weights or attributes or any(mask.frozen() != then for mask, then in masks)

    def _record(
        self, key: Hashable, call: Callable[..., Any], mask: Mask | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Recorded | None:
        """A new recording; None, for good, if there cannot be one."""
        self._seen.discard(key)
        if len(self._recorded) >= MOST_RECORDED:
            if self._device_type == "cuda":
                torch.cuda.synchronize()  # it may be running
            self._recorded.popitem(last=False)
        try:
            changing = nullcontext() if mask is None else replacing(mask)
            with no_autocast_cache(), noting_masks() as masks, changing as replaced:
                recorded = _Recorded(self._recorder(_filling(replaced, call), args, kwargs), masks, replaced)
            if not recorded.mask_is_filled():
                raise UnsupportedError("a key that no query sees comes before seen ones", {})
        except Exception as error:  # whatever a model does that cannot be captured: it synchronises, copies, ...
            self._failed.add(key)
            reason = f"a call cannot be recorded as a CUDA graph and runs unrecorded: {error}"
            warnings.warn(reason, RuntimeWarning, stacklevel=5)
            return None
        self._recorded[key] = recorded
        return recorded

    def _forget(self) -> None:
        if self._recorded and self._device_type == "cuda":
            torch.cuda.synchronize()  # one of them may be running
        self._recorded.clear()
        self._seen.clear()
        self._failed.clear()


class _Recorded(NamedTuple):
    """A recorded call.

    Attributes:
        replay: runs it.
        masks: the masks that may change under which it was recorded.
        replaced: the mask that changes between replays, if there is one.
    """

    replay: Replay
    masks: list[UsedMask]
    replaced: ReplacedMask | None

    def replayed(self, mask: Mask | None, tensors: Sequence[Tensor]) -> Any:
        """The result with these tensors, under this mask where it is replaced."""
        if self.replaced is None or mask is None:
            return self.replay(tensors)
        return self.replay(tensors, partial(self.replaced.take, mask))

    def mask_is_filled(self) -> bool:
        """Whether the last replay, or the recording, was under the mask that was given."""
        return self.replaced is None or self.replaced.holds_mask()


def _filling(replaced: ReplacedMask | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, after the lists are filled for the mask that was taken."""
    if replaced is None:
        return call

    def filled_call(*args: Any, **kwargs: Any) -> Any:
        replaced.fill()
        return call(*args, **kwargs)

    return filled_call


class CudaRecorder:
    """Records calls as CUDA graphs that share their memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.alive: weakref.WeakSet[Recording] = weakref.WeakSet()
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
        self._streams: set[int] = set()
        with torch.cuda.device(self._device):
            if recorder.pool is None or not recorder.alive:  # PyTorch refuses a pool whose last graph was freed
                recorder.pool = torch.cuda.graph_pool_handle()
            # Every replay copies this way: a dtype without a copy kernel fails here, before anything is recorded.
            _copy_in(self._inputs, [x for x in given if isinstance(x, Tensor)])
            versions = versions_of(self._inputs)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate workspaces for a stream on first use
                call(*inputs[: len(args)], **named)
            torch.cuda.synchronize()
            same = all(_same(new, old) for new, old in zip(inputs, given, strict=True))
            if not same or versions != versions_of(self._inputs):  # versions also show writes of equal values
                raise RuntimeError("it writes to its arguments")
            try:
                self._graph, out = captured(lambda: call(*inputs[: len(args)], **named), side, recorder.pool)
            except BaseException:
                recorder.pool = None  # a failed capture may leave allocations in it
                raise
        recorder.alive.add(self)
        self._leaves, self._spec = pytree.tree_flatten(out)
        for leaf in self._leaves:
            if not isinstance(leaf, (*_PLAIN, float, Tensor)):
                raise RuntimeError(f"it returns a {type(leaf).__name__}, whose tensors cannot be copied")
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                raise RuntimeError(f"it returns a tensor on {leaf.device}")

    def __call__(self, tensors: Sequence[Tensor], prepare: Callable[[], object] | None = None) -> Any:
        # Host time before the replay is GPU idle time: set the device only if it is another.
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self._replayed(tensors, prepare)
        return self._replayed(tensors, prepare)

    def _replayed(self, tensors: Sequence[Tensor], prepare: Callable[[], object] | None) -> Any:
        index, last = self._device.index, self._recorder.last
        now = index, raw_stream(index)
        if last is None or now != (last.device_index, last.cuda_stream):
            stream = torch.cuda.current_stream()
            if last is not None:  # it may still read what this replay writes
                stream.wait_stream(last)
            self._recorder.last = stream
        if now[1] not in self._streams:
            record_streams(self._inputs, self._device, self._streams)
        _copy_in(self._inputs, tensors)
        if prepare is not None:
            prepare()
        self._graph.replay()
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def signature(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> tuple[Hashable, list[Tensor]]:
    """What a recording depends on, and the tensors among the arguments; (None, []) for what cannot be recorded."""
    if is_intercepted():
        return None, []
    key: list[Hashable] = [len(args), *kwargs]
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor or type(value) is nn.Parameter:
            strided = value.layout is torch.strided and not value.is_nested
            if value.device.type != device_type or value.requires_grad or not strided:
                return None, []
            key.append((value.shape, value.stride(), value.dtype, value.device, value.is_inference()))
            tensors.append(value)
        elif isinstance(value, float):
            key.append(value.hex())  # distinguishes -0.0 from 0.0, and NaN equals NaN
        elif isinstance(value, _PLAIN):
            key.append((type(value), value))
        else:
            return None, []
    if not tensors or any(x.device != tensors[0].device for x in tensors):
        return None, []
    key += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    key += [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
    if torch.is_autocast_enabled(device_type):
        key.append(torch.get_autocast_dtype(device_type))
    return tuple(key), tensors


def _records_gradients(out: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(out))


def _copy_in(kept: list[Tensor], tensors: Sequence[Tensor]) -> None:
    with torch.inference_mode():  # among them may be inference tensors, which cannot be written to outside
        copy_all(kept, [_memory(x) for x in tensors])


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
