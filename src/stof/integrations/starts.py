"""Compiled calls kept for later processes: they start without tracing the model, and without Inductor's front end.

With all caches filled, most of a start is Dynamo tracing the model's Python code, and Inductor preparing to look its
graph up. Of a call that ran as one graph, the file kept here has what is left when that is over: the compiled graph,
where its inputs are found, and what its results are made into. It serves a call for which everything is the same that
tracing met or could have met: the model with its attributes and configurations, and the code of its classes
(`stof.integrations.fingerprint`); the files of the code that was traced; what the global names in it stand for; each
value that Dynamo's guards looked at; arguments, options, what is known of the device, versions and settings. Else the
model is compiled.

Not compared: what Python code asks the outside world (files, the network, the clock), and results that were declared
constant (`torch.compiler.assume_constant_result`). Code that asks for environment variables is never kept.

Files hold pickles, as those of Inductor's own caches do, and lie in the same user's folder.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import logging
import os
import pickle
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from stof.fusion.ahead import hash_triton, settle_caches
from stof.fusion.store import source_digest
from stof.integrations.fingerprint import (
    Description,
    IndescribableError,
    Name,
    file_digest,
    files_of,
    name_text,
    names_of,
    shallow_text,
)
from stof.tuning.files import remembering, replace_whole_bytes
from stof.tuning.machine import device_name, package_version

if TYPE_CHECKING:
    from stof.fusion.report import FusionReport

VERSION = 1
# Files that stay; the oldest go.
MOST_KEPT = 64
# Seconds after which a file that is half written was given up.
_HALF_WRITTEN_S = 3600.0

_log = logging.getLogger(__name__)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

# Where an input is found: ("weight", name), ("arg", number) or ("kwarg", name); and a result: ("out", number) or, of a
# plain value, ("is", value).
Place = tuple[str, Any]


@dataclass(frozen=True)
class Start:
    """A file's content.

    Attributes:
        inputs: of the compiled graph.
        leaves, structure: what a call returns, and how that is put together.
        files, names: of the code that was traced (`files_of`, `names_of`).
        guards: what Dynamo looked at, as expressions, each with a hash of what it found.
        reports: of the graph.
        graph: the compiled graph, as PyTorch writes it.
    """

    inputs: tuple[Place, ...]
    leaves: tuple[Place, ...]
    structure: str
    files: dict[str, str]
    names: list[Name]
    guards: list[tuple[str, str]]
    reports: list[FusionReport]
    graph: bytes

    def differs(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What tracing would meet now that it did not meet then; "" for nothing."""
        for file, digest in self.files.items():
            if file_digest(file) != digest:
                return file
        for module, name, text in self.names:
            if name_text(module, name) != text:
                return f"{module}.{name}"
        scope = _scope(model, args, kwargs)
        return next((one for one, text in self.guards if _guarded(one, scope) != text), "")


class Starts:
    """A folder of starts, for one model and its options.

    Args:
        folder: created when something is written.
        model: as it is called; compiled with `options`.
        options: everything else that a compiled graph for a device depends on, as text.
        tell: called with the reports of a call that is not compiled anew.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        options: Callable[[torch.device], str],
        tell: Callable[[FusionReport], object] = lambda report: None,
    ) -> None:
        self._folder, self._model, self._options, self._tell = folder, model, options, tell

    def path(self, signature: Hashable, device: torch.device) -> tuple[Path, Description]:
        """The file for a call of this signature, and what was described for it.

        Raises:
            IndescribableError: another process would not know it again.
        """
        if nn.modules.module._has_any_global_hook():
            raise IndescribableError("hooks of all modules")
        said = Description()
        said.add(self._model)
        text = "\n".join((said.digest(), self._options(device), repr(signature), *_surroundings(device)))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.start", said

    def find(
        self, signature: Hashable, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Resumed | None:
        """A call kept by an earlier process; None if there is none that serves."""
        try:
            path, said = self.path(signature, device)
            start = _read(path)
            if start is None:
                return None
            if other := start.differs(self._model, args, kwargs):
                _log.info("compiled anew: %s is another", other)
                return None
            if device.type == "cuda":
                settle_caches()
                if (hashing := hash_triton()) is not None:
                    hashing.join()
            call = Resumed(start, said)
        except IndescribableError as reason:
            _log.debug("not looked up: %s", reason)
            return None
        except Exception:  # from PyTorch's loading, whatever it does not understand
            _log.info("a kept start cannot be used", exc_info=True)
            return None
        for report in start.reports:
            self._tell(replace(report, measurements=0, notes=[*report.notes, "as an earlier process compiled it"]))
        return call

    def keep(
        self,
        noted: Noted,
        signature: Hashable,
        device: torch.device,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        before: Description,
    ) -> None:
        """Write a call that was compiled just now, if it can be used by others; else say why in the log.

        Args:
            noted: while it ran.
            before: the model's description then.
        """
        try:
            path, said = self.path(signature, device)
            if not _same(said, before):
                raise IndescribableError("the call changed the model")
            start = noted.start(self._model, said.tensors, args, kwargs, out)
            content = pickle.dumps(start)
        except IndescribableError as reason:
            _log.info("not kept for later processes: %s", reason)
            return
        except Exception:  # from PyTorch's writing, or of a value that cannot be pickled
            _log.info("not kept for later processes", exc_info=True)
            return
        with remembering(path):
            replace_whole_bytes(path, hashlib.sha256(content).digest() + content)
            _prune(self._folder)

    def describe(self) -> Description | None:
        """The model as it is; None where another process would not know it again."""
        try:
            said = Description()
            said.add(self._model)
        except Exception as reason:  # of a model that is odd in whatever way
            _log.info("not kept for later processes: %s", reason)
            return None
        return said

    def still(self, found: Resumed) -> bool:
        """Whether the model is what it was when a call was found."""
        said = self.describe()
        return said is not None and _same(said, found.said)


def _same(one: Description, other: Description) -> bool:
    """Whether they are of the same model, with the same tensors in it."""
    if one.digest() != other.digest() or one.tensors.keys() != other.tensors.keys():
        return False
    return all(tensor is other.tensors[name] for name, tensor in one.tensors.items())


class Resumed:
    """A call of a compiled graph, without the Python code around it."""

    def __init__(self, start: Start, said: Description) -> None:
        self.said = said
        self._graph = load_graph(start.graph)
        self._inputs, self._leaves = start.inputs, start.leaves
        self._structure = pytree.treespec_loads(start.structure)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {"weight": self.said.tensors, "arg": args, "kwarg": kwargs}
        results: Sequence[Any] = self._graph(*(given[kind][name] for kind, name in self._inputs))
        leaves = [results[value] if kind == "out" else value for kind, value in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)


class Noted:
    """What is compiled while a call runs: filled by the backend (`note`, `reported`)."""

    def __init__(self) -> None:
        self.graphs: list[NotedGraph] = []
        self.reports: list[FusionReport] = []
        self._breaks = sum(counters["graph_break"].values())

    def start(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> Start:
        """The call that ran.

        Raises:
            IndescribableError: it was not one graph that was compiled just now and ran once, whose inputs are the
                model's and the call's tensors, and whose results are the call's.
        """
        if len(self.graphs) != 1:
            raise IndescribableError(f"{len(self.graphs)} graphs were compiled")
        graph = self.graphs[0]
        if graph.problem:
            raise IndescribableError(graph.problem)
        if graph.calls != 1:
            raise IndescribableError(f"its graph ran {graph.calls} times")
        if sum(counters["graph_break"].values()) != self._breaks:
            raise IndescribableError("it is not one graph")
        _check_whole(model, graph.code)
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len({id(tensor) for tensor in (*tensors.values(), *given)}) < len(tensors) + len(given):
            raise IndescribableError("a tensor is given twice")
        known: dict[int, Place] = {id(tensor): ("weight", name) for name, tensor in tensors.items()}
        known |= {id(value): ("arg", number) for number, value in enumerate(args) if isinstance(value, Tensor)}
        known |= {id(value): ("kwarg", name) for name, value in kwargs.items() if isinstance(value, Tensor)}
        inputs = [known.get(id(value)) for value in graph.inputs]
        places = tuple(place for place in inputs if place is not None)
        if len(places) < len(inputs):
            kinds = {type(v).__name__ for v, place in zip(graph.inputs, inputs, strict=True) if place is None}
            raise IndescribableError(f"its graph takes what is neither an argument nor the model's: {kinds}")
        numbers = {id(value): number for number, value in enumerate(graph.outputs) if isinstance(value, Tensor)}
        leaves, structure = pytree.tree_flatten(out)
        text = pytree.treespec_dumps(structure)
        if pytree.treespec_loads(text) != structure:
            raise IndescribableError("the structure of its result cannot be written")
        scope = _scope(model, args, kwargs)
        return Start(
            inputs=places,
            leaves=tuple(_leaf(leaf, numbers) for leaf in leaves),
            structure=text,
            files=files_of(graph.code),
            names=names_of(graph.code),
            guards=_guards(graph.guards, scope),
            reports=self.reports,
            graph=graph.written(),
        )


@dataclass
class NotedGraph:
    """A compiled graph that remembers its one call, until `forget`.

    Attributes:
        run: the compiled graph.
        code: what was traced for it.
        problem: why other processes cannot run it, "" if they can.
        guards: expressions that Dynamo looked at.
    """

    run: Callable[..., Any]
    code: list[Any]
    problem: str
    guards: list[str]
    calls: int = 0
    inputs: tuple[Any, ...] = ()
    outputs: Sequence[Any] = ()
    noting: bool = field(default=True, repr=False)

    def __call__(self, *args: Any) -> Any:
        out = self.run(*args)
        if self.noting:
            self.calls, self.inputs, self.outputs = self.calls + 1, args, out
        return out

    def forget(self) -> None:
        """Hold no tensors any longer."""
        self.noting, self.inputs, self.outputs, self.code = False, (), (), []

    def written(self) -> bytes:
        """The compiled graph as PyTorch writes it."""
        run = self.run
        while (winner := getattr(run, "winner", None)) is not None:  # of a race between versions
            run = winner
        if not hasattr(run, "serialize"):
            raise IndescribableError("PyTorch does not write its graph")
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable

        written: bytes = Serializable.serialize_compile_artifacts(Serializable(run))
        return written


def load_graph(written: bytes) -> Callable[..., Any]:
    """A compiled graph from what `NotedGraph.written` gave: called with its inputs, returns a sequence."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable

    loaded: Callable[..., Any] = Serializable.deserialize_compile_artifacts(written)
    return loaded


_noting = threading.local()


@contextmanager
def noting() -> Iterator[Noted]:
    """Note what this thread compiles."""
    before, noted = getattr(_noting, "noted", None), Noted()
    _noting.noted = noted
    try:
        yield noted
    finally:
        _noting.noted = before
        for graph in noted.graphs:
            graph.forget()


def note(gm: fx.GraphModule, run: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Compile a graph by `run()`, noted if somebody asked for that.

    Args:
        gm: what Dynamo traced, or what became of it.
    """
    noted: Noted | None = getattr(_noting, "noted", None)
    if noted is None:
        return run()
    try:
        problem = _not_portable(gm) or _effects()
        context = torch._guards.TracingContext.get()
        guards = sorted({_name(guard) for guard in context.guards_context.dynamo_guards})
        code = list(context.traced_code)
    except Exception:  # of a PyTorch that is another inside, or a backend that was called by somebody else
        _log.info("not kept for later processes", exc_info=True)
        problem, guards, code = "nothing is known of what was traced", [], []
    graph = NotedGraph(run(), code, problem, guards)
    noted.graphs.append(graph)
    return graph


def reported(report: FusionReport) -> None:
    """Note a report."""
    noted: Noted | None = getattr(_noting, "noted", None)
    if noted is not None:
        noted.reports.append(report)


def _not_portable(gm: fx.GraphModule) -> str:
    """What of a graph is this process's alone."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break:
        return "it is not one graph"
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            return "its graph holds values"
        if "triton_kernel_wrapper" in str(node.target):
            return "its graph holds a Triton kernel, whose source was not traced"
        texts = [argument for argument in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(argument, str)]
        if str(node.target).startswith("stof.masked_attention") and any(
            "<" in text or text.startswith("plan ") for text in texts
        ):
            return "its attention has a plan, or a mask made from a function or a tensor"
    return ""


def _effects() -> str:
    """What else the traced code does, "" for nothing that outlives the call."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    for value in effects.id_to_variable.values():
        existing = isinstance(value.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        if not existing or not effects.is_modified(value):
            continue
        # Arguments by keyword are a new dictionary in each call; transformers sets a variable for the call's duration.
        if _name(value.source) in ("L['args']", "L['kwargs']"):
            continue
        if getattr(value, "value_type", type(None)).__module__ != "transformers.utils.output_capturing":
            return f"the call changes {_name(value.source) or 'an object'}"
    return ""


def _name(source: Any) -> str:
    """The expression of a source or a guard; a method in torch 2.11, later a property."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


# Not of the outermost function: what Dynamo names after addresses, which classes of PyTorch are.
_OF_THIS_PROCESS = re.compile(r"G\['_\d+_c\d+'\]")


class _Globals(dict[str, Any]):
    """Global names of the outermost function, and those that Dynamo adds to reach other modules."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__import_"):
            return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]
        if name.startswith("__builtins_dict__"):
            return vars(builtins)
        raise KeyError(name)


def _outermost(model: nn.Module) -> types.FunctionType:
    """The function that tracing a model begins with."""
    forward = model.forward
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, types.FunctionType):
        raise IndescribableError("its forward is no function")
    return function


def _check_whole(model: nn.Module, code: Sequence[types.CodeType]) -> None:
    """Raise IndescribableError unless the model's forward was traced as a whole, with no hooks before and after it."""
    if not code or code[0] is not _outermost(model).__code__:
        raise IndescribableError("its graph is not of the model's whole forward")
    if any(one.co_name.startswith("torch_dynamo_resume_in_") for one in code):
        raise IndescribableError("it is not one graph")
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    if any(not (getattr(hook, "__module__", None) or "").startswith("stof.") for hook in hooks):
        raise IndescribableError("the model has hooks")


def _scope(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Where guards' expressions mean what they meant to Dynamo."""
    function = _outermost(model)
    for hook in model._forward_pre_hooks.values():  # ours, see `_check_whole`
        args, kwargs = hook(model, args, kwargs) or (args, kwargs)
    bound = inspect.Signature.from_callable(function, follow_wrapped=False).bind(model, *args, **kwargs)
    bound.apply_defaults()
    closed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    local = {name: cell.cell_contents for name, cell in closed} | dict(bound.arguments)
    return {"G": _Globals(function.__globals__), "L": local}


def _guards(expressions: Sequence[str], scope: dict[str, Any]) -> list[tuple[str, str]]:
    """Each expression with what it gives now.

    Raises:
        IndescribableError: one cannot be evaluated outside of Dynamo.
    """
    found = []
    for expression in expressions:
        if not expression or _OF_THIS_PROCESS.search(expression):
            continue
        text = _guarded(expression, scope)
        if text is None:
            raise IndescribableError(f"a guard on {expression}, which cannot be evaluated")
        if text:
            found.append((expression, text))
    return found


def _guarded(expression: str, scope: dict[str, Any]) -> str | None:
    """A hash of what an expression gives; "" for tensors and modules, which are described, None where it fails."""
    try:
        value = eval(expression, dict(scope))
    except Exception:
        return None
    return "" if isinstance(value, Tensor | nn.Module) else shallow_text(value)


def _leaf(leaf: Any, numbers: Mapping[int, int]) -> Place:
    if isinstance(leaf, Tensor):
        if id(leaf) not in numbers:
            raise IndescribableError("the call returns a tensor that its graph does not")
        return "out", numbers[id(leaf)]
    if not isinstance(leaf, _PLAIN):
        raise IndescribableError(f"the call returns a {type(leaf).__name__}")
    return "is", leaf


def _surroundings(device: torch.device) -> list[str]:
    """Versions and settings that compiled code depends on."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise IndescribableError("the process is one of several")
    packages = ("transformers", "triton", "tilelang")
    found = [str(VERSION), sys.version, torch.__version__, source_digest("..")]
    found += [str(package_version(name)) for name in packages]
    found += [device_name(device), str(device), os.environ.get("CUDA_VISIBLE_DEVICES", "")]
    if device.type == "cuda":
        kind = torch.cuda.get_device_properties(device)
        found.append(repr((kind.name, kind.major, kind.minor, kind.multi_processor_count, kind.total_memory)))
    settings = Description()
    for config in (torch._dynamo.config, inductor_config, functorch_config):
        settings.add(config.save_config_portable())
    found.append(settings.digest())
    backends = torch.backends.cuda
    found += [
        torch.get_float32_matmul_precision(),
        *(str(getattr(backends.matmul, name)) for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction")),
        str(torch.backends.cudnn.allow_tf32),
        str(backends.matmul.allow_bf16_reduced_precision_reduction),
        *(str(enabled()) for enabled in (backends.flash_sdp_enabled, backends.math_sdp_enabled)),
        *(str(enabled()) for enabled in (backends.mem_efficient_sdp_enabled, backends.cudnn_sdp_enabled)),
        str(torch.are_deterministic_algorithms_enabled()),
        str(torch.get_default_device()),
    ]
    return found


def _read(path: Path) -> Start | None:
    """A file's content; None where there is no file, or it is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        _log.info("%s is not whole and is ignored", path)
        return None
    start = pickle.loads(content[32:])
    return start if isinstance(start, Start) else None


def _prune(folder: Path) -> None:
    """Delete the oldest files, and what killed processes left half written; others may be doing the same."""
    ages: list[tuple[float, Path]] = []
    for file in folder.iterdir():
        with suppress(OSError):
            ages.append((time.time() - file.stat().st_mtime, file))
    starts = sorted((age, file) for age, file in ages if file.suffix == ".start")
    halves = [file for age, file in ages if file.suffix == ".part" and age > _HALF_WRITTEN_S]
    for file in [file for _, file in starts[MOST_KEPT:]] + halves:
        with suppress(OSError):
            file.unlink()
