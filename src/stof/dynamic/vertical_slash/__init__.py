"""Masks of vertical columns and slash distances."""
