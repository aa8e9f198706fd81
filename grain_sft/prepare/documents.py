"""`Documents`: random access to the documents of a corpus that is being written.

Writers read the documents in blocks, in the order of the new corpus. The documents are stored in parts, in the order of the
inputs. In a preparation, a part is a chunk file. In a conversion, a part is a split of the old corpus.
"""

import abc
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError
from grain_sft.prepare.chunks import Chunks, Header
from grain_sft.storage import files

BLOCK_TOKENS, BLOCK_DOCUMENTS = 1 << 20, 4096  # see `in_blocks`
BLOCK_SOURCES = 1 << 16  # maximum number of documents whose sources are yielded together
GATHER_BLOCKS = 128  # blocks read at once from remote chunks; they take 1 GiB if a token and its loss together take 8 bytes

Ids = npt.NDArray[Any]
"""Numbers of documents, int32 or int64. The documents of all inputs are numbered from 0, in order. A dropped document has a
number, too. A rejected record has none.
"""

Reader = Callable[[int, npt.NDArray[Any], npt.NDArray[Any]], None]
"""Function of (start, tokens, loss) that fills both arrays from a part, beginning at the part's token `start`."""

ChunkFile = io.FileIO | io.BytesIO


class Block(NamedTuple):
    """Documents: `lengths` int64 [documents], and their concatenated `tokens` and `loss` (bool or float32)."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]
    loss: npt.NDArray[Any]


def in_blocks(lengths: npt.NDArray[Any], ids: Ids) -> Iterator[Ids]:
    """Yield `ids` in blocks of at most `BLOCK_DOCUMENTS` documents and `BLOCK_TOKENS` tokens.

    A document of more than `BLOCK_TOKENS` tokens is a block of its own.
    """
    begin = 0
    while begin < len(ids):
        candidates = ids[begin : begin + BLOCK_DOCUMENTS]
        token_ends = np.cumsum(lengths[candidates], dtype=np.int64)
        count = max(1, int(np.searchsorted(token_ends, BLOCK_TOKENS, side="right")))
        yield candidates[:count]
        begin += count


@dataclasses.dataclass(eq=False)
class Documents(abc.ABC):
    """Documents by number.

    Attributes:
      lengths: Number of tokens of each document; 0 for a dropped document.
      starts: Index of each document's first token in its part.
      firsts: int64 [parts + 1], number of each part's first document, then the number of all documents: [0, 3, 5] for two
        parts of 3 and 2 documents.
      token_dtype: Dtype of tokens in blocks.
      loss_dtype: Dtype of loss in blocks: bool, or float32 for weights.
      blocks_at_once: Number of blocks that are read together. Each part that they need is read once.
    """

    lengths: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    firsts: npt.NDArray[np.int64]
    token_dtype: np.dtype[Any]
    loss_dtype: np.dtype[Any]
    blocks_at_once = 1

    @abc.abstractmethod
    def readers(self, parts: Sequence[int]) -> Iterable[Reader]:
        """Return a `Reader` for each of `parts`, in that order. The caller uses each reader before it requests the next one."""

    @abc.abstractmethod
    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the sources of `ids` in that order, several at a time: int64 [documents, 2], pairs (input, line)."""

    def parts_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.firsts, ids, side="right") - 1

    def blocks(self, ids: Ids) -> Iterator[Block]:
        """Yield the documents `ids` in that order, several at a time."""
        blocks = in_blocks(self.lengths, ids)
        while window := list(itertools.islice(blocks, self.blocks_at_once)):
            tokens, loss = self._gather(np.concatenate(window))
            start = 0
            for block_ids in window:
                lengths = self.lengths[block_ids].astype(np.int64)
                stop = start + int(lengths.sum())
                yield Block(lengths, tokens[start:stop].copy(), loss[start:stop].copy())
                start = stop
            del tokens, loss  # frees their memory before the next `_gather`; the blocks are copies

    def _gather(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the concatenated tokens and loss of the documents `ids`. Each part is read once.

        Documents that are adjacent both in `ids` and in their part make a run. One call of a `Reader` reads a run. Example:

          ids                    5       0       1       2
          part                   1       0       0       0
          tokens of the part     0:3     0:5     5:9     9:11
          tokens of the result   0:3     3:8     8:12    12:14

        The runs are document 5, and documents 0 to 2. Part 0 is read first and fills tokens 3:14 of the result.
        """
        lengths = self.lengths[ids].astype(np.int64)
        starts = self.starts[ids].astype(np.int64)
        parts = self.parts_of(ids)
        # index in the result of each document's first token, then the number of all tokens; in the example: [0, 3, 8, 12, 14]
        begins = np.append(0, np.cumsum(lengths))
        tokens, loss = np.empty(begins[-1], self.token_dtype), np.empty(begins[-1], self.loss_dtype)
        is_adjacent = (starts[1:] == starts[:-1] + lengths[:-1]) & (parts[1:] == parts[:-1])
        first = np.append(0, np.flatnonzero(~is_adjacent) + 1)  # index in `ids` of each run's first document: [0, 1]
        # for each run: its first token in the part, and where it begins and ends in the result: [[0, 0, 3], [0, 3, 14]]
        runs = np.stack([starts[first], begins[first], np.append(begins[first[1:]], begins[-1])], axis=1)
        by_part = np.argsort(parts[first], kind="stable")
        # the parts to read, ascending, and for each part the index of its first run in `runs[by_part]`
        needed, borders = np.unique(parts[first][by_part], return_index=True)
        runs_of_parts = np.split(runs[by_part], borders[1:])
        for read, runs_of_part in zip(self.readers(needed.tolist()), runs_of_parts, strict=True):
            for start, begin, end in runs_of_part.tolist():
                read(start, tokens[begin:end], loss[begin:end])
        return tokens, loss


class ChunkDocuments(Documents):
    """Documents of a preparation, in its chunk files. Memory holds 8 bytes for each document."""

    def __init__(self, chunks: Chunks, headers: Sequence[Header], lengths: npt.NDArray[Any] | None = None) -> None:
        firsts = np.cumsum([0, *(header.records for header in headers)])
        lengths = chunks.column(headers, "length") if lengths is None else lengths
        starts = np.empty(len(lengths), np.uint32)
        for begin, end in itertools.pairwise(firsts.tolist()):
            starts[begin:end] = np.cumsum(lengths[begin:end]) - lengths[begin:end]
        dtypes = (headers[0].token_dtype, headers[0].loss_dtype) if headers else ("uint16", "bool")
        super().__init__(lengths, starts, firsts, *map(np.dtype, dtypes))
        self._chunks, self.headers = chunks, headers
        if chunks.remote:
            # whole chunks are read, because one request for each document would be slow
            self.blocks_at_once = GATHER_BLOCKS

    def readers(self, parts: Sequence[int]) -> Iterator[Reader]:
        opened: Iterable[ChunkFile] = map(self._open, parts)
        if self._chunks.remote:
            opened = map(io.BytesIO, self._chunks.contents(parts))
        for part, file in zip(parts, opened, strict=True):
            with file:
                yield functools.partial(self._read, part, file)

    def _open(self, part: int) -> io.FileIO:
        path = self._chunks.path(part)
        with files.reading(path):
            return open(path, "rb", buffering=0)

    def _read(self, part: int, file: ChunkFile, start: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        header = self.headers[part]
        columns = [(header.tokens_at, tokens), (header.loss_at, loss)]
        if header.loss_at == header.rejected_at:  # the section of the loss is empty: every token has the loss 1
            loss[:] = 1
            columns.pop()
        for offset, out in columns:
            file.seek(offset + start * out.itemsize)
            if file.readinto(out.data) != out.nbytes or file.seek(0, io.SEEK_END) != header.end:
                raise StorageError(f"{self._chunks.path(part)}: changed while in use. Prepare again.")

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        records_of_chunks = self._chunks.records(self.headers)
        of_chunks = [np.stack([records["input"], records["line"]], axis=1) for records in records_of_chunks]
        sources = np.concatenate([np.empty((0, 2), np.int64), *of_chunks])
        for begin in range(0, len(ids), BLOCK_SOURCES):
            yield sources[ids[begin : begin + BLOCK_SOURCES]]
