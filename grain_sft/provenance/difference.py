"""Difference: the first step at which two pipelines have different batches, and how many rows and documents differ."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, RunDocuments
from grain_sft.pipeline import Pipeline, batch_of_arrays
from grain_sft.provenance.lines import iter_trace
from grain_sft.types import Bools, Ints


@dataclasses.dataclass(frozen=True)
class Difference:
    """How the batches of two pipelines differ.

    Attributes:
      reasons: A sentence for each part in which the receipts differ: "here" is the first pipeline, "there" the second.
      compared: Searched steps, up to the end of the longer run. A run also ends at a step for which a source has no row left.
      first_step: First step that has different batches, or that only one run has. None if all compared batches are equal.
      counted: Steps whose rows and documents were counted, beginning with `first_step`.
      total_rows: Number of rows in the steps `counted`. If two batches of a step differ in size, the larger batch counts.
      differing_rows: Number of rows in the steps `counted` that differ.
      documents: Number of documents in the steps `counted` that only the first pipeline reads, and number that only the second
        reads. None if a layout does not follow documents (`Layout.follows_documents`).
    """

    reasons: list[str]
    compared: range
    first_step: int | None
    counted: range
    total_rows: int = 0
    differing_rows: int = 0
    documents: tuple[int, int] | None = None


def difference(one: Pipeline, other: Pipeline, *, steps: range | None = None, count: int = 100) -> Difference:
    """Return the first step at which two pipelines have different global batches, why, and how many rows and documents differ.

    If the runs have no stages and the same sources in one order, and their receipts differ at most in the sampler and in
    amendments, the function compares row numbers and withdrawn documents, and reads no tokens. Otherwise, it makes and compares
    the batches.

    Args:
      one, other: Pipelines of host 0 of 1.
      steps: Consecutive steps to search. None searches from step 0 to 10,000 steps after the last amendment or change of a
        schedule.
      count: Number of steps whose rows and documents are counted, beginning with the first step that differs.

    Raises:
      RowIndexError: `steps` are not consecutive, or begin before step 0.
      SamplerError: A pipeline has several hosts.
      CorpusFileError, CorpusError: Files can't be read.
    """
    if any(each.sampler.host.count > 1 for each in (one, other)):
        raise SamplerError("difference: expected pipelines of one host. Load them with Host(0, 1).")
    if steps is None:
        changes = [0]  # steps at which a schedule or an amendment takes effect
        for each in (one, other):
            changes += [*each.planned_sampler.changes, *(amendment.step for amendment in each.amendments)]
        steps = range(max(changes) + 10_000)
    if not isinstance(steps, range) or steps.step != 1 or steps.start < 0:
        raise RowIndexError(f"{steps}: expected consecutive steps from 0 on. Give a range such as range(1000, 2000).")
    reasons = one.receipt.differences(other.receipt.parts)
    end = max(one.sampler.end_of_batches, other.sampler.end_of_batches)
    steps = steps[: max(0, end - steps.start)]
    compare = _by_row_numbers if _same_numbers_mean_same_rows(one, other) else _by_batches
    first = next((step for step, num_differing, _ in compare(one, other, steps) if num_differing), None)
    if first is None:
        return Difference(reasons, steps, None, range(0))
    counted = range(first, min(first + count, end))
    # numbers of differing rows and of all rows of each step; (0, 0) is their sum if `count` is 0
    counts = [rows_of_step for _, *rows_of_step in compare(one, other, counted)]
    differing_rows, total_rows = map(sum, zip((0, 0), *counts, strict=True))
    return Difference(reasons, steps, first, counted, total_rows, differing_rows, _documents_of_one(one, other, counted))


def _rows(pipeline: Pipeline, step: int) -> Ints:
    """Return the rows of the global batch of `step`, int64 [rows]; none after the last batch of the run."""
    return pipeline.sampler.rows(step) if step < pipeline.sampler.end_of_batches else np.zeros(0, np.int64)


def _same_numbers_mean_same_rows(one: Pipeline, other: Pipeline) -> bool:
    """Return whether files, layout and transforms are the same. If so, rows of equal numbers differ only by withdrawals."""
    if max(len(one.stages), len(other.stages)) > 1:  # row numbers count within a stage
        return False
    # rows are numbered source by source
    names, other_names = (list(each.stages[0].source.layout.parts) for each in (one, other))
    parts, other_parts = one.receipt.parts, other.receipt.parts
    differing = (name for name in parts | other_parts if parts.get(name) != other_parts.get(name))
    return names == other_names and all(name == "sampler" or name.startswith("amendment ") for name in differing)


def _by_row_numbers(one: Pipeline, other: Pipeline, steps: range) -> Iterator[tuple[int, int, int]]:
    """Yield each step, its number of differing rows, and its number of rows. Compare row numbers and withdrawn documents.

    If two batches differ in size, the number of rows is that of the larger batch, and rows that only one batch has differ.
    """
    for step in steps:
        rows, other_rows = _rows(one, step), _rows(other, step)
        num_rows, num_paired = max(len(rows), len(other_rows)), min(len(rows), len(other_rows))
        rows, other_rows = rows[:num_paired], other_rows[:num_paired]
        equal = rows == other_rows
        if equal.any() and (one.at(step).withdrawals or other.at(step).withdrawals):
            equal &= (_withdrawn(one, step, rows) == _withdrawn(other, step, other_rows)).all(axis=1)
        yield step, num_rows - int(equal.sum()), num_rows


def _withdrawn(pipeline: Pipeline, step: int, rows: Ints) -> Bools:
    """Return whether each token of `rows` is withdrawn at `step`, bool [rows, L]."""
    pipeline = pipeline.at(step)
    withdrawn = np.zeros((len(rows), pipeline.source.layout.width(rows)), np.bool_)
    spans = () if pipeline.withdrawals is None else pipeline.withdrawals.spans(rows, step)
    for start, stop in spans:
        withdrawn.reshape(-1)[start:stop] = True
    return withdrawn


def _by_batches(one: Pipeline, other: Pipeline, steps: range) -> Iterator[tuple[int, int, int]]:
    """Yield the same values as `_by_row_numbers`, from a comparison of the arrays of the batches."""
    for step in steps:
        # sizes of the smaller and of the larger batch
        num_paired, num_rows = sorted(len(_rows(each, step)) for each in (one, other))
        equal = np.ones(num_paired, np.bool_)
        if num_paired:
            batch, other_batch = batch_of_arrays(one, step), batch_of_arrays(other, step)
            # without the number of rows, in which the batches may differ
            shapes, other_shapes = ({key: np.shape(each[key])[1:] for key in each} for each in (batch, other_batch))
            equal[:] = shapes == other_shapes
            for key in batch if shapes == other_shapes else ():
                # if the value of `key` is a number, it is compared as an array [1], and the result counts for all rows
                equal_items = np.atleast_1d(batch[key])[:num_paired] == np.atleast_1d(other_batch[key])[:num_paired]
                equal &= equal_items.all(axis=tuple(range(1, equal_items.ndim)))
        yield step, num_rows - int(equal.sum()), num_rows


def _documents_of_one(one: Pipeline, other: Pipeline, steps: range) -> tuple[int, int] | None:
    """Return how many documents only `one` reads in `steps`, and how many only `other` reads; None as in `Difference`."""
    stages = (*one.stages, *other.stages)
    if not all(part.follows_documents for each in stages for part in each.source.layout.parts.values()):
        return None
    both = RunDocuments([*one.documents.layouts, *other.documents.layouts])
    read, other_read = _documents_read(one, steps, both), _documents_read(other, steps, both)
    # Two documents are the same if they have the same number, or the same (source, record), such as line 7 of a.jsonl.
    # Numbers differ between two copies of a corpus. Sources differ between two mixtures that give a corpus different names.
    records = {read[number] for number in read.keys() - other_read.keys()}
    other_records = {other_read[number] for number in other_read.keys() - read.keys()}
    return len(records - set(other_read.values())), len(other_records - set(read.values()))


def _documents_read(pipeline: Pipeline, steps: range, run: RunDocuments) -> dict[int, tuple[str, int]]:
    """Return the (source, record) of each document that `steps` read, by the document's number in `run`.

    A document without a record has ("", number) instead.
    """
    documents: dict[int, tuple[str, int]] = {}
    for stage in pipeline.stages:
        own = range(max(steps.start, stage.first_step), min(steps.stop, stage.sampler.end_of_batches))
        if not own:  # the stage has none of `steps`
            continue
        for lines in iter_trace(stage, own, trainable=False):
            kept = (lines.instance != FILL_ROW) & (lines.document >= 0)
            if lines.withdrawn is not None:  # a line whose tokens are all withdrawn reads nothing of its document
                kept &= lines.withdrawn < lines.stop - lines.start
            lines = lines.select(kept)
            numbers = run.of(stage.source.layout, lines.document).tolist()
            for number, source, record in zip(numbers, lines.source.tolist(), lines.record.tolist(), strict=True):
                documents[number] = ("", number) if record < 0 else (lines.source_names[source], record)
    return documents
