"""Names that Inductor's wrappers import, without the modules that define them, which load the whole compiler.

A wrapper is the Python code around a compiled graph's kernels. One that is kept for later processes
(`stof.integrations.noted`) imports these names from here, so that a start does not wait for the compiler.
"""

from __future__ import annotations

from typing import Any

import torch

# Lines of wrappers, as PyTorch 2.11 to 2.13 write them, and what stands there instead.
REPLACED = {
    "from torch._inductor.select_algorithm import extern_kernels": f"from {__name__} import extern_kernels",
    "from torch._inductor.codegen.memory_planning import _align as align": f"from {__name__} import align",
}


class _ExternKernels:
    """Kernels of libraries: the usual products are operators of PyTorch; the rest is asked of Inductor."""

    mm, bmm, addmm, baddbmm = torch.mm, torch.bmm, torch.addmm, torch.baddbmm

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels as defined

        return getattr(defined, name)


extern_kernels = _ExternKernels()


def align(size: int) -> int:
    """A size in bytes, as Inductor rounds it in its pools of memory."""
    from torch._inductor.codegen.memory_planning import _align

    return int(_align(size))


def lightened(wrapper: str) -> str:
    """A wrapper's code that imports from here what it can."""
    return "\n".join(REPLACED.get(line, line) for line in wrapper.split("\n"))
