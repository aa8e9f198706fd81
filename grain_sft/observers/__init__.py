"""Observers of a run: metrics, and the watchdog that names what a run waits for."""

from grain_sft.pipeline import OBSERVERS, Delivery, IteratorStats, Observer

__all__ = ["OBSERVERS", "Delivery", "IteratorStats", "Observer"]
