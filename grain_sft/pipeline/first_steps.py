"""A warning, with the reason, if no target in a run's first batches takes loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from grain_sft.errors import GrainSftError
from grain_sft.layout import FILL_ROW, Layout
from grain_sft.pipeline.run import Run
from grain_sft.source import Element
from grain_sft.storage import ForkSafeLock
from grain_sft.types import Ints

NUM_CHECKED = 4  # number of batches without loss before the warning
_MOST_ROWS = 64  # maximum number of rows that are read again to find the reason


class FirstSteps:
    """Check of a pipeline's first batches. It logs a warning if the pipeline has no transforms, or if no target takes loss.

    A target is the token after an input. It takes loss if the loss of its prediction counts in training.
    """

    def __init__(self) -> None:
        self.left = NUM_CHECKED  # number of batches still to check
        self._steps: list[int] = []  # checked steps without loss
        self._lock = ForkSafeLock()

    def check(self, pipeline: Run, step: int, batch: Any) -> None:
        """Check the batch of `step`. Call this only while `left` is not 0."""
        if not pipeline.at(step).transforms and self.left == NUM_CHECKED:  # the first checked batch
            keys = ", ".join(batch) if isinstance(batch, dict) else "those of its source"
            advice = "Give the pipeline [ShiftTargets()] for inputs and targets."
            logging.warning("This pipeline has no transforms: its batches have the keys %s. %s", keys, advice)
        if takes_loss(batch) is not False:  # a batch with loss, or with unknown keys, ends the check
            self.left = 0
            return
        with self._lock.lock:
            if not self.left or step in self._steps:  # an iterator that goes back makes a step twice
                return
            self._steps.append(step)
            self.left = min(NUM_CHECKED, pipeline.end_step - pipeline.first_step) - len(self._steps)
            if self.left:
                return
        reason = why_no_loss(pipeline, self._steps)
        steps = ", ".join(map(str, sorted(self._steps)))
        logging.warning("No target takes loss in the first batches (steps %s): %s", steps, reason)

    def __reduce__(self) -> tuple[type[FirstSteps], tuple[()]]:
        return type(self), ()  # a worker process checks its own first batches


def takes_loss(batch: Any) -> bool | None:
    """Return whether a target of a batch takes loss. None means that the keys of the batch do not state it."""
    if not isinstance(batch, dict):
        return None
    if "chosen_ids" in batch:  # a batch of preference pairs; pairs of equal responses have no preference to train
        return bool(np.any(batch["chosen_ids"] != batch["rejected_ids"]))
    if "targets_segmentation" in batch:  # this and `targets_weights` are 0 where a target takes no loss
        return bool(np.any(batch.get("targets_weights", batch["targets_segmentation"])))
    if "loss_mask" in batch and "segment_ids" in batch:
        return bool(np.any(batch["loss_mask"] & (batch["segment_ids"] != 0)))
    return None


def why_no_loss(pipeline: Run, steps: Sequence[int]) -> str:
    """Return why no target in the batches of `steps` takes loss. This reads up to 64 rows of the batches again."""
    try:
        pipeline = pipeline.at(max(steps))  # the stage of the last step; steps of earlier stages are left out
        rows = np.concatenate([pipeline.sampler.rows(step) for step in steps if step >= pipeline.first_step])
        rows = rows[rows != FILL_ROW][:_MOST_ROWS]
        if not len(rows):
            return "all rows of these batches hold only padding. Start at an earlier step."
        element = pipeline.source_at(max(steps)).read(rows)
        layout = pipeline.source.layout
        # for pairs, the transform that makes `chosen_ids` has the reason
        reason = "" if layout.of_pairs else _reason_in_source(layout, rows, element)
        return reason or _reason_in_transforms(pipeline, element)
    except GrainSftError as error:
        return f"the reason was not found: {error}"


def _reason_in_source(layout: Layout, rows: Ints, element: Element) -> str:
    """Return why no target of `rows` takes loss in the source; "" if a target does. `element` has the arrays of `rows`."""
    if not element["segment_ids"].any():
        return "these rows have no tokens: the layout gives them none, or their documents are withdrawn."
    loss = element["loss_mask"] & (element["segment_ids"] != 0)
    if (loss & (element["positions"] > 0)).any():  # the first token of a segment, at position 0, is not a target
        return ""
    if loss.any():
        longest = int(element["positions"].max()) + 1
        reason = "only the first token of a document takes loss, and it has no input before it"
        found = f"The longest document here has {longest} token{'s' if longest > 1 else ''}"
        return f"{reason}. {found}: are the documents too short, or split at the wrong token?"
    for name, _, rows_of_part in layout.split(rows):
        part = layout.parts[name]
        documents, table = part.pieces(rows_of_part).document, part.documents
        if documents is None or table is None:  # rows that are not made of documents
            continue
        for document in np.unique(documents).tolist():
            start = int(table.start[document])
            # read the loss mask of the whole document, which may have tokens outside these rows
            _, loss = part.corpus.read(start, start + int(table.length[document]))
            if loss is None or loss.any():  # None: all tokens of the document take loss
                found = f"the documents are longer than a row of {layout.sequence_length} tokens"
                reason = "only tokens that are not in these rows take loss: they were cut off, or are in other rows"
                return f"{found}, and {reason}. Give a longer sequence_length, or another `keep` of a padded layout."
    found = "the loss mask is 0 for each token of these rows and of their documents"
    reason = "the mask holds only zeros, or the documents are prompts without an answer"
    return f"{found}: {reason}. Prepare the corpus again, or give use_loss_mask: false."


def _reason_in_transforms(pipeline: Run, element: Element) -> str:
    """Return a sentence that names the first transform after which no target of `element` takes loss."""
    count = len(element["tokens"])
    for transform in pipeline.transforms:
        element = transform.map(element)
        if takes_loss(element) is False:
            own_reason = getattr(transform, "no_loss_reason", None)
            reason = ". Check this transform." if own_reason is None else f": {own_reason}"
            return f"{transform!r} took the loss off all {count} rows that were checked{reason}"
    return "some targets take loss when the rows are read again. Does a transform give other values each time?"
