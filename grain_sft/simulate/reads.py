"""Reads: byte ranges of files that rows are read from, as `grain_sft.source` reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Layout
from grain_sft.storage import FileStamp, RemoteOptions, files
from grain_sft.transforms import reader_of

if TYPE_CHECKING:
    from jaxtyping import Int64

    from grain_sft.pipeline import Pipeline

Ints = npt.NDArray[np.int64]


class Ranges(NamedTuple):
    """Byte ranges of one gather as columns int64 [ranges], ordered by row.

    Attributes:
      row: Index into the given rows; in a `Walk`, the cell.
      file: Number of the file in `Gather.files`.
      offset: First byte.
      size: Number of bytes, 1 or more.
    """

    row: Int64[np.ndarray, " ranges"]
    file: Int64[np.ndarray, " ranges"]
    offset: Int64[np.ndarray, " ranges"]
    size: Int64[np.ndarray, " ranges"]

    def select(self, lines: npt.NDArray[Any]) -> Ranges:
        """Return some of the ranges, by a mask or by their numbers."""
        return Ranges(*(column[lines] for column in self))


@dataclasses.dataclass(frozen=True)
class Gather:
    """Reads that a batch makes concurrently: those of one source's tokens, or of its loss values of one kind. Gathers follow
    each other.

    Attributes:
      files: Files that are read.
      options: Options of remote files.
      remote: bool [files], whether a read of the file is a request.
      unversioned: bool [files], whether the index states no version of the file, so that the first read requests it.
      offsets: int64 [files], byte of the file at which the values begin.
      width: Number of bytes of a value: a token, the loss of a token, or a whole stored row.
      has_values: bool [files], whether the gather has values of the shard with the file's number.
    """

    files: Sequence[FileStamp]
    options: RemoteOptions
    remote: npt.NDArray[np.bool_]
    unversioned: npt.NDArray[np.bool_]
    offsets: Ints
    width: int
    has_values: npt.NDArray[np.bool_]


class _Part:
    """Reads of the rows of one source, whose first gather has the number `first`."""

    def __init__(self, layout: Layout, first: int, *, shifted: bool, all_remote: bool) -> None:
        corpus, self._layout, self._first = layout.corpus, layout, first
        self.gathers: list[Gather] = []

        def add(
            stamps: Sequence[FileStamp], width: int, has_values: Sequence[bool] = (True,) * len(corpus.shards)
        ) -> None:
            away = np.array([files.is_remote(each.path) for each in stamps], np.bool_)
            unversioned = away & [each.version is None for each in stamps]
            offsets = np.array([each.data_offset for each in stamps], np.int64)
            options = corpus.remote or RemoteOptions.from_environment()
            gather = Gather(stamps, options, away | all_remote, unversioned, offsets, width, np.array(has_values))
            self.gathers.append(gather)

        if layout.row_format is not None:
            length = layout.sequence_length
            self._begins: Ints = np.cumsum([0, *(shard.num_tokens // length for shard in corpus.shards)])[:-1]
            add(corpus.shards, layout.row_format.dtype(corpus.dtype).itemsize)
            if corpus.has_loss and (corpus.has_weights or not shifted):
                add([each for each in corpus.loss_files if each], length * (4 if corpus.has_weights else 1))
            return
        add(corpus.shards, corpus.dtype.itemsize)
        for kind, one in {loss.kind: loss for loss in corpus.loss_files if loss is not None}.items():
            # a file of this kind takes the place of other files, as in `LossReader`
            of_kind = [loss if loss is not None and loss.kind == kind else one for loss in corpus.loss_files]
            has_values = [loss is not None and loss.kind == kind for loss in corpus.loss_files]
            add(of_kind, one.values.dtype.itemsize, has_values)

    def ranges(self, rows: Ints) -> Iterator[tuple[int, Ranges]]:
        """Yield the number of each gather and its ranges."""
        values = self._values(rows)
        for number, gather in enumerate(self.gathers, self._first):
            row, file, start, length = values.select(gather.has_values[values.file] & (values.size > 0))
            yield number, Ranges(row, file, gather.offsets[file] + start * gather.width, length * gather.width)

    def _values(self, rows: Ints) -> Ranges:
        """Return the ranges of values: `file` is a shard, and `offset` and `size` count its values instead of bytes."""
        if self._layout.row_format is None:
            found = self._layout.pieces(rows)
            return Ranges(found.row, found.shard, found.start, found.length)
        shard = self._begins.searchsorted(rows, side="right") - 1
        return Ranges(np.arange(len(rows)), shard, rows - self._begins[shard], np.ones(len(rows), np.int64))


class Reads:
    """Byte ranges that the rows of a pipeline's layout are read from.

    Args:
      pipeline: Pipeline of the rows.
      all_remote: Whether local files count as files in a bucket.

    Attributes:
      gathers: Gathers of a batch, in order.
    """

    def __init__(self, pipeline: Pipeline, *, all_remote: bool = False) -> None:
        source = pipeline.source
        shifted = len(reader_of(source, pipeline.transforms)[1]) < len(pipeline.transforms)
        self._layout, self._parts = source.layout, dict[str, _Part]()
        self.gathers: list[Gather] = []
        for name, layout in source.layout.parts.items():
            part = self._parts[name] = _Part(layout, len(self.gathers), shifted=shifted, all_remote=all_remote)
            self.gathers += part.gathers

    def ranges(self, rows: Ints) -> Iterator[tuple[int, Ranges]]:
        """Yield (number, ranges) of each gather that reads some of `rows`, int64 [n], without `FILL_ROW`."""
        for name, index, own in self._layout.split(rows):
            for gather, found in self._parts[name].ranges(own):
                if len(found.row):
                    yield gather, found._replace(row=index[found.row])
