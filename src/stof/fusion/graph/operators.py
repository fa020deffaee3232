"""A model's operators, as segments are made of them: kinds, classes and what each one reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from stof.fusion.graph.nodes import fake_value, op_name
from stof.fusion.graph.symbolic_shapes import Values, size_hint


class Kind(str, Enum):
    """What an operator is, whatever its spelling in the graph."""

    LINEAR = "linear"
    ATTENTION = "attention"
    MATMUL = "matmul"
    RMS_NORM = "rms_norm"
    LAYER_NORM = "layer_norm"
    ACTIVATION = "activation"
    GATE = "gate"
    ROTARY = "rotary"
    RESIDUAL = "residual"
    OTHER = "other"

    @property
    def compute_intensive(self) -> bool:
        """The paper's CI class (GEMMs inside); everything else is MI, bound by memory."""
        return self in (Kind.LINEAR, Kind.ATTENTION, Kind.MATMUL)

    def __str__(self) -> str:
        return self.value


# Names as `op_name` returns them.
ATTENTION_OPERATORS = ("stof.masked_attention", "stof.varying_attention")
# Segments of at most so many operators are described operator by operator.
_FEW = 4
NORMS = {Kind.RMS_NORM: "rms", Kind.LAYER_NORM: "layer"}


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator of the normalized graph.

    Attributes:
        kind: what it is.
        root: the node that holds its value.
        nodes: `root` and the nodes whose values serve it alone, in graph order.
        inputs: the nodes it reads data from: LINEAR x; norms x; ACTIVATION x; GATE (gate, up), both before the
            activation; RESIDUAL (a, b); ROTARY x; others whatever they read.
        weight: LINEAR `[N, K]` (or `[K, N]` when `transposed`); norms `[N]` or None.
        bias: `[N]` or None.
        transposed: the weight is stored as `[K, N]`.
        activation: of ACTIVATION and GATE: "gelu", "gelu_tanh", "relu" or "silu".
        eps: of norms.
        foldable: of norms: whether the weight may be folded into the GEMM that follows.
    """

    kind: Kind
    root: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    transposed: bool = False
    activation: str = "none"
    eps: float = 0.0
    foldable: bool = False

    @property
    def value(self) -> Tensor:
        """The fake tensor of the operator's result."""
        value = fake_value(self.root)
        if value is None:  # an operator with several results counts by its first tensor
            value = next(v for v in self.root.meta["example_value"] if isinstance(v, Tensor))
        return value

    @property
    def label(self) -> str:
        """Short text for people: `linear 768>3072`, `gelu`, `rms_norm`; what is of no known kind by its function."""
        if self.kind is Kind.LINEAR:
            n, k = self.weight_size
            return f"linear {k}>{n}"
        if self.kind is Kind.ACTIVATION:
            return self.activation
        if self.kind is Kind.OTHER:
            return op_name(self.root) or _full_name(self.root.target).rpartition(".")[2]
        return f"{self.activation} gate" if self.kind is Kind.GATE else self.kind.value

    @property
    def is_stof_attention(self) -> bool:
        """Whether stof's attention computes it, which is a kernel of its own in any graph."""
        return self.kind is Kind.ATTENTION and op_name(self.root).startswith("stof.")

    @property
    def weight_size(self) -> tuple[int, int]:
        """`(N, K)` of a LINEAR."""
        weight = fake_value(self.weight)
        assert weight is not None
        rows, columns = weight.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def signature(self, at: Values | None = None) -> tuple[Any, ...]:
        """Equal, in any process, for operators that compute the same function on tensors of equal shapes and dtypes.

        Symbolic sizes count at the values of `at`, else at those of the call that is being compiled.
        """
        shapes = tuple(_form(node, at) for node in (*self.inputs, self.weight, self.bias))
        options: tuple[Any, ...] = (self.kind.value, self.activation, self.eps, self.transposed)
        if self.kind is Kind.OTHER:
            options += (op_name(self.root) or _full_name(self.root.target),)
        return (*options, shapes, _form(self.root, at))


def in_words(operators: Sequence[Operator]) -> str:
    """Operators for people, `linear 768>3072 + gelu`; many, or of no known kind, `9 operators: residual x 2, gelu`."""
    known = [operator.label for operator in operators if operator.kind is not Kind.OTHER]
    if len(operators) == 1 or len(operators) == len(known) <= _FEW:
        return " + ".join(operator.label for operator in operators)
    names = Counter(known or (operator.label for operator in operators))
    listed = [f"{name} x {count}" if count > 1 else name for name, count in names.items()]
    more = ", ..." if len(listed) > _FEW else ""
    return f"{len(operators)} operators: {', '.join(listed[:_FEW])}{more}"


def _full_name(target: Any) -> str:
    """A function that `op_name` does not know: its `str` would hold an address, another one in every process."""
    named = hasattr(target, "__module__") and hasattr(target, "__qualname__")
    return f"{target.__module__}.{target.__qualname__}" if named else str(target)


def _form(node: fx.Node | None, at: Values | None) -> str:
    if node is None:
        return "-"
    value = fake_value(node)
    if value is None:
        return "?"
    sizes = [size_hint(size, at) for size in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')}{sizes}@{value.device.type}"
