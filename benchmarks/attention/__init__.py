"""Attention, masks and eager calls, each beside its peers."""
