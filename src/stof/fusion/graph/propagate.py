"""Running a rewritten graph on fake tensors: the proof that shapes, dtypes and views still fit together."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stof.fusion.passes.lower_segments import fake_context, fake_mode_of


class _Propagate(fx.Interpreter):
    """Runs a graph on the fake values of its placeholders and notes every node's new value."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result


def propagate(gm: fx.GraphModule, *, strides: bool = False) -> str:
    """Recompute the fake values of `gm`; "" if that works and results keep their sizes and dtypes, else why not.

    Args:
        strides: results have to keep their strides as well.
    """
    inputs = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    before = _forms(gm, strides)
    mode = fake_mode_of(inputs)
    shapes = getattr(mode, "shape_env", None)
    try:
        with fake_context(mode):
            if shapes is None:
                _Propagate(gm).run(*inputs)
            else:
                with shapes.suppress_guards():
                    _Propagate(gm).run(*inputs)
    except Exception as error:  # whatever an operator of the user's graph raises when a tensor is laid out differently
        return str(error).strip().splitlines()[0]
    return "" if _forms(gm, strides) == before else "results would change their shape, strides or dtype"


def _forms(gm: fx.GraphModule, strides: bool) -> list[str]:
    """Sizes, dtype and, if asked for, strides of everything the graph returns."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    return [
        f"{tuple(v.shape)} {v.dtype} {v.stride() if strides else ''}" if isinstance(v, torch.Tensor) else str(type(v))
        for v in values
    ]
