"""Rewrites of a captured graph."""
