"""Builds layouts from masks: in closed form, strip by strip, or on the GPU."""
