"""Store: the chunks of a preparation, and its documents by number."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError
from grain_sft.prepare import chunk
from grain_sft.prepare.chunks import Chunks

MAX_OPEN = 256  # chunk files
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 4096
BLOCK_SOURCES = 1 << 16  # documents whose inputs and lines are at hand together
GATHER_TOKENS = 1 << 28
GATHER_DOCUMENTS = 1 << 22

Ids = npt.NDArray[Any]
"""Documents by number, int32 or int64: valid records of all inputs, in order, dropped ones included."""


class Block(NamedTuple):
    """Some consecutive documents of an order."""

    lengths: npt.NDArray[np.int64]  # [documents]
    tokens: npt.NDArray[Any]  # of all of them
    loss: npt.NDArray[Any]  # bool or float32, beside the tokens

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

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Input and line [documents, 2] of the documents `ids`, some at a time, in that order."""
        ...


def in_blocks(
    lengths: npt.NDArray[Any], ids: Ids, documents: int = BLOCK_DOCUMENTS, tokens: int = BLOCK_TOKENS
) -> Iterator[Ids]:
    """`ids` in consecutive parts of at most so many documents and tokens, and at least one document."""
    position = 0
    while position < len(ids):
        some = ids[position : position + documents]
        totals = np.cumsum(lengths[some], dtype=np.int64)
        count = max(1, int(np.searchsorted(totals, tokens, side="right")))
        yield some[:count]
        position += count


@dataclasses.dataclass(frozen=True)
class Table:
    """Where every document is: 8 bytes each.

    Attributes:
      lengths: uint32 [documents]; 0 where it was dropped.
      starts: uint32 [documents], first token of each, counted in its chunk.
      first: int64 [units + 1], number of each unit's first document.
      headers: of every unit's chunk.
    """

    lengths: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.uint32]
    first: Ids
    headers: tuple[chunk.Header, ...]

    @classmethod
    def of(cls, chunks: Chunks, units: int) -> Table:
        """Read the records of all chunks.

        Raises:
          StorageError: a chunk is missing or damaged.
        """
        found = chunks.complete_headers(units)
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
        starts = np.empty(len(lengths), np.uint32)
        for begin, end in itertools.pairwise(first.tolist()):
            starts[begin:end] = np.cumsum(lengths[begin:end]) - lengths[begin:end]
        return cls(lengths, starts, first, tuple(headers))


@contextlib.contextmanager
def _scratch(dtype: np.dtype[Any], size: int) -> Iterator[npt.NDArray[Any]]:
    """An array [size] in a temporary file, so that it may be larger than memory."""
    with tempfile.TemporaryFile(prefix="grain_sft-") as file:
        yield np.memmap(file, dtype, "w+", shape=(max(1, size),))[:size]


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
        if self._chunks.remote:
            yield from self._gather(ids)
            return
        for some in in_blocks(self.lengths, ids):
            yield self.read(some)

    def _gather(self, ids: Ids) -> Iterator[Block]:
        """Blocks of remote chunks: a round trip for each document would be too slow, so the documents of many blocks are
        first brought to temporary local files, for which every chunk is read once and whole."""
        for window in in_blocks(self.lengths, ids, GATHER_DOCUMENTS, GATHER_TOKENS):
            with (
                _scratch(self.token_dtype, int(self.lengths[window].sum(dtype=np.int64))) as tokens,
                _scratch(self.loss_dtype, len(tokens)) as loss,
            ):
                self._bring(window, tokens, loss)
                yield from self._blocks_of(window, tokens, loss)

    def _bring(self, ids: Ids, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        """Fill `tokens` and `loss` with the documents `ids`."""
        table = self.table
        lengths = table.lengths[ids].astype(np.int64)
        places = np.cumsum(lengths) - lengths
        units = np.searchsorted(table.first, ids, side="right") - 1
        order = np.argsort(units, kind="stable")
        needed, firsts = np.unique(units[order], return_index=True)
        parts = np.split(order, firsts[1:])
        for unit, here, data in zip(needed.tolist(), parts, self._chunks.contents(needed.tolist()), strict=True):
            header = table.headers[unit]
            if len(data) != header.end:
                raise StorageError(f"{self._chunks.path(unit)}: changed while in use. Prepare again.")
            counts = lengths[here]
            # the numbers of all their tokens, in the chunk and in the arrays
            inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            source = inside + np.repeat(table.starts[ids[here]].astype(np.int64), counts)
            target = inside + np.repeat(places[here], counts)
            tokens[target] = np.frombuffer(data, self.token_dtype, header.tokens, header.tokens_at)[source]
            loss[target] = np.frombuffer(data, self.loss_dtype, header.tokens, header.loss_at)[source]

    def _blocks_of(self, ids: Ids, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> Iterator[Block]:
        """The blocks of documents whose tokens and loss are at hand."""
        place = 0
        for some in in_blocks(self.lengths, ids):
            lengths = self.lengths[some].astype(np.int64)
            stop = place + int(lengths.sum())
            yield Block(lengths, np.array(tokens[place:stop]), np.array(loss[place:stop]))
            place = stop

    def read(self, ids: Ids) -> Block:
        """The documents `ids`, in that order."""
        lengths = self.table.lengths[ids].astype(np.int64)
        tokens = np.empty(int(lengths.sum()), self.token_dtype)
        loss = np.empty(len(tokens), self.loss_dtype)
        units = np.searchsorted(self.table.first, ids, side="right") - 1
        # runs of documents that stand side by side in one chunk are read at once
        breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(units) != 0)) + 1
        places = np.concatenate([[0], np.cumsum(lengths)])
        bounds = [0, *breaks.tolist(), len(ids)]
        for begin, end in itertools.pairwise(bounds):
            if begin == end:
                continue
            unit, place, stop = int(units[begin]), int(places[begin]), int(places[end])
            file = self._file(unit)
            offset = int(self.table.starts[ids[begin]])
            if stop > place:
                file.fill(offset, tokens[place:stop], loss[place:stop])
        return Block(lengths, tokens, loss)

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Input and line [documents, 2] of the documents `ids`, some at a time, in that order; no token is read."""
        with _scratch(np.dtype(np.uint32), len(self.lengths)) as lines:
            place = 0
            for records in self._chunks.all_records(self.table.headers):
                lines[place : place + len(records)] = records["line"]
                place += len(records)
            for begin in range(0, len(ids), BLOCK_SOURCES):
                some = ids[begin : begin + BLOCK_SOURCES]
                units = np.searchsorted(self.table.first, some, side="right") - 1
                yield np.stack([self._unit_inputs[units], lines[some].astype(np.int64)], axis=1)

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
    """An open local chunk."""

    def __init__(self, chunks: Chunks, unit: int, header: chunk.Header) -> None:
        self._path = chunks.path(unit)
        self._header = header
        self._fd = -1
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
