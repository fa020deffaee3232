"""What it takes to test attention under a mask: a float64 oracle, awkward inputs, and error budgets.

Nothing here calls a kernel of STOF: a test that compares against `oracle_attention` compares against the definition.

    inputs = make_inputs(heads=4, kv_heads=2, q_len=100, memory="strided")
    keep = mask.to_dense(100)
    out, lse = stof.attention(*inputs.qkv, mask, return_lse=True)
    assert_attention(out, lse, *inputs.qkv, keep)
"""

from stof.testing.inputs import MEMORY_LAYOUTS, AttentionInputs, make_inputs, spread
from stof.testing.oracle import ErrorBudget, assert_attention, error_budget, oracle_attention, plain_attention
from stof.testing.random_calls import RandomCall, random_call

__all__ = [
    "MEMORY_LAYOUTS",
    "AttentionInputs",
    "ErrorBudget",
    "RandomCall",
    "assert_attention",
    "error_budget",
    "make_inputs",
    "oracle_attention",
    "plain_attention",
    "random_call",
    "spread",
]
