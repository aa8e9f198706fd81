"""Reads: byte ranges of a batch's rows, by the rules of `grain_sft.source`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Layout
from grain_sft.storage import FileStamp, RemoteOptions, files

if TYPE_CHECKING:
    from jaxtyping import Int64

    from grain_sft.pipeline import Pipeline

Ints = npt.NDArray[np.int64]


class Ranges(NamedTuple):
    """Byte ranges of one gather as columns int64 [ranges], ordered by row.

    Attributes:
      row: Index into the given rows.
      file: Number of the file in `Gather.files`.
      offset: First byte.
      size: Number of bytes, 1 or more.
    """

    row: Int64[np.ndarray, " ranges"]
    file: Int64[np.ndarray, " ranges"]
    offset: Int64[np.ndarray, " ranges"]
    size: Int64[np.ndarray, " ranges"]


@dataclasses.dataclass(frozen=True)
class Gather:
    """Concurrent reads of a batch: the tokens of one source, or its loss values of one kind. A batch makes one gather after
    the other.

    Attributes:
      files: Files that are read.
      options: Options of remote files.
      remote: bool [files], whether a read of the file is a request.
      unversioned: bool [files], whether the index states no version, so that the first read asks for it.
      offsets: int64 [files], byte at which the values begin.
    """

    files: Sequence[FileStamp]
    options: RemoteOptions
    remote: npt.NDArray[np.bool_]
    unversioned: npt.NDArray[np.bool_]
    offsets: Ints

    @classmethod
    def of(cls, stamps: Sequence[FileStamp], options: RemoteOptions | None, all_remote: bool) -> Gather:
        """Return the gather of the files `stamps`. With `all_remote`, local files count as files in a bucket."""
        remote = np.array([all_remote or files.is_remote(each.path) for each in stamps], np.bool_)
        unversioned = np.array([files.is_remote(each.path) and each.version is None for each in stamps], np.bool_)
        offsets = np.array([each.data_offset for each in stamps], np.int64)
        return cls(stamps, options or RemoteOptions.from_environment(), remote, unversioned, offsets)


class _Part:
    """Reads of the rows of one source, whose gathers have the numbers `first`, `first + 1`, …"""

    def __init__(self, layout: Layout, first: int, *, shifted: bool, all_remote: bool) -> None:
        corpus, self._layout, self._first = layout.corpus, layout, first
        self.gathers = [Gather.of(corpus.shards, corpus.remote, all_remote)]
        losses = corpus.loss_files
        if layout.row_format is not None:
            length = layout.sequence_length
            self._sizes = [layout.row_format.dtype(corpus.dtype).itemsize]
            rows = [shard.num_tokens // length for shard in corpus.shards]
            self._begins: Ints = np.cumsum([0, *rows])[:-1]
            if corpus.has_loss and (corpus.has_weights or not shifted):
                self.gathers.append(Gather.of([each for each in losses if each], corpus.remote, all_remote))
                self._sizes.append(length * (4 if corpus.has_weights else 1))
            return
        self._itemsize = corpus.dtype.itemsize
        kinds = sorted({loss.kind for loss in losses if loss is not None})
        self._kind_of = np.array([-1 if loss is None else kinds.index(loss.kind) for loss in losses])
        self._widths = []
        for kind in kinds:
            of_kind = [loss for loss in losses if loss is not None and loss.kind == kind]
            self._widths.append(of_kind[0].values.dtype.itemsize)
            filled = [loss if loss is not None and loss.kind == kind else of_kind[0] for loss in losses]
            self.gathers.append(Gather.of(filled, corpus.remote, all_remote))

    def ranges(self, rows: Ints) -> Iterator[tuple[int, Ranges]]:
        """Yield the number of each gather and its ranges."""
        if self._layout.row_format is not None:
            shard = self._begins.searchsorted(rows, side="right") - 1
            number, row = rows - self._begins[shard], np.arange(len(rows))
            for at, (gather, size) in enumerate(zip(self.gathers, self._sizes, strict=True)):
                sizes = np.full(len(rows), size, np.int64)
                yield self._first + at, Ranges(row, shard, gather.offsets[shard] + number * size, sizes)
            return
        found = self._layout.pieces(rows)
        columns = Ranges(found.row, found.shard, found.start, found.length)
        yield self._first, self._of_pieces(0, columns, self._itemsize)
        kind_of = self._kind_of[found.shard]
        for kind, width in enumerate(self._widths):
            own = kind_of == kind
            of_kind = Ranges(*(column[own] for column in columns))
            yield self._first + 1 + kind, self._of_pieces(1 + kind, of_kind, width)

    def _of_pieces(self, gather: int, values: Ranges, width: int) -> Ranges:
        """Return the byte ranges of ranges of values of `width` bytes each."""
        row, file, start, length = values
        found = Ranges(row, file, self.gathers[gather].offsets[file] + start * width, length * width)
        real = found.size > 0
        return found if real.all() else Ranges(*(column[real] for column in found))


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
        shifted = any(hasattr(source, "read_rows") and hasattr(each, "reader") for each in pipeline.transforms[:1])
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
