"""Packing weights: linear layers that read the same tensor keep their weights as rows of one.

One GEMM for query, key and value, and one for gate and up projection, needs their weights side by side in memory. A
graph that is being compiled cannot arrange that (it may gain no parameters), so modules do, before: each layer becomes
a `PackedLinear` that computes with its rows. Without the compiler the model still computes the same, state dicts keep
their names, and `unpack_weights` takes it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


@dataclass
class Packing:
    """What `pack_weights` did: groups packed, and for the others why not. Names as in `model.named_modules()`."""

    packed: list[tuple[str, ...]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class PackedLinear(nn.Linear):
    """A linear layer whose weight is rows `start .. stop - 1` of a parameter it shares with its neighbours.

    `weight` and `bias` are views, to be read; write to them in place under `torch.no_grad()`. Assigning to
    `weight.data` changes the view alone, without an error. State dicts hold "weight" and "bias" as those of
    `nn.Linear` do.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, stop: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.shape[1], stop - start
        self.start, self.stop = start, stop
        self.packed_weight = weight
        self.register_parameter("packed_bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """`[out_features, in_features]`, a view."""
        return self.packed_weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """`[out_features]`, a view, or None."""
        packed = self.packed_bias
        return packed[self.start : self.stop] if isinstance(packed, Tensor) else None

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {
            prefix + name: value for name, value in (("weight", self.weight), ("bias", self.bias)) if value is not None
        }
        for key, value in own.items():
            given = state_dict.get(key)
            if given is None:
                missing_keys += [key] if strict else []
            elif given.shape != value.shape:
                error_msgs.append(f"size mismatch for {key}: {list(given.shape)} given, {list(value.shape)} expected.")
            elif local_metadata.get("assign_to_params_buffers", False):
                error_msgs.append(
                    f"{key} is packed with its neighbours; load with assign=False, or unpack_weights first."
                )
            else:
                with torch.no_grad():
                    value.copy_(given)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in own]


def pack_weights(model: nn.Module) -> Packing:
    """Pack the weights of neighbouring linear layers of `model`, in place; see `Packing` for what was skipped.

    Parameters are replaced: hand optimizers and the like the new ones, or unpack first. Shared (tied) weights, weights
    that are no plain tensors (quantized ones), and layers with hooks or parametrizations are left as they are.
    """
    # A layer that several modules hold counts for each of them.
    holders = [model, *(child for _, _, child in _children(model))]
    uses = Counter(id(p) for module in holders for p in entries_of(module)[1].values() if p is not None)
    done = Packing()
    for path, parent in list(model.named_modules()):
        for group in GROUPS:
            # Its own children: attributes of a wrapper may be layers of the module that it wraps.
            layers = [entries_of(parent)[0].get(name) for name in group]
            if not all(isinstance(layer, nn.Linear) for layer in layers):
                continue
            names = tuple(f"{path}.{name}" if path else name for name in group)
            if any(isinstance(layer, PackedLinear) for layer in layers):
                continue
            linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
            reason = _unpackable(linears, uses)
            if reason:
                done.skipped.append(f"{', '.join(names)}: {reason}")
                continue
            for name, layer in zip(group, _packed(linears), strict=True):
                setattr(parent, name, layer)
            done.packed.append(names)
    return done


def unpack_weights(model: nn.Module) -> int:
    """Give every packed layer of `model` its own `nn.Linear` with its own weight again; returns how many there were."""
    found = [(parent, name, child) for parent, name, child in _children(model) if isinstance(child, PackedLinear)]
    for parent, name, packed in found:
        plain = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
        plain.weight = nn.Parameter(packed.weight.detach().clone(), packed.packed_weight.requires_grad)
        if packed.bias is not None:
            plain.bias = nn.Parameter(packed.bias.detach().clone(), packed.packed_weight.requires_grad)
        setattr(parent, name, plain.train(packed.training))
    return len(found)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(model.modules()):
        for name, child in list(entries_of(parent)[0].items()):
            if child is not None:
                yield parent, name, child


def _unpackable(layers: list[nn.Linear], uses: Counter[int]) -> str:
    """Why these layers cannot share a weight; "" if they can."""
    for layer in layers:
        if type(layer) is not nn.Linear:
            return f"a {type(layer).__name__} is no plain linear layer"
        tensors = [p for p in (layer.weight, layer.bias) if p is not None]
        if any(type(p) is not nn.Parameter or type(p.data) is not Tensor for p in tensors):
            return f"its weight is a {type(layer.weight.data).__name__}"
        if any(uses[id(p)] > 1 for p in tensors):
            return "its weight is tied to another layer's"
        if has_hooks(layer):
            return "it has hooks"
    first = layers[0]
    properties: dict[str, set[Any]] = {
        "widths": {layer.in_features for layer in layers},
        "dtypes": {layer.weight.dtype for layer in layers},
        "devices": {layer.weight.device for layer in layers},
        "biases": {layer.bias is None for layer in layers},
        "requires_grad": {layer.weight.requires_grad for layer in layers},
    }
    for what, values in properties.items():
        if len(values) > 1:
            return f"{what} differ"
    return "floating-point weights only" if not first.weight.is_floating_point() else ""


def _packed(layers: list[nn.Linear]) -> list[PackedLinear]:
    grad = layers[0].weight.requires_grad
    with torch.no_grad():
        weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), grad)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        bias = nn.Parameter(torch.cat(biases), grad) if biases else None
    out, start = [], 0
    for layer in layers:
        packed = PackedLinear(weight, bias, start, start + layer.out_features)
        out.append(packed.train(layer.training))
        start += layer.out_features
    return out
