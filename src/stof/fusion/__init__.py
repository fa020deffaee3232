"""Operator fusion: a model's graph as tagged operators, segments of them, and the templates that compute segments.

    ops = normalise(graph_module)          # linear, norms, attention, ... found by structure
    scheme = initial_scheme(ops, offers)   # which neighbours form a segment
    lower(graph_module, ops, scheme)       # segments that a template covers become one call of it

`stof.integrations.torch_compile` puts these together as the backend of `torch.compile`.
"""
