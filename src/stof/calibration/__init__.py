"""Measure this GPU, fit the cost model to it, and compare the layouts of one mask."""
