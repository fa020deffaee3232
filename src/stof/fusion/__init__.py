"""Operator fusion for the parts of a model that are not attention."""
