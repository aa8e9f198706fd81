"""Pipeline: the batch of step k, its iterators, its receipt."""

from grain_sft.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
