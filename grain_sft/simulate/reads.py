"""`Reads`: the byte ranges of files that `grain_sft.source` reads for the rows of a batch, computed without reading."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.layout import Layout
from grain_sft.pipeline import Pipeline
from grain_sft.storage import FileStamp, RemoteOptions, files
from grain_sft.transforms import reader_of
from grain_sft.types import Array, Bools, Ints


class Ranges(NamedTuple):
    """Byte ranges that one `Gather` reads, as columns int64 [ranges]."""

    cell: Ints  # number of the batch that reads the range; each step of each host has a number, as in `demand.Demand`
    file: Ints  # index of the file in `Gather.files`
    offset: Ints  # offset of the range in the file
    size: Ints  # number of bytes, 1 or more

    def select(self, lines: Array) -> Self:
        return type(self)(*(column[lines] for column in self))


class Gather(NamedTuple):
    """Files that a batch reads at the same time: the token files of a source, or its loss files of one kind.

    A batch makes one gather after the other.

    Attributes:
      files: File of each shard. Where `has_values` is False, it is a placeholder that is not read.
      options: Options for reading remote files.
      remote: bool [files], whether a read of the file counts as a request to a bucket.
      unversioned: bool [files], whether `FileStamp.version` of a remote file is None. The first read then requests the version.
      offsets: int64 [files], byte of the file at which the values begin.
      width: Number of bytes of a value: a token, the loss of a token, or the tokens or losses of a whole stored row.
      has_values: bool [files], whether the shard has a file to read.
    """

    files: Sequence[FileStamp]
    options: RemoteOptions
    remote: Bools
    unversioned: Bools
    offsets: Ints
    width: int
    has_values: Bools


class Reads:
    """Byte ranges from which a pipeline reads rows.

    Args:
      all_remote: Whether reads of local files count as requests to a bucket.

    Attributes:
      gathers: All gathers of a batch, in the order of the sources.
    """

    def __init__(self, pipeline: Pipeline, *, all_remote: bool = False) -> None:
        self._layout = pipeline.source.layout
        # `reader_of` leaves out the transform that `source` applies while it reads. This can only be `ShiftTargets`.
        _, transforms_after_reading = reader_of(pipeline.source, pipeline.transforms)
        shifted = len(transforms_after_reading) < len(pipeline.transforms)
        self.gathers: list[Gather] = []
        self._numbers: dict[str, range] = {}  # by source, the indices of its gathers in `gathers`
        for name, layout in self._layout.parts.items():
            first = len(self.gathers)
            for files_of_shards, width in _files_read(layout, shifted):
                self.gathers.append(_gather(layout.corpus, files_of_shards, width, all_remote))
            self._numbers[name] = range(first, len(self.gathers))

    def ranges(self, rows: Ints, cells: Ints) -> Iterator[tuple[int, Ranges]]:
        """Yield the number and the ranges of each gather that reads some of `rows`.

        Args:
          rows: int64 [n], numbers of rows of the layout.
          cells: int64 [n], cell of each row: the number of the batch that reads the row.
        """
        for name, index, own_rows in self._layout.split(rows):
            row, shard, start, length = _values(self._layout.parts[name], own_rows)
            cell = cells[index][row]
            for number in self._numbers[name]:
                gather = self.gathers[number]
                is_read = gather.has_values[shard] & (length > 0)
                if is_read.any():
                    file = shard[is_read]
                    offset = gather.offsets[file] + start[is_read] * gather.width
                    yield number, Ranges(cell[is_read], file, offset, length[is_read] * gather.width)


def _files_read(layout: Layout, shifted: bool) -> Iterator[tuple[Sequence[FileStamp | None], int]]:
    """Yield, for each gather of a source, the file of each shard and the number of bytes of a value.

    `shifted` states whether the targets are made while rows are read, as `reader_of` decides.
    """
    corpus, row_format = layout.corpus, layout.row_format
    yield corpus.shards, (corpus.dtype if row_format is None else row_format.dtype(corpus.dtype)).itemsize
    # if `shifted`, materialized rows themselves state which targets take loss: only weights are in loss files
    if row_format is not None and shifted and not corpus.has_weights:
        return
    tokens = 1 if row_format is None else layout.sequence_length  # tokens of a value
    # a gather for each kind of loss file, as in `LossReader`
    for kind, file_of_kind in {loss.kind: loss for loss in corpus.loss_files if loss is not None}.items():
        stamps = [None if loss is None or loss.kind != kind else loss for loss in corpus.loss_files]
        yield stamps, tokens * file_of_kind.encoding.dtype.itemsize


def _gather(corpus: Corpus, files_of_shards: Sequence[FileStamp | None], width: int, all_remote: bool) -> Gather:
    """Return the gather of `files_of_shards`, which has the file of each shard, or None if the shard has no such file."""
    has_values = np.array([stamp is not None for stamp in files_of_shards])
    # in place of files that shards lack; it is never read
    placeholder = next(stamp for stamp in files_of_shards if stamp is not None)
    stamps = [placeholder if stamp is None else stamp for stamp in files_of_shards]
    in_bucket = np.array([files.is_remote(stamp.path) for stamp in stamps], np.bool_)
    unversioned = in_bucket & [stamp.version is None for stamp in stamps]
    offsets = np.array([stamp.data_offset for stamp in stamps], np.int64)
    options = corpus.remote or RemoteOptions.from_environment()
    return Gather(stamps, options, in_bucket | all_remote, unversioned, offsets, width, has_values)


def _values(layout: Layout, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the pieces of `rows`, as columns: index in `rows`, shard, index of the first value in the shard, number of values.

    A value is a token or, in a corpus of materialized rows, a whole row.
    """
    if layout.row_format is None:
        pieces = layout.pieces(rows)
        return pieces.row, pieces.shard, pieces.start, pieces.length
    first_rows = layout.corpus.shard_borders // layout.sequence_length
    shard = first_rows.searchsorted(rows, side="right") - 1
    return np.arange(len(rows)), shard, rows - first_rows[shard], np.ones(len(rows), np.int64)
