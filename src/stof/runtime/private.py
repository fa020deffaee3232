"""Everything private of PyTorch and Triton that the library uses."""

from __future__ import annotations

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
