"""NpyDataSource: the arrays of row i, or of rows i, j, k at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.corpus import LossReader, are_long
from grain_sft.errors import LayoutError
from grain_sft.layout import FILL_ROW, Layout, Pieces, checked_record, checked_rows
from grain_sft.source import workers
from grain_sft.source.arrays import Arrays, Element
from grain_sft.source.row_reader import ReadyArrays, RowReader
from grain_sft.source.segment_reader import SegmentReader
from grain_sft.storage import ShardReader

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64, Integer

workers.default_grain_flags()  # so that worker processes of any grain.DataLoader over an NpyDataSource start

_BATCH_SIZES_KEPT = 8


class ReadRows(NamedTuple):
    """Rows as they were read, arrays [rows, L], for a transform that can do with less than what `NpyDataSource.read`
    makes of them.

    Attributes:
      tokens, segment_ids, positions: as `read` gives them.
      loss: bool, or float32 weights; None: every token that is no padding takes loss, or as `target_segment_ids` says.
      lasts: int64 [segments], places of every segment's last token in the rows one after the other.
      held: bool, tokens that are no padding, where that is at hand.
      target_segment_ids: int32, what `ShiftTargets` makes of all this, where that is known, as it is wherever both `loss` and
        `held` are None.
      inputs, targets: int32, what `ShiftTargets` makes of the tokens, where that is known.
    """

    tokens: Integer[np.ndarray, "rows length"]
    loss: npt.NDArray[Any] | None
    segment_ids: Int32[np.ndarray, "rows length"]
    positions: Int32[np.ndarray, "rows length"]
    target_segment_ids: Int32[np.ndarray, "rows length"] | None = None
    inputs: Int32[np.ndarray, "rows width"] | None = None
    targets: Int32[np.ndarray, "rows width"] | None = None
    lasts: Int64[np.ndarray, " segments"] | None = None
    held: npt.NDArray[np.bool_] | None = None


class NpyDataSource(grain.sources.RandomAccessDataSource[Element]):
    """Rows of a layout by number, read from the token files.

    `source[i]` is row i as arrays [L]; `source.read(indices)` is many rows as arrays [rows, L], the same values in one
    gather. Keys:
      tokens: the corpus's dtype. Always a fresh copy.
      loss_mask: bool, tokens that take loss as targets: of the corpus's loss files or, without any, all.
      loss_weights: float32, how much, where the corpus has weights; `loss_mask` is then where they are not 0.
      segment_ids: int32, from 1; 0 is padding.
      positions: int32, from 0 in every segment.
    Arrays that `read` returns for every batch (in a window layout all but tokens and loss) are shared and read-only. Padding is
    the corpus's `pad_token_id`, else its EOS, else 0. Row `FILL_ROW` (-1) of `read` is all padding.

    Opens files on first use. Safe in threads; pickles without its open files, so that each worker process opens its own.

    Args:
      layout: Layout of the rows.
      max_open_files: Most files that stay open; None for 1024, or less under a low `ulimit -n`.

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
        self._ready = None if layout.row_format is None else RowReader(corpus, max_open_files)
        self._loss = LossReader(corpus.loss_files, max_open_files, remote=corpus.remote) if corpus.has_loss else None
        self._arrays = Arrays()
        self._fit = _all_fit(layout)
        self._segment_reader = SegmentReader(layout, self._reader, self._fit) if _has_long_segments(layout) else None
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

    def read_shifted(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadyArrays | None:
        """What `ShiftTargets` makes of the same rows, where it is at hand once they are read: where they were written out, or
        are read row by row. Else None: use `read_rows`.

        Raises: as `read`.
        """
        ready, long = self._ready, self._segment_reader
        if ready is None and (long is None or self._loss is not None):
            return None
        rows, filled = checked_rows(indices, self.layout)
        if filled:
            return None
        if ready is not None:
            return ready.read(rows, self._arrays, only_weights=True)
        assert long is not None
        read = long.read(rows, self._arrays, shifted=True)
        return (*read[:5], None) if read.fit else None

    def _read(self, rows: npt.NDArray[np.int64], shifted: bool = False) -> ReadRows:
        if self._ready is not None:
            inputs, targets, positions, segments, target_segments, loss = self._ready.read(
                rows, self._arrays, only_weights=shifted
            )
            dtype = self.layout.corpus.dtype
            tokens = inputs.view(dtype) if dtype.itemsize == 4 else inputs.astype(dtype)
            return ReadRows(tokens, loss, segments, positions, target_segments, inputs, targets)
        if self._segment_reader is not None:
            return self._read_long(self._segment_reader, rows, shifted)
        return self._read_pieces(rows, shifted)

    def _read_pieces(self, rows: npt.NDArray[np.int64], shifted: bool) -> ReadRows:
        """Rows of any layout, their pieces copied all at once."""
        shape, dtype = (len(rows), self.layout.sequence_length), self.layout.corpus.dtype
        pieces, wide = self.layout.pieces(rows), dtype.itemsize == 4
        stack, (inputs, targets, *more) = self._arrays.stack(
            2 if pieces.segment is None else 4, shape, lambda stack: stack
        )
        tokens = inputs.view(dtype) if wide else self._arrays.empty(shape, dtype, 1)
        if pieces.segment is None:
            read = self._constants.get(len(rows)) or self._whole_rows(shape)
        else:
            read = self._segments(pieces, tokens, more[0])
        self._gather(pieces, stack.first if wide else tokens.reshape(-1).data.cast("B"))
        loss = None if self._loss is None else self._gather_loss(self._loss, pieces, shape)
        target_segments = None
        if shifted and more and loss is None:
            target_segments = more[1]
            target_segments[...] = read.segment_ids
            target_segments.reshape(-1)[read.lasts] = 0
        known = shifted and _shift(tokens, inputs, targets, self._fit)
        read = read._replace(tokens=tokens, loss=loss, target_segment_ids=target_segments)
        return read._replace(inputs=inputs, targets=targets) if known else read

    def _read_long(self, reader: SegmentReader, rows: npt.NDArray[np.int64], shifted: bool) -> ReadRows:
        """Rows of few long segments: the same as by pieces, which are faster where there are many."""
        read = reader.read(rows, self._arrays, shifted=shifted)
        inputs, dtype = read.inputs, self.layout.corpus.dtype
        tokens = inputs.view(dtype) if dtype.itemsize == 4 else inputs.astype(dtype)
        loss = None if self._loss is None else self._gather_loss(self._loss, self.layout.pieces(rows), inputs.shape)
        target_segments = read.target_segment_ids if shifted and loss is None else None
        made = ReadRows(tokens, loss, read.segment_ids, read.positions, target_segments, lasts=read.lasts)
        return made._replace(inputs=inputs, targets=read.targets) if shifted and read.fit else made

    def _gather(self, pieces: Pieces, out: memoryview) -> None:
        """Copy every piece to its place in the bytes of tokens [rows, L]."""
        length, size = self.layout.sequence_length, self.layout.corpus.dtype.itemsize
        self._reader.gather(pieces.shard, pieces.start, pieces.offsets(length) * size, pieces.length * size, out)

    @staticmethod
    def _gather_loss(reader: LossReader, pieces: Pieces, shape: tuple[int, int]) -> npt.NDArray[Any]:
        """What the loss files say of every piece, at its place in [rows, L]."""
        places = pieces.offsets(shape[1])
        return reader.gather(pieces.shard, pieces.start, places, pieces.length, shape[0] * shape[1]).reshape(shape)

    def _segments(self, pieces: Pieces, tokens: npt.NDArray[Any], positions: npt.NDArray[np.int32]) -> ReadRows:
        """Segments and positions of rows that hold documents; pads `tokens` where there is none."""
        count, length = tokens.shape
        assert pieces.segment is not None and pieces.position is not None
        row = pieces.row
        firsts = pieces.offsets(length)
        ends = firsts + pieces.length
        borders = np.ones(len(row) + 1, np.bool_)  # a segment that goes on in the next piece has no last token there
        borders[1:-1] = (pieces.segment[1:] != pieces.segment[:-1]) | (row[1:] != row[:-1])
        last_of_row = row.searchsorted(np.arange(count), side="right") - 1
        used = ends[last_of_row]
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
        return ReadRows(tokens, None, segments, positions, lasts=ends[borders[1:]] - 1)

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
        return self._constants.setdefault(
            shape[0], ReadRows(segments, None, segments, positions, lasts=lasts, held=held)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "max_open_files": self._max_open_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        workers.end_with_parent()
        self.__init__(state["layout"], max_open_files=state["max_open_files"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """What decides its values and nothing else: Grain compares this when it restores an iterator."""
        return f"NpyDataSource(layout={self.layout!r}, corpus={self.layout.corpus.fingerprint!r}, padding={self._pad})"


def _has_long_segments(layout: Layout) -> bool:
    """Whether rows are read row by row."""
    if layout.row_segments is None or layout.corpus.dtype.itemsize > 4:
        return False
    return are_long(layout.sequence_length, layout.mean_segments)


def _all_fit(layout: Layout) -> bool:
    """Whether int32 is known to hold every token, because whoever looked for the ends of documents saw all of them."""
    highest = layout.highest_token
    return highest is not None and highest <= np.iinfo(np.int32).max


def _shift(
    tokens: npt.NDArray[Any], inputs: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], all_fit: bool
) -> bool:
    """Make inputs and targets of tokens; False: int32 can't hold them. Those of 4 bytes are in `inputs` already."""
    if tokens.itemsize > 4:
        return False
    if tokens.itemsize < 4:
        inputs[...] = tokens
    elif not all_fit and inputs.size and np.minimum.reduce(inputs, axis=None) < 0:
        return False
    targets.reshape(-1).data[:-1] = inputs.reshape(-1).data[1:]
    targets[:, -1] = 0
    return True


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
