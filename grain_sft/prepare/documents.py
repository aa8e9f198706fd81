"""Random access by number to documents in several parts: the chunks of a preparation, or the splits of a corpus."""

import abc
import functools
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError
from grain_sft.prepare.chunks import Chunks, Header
from grain_sft.storage import files

MAX_OPEN = 256  # chunk files
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 4096
BLOCK_SOURCES = 1 << 16  # documents, whose inputs and lines are yielded together
GATHER_BLOCKS = 128  # blocks of remote chunks in memory; a token takes up to 8 bytes

Ids = npt.NDArray[Any]
"""int32 or int64, numbers of documents. All valid records are numbered in the order of the inputs, dropped ones included."""


class Block(NamedTuple):
    """Several documents: `lengths` int64 [documents], and their concatenated `tokens` and `loss` (bool or float32)."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    loss: npt.NDArray[Any]


def in_blocks(lengths: npt.NDArray[Any], ids: Ids) -> Iterator[Ids]:
    """Yield consecutive parts of `ids`: one document, or at most `BLOCK_DOCUMENTS` of at most `BLOCK_TOKENS` tokens."""
    begin = 0
    while begin < len(ids):
        part = ids[begin : begin + BLOCK_DOCUMENTS]
        totals = np.cumsum(lengths[part], dtype=np.int64)
        count = max(1, int(np.searchsorted(totals, BLOCK_TOKENS, side="right")))
        yield part[:count]
        begin += count


class Documents(abc.ABC):
    """Documents that writers read by number.

    Args:
      lengths: Number of tokens of each document; 0 where it was dropped.
      starts: Index of each document's first token in its part.
      firsts: int64 [parts + 1], number of each part's first document, then the number of all documents.
      token_dtype: Dtype of tokens in blocks.
      loss_dtype: Dtype of loss in blocks: bool, or float32 for weights.
      first_weights: Whether the first token of any document has loss.
    """

    def __init__(
        self,
        lengths: npt.NDArray[Any],
        starts: npt.NDArray[Any],
        firsts: npt.NDArray[np.int64],
        token_dtype: npt.DTypeLike,
        loss_dtype: npt.DTypeLike,
        first_weights: bool = False,
    ) -> None:
        self.lengths, self.starts, self.firsts = lengths, starts, firsts
        self.token_dtype, self.loss_dtype = np.dtype(token_dtype), np.dtype(loss_dtype)
        self.first_weights = first_weights

    @abc.abstractmethod
    def fill(self, part: int, start: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        """Fill `tokens` and `loss`, of one length, from the tokens of a part that begin at `start`."""

    @abc.abstractmethod
    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Yield int64 [documents, 2], input and line of the documents `ids` in that order, several at a time."""

    def parts_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the part of each document."""
        return np.searchsorted(self.firsts, ids, side="right") - 1

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """Yield the documents `ids` in that order, several at a time; consecutive documents of a part are filled at once."""
        for some in in_blocks(self.lengths, ids):
            lengths, starts = (array[some].astype(np.int64) for array in (self.lengths, self.starts))
            parts = self.parts_of(some)
            breaks = np.flatnonzero((starts[1:] != starts[:-1] + lengths[:-1]) | (np.diff(parts) != 0)) + 1
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            tokens, loss = (np.empty(int(offsets[-1]), dtype) for dtype in (self.token_dtype, self.loss_dtype))
            for begin, end in itertools.pairwise([0, *breaks.tolist(), len(some)]):
                run = slice(int(offsets[begin]), int(offsets[end]))
                self.fill(int(parts[begin]), int(starts[begin]), tokens[run], loss[run])
            yield Block(lengths, tokens, loss)


class ChunkDocuments(Documents):
    """Documents of a preparation, whose parts are its chunks. It holds 8 bytes per document.

    Args:
      chunks: Folder of the chunks.
      headers: Header of each chunk.
      lengths: Lengths of all documents; None reads them in the chunks.
    """

    def __init__(self, chunks: Chunks, headers: Sequence[Header], lengths: npt.NDArray[Any] | None = None) -> None:
        firsts = np.cumsum([0, *(header.records for header in headers)])
        lengths = chunks.column(headers, "length") if lengths is None else lengths
        starts = np.empty(len(lengths), np.uint32)
        for begin, end in itertools.pairwise(firsts.tolist()):
            starts[begin:end] = np.cumsum(lengths[begin:end]) - lengths[begin:end]
        dtypes = (headers[0].token_dtype, headers[0].loss_dtype) if headers else ("uint16", "bool")
        super().__init__(lengths, starts, firsts, *dtypes, any(header.first_weights for header in headers))
        self._chunks, self.headers = chunks, headers
        self._file = functools.lru_cache(MAX_OPEN)(self._open)

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """See `Documents.blocks`.

        In a bucket one request per document would be too slow, so the documents of many blocks are gathered at once. That
        reads each of their chunks once, as a whole.
        """
        if not self._chunks.remote:
            yield from super().blocks(ids)
            return
        blocks = in_blocks(self.lengths, ids)
        while window := list(itertools.islice(blocks, GATHER_BLOCKS)):
            tokens, loss = self._gather(np.concatenate(window))
            start = 0
            for some in window:
                lengths = self.lengths[some].astype(np.int64)
                stop = start + int(lengths.sum())
                yield Block(lengths, tokens[start:stop].copy(), loss[start:stop].copy())
                start = stop
            del tokens, loss  # before the next are gathered; a caller may still hold a block

    def _open(self, number: int) -> io.FileIO:
        path = self._chunks.path(number)
        with files.reading(path):
            return open(path, "rb", buffering=0)

    def _gather(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the concatenated tokens and loss of the documents `ids`."""
        lengths, starts = (array[ids].astype(np.int64) for array in (self.lengths, self.starts))
        targets = np.cumsum(lengths) - lengths
        tokens, loss = (np.empty(int(lengths.sum()), dtype) for dtype in (self.token_dtype, self.loss_dtype))
        numbers = self.parts_of(ids)
        order = np.argsort(numbers, kind="stable")
        needed, firsts = np.unique(numbers[order], return_index=True)
        parts = np.split(order, firsts[1:])
        for number, part, data in zip(needed.tolist(), parts, self._chunks.contents(needed.tolist()), strict=True):
            header = self.headers[number]
            if len(data) != header.end:
                raise StorageError(f"{self._chunks.path(number)}: changed while in use. Prepare again.")
            its_tokens = np.frombuffer(data, self.token_dtype, header.tokens, header.tokens_at)
            if header.all_loss:
                its_loss = np.ones(header.tokens, self.loss_dtype)
            else:
                its_loss = np.frombuffer(data, self.loss_dtype, header.tokens, header.loss_at)
            for start, target, length in np.stack([starts, targets, lengths], axis=1)[part].tolist():
                tokens[target : target + length] = its_tokens[start : start + length]
                loss[target : target + length] = its_loss[start : start + length]
        return tokens, loss

    def fill(self, part: int, start: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        header, file = self.headers[part], self._file(part)
        _read_into(file, header.tokens_at + start * tokens.itemsize, tokens)
        if header.all_loss:
            loss[:] = 1
        else:
            _read_into(file, header.loss_at + start * loss.itemsize, loss)

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """See `Documents.sources`. Reads no tokens."""
        columns = [self._chunks.column(self.headers, name) for name in ("input", "line")]
        for begin in range(0, len(ids), BLOCK_SOURCES):
            some = ids[begin : begin + BLOCK_SOURCES]
            yield np.stack([column[some].astype(np.int64) for column in columns], axis=1)


def _read_into(file: io.FileIO, offset: int, out: npt.NDArray[Any]) -> None:
    """Fill `out` with the bytes of a file from `offset` on."""
    if os.preadv(file.fileno(), [out.data], offset) != out.nbytes:
        raise StorageError(f"{file.name}: was cut short while in use. Prepare again.")
