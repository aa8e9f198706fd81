"""Pipeline: the batch of step k, its iterators, its receipt, and the observers of its batches."""

from grain_sft.pipeline.delivery import StepIterator
from grain_sft.pipeline.observer import OBSERVERS, Delivery, IteratorStats, Observer, standing_observers
from grain_sft.pipeline.pipeline import Pipeline

__all__ = ["OBSERVERS", "Delivery", "IteratorStats", "Observer", "Pipeline", "StepIterator", "standing_observers"]
