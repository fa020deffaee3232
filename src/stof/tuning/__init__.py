"""Timing that can be believed, and (later) the store of measured choices. Imports nothing of STOF but errors."""
