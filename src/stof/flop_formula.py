"""What `torch.utils.flop_counter.FlopCounterMode` counts for attention: two products over the scores that are kept."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

from stof.dispatch import plan_of
from stof.handles import named
from stof.operators import (
    _attention_backward,
    _dropout_attention,
    _dropout_attention_backward,
    _masked_attention,
    dropout_attention_backward_op,
    dropout_attention_op,
    masked_attention_backward_op,
    masked_attention_op,
    varying_attention_backward_op,
    varying_attention_op,
    varying_dropout_attention_backward_op,
    varying_dropout_attention_op,
)
from stof.runtime.private import FakeTensor, dispatch_modes

# Of the operators without dropout, and with it.
_FORWARD, _BACKWARD = (
    tuple([inspect.signature(function) for function in functions])
    for functions in ((_masked_attention, _dropout_attention), (_attention_backward, _dropout_attention_backward))
)


def attention_flops(*args: Any, out_val: Any = None, dropout: bool = False, **kwargs: Any) -> int:
    """`2 * kept scores * (D + Dv)`, as FlashAttention is counted; arguments of the operators in `stof.operators`."""
    del out_val
    scores, head_dim, value_dim = _kept_scores(_FORWARD[dropout].bind(*args, **kwargs))
    return 2 * scores * (head_dim + value_dim)


def backward_flops(*args: Any, out_val: Any = None, dropout: bool = False, **kwargs: Any) -> int:
    """`2 * kept scores * (3 * D + 2 * Dv)`: scores, the gradients of weights, and those of q, k and v."""
    del out_val
    scores, head_dim, value_dim = _kept_scores(_BACKWARD[dropout].bind(*args, **kwargs))
    return 2 * scores * (3 * head_dim + 2 * value_dim)


def _kept_scores(call: inspect.BoundArguments) -> tuple[int, int, int]:
    """Kept scores of a call, and its widths D and Dv.

    The mask's plan counts the kept scores. Fake and meta tensors have no plan, so all scores count there.
    """
    call.apply_defaults()
    q, k, v, mask, number, keep = (call.arguments[name] for name in ("q", "k", "v", "mask", "number", "keep"))
    share = 1.0
    if 0 not in q.shape and 0 not in k.shape and not isinstance(q, FakeTensor) and not q.is_meta:
        share = plan_of(named(mask, number, keep), q, k).statistics().density
    batch, heads, q_len, head_dim = q.shape
    return round(share * batch * heads * q_len * k.shape[2]), head_dim, v.shape[3]


def register_flops() -> None:
    """Register the formula with PyTorch and with the counters that run, if there are any.

    `torch.utils.flop_counter` takes long to import, so it is imported only where FLOPs are counted.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    formulas = {
        op._opoverload.overloadpacket: formula
        for formula, operators in (
            (attention_flops, (masked_attention_op, varying_attention_op)),
            (backward_flops, (masked_attention_backward_op, varying_attention_backward_op)),
            (
                partial(attention_flops, dropout=True),
                (dropout_attention_op, varying_dropout_attention_op),
            ),
            (
                partial(backward_flops, dropout=True),
                (dropout_attention_backward_op, varying_dropout_attention_backward_op),
            ),
        )
        for op in operators
    }
    for operator, formula in formulas.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator, get_raw=True)(formula)
    for mode in dispatch_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):  # it copied PyTorch's formulas when it was made
            for operator, formula in formulas.items():
                counter.flop_registry.setdefault(operator, formula)
