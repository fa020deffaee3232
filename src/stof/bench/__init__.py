"""Benchmarks: the mask grid, the peers, the check that comes before every time, and the JSON they write."""
