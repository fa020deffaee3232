"""What `torch.utils.flop_counter.FlopCounterMode` counts for attention: two products over the scores that are kept."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from stof.dispatch import plan_of
from stof.handles import named
from stof.operators import _masked_attention, masked_attention_op, varying_attention_op
from stof.runtime.private import FakeTensor, dispatch_modes

_ARGUMENTS = inspect.signature(_masked_attention)


def attention_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """`2 * kept scores * (D + Dv)`, as FlashAttention is counted; arguments of the operators in `stof.operators`.

    The mask's plan counts the kept scores. Fake and meta tensors have no plan, so all scores count there.
    """
    del out_val
    call = _ARGUMENTS.bind(*args, **kwargs)
    call.apply_defaults()
    q, k, v, mask, number, keep = (call.arguments[name] for name in ("q", "k", "v", "mask", "number", "keep"))
    share = 1.0
    if 0 not in q.shape and 0 not in k.shape and not isinstance(q, FakeTensor) and not q.is_meta:
        share = plan_of(named(mask, number, keep), q, k).statistics().density
    batch, heads, q_len, head_dim = q.shape
    return round(2 * share * batch * heads * q_len * k.shape[2] * (head_dim + v.shape[3]))


def register_flops() -> None:
    """Register the formula with PyTorch and with the counters that run, if there are any.

    `torch.utils.flop_counter` takes long to import, so a program that does not count does not import it here.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    operators = [op._opoverload.overloadpacket for op in (masked_attention_op, varying_attention_op)]
    missing = [op for op in operators if op not in module.flop_registry]
    if missing:
        module.register_flop_formula(missing, get_raw=True)(attention_flops)
    for mode in dispatch_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):  # it copied PyTorch's formulas when it was made
            for op in operators:
                counter.flop_registry.setdefault(op, attention_flops)
