"""Checks of a layout from another package, and of the pieces that it returns."""

import itertools
from typing import Any

import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.corpus import CorpusData, Documents
from grain_sft.errors import LayoutError
from grain_sft.layout.pieces import Pieces, expand_counts
from grain_sft.layout.traits import Traits
from grain_sft.registry import entry_errors, is_ours, name_of
from grain_sft.types import Bools, Ints


def check_layout(layout: Traits) -> None:
    """Raise a LayoutError if a layout of another package lacks a corpus, a sequence length or rows."""
    if is_ours(type(layout)):
        return
    name = f"layout {name_of(type(layout))}"
    with entry_errors(LayoutError, name, "Fix its code."):
        check_type(f"{name}: corpus", layout.corpus, CorpusData, "a Corpus")
        as_integer(f"{name}: sequence_length", layout.sequence_length, 1, LayoutError)
        count = as_integer(f"{name}: __len__()", len(layout), 1, LayoutError)
        if (again := len(layout)) != count:
            raise LayoutError(f"{name}: __len__() is {count}, then {again}. Return one number in all calls.")
        if len(counts := layout.row_counts) != len(layout.row_lengths) or (counts and sum(counts) != count):
            raise LayoutError(f"{name}: row_counts={counts}: expected {count} rows of all row_lengths. Fix it.")


def checked_pieces(columns: Any, layout: Traits, rows: Ints, documents: Documents | None = None) -> Pieces:
    """Check `columns`, which `layout` returned for `rows`, and return them as int64 `Pieces`.

    Args:
      documents: Documents that pieces are compared with. None skips this check, which may need a search for documents.

    Raises:
      LayoutError: The columns are not pieces that fit the rows and the corpus.
    """
    method = f"{name_of(type(layout))}.pieces"
    found = f"{method}: a result of type {type(columns).__name__}"
    with entry_errors(LayoutError, found, "Expected int64 columns of one length."):
        int64s = [None if column is None else np.asarray(column).astype("i8", casting="safe") for column in columns]
        pieces = Pieces._make(int64s)
        shapes = {column.shape for column in int64s if column is not None}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            raise ValueError(f"columns of shapes {sorted(shapes)}")
        faults = _faults(pieces, layout, rows, documents)
    for fault, wrong in faults.items():
        if wrong.any():
            row, column, shard, start, length = (int(values[wrong.argmax()]) for values in pieces[:5])
            where = f"row {rows[row]}" if 0 <= row < len(rows) else f"index {row} of {len(rows)} rows"
            piece = f"a piece of {length} tokens at column {column}, from token {start} of shard {shard} on"
            raise LayoutError(f"{method}: {where}: {piece}, {fault}. Fix the layout.")
    if (pieces.segment is None) != (pieces.position is None):
        raise LayoutError(f"{method}: only one of the columns `segment` and `position`. Return both, or None for both.")
    if pieces.segment is None and pieces.length.sum() != len(rows) * layout.width(rows):
        raise LayoutError(f"{method}: rows with padding need the columns `segment` and `position`. Return both.")
    if pieces.document is None and layout.follows_documents:
        raise LayoutError(f"{method}: `follows_documents` is set, but `document` is missing. Return it.")
    return pieces


def check_repeated(pieces: Pieces, layout: Traits, rows: Ints) -> None:
    """Raise a LayoutError if a row has other pieces than `pieces`, which `layout` returned for `rows`, in another call.

    The first and the last row are requested alone, and all rows in two other groups.
    """
    whole, backwards = _table(pieces, rows), np.arange(len(rows))[::-1]
    for index in (backwards[-1:], backwards[:1], backwards[::2], backwards[1::2]):
        first, end = (pieces.row.searchsorted(index, side) for side in ("left", "right"))
        row, number = expand_counts(end - first)
        before, after = whole[first[row] + number], _table(layout.pieces(rows[index]), rows[index])
        if not np.array_equal(before, after):
            pairs = itertools.zip_longest(before.tolist(), after.tolist())
            one, other = next(pair for pair in pairs if pair[0] != pair[1])
            found = f"{one} in a call for {len(rows)} rows, but {other} in a call for {len(index)}"
            found += ". The numbers are row, column, shard, start, length, segment, position and document"
            raise LayoutError(f"{name_of(type(layout))}.pieces: a piece is {found}. Let a row depend only on its number.")


def _table(pieces: Pieces, rows: Ints) -> Ints:
    """Return the columns of the `pieces` of `rows`, as int64 [pieces, 8]. The first column has row numbers."""
    document = np.full(len(pieces.row), -1) if pieces.document is None else pieces.document
    return np.stack([rows[pieces.row], *pieces[1:5], *pieces.segments_and_positions, document], axis=1)


def _faults(pieces: Pieces, layout: Traits, rows: Ints, documents: Documents | None) -> dict[str, Bools]:
    """Return {text of a fault: mask of the pieces that have it, bool [pieces]}."""
    row, shard = pieces.row, pieces.shard
    segment, position = pieces.segments_and_positions
    document = np.full(len(row), -1) if pieces.document is None else pieces.document
    stop, width = pieces.column + pieces.length, layout.width(rows)
    begins_row = np.diff(row, prepend=-1) != 0
    stop_before = np.where(begins_row, 0, np.roll(stop, 1))
    segment_before = np.where(begins_row, 0, np.roll(segment, 1))
    moved = (segment == segment_before) & (position != np.roll(position + pieces.length, 1))
    highest = np.maximum(segment_before + 1, len(layout.segment_names))  # named segments may have no tokens
    num_tokens = np.array([each.num_tokens for each in layout.corpus.shards])
    has_shard = (shard >= 0) & (shard < len(num_tokens))
    after_end = pieces.start + pieces.length > num_tokens[np.where(has_shard, shard, 0)]
    unknown_document, num_documents = "names a document, but `follows_documents` is not set", 0
    if layout.follows_documents:
        unknown_document, num_documents = "names a document that does not exist", layout.num_documents
    outside = np.zeros(len(row), np.bool_)
    if documents:
        # "clip", because the numbers of shards and documents may be wrong
        begin = pieces.start + layout.corpus.shard_borders.take(shard, mode="clip")
        first, length = (column.take(document, mode="clip") for column in documents)
        outside = (document >= 0) & ((begin < first) | (begin + pieces.length > first + length))
    return {
        "is of another row, or out of order": (row < 0) | (row >= len(rows)) | (np.diff(row, prepend=0) < 0),
        "has no tokens": pieces.length < 1,
        "is not in the file": ~has_shard | (pieces.start < 0) | after_end,
        "does not begin where the piece before it ends": pieces.column != stop_before,
        f"ends after the row of {width}": stop > width,
        "skips a segment": (segment < np.maximum(1, segment_before)) | (segment > highest),
        "is of a second segment, but `one_segment` is set": (segment > 1) & layout.one_segment,
        "has a negative position": position < 0,
        "does not continue the positions of its segment": moved,
        unknown_document: document >= num_documents,
        "is not inside its document": outside,
    }
