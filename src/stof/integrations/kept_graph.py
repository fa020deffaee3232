"""A compiled graph as a start keeps it: loaded with less of PyTorch's compiler than PyTorch's own form of it.

Imported where such a graph is written or read, for it needs modules of PyTorch that nobody else here does.
"""

from __future__ import annotations

from typing import Any

from torch._functorch._aot_autograd.aot_autograd_result import BundledCompiledForward
from torch._inductor import config
from torch._inductor.codecache import code_hash
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.triton_bundler import TritonBundler

from stof.integrations.wrapper_names import lightened


class KeptForward(BundledCompiledForward[CompiledFxGraph]):
    """The graph; `result` is what Inductor made of it.

    PyTorch's own form also logs what it loads and runs, for which it imports all of Inductor's lowering, and starts
    Inductor's compiling processes, which have nothing to compile.
    """

    def post_compile(self, result: CompiledFxGraph, fx_config: Any) -> Any:
        """Load its kernels and its wrapper; returns what is called with a list of inputs."""
        constants = CompiledFxGraphConstants()
        if result._triton_bundle:
            TritonBundler.read_and_emit(result._triton_bundle)
        with config.patch(compile_threads=1):
            result.after_deserialization(constants)
        result.post_compile(self.example_inputs, constants, fx_config)
        call: Any = result.current_callable

        def run(inputs: list[Any]) -> Any:
            return call(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]  # takes the list, and may empty it
        return run


def lighten(entry: Any) -> None:
    """Change a written graph of PyTorch's so that it is loaded like this; one of another kind is left as it is."""
    forward = entry.compiled_fw
    if type(forward) is not BundledCompiledForward or type(forward.result) is not CompiledFxGraph:
        return
    graph = forward.result
    graph.source_code = lightened(graph.source_code)
    graph.cache_key = code_hash(graph.source_code)  # its file is named after it
    entry.compiled_fw = KeptForward(graph)
