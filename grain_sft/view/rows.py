"""Rows of a step for display: each token with its segment, position, loss and origin."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import check_type
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.pipeline import Pipeline, batch_of_arrays
from grain_sft.provenance import Trace, trace
from grain_sft.source import Element
from grain_sft.transforms import trait
from grain_sft.types import Ints
from grain_sft.view.text import visible_line

_SHIFTED_KEYS = ("inputs", "inputs_segmentation", "inputs_position", "targets", "targets_segmentation")
_SOURCE_KEYS = ("tokens", "segment_ids", "positions", "loss_mask")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one token file in one segment of a row.

    Attributes:
      segment: Number of the segment in the row, from 1.
      document: Number of the document in the run, as in `provenance.trace`; None if the layout does not state it (windows).
      source: Name of the input that the document comes from, or the label of its token file; "" if the corpus states neither.
      record: Line or row of the document in its input, from 1; None if the corpus does not state it.
      file: Path of the token file.
      start, stop: Range of tokens in the file.
      withdrawn: Number of the piece's tokens that are padding at the step of the row, because their document was withdrawn.
      mixed: Whether the run is a mixture of several corpora.
      column: Index of the piece's first token in its row.
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
    column: int = 0

    @property
    def source_record(self) -> str:
        """Source and record, such as "a.jsonl:7"; in a mixture "a, record 7", because "a:7" means document 7 of a."""
        source = visible_line(self.source)
        if not self.source or self.record is None:
            return source
        return f"{source}, record {self.record}" if self.mixed else f"{source}:{self.record}"


@dataclasses.dataclass(frozen=True, eq=False)
class RowView:
    """A row of a batch, token by token.

    Attributes:
      step, epoch: Step and epoch, from 0. In a mixture, a row of padding alone has the epoch -1.
      row: Index of the row in this host's batch.
      slot: Index of the row in the global batch.
      instance: Number of the row in the layout; -1 for a row of padding alone.
      tokens: int64 [n], the tokens of the row. If the batch has inputs and targets, the tokens are the inputs, and then the
        last target if this target takes loss.
      segments: int64 [n], segment of each token, from 1; 0 is padding.
      positions: int64 [n], position of each token.
      loss: bool [n], whether each token takes loss. If the batch has targets, token 5 takes loss if the target of input 4 does.
      weights: float32 [n], weight of each token's loss; None if the batch has no weights.
      pieces: Pieces of token files that the tokens come from, in order.
      notes: Remarks for the user: differences between the batch and the trace, withdrawn pieces, loss that a filter removed.
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
    """Return a `RowView` for each of `rows` of `pipeline[step]`.

    Args:
      rows: Indices of rows of this host's batch; None means all rows.

    Raises:
      RowIndexError: The step does not exist, or the host's batch does not have the row.
      WrongTypeError: The index of a row is not an integer.
      PipelineError: The batch has neither the source's keys nor those of `ShiftTargets`.
      CorpusFileError, CorpusError: Files cannot be read.
    """
    stage = pipeline.at(step)
    names_of_traits = ("splits_rows", "divides_segments", "filters_repetition")
    traits = {name for name in names_of_traits if any(trait(transform, name) for transform in stage.transforms)}
    # after a transform that splits rows, rows are not those of the trace, so show the rows of the source
    batch = stage.source_at(step).read(stage.sampler.rows(step)) if "splits_rows" in traits else batch_of_arrays(pipeline, step)
    count = len(stage.sampler.rows(step))
    indices = range(count) if rows is None else rows
    for row in indices:
        check_type("rows: an item", row, int | np.integer, "the index of a row")
        if isinstance(row, bool) or not 0 <= row < count:
            raise RowIndexError(f"row {row} of step {step}: expected 0 to {count - 1}, the rows of this host's batch.")
    origins = trace(pipeline, range(step, step + 1), host=stage.sampler.host, trainable=False)
    slots = stage.sampler.slots(range(step, step + 1), hosts=[stage.sampler.host.index])
    failing = _rows_of_failing_filter(stage, step) if "filters_repetition" in traits else ()
    views = []
    for row in indices:
        slot, instance = int(slots.slot[row]), int(slots.row[row])
        origin = origins.select(origins.row == slot)  # `Trace.row` has slots of the global batch
        # a layout may pack several epochs, which only the trace counts; it has no line for a row without tokens
        epoch = int(next(iter(origin.epoch), slots.epoch[row]))
        # arrays of the batch that have an item for each row
        arrays = _arrays({name: array[row] for name, array in batch.items() if np.shape(array)[:1] == (count,)})
        pieces = _pieces(origin, is_mixture="" not in stage.source.layout.parts)
        if "divides_segments" in traits:
            pieces = _cut_at_segments(pieces, arrays["segments"])
        notes = _notes(batch, row, arrays["segments"], pieces)
        notes += [f"padding: {describe_origin(each)}" for each in pieces if each.withdrawn == each.stop - each.start]
        if row in failing:
            notes.append("NgramFilter took the loss off this row: it repeats an n-gram too often.")
        names = stage.source.layout.segment_names if instance >= 0 else ()
        views.append(RowView(step, epoch, row, slot, instance, **arrays, pieces=pieces, notes=tuple(notes), names=names))
    return views


def _rows_of_failing_filter(stage: Pipeline, step: int) -> set[int]:
    """Return the rows of this host's batch from which an `NgramFilter` removed the loss."""
    rows = set[int]()
    element = stage.source_at(step).read(stage.sampler.rows(step))
    for transform in stage.transforms:
        tokens, segments = _SHIFTED_KEYS[:2] if "inputs" in element else _SOURCE_KEYS[:2]
        if trait(transform, "filters_repetition") and tokens in element:
            rows.update(np.flatnonzero(transform.fails(element[tokens], element.get(segments))).tolist())
        element = transform.map(element)
    return rows


def segment_runs(view: RowView) -> list[tuple[int, int, int]]:
    """Return (segment, first token, last token + 1) of each segment and each stretch of padding, in order.

    A segment that has a name, such as "chosen", is included even if it has no tokens.
    """
    edges = [0, *(np.flatnonzero(np.diff(view.segments)) + 1).tolist(), len(view.segments)]
    runs = [(int(view.segments[first]), first, stop) for first, stop in itertools.pairwise(edges) if first < stop]
    # segments with names, such as those of preference pairs, come in order, before padding: segment s belongs at runs[s - 1]
    for index in range(len(view.names)):
        if index == len(runs) or runs[index][0] != index + 1:
            end_before = runs[index - 1][2] if index else 0
            runs.insert(index, (index + 1, end_before, end_before))
    return runs


def describe_origin(piece: Piece) -> str:
    """Return a piece's origin, such as "document 3 of a.jsonl:7, tokens 0 to 99 of 0.npy"."""
    document = "" if piece.document is None else f"document {piece.document:,} "
    source = f"of {piece.source_record}, " if piece.source else ""
    withdrawn = f", {piece.withdrawn:,} of them withdrawn" if piece.withdrawn else ""
    return f"{document}{source}tokens {piece.start:,} to {piece.stop - 1:,} of {visible_line(piece.file)}{withdrawn}"


def _arrays(row: Element) -> dict[str, Any]:
    """Return fields of the `RowView` of a row, by name."""
    is_shifted = row.keys() >= set(_SHIFTED_KEYS)
    if not is_shifted and not row.keys() >= set(_SOURCE_KEYS):
        shifted, source = ", ".join(_SHIFTED_KEYS), ", ".join(_SOURCE_KEYS)
        expected = f"expected those of ShiftTargets ({shifted}) or of the source ({source})"
        raise PipelineError(f"a batch with the keys {', '.join(row)}: {expected}. Other batches can't be shown.")
    keys = _SHIFTED_KEYS if is_shifted else _SOURCE_KEYS
    if len({len(row[key]) for key in keys}) > 1:
        raise PipelineError(f"a batch whose {', '.join(keys)} have different lengths. Fix the transforms.")
    tokens, segments, positions = (row[key].astype(np.int64) for key in keys[:3])
    loss, weights = row.get("loss_mask"), row.get("loss_weights")
    if is_shifted:
        # the target of input 4 is token 5; token 0 is not a target
        loss, weights = np.append(False, row["targets_segmentation"] != 0), row.get("targets_weights")
        if loss[-1]:
            tokens = np.append(tokens, np.int64(row["targets"][-1]))
            segments = np.append(segments, np.int64(row["targets_segmentation"][-1]))
            positions = np.append(positions, positions[-1] + 1)
        loss = loss[: len(tokens)]
        weights = None if weights is None else np.append(np.float32(0), weights).astype(np.float32)[: len(tokens)]
    return {"tokens": tokens, "segments": segments, "positions": positions, "loss": loss, "weights": weights}


def _pieces(origin: Trace, is_mixture: bool) -> tuple[Piece, ...]:
    """Return the pieces of one row from its lines in a trace."""
    lines = origin.select(origin.instance >= 0).columns()
    lengths = lines["stop"] - lines["start"]
    lines["column"] = lengths.cumsum() - lengths  # pieces fill a row from column 0 on, without gaps
    pieces = []
    for values in zip(*(column.tolist() for column in lines.values()), strict=True):
        line = dict(zip(lines, values, strict=True))
        document, record = (None if line[name] < 0 else line[name] for name in ("document", "record"))
        source = origin.source_names[line["source"]] if line["source"] >= 0 else ""
        file = origin.paths[line["shard"]]
        tokens = line["start"], line["stop"], line.get("withdrawn", 0)
        pieces.append(Piece(line["segment"], document, source, record, file, *tokens, is_mixture, line["column"]))
    return tuple(pieces)


def _cut_at_segments(pieces: Sequence[Piece], segments: Ints) -> tuple[Piece, ...]:
    """Cut `pieces` where the segment changes. `segments` is int64 [n], the batch's segment of each token of the row."""
    borders = np.flatnonzero(np.diff(segments)) + 1
    cut_pieces = []
    for piece in pieces:
        to_file = piece.start - piece.column  # column + `to_file` is the token's index in the file
        stop_column = piece.stop - to_file
        inner_borders = borders[(borders > piece.column) & (borders < stop_column)].tolist()
        for begin, end in itertools.pairwise([piece.column, *inner_borders, stop_column]):
            if begin < len(segments):  # a transform may cut the last columns
                segment = int(segments[begin])
                withdrawn = end - begin if piece.withdrawn and segment == 0 else 0
                tokens = {"start": begin + to_file, "stop": end + to_file, "column": begin}
                cut_pieces.append(dataclasses.replace(piece, segment=segment, withdrawn=withdrawn, **tokens))
    return tuple(cut_pieces)


def _notes(batch: Element, row: int, segments: Ints, pieces: Sequence[Piece]) -> list[str]:
    """Return notes on a segment with another size in the batch than in the trace, and on targets other than the next input."""
    notes = []
    count = max(segments.max(initial=0), max((piece.segment for piece in pieces), default=0)) + 1
    # number of tokens of each segment
    in_batch, in_layout = np.bincount(segments, minlength=count), np.zeros(count, np.int64)
    for piece in pieces:
        in_layout[piece.segment] += piece.stop - piece.start - piece.withdrawn
    first = next(iter(np.flatnonzero(in_batch[1:] != in_layout[1:]) + 1), None)  # first segment that differs
    # no note if only the end of the row is missing: a transform may cut the last columns
    if first is not None and (in_batch[first] >= in_layout[first] or in_batch[first + 1 :].any()):
        counts = f"{in_batch[first]} tokens in the batch, {in_layout[first]} in the layout"
        reason = "a transform changed the rows, so the sources may be shown at the wrong tokens"
        notes.append(f"segment {first} has {counts}: {reason}.")
    if batch.keys() >= set(_SHIFTED_KEYS):
        targets, takes_loss = batch["targets"][row], batch["targets_segmentation"][row, :-1] != 0
        wrong = np.flatnonzero(takes_loss & (targets[:-1] != batch["inputs"][row, 1:]))
        if len(wrong):
            example = f"the target of input {wrong[0]} is {targets[wrong[0]]}"
            reason = "A transform changed targets; the row shows inputs"
            notes.append(f"{len(wrong)} targets are not the next input. For example, {example}. {reason}.")
    return notes
