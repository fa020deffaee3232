"""Tile lists that kernels read, filled on the device from the program of a mask or from a bool tensor."""
