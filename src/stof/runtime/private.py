"""Everything private of PyTorch and Triton that the library uses."""

from __future__ import annotations

import contextlib
import os

import torch
from torch import Tensor


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether an implementation may be called straight, past the operator and its host time.

    The operator must be seen by autograd when an input requires a gradient, and by whoever wraps tensors or intercepts
    operators (fake tensors, functorch transforms, tracing).
    """
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (grad and tensor.requires_grad)):
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


_PLAIN = (Tensor, torch.nn.Parameter)


# torch.compile


def init_triton_cache(device: torch.device) -> None:
    """Point Triton at the ptxas and the cache folder that Inductor uses, before any kernel is compiled or looked for.

    Inductor sets both when it first compiles a Triton kernel of its own. A process that measures compiles earlier than
    that: without these two names, later processes would look elsewhere and compile its kernels again.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
        from torch._inductor.runtime.runtime_utils import triton_cache_dir

        _set_triton_ptxas_path()
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
