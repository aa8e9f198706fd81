"""Rows of a step, with the origin of each token, for display."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.pipeline import Pipeline
from grain_sft.provenance import Trace, trace
from grain_sft.source import Element
from grain_sft.transforms import trait
from grain_sft.view.text import visible_line

_BATCH = ("inputs", "inputs_segmentation", "inputs_position", "targets", "targets_segmentation")
_SOURCE = ("tokens", "segment_ids", "positions", "loss_mask")

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one token file in one segment of a row.

    Attributes:
      segment: Number of the segment in the row, from 1.
      document: Number of the document in the run, as in a trace; None in a layout that does not follow documents.
      source: Name of the document's input, or the label of its file; "" if it has neither.
      record: Line or row in that input, from 1; None if the corpus does not state it.
      file: Path of the token file.
      start, stop: Range of tokens in the file.
      withdrawn: Number of these tokens whose document is withdrawn at this step.
      mixed: Whether `source` is one of a mixture.
    """

    segment: int
    document: int | None
    source: str
    record: int | None
    file: str
    start: int
    stop: int
    withdrawn: int = 0
    mixed: bool = False

    @property
    def source_record(self) -> str:
        """Source and record, as an amendment names them. In a mixture, SOURCE:NUMBER would name a document instead."""
        record = "" if self.record is None else f", record {self.record}" if self.mixed else f":{self.record}"
        return f"{visible_line(self.source)}{record}" if self.source else ""


@dataclasses.dataclass(frozen=True, eq=False)
class RowView:
    """A row of a batch, token by token.

    Attributes:
      step, epoch: Step and epoch, from 0.
      row: Index of the row in this host's batch.
      slot: Index of the row in the global batch.
      instance: Number of the row in the layout; -1 for a row of padding alone.
      tokens: int64 [n], the inputs, then the last target if it takes loss.
      segments, positions: int64 [n], of the tokens. Segment 0 is padding.
      loss: bool [n], whether the token takes loss; after `ShiftTargets`, as the target of the previous input.
      weights: float32 [n], the weight of that loss; None if the batch has no weights.
      pieces: Where the tokens come from, in order.
      notes: Differences between the batch and the trace, and withdrawn pieces.
      names: Names of the segments, from 1, as in `Layout.segment_names`; empty for a row of padding alone.
    """

    step: int
    epoch: int
    row: int
    slot: int
    instance: int
    tokens: Ints
    segments: Ints
    positions: Ints
    loss: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float32] | None
    pieces: tuple[Piece, ...]
    notes: tuple[str, ...]
    names: Sequence[str] = ()


def view_rows(pipeline: Pipeline, step: int, rows: Sequence[int] | None = None) -> list[RowView]:
    """Return rows of `pipeline[step]`. None means all rows of this host.

    Raises:
      RowIndexError: The step does not exist, or the host's batch does not have the row.
      PipelineError: The batch has neither the source's keys nor those of `ShiftTargets`.
      CorpusFileError, CorpusError: Files cannot be read.
    """
    stage = pipeline.at(step)
    # A transform that splits rows changes their lengths: read the source's rows instead.
    splits = any(trait(each, "splits_rows") for each in stage.transforms)
    batch = stage.source_at(step).read(stage.sampler.rows(step)) if splits else pipeline[step]
    count = len(next(iter(batch.values())))
    indices = range(count) if rows is None else rows
    for row in indices:
        if not 0 <= row < count:
            raise RowIndexError(f"row {row} of step {step}: expected 0 to {count - 1}, the rows of this host's batch.")
    lines = trace(pipeline, range(step, step + 1), host=stage.sampler.host, trainable=False)
    slots = np.unique(lines.row)  # `Trace.row` is a slot; entry i is that of row i of this host's batch
    divided = any(trait(each, "divides_segments") for each in stage.transforms)
    ngram_filter: Any = next((each for each in stage.transforms if trait(each, "filters_repetition")), None)
    tokens, segments = _BATCH[:2] if "inputs" in batch else _SOURCE[:2]
    failing = np.zeros(count, bool)
    if ngram_filter is not None and tokens in batch:
        failing = ngram_filter.fails(batch[tokens], batch.get(segments))
    views = []
    for row in indices:
        of_row = lines.select(lines.row == slots[row])
        arrays = _arrays({name: array[row] for name, array in batch.items() if np.ndim(array)})
        pieces = _pieces(of_row, "" not in stage.source.layout.parts)
        if divided:
            pieces = _cut_at_segments(pieces, arrays["segments"])
        notes = _notes(batch, row, arrays["segments"], pieces)
        notes += [f"padding: {describe_origin(each)}" for each in pieces if each.withdrawn == each.stop - each.start]
        if failing[row]:
            notes.append("NgramFilter took the loss off this row: it repeats an n-gram too often.")
        epoch, slot, instance = (int(each[0]) for each in (of_row.epoch, of_row.row, of_row.instance))
        names = stage.source.layout.segment_names if instance >= 0 else ()
        arrays |= {"pieces": pieces, "notes": tuple(notes), "names": names}
        views.append(RowView(step, epoch, row, slot, instance, **arrays))
    return views


def segment_runs(view: RowView) -> list[tuple[int, int, int]]:
    """Return (segment, first token, token after the last) of each segment and each stretch of padding, in order. Named
    segments are included even if empty."""
    borders = np.flatnonzero(np.diff(view.segments)) + 1
    edges = [0, *borders.tolist(), len(view.segments)]
    runs = [(int(view.segments[first]), first, stop) for first, stop in itertools.pairwise(edges) if first < stop]
    for index in range(len(view.names)):
        if index == len(runs) or runs[index][0] != index + 1:
            stop = runs[index - 1][2] if index else 0
            runs.insert(index, (index + 1, stop, stop))
    return runs


def segment_title(view: RowView, segment: int) -> str:
    """Return the number of a segment and, if it has one, its name."""
    return f"segment {segment}, {view.names[segment - 1]}" if view.names else f"segment {segment}"


def describe_origin(piece: Piece) -> str:
    """Return a description of a piece's origin."""
    document = "" if piece.document is None else f"document {piece.document:,} "
    source = f"of {piece.source_record}, " if piece.source else ""
    gone = f", {piece.withdrawn:,} of them withdrawn" if piece.withdrawn else ""
    return f"{document}{source}tokens {piece.start:,} to {piece.stop - 1:,} of {visible_line(piece.file)}{gone}"


def _arrays(row: Element) -> dict[str, Any]:
    """Return tokens, segments, positions, loss and weights of a row."""
    shifted = row.keys() >= set(_BATCH)
    if not shifted and not row.keys() >= set(_SOURCE):
        expected = f"expected those of ShiftTargets ({', '.join(_BATCH)}) or of the source ({', '.join(_SOURCE)})"
        raise PipelineError(f"a batch with the keys {', '.join(row)}: {expected}. Other batches can't be shown.")
    tokens, segments, positions = (row[key].astype(np.int64) for key in (_BATCH if shifted else _SOURCE)[:3])
    if not shifted:
        loss, weights = row["loss_mask"], row.get("loss_weights")
    else:
        loss, weights = np.append(False, row["targets_segmentation"] != 0), row.get("targets_weights")
        if loss[-1]:
            tokens = np.append(tokens, np.int64(row["targets"][-1]))
            segments = np.append(segments, np.int64(row["targets_segmentation"][-1]))
            positions = np.append(positions, positions[-1] + 1)
        loss = loss[: len(tokens)]
        weights = None if weights is None else np.append(np.float32(0), weights).astype(np.float32)[: len(tokens)]
    return {"tokens": tokens, "segments": segments, "positions": positions, "loss": loss, "weights": weights}


def _pieces(lines: Trace, mixed: bool) -> tuple[Piece, ...]:
    """Return the pieces of a row's trace, none for a row of padding alone. `mixed`: Whether the run is a mixture."""
    found, pieces = lines.select(lines.instance >= 0), []
    names = ("segment", "document", "source", "record", "shard", "start", "stop")
    withdrawn = np.zeros_like(found.step) if found.withdrawn is None else found.withdrawn
    columns = [*(getattr(found, name) for name in names), withdrawn]
    for segment, number, source, line, shard, *place in zip(*(each.tolist() for each in columns), strict=True):
        document, record = (None if each < 0 else each for each in (number, line))
        start, stop, gone = place
        name, file = found.source_names[source], found.paths[shard]
        pieces.append(Piece(segment, document, name, record, file, start, stop, gone, mixed))
    return tuple(pieces)


def _cut_at_segments(pieces: Sequence[Piece], segments: Ints) -> tuple[Piece, ...]:
    """Return the pieces of a row, cut where a segment of the batch or its padding ends."""
    borders, column, found = np.flatnonzero(np.diff(segments)) + 1, 0, []
    for piece in pieces:
        stop = column + piece.stop - piece.start
        edges = [column, *borders[(borders > column) & (borders < stop)].tolist(), stop]
        for begin, end in itertools.pairwise(edges):
            if begin < len(segments):
                segment, shift = int(segments[begin]), piece.start - column
                gone = end - begin if piece.withdrawn and segment == 0 else 0
                place = {"segment": segment, "start": begin + shift, "stop": end + shift}
                found.append(dataclasses.replace(piece, **place, withdrawn=gone))
        column = stop
    return tuple(found)


def _notes(batch: Element, row: int, segments: Ints, pieces: Sequence[Piece]) -> list[str]:
    """Return a note for each disagreement between batch and trace, or between targets and inputs."""
    notes = []
    count = max(segments.max(initial=0), max((piece.segment for piece in pieces), default=0)) + 1
    found, stated = np.bincount(segments, minlength=count), np.zeros(count, np.int64)
    for piece in pieces:
        stated[piece.segment] += piece.stop - piece.start - piece.withdrawn
    differing = np.flatnonzero(found[1:] != stated[1:]) + 1
    first = differing[0] if len(differing) else None
    # A transform may cut the last columns. Then the first segment that differs is shorter, and none follows it.
    if first is not None and (found[first] >= stated[first] or found[first + 1 :].any()):
        counts = f"{found[first]} tokens in the batch, {stated[first]} in the layout"
        reason = "a transform changed the rows, so the sources may be shown at the wrong tokens"
        notes.append(f"segment {first} has {counts}: {reason}.")
    if "targets" in batch:
        targets, taken = batch["targets"][row], batch["targets_segmentation"][row, :-1] != 0
        wrong = np.flatnonzero(taken & (targets[:-1] != batch["inputs"][row, 1:]))
        if len(wrong):
            example = f"the target of input {wrong[0]} is {targets[wrong[0]]}"
            reason = "A transform changed targets; the row shows inputs"
            notes.append(f"{len(wrong)} targets are not the next input, the first of them: {example}. {reason}.")
    return notes
