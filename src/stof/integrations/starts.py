"""Compiled calls kept for later processes: they start without tracing the model, and without Inductor's front end.

With all caches filled, most of a start is Dynamo tracing the model's Python code and Inductor preparing to look its
graph up. Of a call that ran as one graph, the file kept here has what is left when that is over: the compiled graph,
where its inputs are found, and what its results are made into. It serves a call for which everything is the same that
tracing could have met (`stof.integrations.fingerprint`): the model with its attributes and configurations, its code and
the code it calls, arguments, options, what is known of the device, versions and settings. Else the model is compiled.

Files hold pickles, as those of Inductor's own caches do, and lie in the same user's folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
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
        reports: of the graph.
        graph: the compiled graph, as PyTorch writes it.
    """

    inputs: tuple[Place, ...]
    leaves: tuple[Place, ...]
    structure: str
    files: dict[str, str]
    names: list[Name]
    reports: list[FusionReport]
    graph: bytes

    def holds(self) -> bool:
        """Whether the code that was traced is what would be traced now."""
        return all(file_digest(name) == digest for name, digest in self.files.items()) and all(
            name_text(module, name) == text for module, name, text in self.names
        )


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

    def find(self, signature: Hashable, device: torch.device) -> Callable[..., Any] | None:
        """A call kept by an earlier process; None if there is none that serves."""
        try:
            path, said = self.path(signature, device)
            start = _read(path)
            if start is None or not start.holds():
                return None
            if device.type == "cuda":
                settle_caches()
                if (hashing := hash_triton()) is not None:
                    hashing.join()
            call = _Resumed(start, said.tensors)
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
        before: str,
    ) -> None:
        """Write a call that was compiled just now, if it can be used by others; else say why in the log.

        Args:
            noted: while it ran.
            before: the model's description then.
        """
        try:
            path, said = self.path(signature, device)
            if said.digest() != before:
                raise IndescribableError("the call changed the model")
            start = noted.start(said.tensors, args, kwargs, out)
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

    def describe(self) -> str | None:
        """The model as it is; None where another process would not know it again."""
        try:
            said = Description()
            said.add(self._model)
        except IndescribableError as reason:
            _log.info("not kept for later processes: %s", reason)
            return None
        return said.digest()


class _Resumed:
    """A call of a compiled graph, without the Python code around it."""

    def __init__(self, start: Start, tensors: Mapping[str, Tensor]) -> None:
        self._start, self._graph = start, load_graph(start.graph)
        self._structure = pytree.treespec_loads(start.structure)
        self._weights = {name: tensors[name] for kind, name in start.inputs if kind == "weight"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {"weight": self._weights, "arg": args, "kwarg": kwargs}
        results: Sequence[Any] = self._graph(*(given[kind][name] for kind, name in self._start.inputs))
        leaves = [results[value] if kind == "out" else value for kind, value in self._start.leaves]
        return pytree.tree_unflatten(leaves, self._structure)


class Noted:
    """What is compiled while a call runs: filled by the backend (`note`, `reported`)."""

    def __init__(self) -> None:
        self.graphs: list[NotedGraph] = []
        self.reports: list[FusionReport] = []

    def start(self, tensors: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Start:
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
        return Start(
            inputs=places,
            leaves=tuple(_leaf(leaf, numbers) for leaf in leaves),
            structure=pytree.treespec_dumps(structure),
            files=files_of(graph.code),
            names=names_of(graph.code),
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
    """

    run: Callable[..., Any]
    code: list[Any]
    problem: str
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
    problem, code = _not_portable(gm), list(torch._guards.TracingContext.get_traced_code() or ())
    graph = NotedGraph(run(), code, problem if code else "nothing is known of the code that was traced")
    noted.graphs.append(graph)
    return graph


def reported(report: FusionReport) -> None:
    """Note a report."""
    noted: Noted | None = getattr(_noting, "noted", None)
    if noted is not None:
        noted.reports.append(report)


def _not_portable(gm: fx.GraphModule) -> str:
    """What of a graph is this process's alone."""
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            return "its graph holds values"
        texts = [argument for argument in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(argument, str)]
        if str(node.target).startswith("stof.masked_attention") and any(
            "<" in text or text.startswith("plan ") for text in texts
        ):
            return "its attention has a plan, or a mask made from a function or a tensor"
    return ""


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

    packages = ("transformers", "triton", "tilelang")
    found = [torch.__version__, *(str(package_version(name)) for name in packages), source_digest(".."), str(VERSION)]
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
