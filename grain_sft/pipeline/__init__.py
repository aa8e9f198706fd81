"""`Pipeline`, with its iterators, its receipt and its observers."""

from grain_sft.pipeline.amendments import Amendment, first_step
from grain_sft.pipeline.check_rows import batch_of_arrays
from grain_sft.pipeline.counts import MOST_UNCOUNTED, IteratorStats, count_batches, make_batch
from grain_sft.pipeline.first_steps import NUM_CHECKED, takes_loss, why_no_loss
from grain_sft.pipeline.iterator import PREFETCH, READ_THREADS, PipelineIterator
from grain_sft.pipeline.observer import OBSERVERS, standing_observers
from grain_sft.pipeline.pipeline import Pipeline
from grain_sft.pipeline.read_ahead import ReadAhead
from grain_sft.pipeline.receipt import Receipt, layout_receipt
from grain_sft.pipeline.run import Arrival, Delivery, ObservedIterator, Observer, Run
from grain_sft.pipeline.stage import Stage
from grain_sft.pipeline.stages import StagedPipeline
from grain_sft.pipeline.step_iterator import StepIterator, checked_step

__all__ = [
    "MOST_UNCOUNTED", "NUM_CHECKED", "OBSERVERS", "PREFETCH", "READ_THREADS", "Amendment", "Arrival", "Delivery",
    "IteratorStats", "ObservedIterator", "Observer", "Pipeline", "PipelineIterator", "ReadAhead", "Receipt", "Run", "Stage",
    "StagedPipeline", "StepIterator", "batch_of_arrays", "checked_step", "count_batches", "first_step",
    "layout_receipt", "make_batch", "standing_observers", "takes_loss", "why_no_loss",
]  # fmt: skip
