"""Operator fusion: a model's graph as tagged operators, segments of them, and the templates that compute segments.

    report = fuse(graph_module)                      # by rule; the graph Dynamo captured is rewritten in place
    report = fuse(graph_module, Search(timer, 60.0))  # by measuring

`pipeline.fuse` puts the parts together, `stof.integrations.torch` is the backend of `torch.compile` around it.
"""
