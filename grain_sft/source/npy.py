"""NpyDataSource: random access to the rows of a layout."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.corpus import LossReader, are_long, check_signed
from grain_sft.errors import LayoutError
from grain_sft.layout import FILL_ROW, ColumnsLayout, Layout, Pieces, check_layout, checked_record, checked_rows
from grain_sft.source import workers
from grain_sft.source.arrays import Arrays, Element, ReadRows, Stack
from grain_sft.source.row_arrays import fill_segments, whole_rows
from grain_sft.source.row_reader import RowReader
from grain_sft.source.segment_reader import SegmentReader
from grain_sft.storage import Buffers, ShardReader
from grain_sft.types import Array, Integers, Ints

workers.default_grain_flags()  # without these flags, worker processes of a grain.DataLoader may not start


class RowSource(grain.sources.RandomAccessDataSource[Element]):
    """Base of the sources: random access to the rows of `layout`."""

    layout: Layout

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index: int) -> Element:
        """Return row `index` as new arrays [L]. Raises: as `read`."""
        element = self.read((checked_record(index, self.layout),))
        return {key: array[0] if array.flags.writeable else array[0].copy() for key, array in element.items()}

    @abc.abstractmethod
    def read(self, indices: Sequence[int] | Integers) -> Element:
        """Return the rows `indices`, in that order, as arrays [rows, L].

        Raises:
          RowIndexError: One of `indices` is not a row of `layout`.
          CorpusFileError: A file is missing, unreadable, or changed since it was indexed.
        """


class NpyDataSource(RowSource):
    """Random access to the rows of a layout, read from the token files.

    `source[i]` is row i as arrays [L]. `source.read(indices)` reads many rows at once, as arrays [rows, L]. Keys:
      tokens: corpus's dtype, token ids; always a new array.
      loss_mask: bool, whether the token takes loss as a target; without loss files, every token except padding does.
      loss_weights: float32, weight of the token's loss, if the corpus has weights; `loss_mask` is then `loss_weights != 0`.
      segment_ids: int32, from 1; 0 is padding.
      positions: int32, from 0 in every segment.
    Arrays that are equal in all batches, such as `positions` in a window layout, are shared and read-only. The padding token is
    the corpus's `pad_token_id`, else its EOS, else 0.

    The source opens files on first use. It is thread-safe, and pickles without open files.

    Args:
      layout: Layout of the rows.
      max_open_files: Maximum number of files that stay open; None for 1024, or less under a low `ulimit -n`.

    Raises:
      LayoutError: `layout` is of a mixture, which only MixtureSource reads. Or the corpus has preference pairs or the weights
        of a blend, and `layout` ignores them. Or `max_open_files` is not a positive integer.
    """

    def __init__(self, layout: Layout, *, max_open_files: int | None = None) -> None:
        check_type("layout", layout, Layout, "a layout, such as WindowLayout(corpus, sequence_length)")
        if max_open_files is not None:
            max_open_files = as_integer("max_open_files", max_open_files, 1, LayoutError)
        check_layout(layout)
        self.layout = layout
        self._max_open_files = max_open_files
        corpus, highest = layout.corpus, layout.highest_token
        if hasattr(corpus, "parts"):  # a `MixtureCorpus`
            raise LayoutError(f"{layout!r} is of several corpora: read it with MixtureSource({{name: source, ...}}).")
        if corpus.of_pairs and not layout.of_pairs:
            raise LayoutError(f"{layout!r}: would train on the pairs' rejected responses. Use the layout of kind pairs.")
        if corpus.weights and not layout.takes_weights:
            problem = f"{layout!r}: the corpus is a blend of weights {corpus.weights}"
            fix = "Leave the weights out, make a mixture of the prefixes, or use the layout of kind megatron_gpt"
            raise LayoutError(f"{problem}, which this layout does not follow. {fix}.")
        self._dtype, self._pad = corpus.dtype, corpus.padding_token_id
        # `_wide`: tokens are as wide as those of a batch, int32, so that they are read straight into it
        self._wide, self._signed = corpus.dtype.itemsize == 4, corpus.signed
        # whether every token is known to fit into int32; `highest` is None if it is unknown
        self._fits_int32 = corpus.dtype.itemsize < 4 or (highest is not None and highest <= np.iinfo(np.int32).max)
        self._arrays = Arrays()
        loss = LossReader(corpus.loss_files, max_open_files, remote=corpus.remote) if corpus.has_loss else None
        self._row_reader = None if layout.row_format is None else RowReader(corpus, loss, max_open_files)
        self._open(ShardReader(corpus.shards, corpus.dtype.itemsize, max_open_files, remote=corpus.remote), loss)

    def _open(self, reader: ShardReader, loss: LossReader | None) -> None:
        """Set the readers. `SegmentReader` is faster for rows of few long segments."""
        layout, self._reader, self._loss = self.layout, reader, loss
        is_possible = layout.row_segments is not None and self._dtype.itemsize <= 4
        is_faster = is_possible and are_long(layout.sequence_length, layout.mean_segments)
        self._segment_reader = SegmentReader(layout, reader, self._fits_int32) if is_faster else None

    def read(self, indices: Sequence[int] | Integers) -> Element:
        """Return the rows `indices` as arrays [rows, L]. A row `FILL_ROW` (-1) is padding, without loss.

        Raises: as `RowSource.read`; and CorpusError for a negative token.
        """
        rows, filled = checked_rows(indices, self.layout)
        if filled:  # at least one row is a `FILL_ROW`
            real, padded = rows != FILL_ROW, {}
            for key, array in self.read(rows[real]).items():
                padded[key] = np.full((len(rows), array.shape[1]), self._pad if key == "tokens" else 0, array.dtype)
                padded[key][real] = array
            return padded
        read, tokens, _ = self._read(rows, shifted=False)
        if tokens is None:
            tokens = read.inputs.view(self._dtype) if self._wide else read.inputs.astype(self._dtype)
        segments, loss = read.segment_ids, read.loss  # `loss` is None, a mask (bool) or weights (float32)
        mask = segments if loss is None else loss  # without loss files, all tokens but padding (segment 0) take loss
        mask = mask if mask.dtype == np.bool_ else mask != 0
        element = {"tokens": tokens, "loss_mask": mask, "segment_ids": segments, "positions": read.positions}
        if loss is not None and loss is not mask:  # float32
            element["loss_weights"] = loss
        return element

    def read_rows(self, indices: Sequence[int] | Integers) -> ReadRows | None:
        """Return the rows `indices` with targets, as `ShiftTargets` makes them.

        Return None if one of `indices` is `FILL_ROW`, or if a token may exceed int32.

        Raises: as `read`.
        """
        rows, filled = checked_rows(indices, self.layout)
        if filled or self._dtype.itemsize > 4:
            return None
        read, _, fit = self._read(rows, shifted=True)
        return read if fit else None

    @property
    def sources(self) -> dict[str, NpyDataSource]:
        """This source under the name "", as in `layout.parts`."""
        return {"": self}

    def with_sources(self, sources: Mapping[str, RowSource]) -> RowSource:
        """Return `sources[""]`, or this source if `sources` has no key ""."""
        return sources.get("", self)

    def columns(self, start: int, stop: int) -> NpyDataSource:
        """Return a source of the columns [start, stop) of the same rows. It shares the open files of this source.

        Raises:
          LayoutError: The rows do not have these columns.
        """
        of_columns = type(self)(ColumnsLayout(self.layout, start, stop), max_open_files=self._max_open_files)
        of_columns._open(self._reader, self._loss)
        return of_columns

    def _read(self, rows: Ints, *, shifted: bool) -> tuple[ReadRows, Array | None, bool]:
        """Return rows, their tokens (None if `inputs` holds them), and whether every token fits in int32.

        `shifted` states whether the targets and their segment ids are made. Without it, these arrays may be uninitialised, and
        the third value may be wrong.
        """
        if self._row_reader is not None:
            read, tokens, fit = self._row_reader.read(rows, self._arrays, only_weights=shifted), None, True
        elif self._segment_reader is None:
            read, tokens, fit = self._read_pieces(rows, shifted)
        else:
            read, tokens, fit = self._read_segments(self._segment_reader, rows, shifted)
        # with `shifted` and tokens of 4 bytes, `fit` is True only if no token is negative
        if self._signed and not (shifted and self._wide and fit):
            corpus, length = self.layout.corpus, self.layout.width(rows)

            def pieces() -> tuple[Ints, Ints, Ints]:
                of_rows = self.layout.pieces(rows)
                return of_rows.shard, of_rows.start, of_rows.offsets(length)

            check_signed(read.inputs if tokens is None else tokens, corpus.shards, corpus.dtype, pieces)
        return read, tokens, fit

    def _read_segments(self, reader: SegmentReader, rows: Ints, shifted: bool) -> tuple[ReadRows, Array | None, bool]:
        """Return what `_read` returns, for rows of long segments."""
        read, ends, fit = reader.read(rows, self._arrays, shifted=shifted)
        if self._loss is not None:
            pieces = self.layout.pieces(rows)
            read = read._replace(loss=_gather_loss(self._loss, pieces, read.inputs.shape), pieces=pieces)
            if shifted:
                length = self.layout.sequence_length
                # the last token of each segment, as an index into the flattened rows
                lasts = [row * length + end - 1 for row, of_row in enumerate(ends) for end in of_row]
                _fill_target_segments(read, np.array(lasts, np.int64))
        return read, None, fit

    def _read_pieces(self, rows: Ints, shifted: bool) -> tuple[ReadRows, Array, bool]:
        """Return what `_read` returns, for any layout."""
        # 1. Allocate the arrays. Tokens of 4 bytes are read straight into `inputs`. Step 4 copies other tokens into `inputs`.
        pieces, shape, fit = self.layout.pieces(rows), (len(rows), self.layout.width(rows)), True
        whole = pieces.segment is None  # every row is one full segment, without padding
        (memory, row_buffers), (inputs, targets, *more) = self._arrays.stack(2 if whole else 4, shape, _views)
        tokens = inputs.view(self._dtype) if self._wide else self._arrays.empty(shape, self._dtype, half=1)
        loss: Array | None = None
        lasts: Ints | slice
        firsts: Ints | None = None  # index of the first token of each piece in the flattened rows
        # 2. Make segment ids and positions, from a cache if all rows are whole. `lasts` are the indices of the segments' last
        # tokens in the flattened rows: 7 and 15 for two whole rows of 8 columns.
        if whole:
            segments, positions, target_segments, mask = whole_rows(*shape, self.layout.first_column)
            # without `shifted`, the cached mask saves `read` a comparison
            loss, lasts = None if shifted else mask, slice(shape[1] - 1, None, shape[1])
        else:
            positions, target_segments = more
            firsts = pieces.offsets(shape[1])
            segments, lasts = fill_segments(pieces, firsts, tokens, positions, self._pad)
        # 3. Read tokens and loss.
        one_piece_a_row = whole and self._wide and len(pieces.row) == shape[0]
        if not (one_piece_a_row and self._reader.fill_rows(pieces.shard, pieces.start, row_buffers)):
            size, out = self._dtype.itemsize, memory if self._wide else tokens.reshape(-1).data.cast("B")
            firsts = pieces.offsets(shape[1]) if firsts is None else firsts
            self._reader.gather(pieces.shard, pieces.start, firsts * size, pieces.length * size, out)
        if self._loss is not None:
            loss = _gather_loss(self._loss, pieces, shape)
            if whole:  # the cached `target_segments` are read-only, and right only if all tokens take loss
                target_segments = self._arrays.empty(shape, np.int32)
        read = ReadRows(inputs, targets, positions, segments, target_segments, loss, pieces)
        if not shifted:
            return read, tokens, fit
        # 4. Make the targets. The last token of a segment has no target in its segment.
        if not self._wide:
            inputs[...] = tokens
        elif not self._fits_int32 and inputs.size:
            fit = bool(np.minimum.reduce(inputs, axis=None) >= 0)  # as int32, a uint32 from 2^31 on is negative
        # One copy shifts all rows. It puts the first token of the next row at the end of each row.
        targets.reshape(-1).data[:-1] = inputs.reshape(-1).data[1:]
        targets[:, -1] = 0
        if loss is not None:
            _fill_target_segments(read, lasts)
        elif not whole:
            target_segments[...] = segments
            target_segments.reshape(-1)[lasts] = 0
        return read, tokens, fit

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "max_open_files": self._max_open_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        workers.end_with_parent()  # Grain's worker processes get the source as a pickle
        self.__init__(state["layout"], max_open_files=state["max_open_files"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """Return all that decides the rows. Grain compares this text when it restores an iterator."""
        corpus = self.layout.corpus.fingerprint
        return f"NpyDataSource(layout={self.layout.data_key}, corpus={corpus!r}, padding={self._pad})"


def _views(stack: Stack) -> tuple[memoryview, list[Buffers]]:
    """Return the memory of the first array, which is `inputs` in `_read_pieces`, and the buffers of each of its rows."""
    return stack.first, [(row,) for row in stack.rows]


def _gather_loss(reader: LossReader, pieces: Pieces, shape: tuple[int, ...]) -> Array:
    """Return the loss of the tokens of `pieces`, bool or float32 [rows, L]."""
    offsets = pieces.offsets(shape[1])
    return reader.gather(pieces.shard, pieces.start, offsets, pieces.length, shape[0] * shape[1]).reshape(shape)


def _fill_target_segments(read: ReadRows, lasts: Ints | slice) -> None:
    """Fill `read.target_segment_ids` from `read.loss`: the segment id where the target takes loss, else 0.

    Example: segment ids 1 1 1 2 2 and loss 0 1 1 1 1 give 1 1 0 2 0. Columns 2 and 4 are `lasts`, the segments' last tokens.
    """
    assert read.loss is not None
    takes_loss, target_ids = np.zeros(read.segment_ids.size, np.bool_), read.target_segment_ids
    np.not_equal(read.loss.reshape(-1)[1:], 0, out=takes_loss[:-1])
    # cast to int32 first: `multiply` would cast in small steps, which is slower
    target_ids[...] = takes_loss.reshape(target_ids.shape)
    np.multiply(target_ids, read.segment_ids, out=target_ids)
    target_ids.reshape(-1)[lasts] = 0
