"""`Documents`: random access to the documents that a writer writes.

Documents lie in parts. In a preparation a part is a chunk file, read by `ChunkDocuments`. In a conversion a part is a split of
the old corpus, read by a subclass in `convert.py`.
"""

import abc
import dataclasses
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

MAX_OPEN = 256  # open chunk files
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 4096
BLOCK_SOURCES = 1 << 16  # documents
GATHER_BLOCKS = 128  # blocks gathered at once from remote chunks: 1 GiB if a token and its loss take 8 bytes

Ids = npt.NDArray[Any]
"""Numbers of documents, int32 or int64, in the order of the inputs. Dropped documents have numbers, rejected records do not."""


class Block(NamedTuple):
    """Several documents: `lengths` int64 [documents], and their concatenated `tokens` and `loss` (bool or float32)."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    loss: npt.NDArray[Any]


def in_blocks(lengths: npt.NDArray[Any], ids: Ids) -> Iterator[Ids]:
    """Yield `ids` in blocks of at most `BLOCK_DOCUMENTS` documents and `BLOCK_TOKENS` tokens, or of one longer document."""
    begin = 0
    while begin < len(ids):
        candidates = ids[begin : begin + BLOCK_DOCUMENTS]
        token_ends = np.cumsum(lengths[candidates], dtype=np.int64)
        count = max(1, int(np.searchsorted(token_ends, BLOCK_TOKENS, side="right")))
        yield candidates[:count]
        begin += count


@dataclasses.dataclass(eq=False)
class Documents(abc.ABC):
    """Documents that writers read by number.

    Attributes:
      lengths: Number of tokens of each document; 0 where it was dropped.
      starts: Index of each document's first token among the tokens of its part.
      firsts: int64 [parts + 1], number of each part's first document, then the number of all documents.
      token_dtype: Dtype of tokens in blocks.
      loss_dtype: Dtype of loss in blocks: bool, or float32 for weights.
    """

    lengths: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    firsts: npt.NDArray[np.int64]
    token_dtype: np.dtype[Any]
    loss_dtype: np.dtype[Any]

    @abc.abstractmethod
    def fill(self, part: int, start: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        """Read tokens `start` to `start + len(tokens)` of a part into `tokens`, and their loss into `loss`."""

    @abc.abstractmethod
    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Yield int64 [documents, 2], (input, line) of the documents `ids` in that order, several at a time."""

    def parts_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the part of each document."""
        return np.searchsorted(self.firsts, ids, side="right") - 1

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """Yield the documents `ids` in that order, several at a time."""
        for block_ids in in_blocks(self.lengths, ids):
            lengths = self.lengths[block_ids].astype(np.int64)
            starts = self.starts[block_ids].astype(np.int64)
            parts = self.parts_of(block_ids)
            is_adjacent = (starts[1:] == starts[:-1] + lengths[:-1]) & (parts[1:] == parts[:-1])
            # a run is a group of adjacent documents, which are read at once
            run_starts = np.flatnonzero(~is_adjacent) + 1
            offsets = np.append(0, np.cumsum(lengths))
            tokens, loss = np.empty(offsets[-1], self.token_dtype), np.empty(offsets[-1], self.loss_dtype)
            for first, stop in itertools.pairwise([0, *run_starts.tolist(), len(block_ids)]):
                run = slice(int(offsets[first]), int(offsets[stop]))
                self.fill(int(parts[first]), int(starts[first]), tokens[run], loss[run])
            yield Block(lengths, tokens, loss)


class ChunkDocuments(Documents):
    """Documents of a preparation, in its chunk files. They take 8 bytes of memory per document.

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
        super().__init__(lengths, starts, firsts, *map(np.dtype, dtypes))
        self._chunks, self.headers = chunks, headers
        self._file = functools.lru_cache(MAX_OPEN)(self._open)

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """See `Documents.blocks`.

        From a bucket, one request for each document would be too slow. So the method gathers the documents of `GATHER_BLOCKS`
        blocks at once: it reads each chunk that has some of them once, as a whole.
        """
        if not self._chunks.remote:
            yield from super().blocks(ids)
            return
        blocks = in_blocks(self.lengths, ids)
        while window := list(itertools.islice(blocks, GATHER_BLOCKS)):
            tokens, loss = self._gather(np.concatenate(window))
            start = 0
            for block_ids in window:
                lengths = self.lengths[block_ids].astype(np.int64)
                stop = start + int(lengths.sum())
                yield Block(lengths, tokens[start:stop].copy(), loss[start:stop].copy())
                start = stop
            del tokens, loss  # frees their memory before the next documents are gathered; the blocks are copies

    def _open(self, number: int) -> io.FileIO:
        path = self._chunks.path(number)
        with files.reading(path):
            return open(path, "rb", buffering=0)

    def _gather(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the concatenated tokens and loss of the documents `ids`."""
        lengths = self.lengths[ids].astype(np.int64)
        starts = self.starts[ids].astype(np.int64)  # index of each document's first token in its chunk
        targets = np.cumsum(lengths) - lengths  # index of each document's first token in the result
        tokens, loss = np.empty(lengths.sum(), self.token_dtype), np.empty(lengths.sum(), self.loss_dtype)
        chunk_of = self.parts_of(ids)
        by_chunk = np.argsort(chunk_of, kind="stable")  # indices in `ids`, ordered by chunk
        needed, firsts = np.unique(chunk_of[by_chunk], return_index=True)
        in_chunk = np.split(by_chunk, firsts[1:])  # for each needed chunk, the indices in `ids` of its documents
        for number, part, data in zip(needed.tolist(), in_chunk, self._chunks.contents(needed.tolist()), strict=True):
            header = self.headers[number]
            if len(data) != header.end:
                raise StorageError(f"{self._chunks.path(number)}: changed while in use. Prepare again.")
            chunk_tokens = np.frombuffer(data, self.token_dtype, header.tokens, header.tokens_at)
            if header.all_loss:
                chunk_loss = np.ones(header.tokens, self.loss_dtype)
            else:
                chunk_loss = np.frombuffer(data, self.loss_dtype, header.tokens, header.loss_at)
            for start, target, length in np.stack([starts, targets, lengths], axis=1)[part].tolist():
                tokens[target : target + length] = chunk_tokens[start : start + length]
                loss[target : target + length] = chunk_loss[start : start + length]
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
        inputs, lines = (self._chunks.column(self.headers, name) for name in ("input", "line"))
        for begin in range(0, len(ids), BLOCK_SOURCES):
            block_ids = ids[begin : begin + BLOCK_SOURCES]
            yield np.stack([inputs[block_ids], lines[block_ids]], axis=1).astype(np.int64)


def _read_into(file: io.FileIO, offset: int, out: npt.NDArray[Any]) -> None:
    """Fill `out` with the bytes of a file from `offset` on."""
    if os.preadv(file.fileno(), [out.data], offset) != out.nbytes:
        raise StorageError(f"{file.name}: was cut short while in use. Prepare again.")
