"""Packing weights: linear layers that read the same tensor keep their weights one after the other in one memory.

One GEMM for query, key and value, and one for gate and up projection, needs their weights side by side. A graph that is
being compiled cannot move them, so this is done before, in place: layers and their parameters stay the objects that
they are, and only the memory of these parameters changes. `passes.horizontal_fusion` finds the packed ones in a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stof.runtime.private import entries_of, has_hooks

# Attributes of one module that are likely to read the same tensor, in the order in which rows are packed: gate before
# up, as the template wants them. A wrong guess costs nothing: only GEMMs that do read the same tensor are merged.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
)

_PLAIN_ATTRIBUTES = frozenset(vars(nn.Module()))
# Memory made by `pack_weights`.
_packed: set[StorageWeakRef] = set()


@dataclass
class Packing:
    """What `pack_weights` did: groups packed, and for the others why not. Names as in `model.named_modules()`."""

    packed: list[tuple[str, ...]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PackedMemory:
    """How contiguous tensors lie one after the other in one memory.

    Attributes:
        shape, stride: of one tensor over all of them.
        offsets: where each begins, in bytes after the first.
        nbytes: of all.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: list[int]
    nbytes: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], itemsize: int) -> PackedMemory:
        """For tensors of these shapes, which differ in the first dimension alone."""
        row = tuple(shapes[0][1:])
        stride = tuple(prod(row[dim:]) for dim in range(len(row) + 1))
        ends = list(accumulate(prod(shape) * itemsize for shape in shapes))
        return cls((sum(shape[0] for shape in shapes), *row), stride, [0, *ends[:-1]], ends[-1])

    def view(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return one tensor over the memory of all parts; None where they do not lie one after the other."""
        first = parts[0].data_ptr()
        if [part.data_ptr() - first for part in parts] != self.offsets:
            return None
        memory = parts[0].untyped_storage()
        if first + self.nbytes > memory.data_ptr() + memory.nbytes():  # neighbours, each in memory of its own
            return None
        return parts[0].as_strided(self.shape, self.stride)


def pack_weights(model: nn.Module) -> Packing:
    """Pack the weights of neighbouring linear layers of `model`, in place; see `Packing` for what was skipped.

    Layers, parameters and state dicts stay as they are; copies and moves (`.to`, `copy.deepcopy`) of the parameters
    lie apart again. Left alone are weights that share memory with others (tied), that are no plain tensors (quantized)
    or have no memory (offloaded), and layers that are not plain `nn.Linear`: with hooks, parametrizations, or a
    `forward` of their own.

    Examples:
        >>> from stof.integrations.torch import pack_weights
        >>> names = ("q_proj", "k_proj", "v_proj")
        >>> attention = nn.ModuleDict({name: nn.Linear(16, 16) for name in names})
        >>> pack_weights(attention).packed
        [('q_proj', 'k_proj', 'v_proj')]
    """
    # Tensors of one memory, and a layer that several modules hold, count for each.
    children = (child for module in model.modules() for child in entries_of(module)[0].values())
    holders = [model, *(child for child in children if child is not None)]
    tensors = (x for module in holders for entries in entries_of(module)[1:] for x in entries.values())
    uses = Counter(memory for x in tensors if (memory := _memory(x)) is not None)
    done = Packing()
    _packed.difference_update([memory for memory in _packed if memory.expired()])
    for names, layers in _groups(model):
        if _are_packed(layers):
            continue
        reason = _unpackable(layers, uses)
        if reason:
            done.skipped.append(f"{', '.join(names)}: {reason}")
            continue
        for parameters in _parameters(layers):
            with torch.inference_mode(parameters[0].is_inference()), torch.no_grad():
                packed = torch.cat([parameter.data for parameter in parameters])
            _packed.add(StorageWeakRef(packed.untyped_storage()))
            for parameter, rows in zip(parameters, packed.split([len(one) for one in parameters]), strict=True):
                parameter.data = rows
        done.packed.append(names)
    return done


def unpack_weights(model: nn.Module) -> int:
    """Give the weights of each packed layer of `model` memory of their own again; return how many layers there were.

    Examples:
        >>> from stof.integrations.torch import pack_weights, unpack_weights
        >>> names = ("q_proj", "k_proj", "v_proj")
        >>> attention = nn.ModuleDict({name: nn.Linear(16, 16) for name in names})
        >>> packing = pack_weights(attention)
        >>> unpack_weights(attention)
        3
    """
    layers = {layer for _, group in _groups(model) for layer in group if _is_packed(layer.weight)}
    for parameter in (parameter for layer in layers for parameter in layer.parameters() if _is_packed(parameter)):
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():
            parameter.data = parameter.data.clone()
    return len(layers)


def _groups(model: nn.Module) -> Iterator[tuple[tuple[str, ...], list[nn.Linear]]]:
    """Linear layers that are likely to read one tensor, and their names."""
    for path, parent in model.named_modules():
        for group in GROUPS:
            # Its own children: attributes of a wrapper may be layers of the module that it wraps.
            layers = [entries_of(parent)[0].get(name) for name in group]
            linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
            if len(linears) == len(group):
                yield tuple(f"{path}.{name}" if path else name for name in group), linears


def _parameters(layers: list[nn.Linear]) -> list[list[nn.Parameter]]:
    """The weights of some layers, and their biases if they have any."""
    columns = ([getattr(layer, name) for layer in layers] for name in ("weight", "bias"))
    return [column for column in columns if all(parameter is not None for parameter in column)]


def _is_packed(parameter: Tensor) -> bool:
    """Whether a parameter lies in memory that `pack_weights` made, be it in its place or not."""
    return _memory(parameter) is not None and StorageWeakRef(parameter.untyped_storage()) in _packed


def _are_packed(layers: list[nn.Linear]) -> bool:
    """Whether the weights of plain layers, and their biases, lie one after the other."""
    if any(type(layer) is not nn.Linear or _memory(layer.weight) is None for layer in layers):
        return False
    return all(
        len({(one.dtype, one.shape[1:]) for one in column}) == 1
        and all(one.is_contiguous() for one in column)
        and PackedMemory.of([one.shape for one in column], column[0].element_size()).view(column) is not None
        for column in _parameters(layers)
    )


def _memory(x: object) -> int | None:
    """The address of a tensor's memory; None for what has none."""
    if not isinstance(x, Tensor) or type(x.data) is not Tensor or x.layout is not torch.strided or x.is_meta:
        return None
    return x.untyped_storage().data_ptr() or None


def _unpackable(layers: list[nn.Linear], uses: Counter[int]) -> str:
    """Why these layers cannot share a weight; "" if they can."""
    inside = Counter(p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters() if _is_packed(p))
    for layer in layers:
        if type(layer) is not nn.Linear:
            return f"a {type(layer).__name__} is no plain linear layer"
        if has_hooks(layer):
            return "it has hooks"
        extra = _extra(layer)
        if extra:
            return f"it holds {', '.join(map(repr, extra))}, which a plain linear layer does not"
        reason = next((why for p in layer.parameters() if (why := _immovable(p, uses, inside))), "")
        if reason:
            return f"its weight {reason}"
    first = layers[0]
    properties: dict[str, set[Any]] = {
        "widths": {layer.in_features for layer in layers},
        "dtypes": {layer.weight.dtype for layer in layers},
        "devices": {layer.weight.device for layer in layers},
        "inference modes": {p.is_inference() for layer in layers for p in layer.parameters()},
        "biases": {layer.bias is None for layer in layers},
    }
    for what, values in properties.items():
        if len(values) > 1:
            return f"{what} differ"
    return "floating-point weights only" if not first.weight.is_floating_point() else ""


def _extra(layer: nn.Linear) -> list[str]:
    """What an instance holds and a new `nn.Linear` does not, such as a `forward`; numbers and texts are but marks."""
    named = {name for entries in entries_of(layer) for name in entries} - {"weight", "bias"}
    held = {name for name, value in vars(layer).items() if not isinstance(value, bool | int | float | str | None)}
    return sorted(named | (held - _PLAIN_ATTRIBUTES))


def _immovable(parameter: Tensor, uses: Counter[int], packed: Counter[int]) -> str:
    """Why a parameter cannot be given other memory; "" if it can.

    Args:
        uses: how many tensors of the model lie in a memory.
        packed: how many of these are in memory that `pack_weights` made for these layers.
    """
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}"
    memory = _memory(parameter)
    if memory is None:
        return f"has no memory (it is on {parameter.device}): it is loaded when it is used"
    if uses[memory] > max(1, packed[memory]):
        return "is tied to another layer's, or lies in one memory with it"
    fills = parameter.untyped_storage().nbytes() == parameter.nbytes or packed[memory]
    if not fills or not parameter.is_contiguous():
        return "is a view of other memory"
    return "is shared with other processes" if parameter.device.type == "cpu" and parameter.is_shared() else ""
