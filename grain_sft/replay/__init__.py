"""Helpers for the exact replay of other systems."""
