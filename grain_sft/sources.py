"""NpyDataSource: the arrays of row i, or of rows i, j, k at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import numpy.typing as npt

from grain_sft import workers
from grain_sft.arrays import Arrays
from grain_sft.corpus.loss_reader import LossReader
from grain_sft.corpus.reader import ShardReader
from grain_sft.corpus.rows import RowReader
from grain_sft.errors import LayoutError
from grain_sft.layout import FILL_ROW, Layout, MaterializedLayout, Pieces, WindowLayout
from grain_sft.layout.span import checked_record, checked_rows

workers.default_grain_flags()  # so that worker processes of any grain.DataLoader over an NpyDataSource start

Element = dict[str, npt.NDArray[Any]]
"""What sources give and transforms take: arrays [L] of a row or [rows, L] of a batch."""


_BATCH_SIZES_KEPT = 8
_LONG_RUN = 1 << 10  # tokens: segments of this mean length and more are filled one by one


class ReadRows(NamedTuple):
    """Rows as they were read, arrays [rows, L], for a transform that can do with less than what `NpyDataSource.read`
    makes of them.

    Attributes:
      tokens, segment_ids, positions: as `read` gives them.
      loss: bool, or float32 weights; None: every token that is no padding takes loss, or as `target_segment_ids` says.
      lasts: int64 [segments], places of every segment's last token in the rows one after the other.
      held: bool, tokens that are no padding, where that is at hand.
      target_segment_ids: int32, what `ShiftTargets` makes of all this, where it was written out; then `lasts` is None.
      fits_int32: every token is known to.
    """

    tokens: npt.NDArray[Any]
    segment_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    loss: npt.NDArray[Any] | None
    lasts: npt.NDArray[np.int64] | None
    held: npt.NDArray[np.bool_] | None = None
    target_segment_ids: npt.NDArray[np.int32] | None = None
    fits_int32: bool = False


class NpyDataSource(grain.sources.RandomAccessDataSource[Element]):
    """Rows of a layout by number, read from the token files.

    `source[i]` is row i as arrays [L]; `source.read(indices)` is many rows as arrays [rows, L], the same values in one
    gather. Keys:
      tokens: the corpus's dtype. Always a fresh copy.
      loss_mask: bool, tokens that take loss as targets: of the corpus's loss files or, without any, all.
      loss_weights: float32, how much, where the corpus has weights; `loss_mask` is then where they are not 0.
      segment_ids: int32, from 1; 0 is padding.
      positions: int32, from 0 in every segment.
    In `read`, arrays that are the same for every batch (in a window layout all but tokens and what loss files say) are
    shared between batches and read-only. Padding is the corpus's `pad_token_id`, else its EOS, else 0. To `read`, row
    `FILL_ROW` (-1) is all padding.

    Files are opened when first read. Safe in threads; pickles without its open files, so that Grain's worker
    processes open their own.

    Args:
      layout: which rows there are.
      max_open_files: at most so many files stay open; None means 1024, or less under a low `ulimit -n`.

    Raises:
      LayoutError: the layout of a mixture, which MixtureSource reads.
    """

    def __init__(self, layout: Layout, *, max_open_files: int | None = None) -> None:
        self.layout = layout
        self._max_open_files = max_open_files
        corpus = layout.corpus
        if hasattr(corpus, "parts"):
            raise LayoutError(f"{layout!r} is of several corpora: read it with MixtureSource({{name: source, ...}}).")
        self._reader = ShardReader(corpus.shards, corpus.dtype.itemsize, max_open_files, remote=corpus.remote)
        self._ready = RowReader(corpus, max_open_files) if isinstance(layout, MaterializedLayout) else None
        self._loss = LossReader(corpus.shards, max_open_files, remote=corpus.remote) if corpus.has_loss else None
        self._arrays = Arrays()
        self._long_runs = (
            not isinstance(layout, (WindowLayout, MaterializedLayout))
            and layout.sequence_length >= _LONG_RUN * layout.mean_segments
        )
        self._constants: dict[int, ReadRows] = {}
        self._numbers: npt.NDArray[np.int32] | None = None
        self._pad = corpus.padding_token_id

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index: int) -> Element:
        """Row `index`: fresh arrays [L].

        Raises:
          RowIndexError: no such row.
          CorpusFileError: its file is missing, unreadable, or not the one that was indexed.
        """
        element = self.read((checked_record(index, self.layout),))
        return {key: array[0] if array.flags.writeable else array[0].copy() for key, array in element.items()}

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        """Rows `indices`, in that order: arrays [rows, L].

        Raises:
          RowIndexError: an index that is no row.
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        rows, filled = checked_rows(indices, self.layout)
        if not filled:
            return _element(self._read(rows))
        held = rows != FILL_ROW
        padded: Element = {}
        for key, array in self.read(rows[held]).items():
            padded[key] = np.full((len(rows), *array.shape[1:]), self._pad if key == "tokens" else 0, array.dtype)
            padded[key][held] = array
        return padded

    def read_rows(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadRows | None:
        """The same rows, before anything is derived from what was read; None where one is `FILL_ROW`.

        Raises: as `read`.
        """
        rows, filled = checked_rows(indices, self.layout)
        return None if filled else self._read(rows, shifted=True)

    def _read(self, rows: npt.NDArray[np.int64], shifted: bool = False) -> ReadRows:
        if self._ready is not None:
            tokens, positions, segments, targets, loss = self._ready.read(rows, self._arrays, only_weights=shifted)
            return ReadRows(tokens, segments, positions, loss, None, None, targets, self._ready.fits_int32)
        shape = (len(rows), self.layout.sequence_length)
        tokens = self._arrays.empty(shape, self.layout.corpus.dtype, 1)
        if self._long_runs and len(rows):
            return self._read_spans(rows, tokens)
        pieces = self.layout.pieces(rows)
        if pieces.segment is None:
            read = self._constants.get(len(rows)) or self._whole_rows(shape)
        else:
            read = self._segments(pieces, tokens)
        self._gather(pieces, tokens)
        loss = None if self._loss is None else self._gather_loss(self._loss, pieces, shape)
        return read._replace(tokens=tokens, loss=loss)

    def _read_spans(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[Any]) -> ReadRows:
        """Rows of few long segments, span by span: the same as by pieces, which are faster where there are many."""
        length, itemsize, counting = tokens.shape[1], tokens.itemsize, self._counting(tokens.shape[1])
        segments, positions = (self._arrays.empty(tokens.shape, np.int32, 1) for _ in range(2))
        flat_segments, flat_positions, flat_tokens = segments.reshape(-1), positions.reshape(-1), tokens.reshape(-1)
        shards: list[int] = []
        starts: list[int] = []
        places: list[int] = []
        counts: list[int] = []
        lasts: list[int] = []
        place = 0
        for row in rows.tolist():
            row_end = place + length
            segment, document, position = 0, None, 0
            for shard, start, stop, of_document in self.layout.ranges(row):
                count = stop - start
                if of_document == document:
                    position += counts[-1]
                    lasts.pop()
                else:
                    segment, position, document = segment + 1, 0, of_document
                shards.append(shard)
                starts.append(start)
                places.append(place)
                counts.append(count)
                flat_segments[place : place + count] = segment
                flat_positions[place : place + count] = counting[position : position + count]
                place += count
                lasts.append(place - 1)
            for array, padding in ((flat_tokens, self._pad), (flat_segments, 0), (flat_positions, 0)):
                array[place:row_end] = padding
            place = row_end
        self._reader.gather(
            shards,
            starts,
            [at * itemsize for at in places],
            [count * itemsize for count in counts],
            flat_tokens.data.cast("B"),
        )
        loss = None
        if self._loss is not None:
            of_shard, begin, at, size = (np.array(column, np.int64) for column in (shards, starts, places, counts))
            loss = self._loss.gather(of_shard, begin, at, size, tokens.size).reshape(tokens.shape)
        return ReadRows(tokens, segments, positions, loss, np.array(lasts, np.int64))

    def _gather(self, pieces: Pieces, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Copy every piece to its place in `tokens` [rows, L]."""
        places = (pieces.row * tokens.shape[1] + pieces.column) * tokens.itemsize
        sizes = pieces.length * tokens.itemsize
        out = tokens.reshape(-1).data.cast("B")
        self._reader.gather(pieces.shard, pieces.start, places, sizes, out)

    @staticmethod
    def _gather_loss(reader: LossReader, pieces: Pieces, shape: tuple[int, int]) -> npt.NDArray[Any]:
        """What the loss files say of every piece, at its place in [rows, L]."""
        places = pieces.row * shape[1] + pieces.column
        return reader.gather(pieces.shard, pieces.start, places, pieces.length, shape[0] * shape[1]).reshape(shape)

    def _segments(self, pieces: Pieces, tokens: npt.NDArray[Any]) -> ReadRows:
        """Segments and positions of rows that hold documents; pads `tokens` where there is none."""
        count, length = tokens.shape
        assert pieces.segment is not None and pieces.position is not None
        row = pieces.row
        firsts = pieces.row * length + pieces.column
        ends = firsts + pieces.length
        borders = np.ones(len(row) + 1, np.bool_)  # a segment that goes on in the next piece has no last token there
        borders[1:-1] = (pieces.segment[1:] != pieces.segment[:-1]) | (row[1:] != row[:-1])
        last_of_row = row.searchsorted(np.arange(count), side="right") - 1
        used = ends[last_of_row]
        positions = self._arrays.empty(tokens.shape, np.int32)
        runs = pieces.length.copy()
        runs[last_of_row] += np.arange(1, count + 1) * length - used  # the padding after it
        segments = pieces.segment.astype(np.int32).repeat(runs).reshape(tokens.shape)
        begins = (firsts - pieces.position).astype(np.int32).repeat(runs)
        np.subtract(self._counting(tokens.size), begins, out=positions.reshape(-1))
        for number, begin in enumerate(used.tolist()):
            rest = slice(begin - number * length, length)
            tokens[number, rest] = self._pad
            segments[number, rest] = 0
            positions[number, rest] = 0
        return ReadRows(tokens, segments, positions, None, ends[borders[1:]] - 1)

    def _counting(self, size: int) -> npt.NDArray[np.int32]:
        """0, 1, 2, ...: kept, since a fresh array of some hundred KB costs more than what is computed from it."""
        numbers = self._numbers  # of batches of another size, another thread may put others there meanwhile
        if numbers is None or len(numbers) != size:
            numbers = self._numbers = np.arange(size, dtype=np.int32)
        return numbers

    def _whole_rows(self, shape: tuple[int, int]) -> ReadRows:
        """What is the same in all batches of rows of one full segment each; their tokens are still to be read."""
        segments = np.ones(shape, np.int32)
        positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        held = np.ones(shape, np.bool_)
        for array in (segments, positions, held):
            array.flags.writeable = False
        if len(self._constants) >= _BATCH_SIZES_KEPT:
            self._constants.clear()
        lasts = np.arange(1, shape[0] + 1) * shape[1] - 1
        return self._constants.setdefault(shape[0], ReadRows(segments, segments, positions, None, lasts, held))

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "max_open_files": self._max_open_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        workers.end_with_parent()
        self.__init__(state["layout"], max_open_files=state["max_open_files"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """What decides its values and nothing else: Grain compares this when it restores an iterator."""
        return f"NpyDataSource(layout={self.layout!r}, corpus={self.layout.corpus.fingerprint!r}, padding={self._pad})"


def _element(read: ReadRows) -> Element:
    """The arrays that `NpyDataSource.read` promises."""
    loss, held = read.loss, read.held
    mask: npt.NDArray[np.bool_]
    if loss is not None:
        mask = loss if loss.dtype == np.bool_ else loss != 0
    else:
        mask = read.segment_ids != 0 if held is None else held
    element = {
        "tokens": read.tokens,
        "loss_mask": mask,
        "segment_ids": read.segment_ids,
        "positions": read.positions,
    }
    return element if loss is None or loss is mask else {**element, "loss_weights": loss}
