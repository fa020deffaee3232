"""Compiled calls kept for later processes: they start without tracing the model, and without Inductor's front end.

With all caches filled, most of a start is Dynamo tracing the model's Python code, and Inductor preparing to look its
graph up. Of a call that ran as one graph, the file kept here has what is left when that is over: the compiled graph,
where its inputs are found, and what its results are made into. It serves a call for which everything is the same that
tracing met or could have met: the model with its attributes and configurations, and the code of its classes
(`stof.integrations.fingerprint`); the files of the code that was traced, and what the global names in it stand for
(`stof.integrations.traced`); each value that Dynamo's guards looked at (`stof.integrations.guards`); arguments,
options, what is known of the device, versions and settings. Else the model is compiled.

Not compared: what Python code asks the outside world (files, the network, the clock), and results that were declared
constant (`torch.compiler.assume_constant_result`). Code that asks for environment variables is never kept.

Files hold pickles, as those of Inductor's own caches do, and lie in the same user's folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stof.files import remembering, write_atomically
from stof.fusion.ahead import hash_triton, settle_caches
from stof.fusion.store import source_digest
from stof.integrations.code_text import IndescribableError
from stof.integrations.fingerprint import Description
from stof.integrations.guards import Guard, check_whole, guards_of, scope_of
from stof.integrations.noted import Noted, load_graph
from stof.integrations.traced import Looks, Name, file_digest, files_of, name_text, names_of
from stof.plans import Decisions, decide_ahead, decisions_of
from stof.tuning.machine import device_name, package_version

if TYPE_CHECKING:
    from stof.fusion.report import FusionReport

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
        guards: what Dynamo looked at, with hashes of what it found.
        reports: of the graph.
        decisions: how its attention ran.
        graph: the compiled graph, as PyTorch writes it.
    """

    inputs: tuple[Place, ...]
    leaves: tuple[Place, ...]
    structure: str
    files: dict[str, str]
    names: list[Name]
    guards: list[Guard]
    reports: list[FusionReport]
    decisions: dict[Hashable, Decisions]
    graph: bytes

    def differs(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What tracing would meet now that it did not meet then; "" for nothing."""
        for file, digest in self.files.items():
            if file_digest(file) != digest:
                return file
        looks = Looks()
        for module, name, text in self.names:
            if name_text(module, name, looks) != text:
                return f"{module}.{name}"
        scope = scope_of(model, args, kwargs)
        return next((said for guard in self.guards if (said := guard.other(scope, looks))), "")


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

    def _path(self, said: Description, signature: Hashable, device: torch.device) -> Path:
        """The file for a call of this signature.

        Raises:
            IndescribableError: another process would not know it again.
        """
        text = "\n".join((said.digest(), self._options(device), repr(signature), *_surroundings(device)))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.start"

    def find(
        self,
        said: Description,
        signature: Hashable,
        device: torch.device,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Resumed | None:
        """A call kept by an earlier process; None if there is none that serves.

        Args:
            said: the model's description now.
        """
        try:
            start = _read(self._path(said, signature, device))
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
            decide_ahead(start.decisions)
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
        said = self.describe()
        if said is None:
            return
        try:
            path = self._path(said, signature, device)
            if not _same(said, before):
                raise IndescribableError("the call changed the model")
            start = _start_of(noted, self._model, said.tensors, args, kwargs, out)
            content = pickle.dumps(start)
        except IndescribableError as reason:
            _log.info("not kept for later processes: %s", reason)
            return
        except Exception:  # from PyTorch's writing, or of a value that cannot be pickled
            _log.info("not kept for later processes", exc_info=True)
            return
        with remembering(path):
            write_atomically(path, hashlib.sha256(content).digest() + content)
            _prune(self._folder)

    def describe(self) -> Description | None:
        """The model as it is; None where another process would not know it again."""
        try:
            if nn.modules.module._has_any_global_hook():
                raise IndescribableError("hooks of all modules")
            if torch._dynamo.eval_frame._stance.stance != "default":
                raise IndescribableError("torch.compile has been told to do otherwise (torch.compiler.set_stance)")
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


def _start_of(
    noted: Noted,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
) -> Start:
    """The call that ran.

    Raises:
        IndescribableError: it was not one graph of the model's whole forward, whose inputs are the model's and the
            call's tensors, and whose results are the call's.
    """
    graph = noted.whole()
    check_whole(model, graph.code)
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
    looks = Looks()
    names = names_of(graph.code, looks)
    own = {id(part) for part in model.modules()}.union(known)
    return Start(
        inputs=places,
        leaves=tuple(_leaf(leaf, numbers) for leaf in leaves),
        structure=text,
        files=files_of(graph.code),
        names=names,
        guards=guards_of(graph.guards, scope_of(model, args, kwargs), own, looks),
        reports=noted.reports,
        decisions=decisions_of(graph.masks),
        graph=graph.written(),
    )


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
    found = [sys.version, torch.__version__, source_digest("..")]
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
