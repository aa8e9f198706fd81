"""Documents of a preparation by number, read from its chunks in any order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError
from grain_sft.prepare.chunks import Chunks, Header

MAX_OPEN = 256  # chunk files
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 4096
BLOCK_SOURCES = 1 << 16  # documents whose inputs and lines are in memory together
GATHER_TOKENS = 1 << 28
GATHER_DOCUMENTS = 1 << 22

Ids = npt.NDArray[Any]
"""Numbers of documents, int32 or int64: valid records of all inputs, in order, dropped ones included."""


class Block(NamedTuple):
    """Some documents: their lengths int64 [documents], and the tokens and loss (bool or float32) of all of them."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    loss: npt.NDArray[Any]


class Source(Protocol):
    """Documents by number, from which writers read.

    Attributes:
      lengths: Tokens of every document.
      token_dtype, loss_dtype: Dtypes of blocks; the loss is bool, or float32 weights.
      first_weights: Whether some document's first token takes loss.
    """

    lengths: npt.NDArray[Any]
    token_dtype: np.dtype[Any]
    loss_dtype: np.dtype[Any]
    first_weights: bool

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """Yield the documents `ids`, some at a time, in that order."""
        ...

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Yield input and line [documents, 2] of the documents `ids`, some at a time, in that order."""
        ...


def in_blocks(
    lengths: npt.NDArray[Any], ids: Ids, documents: int = BLOCK_DOCUMENTS, tokens: int | None = None
) -> Iterator[Ids]:
    """Yield `ids` in consecutive parts of at most this many documents and tokens, and at least one document."""
    tokens = BLOCK_TOKENS if tokens is None else tokens
    position = 0
    while position < len(ids):
        some = ids[position : position + documents]
        totals = np.cumsum(lengths[some], dtype=np.int64)
        count = max(1, int(np.searchsorted(totals, tokens, side="right")))
        yield some[:count]
        position += count


@dataclasses.dataclass(frozen=True)
class Table:
    """Chunk and place of every document: 8 bytes each.

    Attributes:
      lengths: uint32 [documents]; 0 where the document was dropped.
      starts: uint32 [documents], first token of each, counted in its chunk.
      first: int64 [units + 1], number of each unit's first document.
      headers: Headers of all chunks.
    """

    lengths: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.uint32]
    first: Ids
    headers: tuple[Header, ...]

    @classmethod
    def of(cls, chunks: Chunks, units: int) -> Table:
        """Read the records of all chunks."""
        headers = chunks.headers(units)
        return cls.of_lengths(chunks.column(headers, "length"), headers)

    @classmethod
    def of_lengths(cls, lengths: npt.NDArray[np.uint32], headers: Sequence[Header]) -> Table:
        """Return the table of chunks with these headers, whose documents have these lengths."""
        first = np.cumsum([0, *(header.records for header in headers)])
        starts = np.empty(len(lengths), np.uint32)
        for begin, end in itertools.pairwise(first.tolist()):
            starts[begin:end] = np.cumsum(lengths[begin:end]) - lengths[begin:end]
        return cls(lengths, starts, first, tuple(headers))

    def units_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the unit of each document."""
        return np.searchsorted(self.first, ids, side="right") - 1


class Documents:
    """The documents in the chunks of a preparation; a `Source`."""

    def __init__(self, chunks: Chunks, table: Table, unit_inputs: Sequence[int]) -> None:
        self.table = table
        self.lengths = table.lengths
        self.first_weights = any(header.first_weights for header in table.headers)
        self.token_dtype = np.dtype(table.headers[0].token_dtype if table.headers else np.uint16)
        self.loss_dtype = np.dtype(table.headers[0].loss_dtype if table.headers else np.bool_)
        self._chunks = chunks
        self._unit_inputs = np.array(unit_inputs, np.int64)
        self._file = functools.lru_cache(MAX_OPEN)(lambda unit: _opened(chunks.path(unit)))

    def blocks(self, ids: Ids) -> Iterator[Block]:
        if not self._chunks.remote:
            for some in in_blocks(self.lengths, ids):
                yield self._read(some)
            return
        # a round trip for each document would be too slow: the documents of many blocks are first copied to temporary
        # local files, for which every chunk is read once and whole
        for window in in_blocks(self.lengths, ids, GATHER_DOCUMENTS, GATHER_TOKENS):
            size = int(self.lengths[window].sum(dtype=np.int64))
            with _scratch(self.token_dtype, size) as tokens, _scratch(self.loss_dtype, size) as loss:
                self._gather(window, tokens, loss)
                start = 0
                for some in in_blocks(self.lengths, window):
                    lengths = self.lengths[some].astype(np.int64)
                    stop = start + int(lengths.sum())
                    yield Block(lengths, np.array(tokens[start:stop]), np.array(loss[start:stop]))
                    start = stop

    def _gather(self, ids: Ids, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        """Fill `tokens` and `loss` with the documents `ids`."""
        table = self.table
        lengths = table.lengths[ids].astype(np.int64)
        targets = np.cumsum(lengths) - lengths
        units = table.units_of(ids)
        order = np.argsort(units, kind="stable")
        needed, firsts = np.unique(units[order], return_index=True)
        parts = np.split(order, firsts[1:])
        for unit, part, data in zip(needed.tolist(), parts, self._chunks.contents(needed.tolist()), strict=True):
            header = table.headers[unit]
            if len(data) != header.end:
                raise StorageError(f"{self._chunks.path(unit)}: changed while in use. Prepare again.")
            counts = lengths[part]
            # the index of every token, in the chunk and in the arrays
            inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            source = inside + np.repeat(table.starts[ids[part]].astype(np.int64), counts)
            target = inside + np.repeat(targets[part], counts)
            tokens[target] = np.frombuffer(data, self.token_dtype, header.tokens, header.tokens_at)[source]
            loss[target] = np.frombuffer(data, self.loss_dtype, header.tokens, header.loss_at)[source]

    def _read(self, ids: Ids) -> Block:
        """Return the documents `ids` of local chunks. Consecutive documents of one chunk are read at once."""
        lengths = self.table.lengths[ids].astype(np.int64)
        tokens = np.empty(int(lengths.sum()), self.token_dtype)
        loss = np.empty(len(tokens), self.loss_dtype)
        units = self.table.units_of(ids)
        breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(units) != 0)) + 1
        targets = np.concatenate([[0], np.cumsum(lengths)])
        for begin, end in itertools.pairwise([0, *breaks.tolist(), len(ids)]):
            start, stop = int(targets[begin]), int(targets[end])
            if start == stop:
                continue
            unit, first = int(units[begin]), int(self.table.starts[ids[begin]])
            header, file = self.table.headers[unit], self._file(unit)
            for offset, out in ((header.tokens_at, tokens), (header.loss_at, loss)):
                file.seek(offset + first * out.itemsize)
                if file.readinto(out[start:stop]) != (stop - start) * out.itemsize:  # type: ignore[arg-type]
                    raise StorageError(f"{file.name}: was cut short while in use. Prepare again.")
        return Block(lengths, tokens, loss)

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """See `Source`. No token is read."""
        lines = self._chunks.column(self.table.headers, "line")
        for begin in range(0, len(ids), BLOCK_SOURCES):
            some = ids[begin : begin + BLOCK_SOURCES]
            inputs = self._unit_inputs[self.table.units_of(some)]
            yield np.stack([inputs, lines[some].astype(np.int64)], axis=1)


def _opened(path: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise StorageError(f"{path}: can't be opened ({error.strerror}). Prepare again.") from error


@contextlib.contextmanager
def _scratch(dtype: np.dtype[Any], size: int) -> Iterator[npt.NDArray[Any]]:
    """Yield an array [size] in a temporary file, which may be larger than memory."""
    with tempfile.TemporaryFile(prefix="grain_sft-") as file:
        yield np.memmap(file, dtype, "w+", shape=(max(1, size),))[:size]
