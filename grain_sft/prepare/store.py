"""Store: the chunks of a preparation, and its documents by number."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from grain_sft import files
from grain_sft.errors import StorageError
from grain_sft.prepare import chunk

MAX_OPEN = 256  # chunk files
REMOTE_THREADS = 16
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 4096

T = TypeVar("T")

Ids = npt.NDArray[np.int64]
"""Documents by number: valid records of all inputs, in order, dropped ones included."""


class Block(NamedTuple):
    """Some consecutive documents of an order."""

    lengths: npt.NDArray[np.int64]  # [documents]
    tokens: npt.NDArray[Any]  # of all of them
    loss: npt.NDArray[Any]  # bool or float32, beside the tokens
    sources: npt.NDArray[np.int64]  # [documents, 2]: input, line

    def documents(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """(tokens, loss) of each."""
        ends = np.cumsum(self.lengths).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            yield self.tokens[start:end], self.loss[start:end]


class Source(Protocol):
    """Documents by number: what writers read from.

    Attributes:
      lengths: tokens of every document.
      token_dtype, loss_dtype: of blocks; the loss is bool, or float32 weights.
      first_weights: whether some document's first token takes loss.
    """

    lengths: npt.NDArray[Any]
    token_dtype: np.dtype[Any]
    loss_dtype: np.dtype[Any]
    first_weights: bool

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """The documents `ids`, some at a time, in that order."""
        ...


def block_size(lengths: npt.NDArray[Any], ids: Ids) -> int:
    """How many of the first documents of `ids` make one block: about a million tokens."""
    totals = np.cumsum(lengths[ids], dtype=np.int64)
    return max(1, int(np.searchsorted(totals, BLOCK_TOKENS, side="right")))


class Chunks:
    """The folder of chunk files, local or remote."""

    def __init__(self, folder: str, key: str) -> None:
        self._folder = folder
        self._key = key

    def path(self, unit: int) -> str:
        """Of a unit's chunk."""
        return files.join(self._folder, f"unit-{unit:06d}.chunk")

    def write(self, unit: int, data: bytes) -> None:
        """Keep a unit's chunk.

        Raises:
          StorageError: no space, or no permission.
        """
        files.write_bytes(self.path(unit), data)

    def header(self, unit: int) -> chunk.Header | None:
        """What a unit's chunk holds; None where there is none yet, or one of another preparation."""
        path = self.path(unit)
        if not files.exists(path):
            return None
        size = chunk.prefix_size(files.read_range(path, 0, 16), path)
        header = chunk.decode_header(files.read_range(path, 0, size), files.size(path), path)
        return header if header.key == self._key else None

    def records(self, unit: int, header: chunk.Header) -> npt.NDArray[Any]:
        """The records of a chunk [records], dtype `chunk.RECORD`."""
        return np.frombuffer(files.read_range(self.path(unit), header.size, header.tokens_at), chunk.RECORD)

    def all_headers(self, units: int) -> list[chunk.Header | None]:
        """What the chunks of units 0 to `units` hold."""
        return list(self._each(self.header, range(units)))

    def all_records(self, headers: Sequence[chunk.Header]) -> Iterator[npt.NDArray[Any]]:
        """The records of every chunk, in order."""
        return self._each(lambda unit: self.records(unit, headers[unit]), range(len(headers)))

    def _each(self, read: Callable[[int], T], units: Sequence[int]) -> Iterator[T]:
        """`read` of each unit, in order; of chunks in a bucket some at once, since every one takes a round trip."""
        if not files.is_remote(self._folder):
            yield from map(read, units)
            return
        with concurrent.futures.ThreadPoolExecutor(REMOTE_THREADS) as threads:
            for start in range(0, len(units), 2 * REMOTE_THREADS):
                yield from threads.map(read, units[start : start + 2 * REMOTE_THREADS])


@dataclasses.dataclass(frozen=True)
class Table:
    """Where every document is: 12 bytes each.

    Attributes:
      lengths: uint32 [documents]; 0 where it was dropped.
      starts: int64 [documents], counted in the tokens of all chunks.
      first: int64 [units + 1], number of each unit's first document.
      first_token: int64 [units + 1].
      headers: of every unit's chunk.
    """

    lengths: npt.NDArray[np.uint32]
    starts: Ids
    first: Ids
    first_token: Ids
    headers: tuple[chunk.Header, ...]

    @classmethod
    def of(cls, chunks: Chunks, units: int) -> Table:
        """Read the records of all chunks.

        Raises:
          StorageError: a chunk is missing or damaged.
        """
        headers = chunks.all_headers(units)
        found = [header for header in headers if header is not None]
        if len(found) < units:
            missing = headers.index(None)
            raise StorageError(f"{chunks.path(missing)}: is not there any more. Prepare again.")
        lengths = np.empty(sum(header.records for header in found), np.uint32)
        place = 0
        for records in chunks.all_records(found):
            lengths[place : place + len(records)] = records["length"]
            place += len(records)
        return cls.of_lengths(lengths, found)

    @classmethod
    def of_lengths(cls, lengths: npt.NDArray[np.uint32], headers: Sequence[chunk.Header]) -> Table:
        """The table of chunks with these headers, whose documents have these lengths."""
        first = np.cumsum([0, *(header.records for header in headers)])
        starts = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=starts[1:])
        first_token = np.cumsum([0, *(header.tokens for header in headers)])
        return cls(lengths, starts, first, first_token, tuple(headers))


class Documents:
    """Reads documents by number from the chunks.

    Args:
      unit_inputs: the input of every unit.
    """

    def __init__(self, chunks: Chunks, table: Table, unit_inputs: Sequence[int]) -> None:
        self.table = table
        self.lengths = table.lengths
        self.first_weights = any(header.first_weights for header in table.headers)
        self.token_dtype = np.dtype(table.headers[0].token_dtype) if table.headers else np.dtype(np.uint16)
        self.loss_dtype = np.dtype(table.headers[0].loss_dtype) if table.headers else np.dtype(np.bool_)
        self._chunks = chunks
        self._unit_inputs = np.array(unit_inputs, np.int64)
        self._open: collections.OrderedDict[int, _File] = collections.OrderedDict()

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """The documents `ids`, some at a time, in that order."""
        position = 0
        while position < len(ids):
            count = block_size(self.lengths, ids[position : position + BLOCK_DOCUMENTS])
            yield self.read(ids[position : position + count])
            position += count

    def read(self, ids: Ids) -> Block:
        """The documents `ids`, in that order."""
        lengths = self.table.lengths[ids].astype(np.int64)
        tokens = np.empty(int(lengths.sum()), self.token_dtype)
        loss = np.empty(len(tokens), self.loss_dtype)
        sources = np.empty((len(ids), 2), np.int64)
        units = np.searchsorted(self.table.first, ids, side="right") - 1
        sources[:, 0] = self._unit_inputs[units]
        # runs of documents that stand side by side in one chunk are read at once
        breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(units) != 0)) + 1
        places = np.concatenate([[0], np.cumsum(lengths)])
        bounds = [0, *breaks.tolist(), len(ids)]
        for begin, end in itertools.pairwise(bounds):
            if begin == end:
                continue
            unit, place, stop = int(units[begin]), int(places[begin]), int(places[end])
            file = self._file(unit)
            offset = int(self.table.starts[ids[begin]] - self.table.first_token[unit])
            row = int(ids[begin] - self.table.first[unit])
            sources[begin:end, 1] = file.lines[row : row + end - begin]
            if stop > place:
                file.fill(offset, tokens[place:stop], loss[place:stop])
        return Block(lengths, tokens, loss, sources)

    def columns(self, ids: Ids) -> npt.NDArray[Any]:
        """The records of documents `ids`, dtype `chunk.RECORD`; best in ascending order."""
        found = np.empty(len(ids), chunk.RECORD)
        units = np.searchsorted(self.table.first, ids, side="right") - 1
        for unit in np.unique(units).tolist():
            here = np.flatnonzero(units == unit)
            records = self._chunks.records(unit, self.table.headers[unit])
            found[here] = records[ids[here] - self.table.first[unit]]
        return found

    def _file(self, unit: int) -> _File:
        file = self._open.get(unit)
        if file is None:
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            file = self._open[unit] = _File(self._chunks, unit, self.table.headers[unit])
        else:
            self._open.move_to_end(unit)
        return file


class _File:
    """An open chunk: a local file by its descriptor, a remote one whole in memory."""

    def __init__(self, chunks: Chunks, unit: int, header: chunk.Header) -> None:
        self._path = chunks.path(unit)
        self._header = header
        self.lines = chunks.records(unit, header)["line"].copy()
        self._data, self._fd = b"", -1
        if files.is_remote(self._path):
            self._data = files.read_bytes(self._path)
            return
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{self._path}: can't be opened ({error.strerror}). Prepare again.") from error

    def fill(self, offset: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        """Fill the arrays from the chunk's token `offset` on."""
        self._read(self._header.tokens_at + offset * tokens.itemsize, tokens)
        self._read(self._header.loss_at + offset * loss.itemsize, loss)

    def _read(self, place: int, out: npt.NDArray[Any]) -> None:
        view = memoryview(out.view(np.uint8).data).cast("B")
        if self._fd < 0:
            view[:] = self._data[place : place + len(view)]
            return
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, (view[done:],), place + done)
            if not count:
                raise StorageError(f"{self._path}: was cut short while in use. Prepare again.")
            done += count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()
