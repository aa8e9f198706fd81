"""Checks of a config's pipeline: its layout, its sampler and its batches."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import numpy.typing as npt

from grain_sft.layout import FILL_ROW, Layout
from grain_sft.pipeline import Pipeline, takes_loss, why_no_loss
from grain_sft.source import Element
from grain_sft.transforms import trait
from grain_sft.verify.check_plan import check_plan
from grain_sft.verify.finding import Report

_FIRST_STEPS = 8  # of which one must take loss
_BLOCK_ROWS = 1 << 12
_MOST_ROWS = 1 << 28  # of an epoch, a byte of memory each


def check_pipeline(report: Report, pipeline: Pipeline, where: str, vocab_size: int | None) -> None:
    """Check layout, sampler, and the first and the last batch."""
    layout = pipeline.source.layout
    report.figures |= {"rows": len(layout), "receipt": pipeline.receipt.code}
    for part in layout.parts.values():
        for plan in part.plans:
            assert part.packing is not None
            arrays = {name: getattr(plan, name) for name in ("start", "length", "document", "ends")}
            arrays["counts"] = np.array(list(plan.counts.values()), np.int64)
            check_plan(report, where, arrays, dataclasses.asdict(part.packing), part.corpus)
    if report.has_wrong("plan"):
        return  # its rows cannot be read
    _check_layout(report, layout, where)
    _check_sampler(report, pipeline, where)
    _check_batches(report, pipeline, where, vocab_size)
    steps = range(min(_FIRST_STEPS, pipeline.end_step))
    if not report.has_wrong("batches") and all(takes_loss(pipeline[step]) is False for step in steps):
        reason = why_no_loss(pipeline, steps)
        report.wrong("loss", where, f"no target takes loss in the first {len(steps)} steps: {reason}")


def _check_layout(report: Report, layout: Layout, where: str) -> None:
    """Check that the rows of a layout, or in a fast check its first and last ones, lie in the files and in a row."""
    count, length = len(layout), layout.sequence_length
    tokens = np.array([shard.num_tokens for shard in layout.corpus.shards])
    begins = range(0, count, _BLOCK_ROWS) if report.full else sorted({0, max(0, count - _BLOCK_ROWS)})
    for begin in begins:
        rows = np.arange(begin, min(begin + _BLOCK_ROWS, count))
        with report.errors("layout", where, f"rows {begin} to {begin + len(rows) - 1}"):
            pieces = layout.pieces(rows)
        if report.has_wrong("layout"):
            return
        outside = (pieces.shard < 0) | (pieces.shard >= len(tokens)) | (pieces.start < 0) | (pieces.length < 1)
        outside |= pieces.start + pieces.length > tokens[np.clip(pieces.shard, 0, len(tokens) - 1)]
        before = np.cumsum(pieces.length) - pieces.length
        column = before - before[np.searchsorted(pieces.row, pieces.row, side="left")]
        outside |= (pieces.column != column) | (column + pieces.length > length)
        if pieces.segment is not None:
            step = np.diff(pieces.segment, prepend=0)
            new_row = np.diff(pieces.row, prepend=-1) != 0
            outside |= np.where(new_row, pieces.segment != 1, (step != 0) & (step != 1))
        if outside.any():
            at = int(outside.argmax())
            sentence = (
                f"a piece of {pieces.length[at]} tokens at column {pieces.column[at]}, from token {pieces.start[at]} of shard "
                f"{pieces.shard[at]} on, does not fit the file, the row of {length}, or the piece before it."
            )
            report.wrong("layout", where, sentence, f"row {begin + int(pieces.row[at])}")
            return


def _check_sampler(report: Report, pipeline: Pipeline, where: str) -> None:
    """Check that rows exist; in a full check, that no step of the first epoch has one that another had."""
    sampler, count = pipeline.sampler, len(pipeline.source)
    for step in _end_steps(pipeline):
        rows = sampler.rows(step)
        if ((rows < 0) & (rows != FILL_ROW)).any() or (rows >= count).any():
            report.wrong("sampler", where, f"reads row {rows.max()}, but there are {count}.", f"step {step}")
            return
    once = sampler.steps_per_epoch is not None and not sampler.runs_on and sampler.host.count == 1
    if not report.full or not once or count > _MOST_ROWS:
        return
    reads, read = np.zeros(count, np.uint8), 0
    for step in range(pipeline.end_step):
        rows = sampler.rows(step)
        rows = rows[rows != FILL_ROW]
        if read + len(rows) > count or read == count:
            break
        np.add.at(reads, rows, 1)
        again = rows[reads[rows] > 1]
        if len(again):
            sentence = f"reads row {again[0]} a second time in its first epoch."
            report.wrong("sampler", where, sentence, f"step {step}")
            return
        read += len(rows)
    report.figures["rows_of_first_epoch"] = read


def _end_steps(pipeline: Pipeline) -> list[int]:
    """Return the first step and the last; the second step of a run that never ends."""
    return sorted({0, 1 if pipeline.end_step == sys.maxsize else pipeline.end_step - 1})


def _check_batches(report: Report, pipeline: Pipeline, where: str, vocab_size: int | None) -> None:
    """Check the arrays of the first and the last batch."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    trims = any(trait(transform, "trims_columns") for transform in pipeline.transforms)
    one_shape = not (trims or pipeline.sampler.batch_sizes.schedule)
    for step in _end_steps(pipeline):
        with report.errors("batches", where, f"step {step}"):
            batch = pipeline[step]
            here = {key: (array.shape, array.dtype.name) for key, array in batch.items()}
            shapes = shapes or here
            if one_shape and here != shapes:
                report.wrong("batches", where, f"its arrays are {here}, those of step 0 {shapes}.", f"step {step}")
            sentence = wrong_in_batch(batch, vocab_size)
            if sentence:
                report.wrong("batches", where, sentence, f"step {step}")
    report.figures["batch"] = {key: [list(shape), dtype] for key, (shape, dtype) in shapes.items()}


def wrong_in_batch(batch: Element, vocab_size: int | None) -> str:
    """Return what is wrong in a batch of `ShiftTargets`, as a sentence; "" where nothing is, and for other batches."""
    names = ("inputs", "targets", "inputs_position", "inputs_segmentation", "targets_segmentation")
    if any(name not in batch for name in names):
        return ""
    inputs, targets, positions, segments, taken = (batch[name] for name in names)
    if len({array.shape for array in batch.values()}) > 1:
        return f"its arrays are of different shapes: { {key: array.shape for key, array in batch.items()} }."
    if vocab_size is not None and inputs.size and int(max(inputs.max(), targets.max())) >= vocab_size:
        return f"holds the token {max(inputs.max(), targets.max())}, but the vocabulary has {vocab_size} ids."
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    wrong: dict[str, npt.NDArray[np.bool_]] = {
        "a segment does not begin at position 0": np.diff(segments, axis=1, prepend=0) * positions != 0,
        "a position does not count on in its segment": inside & (positions[:, 1:] != positions[:, :-1] + 1),
        "a target is not the token that follows": inside & (taken[:, :-1] != 0) & (targets[:, :-1] != inputs[:, 1:]),
        "a target takes loss in another segment than its input": (taken != 0) & (taken != segments),
    }
    for sentence, found in wrong.items():
        if found.any():
            row, column = np.argwhere(found)[0].tolist()
            return f"{sentence}: row {row} of the batch, column {column}."
    return ""
