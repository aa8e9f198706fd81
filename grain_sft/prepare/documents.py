"""Random access by number to the documents in a preparation's chunks."""

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
BLOCK_SOURCES = 1 << 16  # documents, whose inputs and lines are yielded together
GATHER_TOKENS = 1 << 28
GATHER_DOCUMENTS = 1 << 22

Ids = npt.NDArray[Any]
"""int32 or int64, numbers of documents. All valid records are numbered in the order of the inputs, dropped ones included."""


class Block(NamedTuple):
    """Several documents: `lengths` int64 [documents], and their concatenated `tokens` and `loss` (bool or float32)."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    loss: npt.NDArray[Any]


class Source(Protocol):
    """Documents that writers read by number.

    Attributes:
      lengths: Number of tokens of each document.
      token_dtype, loss_dtype: Dtypes of blocks; `loss_dtype` is bool, or float32 for weights.
      first_weights: Whether the first token of any document has loss.
    """

    lengths: npt.NDArray[Any]
    token_dtype: np.dtype[Any]
    loss_dtype: np.dtype[Any]
    first_weights: bool

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """Yield the documents `ids` in that order, several at a time."""
        ...

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Yield int64 [documents, 2], input and line of the documents `ids` in that order, several at a time."""
        ...


def in_blocks(
    lengths: npt.NDArray[Any], ids: Ids, documents: int = BLOCK_DOCUMENTS, tokens: int | None = None
) -> Iterator[Ids]:
    """Yield consecutive parts of `ids`: one document, or several of at most `documents` documents and `tokens` tokens."""
    tokens = BLOCK_TOKENS if tokens is None else tokens
    begin = 0
    while begin < len(ids):
        part = ids[begin : begin + documents]
        totals = np.cumsum(lengths[part], dtype=np.int64)
        count = max(1, int(np.searchsorted(totals, tokens, side="right")))
        yield part[:count]
        begin += count


@dataclasses.dataclass(frozen=True)
class Table:
    """Location of each document in the chunks, in 8 bytes per document.

    Attributes:
      lengths: uint32 [documents]; 0 where the document was dropped.
      starts: uint32 [documents], index of each document's first token in its chunk.
      first: int64 [units + 1], number of each unit's first document, then the number of all documents.
      headers: Header of each unit's chunk.
    """

    lengths: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.uint32]
    first: Ids
    headers: tuple[Header, ...]

    @classmethod
    def of(cls, chunks: Chunks, units: int) -> Table:
        """Return the table of the chunks of `units` units, read from their records."""
        headers = chunks.headers(units)
        return cls.of_lengths(chunks.column(headers, "length"), headers)

    @classmethod
    def of_lengths(cls, lengths: npt.NDArray[np.uint32], headers: Sequence[Header]) -> Table:
        """Return the table of chunks with these headers and documents of these lengths."""
        first = np.cumsum([0, *(header.records for header in headers)])
        starts = np.empty(len(lengths), np.uint32)
        for begin, end in itertools.pairwise(first.tolist()):
            starts[begin:end] = np.cumsum(lengths[begin:end]) - lengths[begin:end]
        return cls(lengths, starts, first, tuple(headers))

    def units_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the unit of each document."""
        return np.searchsorted(self.first, ids, side="right") - 1


class Documents:
    """Documents in the chunks of a preparation; a `Source`."""

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
        # One request per document would be too slow, so each window of many blocks is first copied to temporary local
        # files. A window reads each of its chunks once, as a whole.
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
            # index of each token in the chunk (`source`) and in the arrays (`target`)
            inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            source = inside + np.repeat(table.starts[ids[part]].astype(np.int64), counts)
            target = inside + np.repeat(targets[part], counts)
            tokens[target] = np.frombuffer(data, self.token_dtype, header.tokens, header.tokens_at)[source]
            loss[target] = np.frombuffer(data, self.loss_dtype, header.tokens, header.loss_at)[source]

    def _read(self, ids: Ids) -> Block:
        """Return the documents `ids` from local chunks, with one read for consecutive documents of a chunk."""
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
        """See `Source`. Reads no tokens."""
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
    """Yield an array [size] in a temporary file, so that it may be larger than memory."""
    with tempfile.TemporaryFile(prefix="grain_sft-") as file:
        yield np.memmap(file, dtype, "w+", shape=(max(1, size),))[:size]
