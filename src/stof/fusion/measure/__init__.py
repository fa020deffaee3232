"""Timing of segments and whole models, and asynchronous compilation of what is timed."""
