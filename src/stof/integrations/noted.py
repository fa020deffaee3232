"""What is compiled while a call runs: the graph with its one call, what was traced for it, and what guards look at.

`stof.integrations.starts` keeps that for later processes. The backend tells it here, as it compiles (`note`,
`reported`), if the thread has asked for it (`noting`).
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from stof.integrations.code_text import IndescribableError

if TYPE_CHECKING:
    from stof.fusion.report import FusionReport

_log = logging.getLogger(__name__)


class Noted:
    """What is compiled while a call runs: filled by the backend (`note`, `reported`)."""

    def __init__(self) -> None:
        self.graphs: list[NotedGraph] = []
        self.reports: list[FusionReport] = []
        self._breaks = sum(counters["graph_break"].values())

    def whole(self) -> NotedGraph:
        """The one graph that ran.

        Raises:
            IndescribableError: there is none, or another process cannot run it.
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
        return graph


@dataclass
class NotedGraph:
    """A compiled graph that remembers its one call, until `forget`.

    Attributes:
        run: the compiled graph.
        code: what was traced for it.
        problem: why other processes cannot run it, "" if they can.
        guards: expressions that Dynamo looked at.
        masks: keys of those that its attention has.
    """

    run: Callable[..., Any]
    code: list[Any]
    problem: str
    guards: list[str]
    masks: set[str] = field(default_factory=set)
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

        from stof.integrations.kept_graph import lighten

        entry, *kernels = pickle.loads(Serializable.serialize_compile_artifacts(Serializable(run)))
        lighten(entry)
        return pickle.dumps((entry, *kernels))


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
        guards = sorted({_looked_at(guard) for guard in context.guards_context.dynamo_guards})
        code = list(context.traced_code)
    except Exception:  # of a PyTorch that is another inside, or a backend that was called by somebody else
        _log.info("not kept for later processes", exc_info=True)
        problem, guards, code = "nothing is known of what was traced", [], []
    graph = NotedGraph(run(), code, problem, guards, {text for node in gm.graph.nodes for text in _masks_of(node)})
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
        if any("<" in text for text in _masks_of(node)):
            return "its attention has a plan, or a mask that changes or is made from a function or a tensor"
    return ""


def _masks_of(node: fx.Node) -> list[str]:
    """The key of an attention operator's mask, or what stands in its place, among other text."""
    if not str(node.target).startswith("stof.masked_attention"):
        return []
    return [argument for argument in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(argument, str)]


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


def _looked_at(guard: Any) -> str:
    """The expression that a guard looks at; of one that asks whether there is an attribute, with the attribute."""
    name, attribute = _name(guard), getattr(guard.create_fn, "keywords", {}).get("attr")
    if not name or attribute is None:
        return name
    if not attribute.isidentifier():
        raise ValueError(f"a guard on an attribute {attribute!r} of {name}")
    return f"{name}.{attribute}"


def _name(source: Any) -> str:
    """The expression of a source or a guard; a method in torch 2.11, later a property."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)
