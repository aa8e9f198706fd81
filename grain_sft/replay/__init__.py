"""Helpers for the exact replay of other systems: OpenChat's learning rate."""
