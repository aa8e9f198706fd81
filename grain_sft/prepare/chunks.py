"""Chunk files: the rendered documents of a preparation, until they are written as a corpus.

A unit is a part of an input file, usually of a few MiB. A group is one unit, or several small units. A chunk has the documents
of one group. A chunk file has five sections:

1. the header: JSON, padded with spaces to 4096 bytes;
2. for each valid record of the inputs, an item of the dtype `RECORD`;
3. the tokens of all kept documents;
4. the loss of these tokens;
5. the rejected records, as lines of JSON.
"""

import collections
import concurrent.futures
import dataclasses
import glob
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError
from grain_sft.storage import files

RECORD = np.dtype(
    [
        ("line", "<i8"),  # number of the record's line in its input, from 1
        ("input", "<u4"),  # number of the input
        ("length", "<u4"),  # tokens kept; 0 if the document was dropped
        ("trainable", "<u4"),  # kept tokens that take loss
        ("cut", "<u4"),  # tokens that were cut off
        ("cut_trainable", "<u4"),  # tokens that were cut off and took loss
    ]
)
AT_ONCE = 16  # maximum number of chunks that are read concurrently

_HEADER_BYTES = 4096

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Header:
    """Header of a chunk.

    Attributes:
      key: Hash of all that decides the documents (`Renderer.key`).
      records: Number of valid records, including those of dropped documents.
      token_dtype, loss_dtype: dtype of the tokens ("uint8", "uint16" or "uint32"), and of their loss ("bool" or "float32").
      binary: Whether the loss of every token is 0 or 1.
      dropped: Number of dropped documents by reason.
      counts: Counts by name. "rejected" counts rejected records. "without_final_eos" counts documents whose last token is not
        EOS. "with_inner_eos" counts documents with an EOS before their last token. "text_bytes" and "text_tokens" are totals
        of the kept plain documents, before they are cut.
      tokens_at, loss_at, rejected_at, end: Offsets of the sections, and of the end of the file. If all tokens have the loss 1,
        the section of the loss is empty. A preparation of plain texts then takes 6 % less CPU time.
    """

    key: str
    records: int
    token_dtype: str
    loss_dtype: str
    binary: bool
    dropped: dict[str, int]
    counts: dict[str, int]
    tokens_at: int
    loss_at: int
    rejected_at: int
    end: int


@dataclasses.dataclass
class Contents:
    """Contents of a chunk before it is written.

    Attributes:
      records: For each valid record, a tuple of the fields of `RECORD`.
      tokens, loss: For each kept document, an array of its tokens and an array of their loss.
      dropped: Number of dropped documents by reason.
      rejected: JSON object of each rejected record.
      counts: The counts "text_bytes" and "text_tokens" of `Header.counts`.
    """

    records: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    tokens: list[npt.NDArray[np.uint32]] = dataclasses.field(default_factory=list)
    loss: list[npt.NDArray[Any]] = dataclasses.field(default_factory=list)
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rejected: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def encode(self, key: str, token_dtype: np.dtype[Any], loss_dtype: np.dtype[Any], eos: int | None) -> bytes:
        """Return the bytes of the chunk's file. `eos` is the id of the EOS token."""
        # "unsafe" allows narrower types: every id of the vocabulary fits into `token_dtype`
        tokens = np.concatenate([np.empty(0, token_dtype), *self.tokens], dtype=token_dtype, casting="unsafe")
        loss = np.concatenate([np.empty(0, loss_dtype), *self.loss], dtype=loss_dtype, casting="unsafe")
        rejected = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in self.rejected).encode()
        stops = np.cumsum([len(document) for document in self.tokens], dtype=np.int64)
        is_eos = np.zeros(len(tokens), np.bool_) if eos is None else tokens == eos
        counts = {**self.counts, "rejected": len(self.rejected)}
        # kept documents have a token or more, so `stops - 1` are their last tokens
        counts["without_final_eos"] = int(np.count_nonzero(~is_eos[stops - 1]))
        is_eos[stops - 1] = False  # now only the EOS tokens inside of documents are True
        documents_of_eos = np.searchsorted(stops, np.flatnonzero(is_eos), side="right")
        counts["with_inner_eos"] = len(np.unique(documents_of_eos))
        loss_bytes = b"" if (loss == 1).all() else loss.tobytes()
        sections = [np.array(self.records, RECORD).tobytes(), tokens.tobytes(), loss_bytes, rejected]
        binary = bool(((loss == 0) | (loss == 1)).all())
        # offsets of the tokens, the loss and the rejected records, and of the end, as in the fields of `Header`
        _, *offsets = itertools.accumulate(map(len, sections), initial=_HEADER_BYTES)
        header = Header(key, len(self.records), token_dtype.name, loss_dtype.name, binary, dict(self.dropped), counts, *offsets)
        return b"".join([msgspec.json.encode(header).ljust(_HEADER_BYTES), *sections])


class Chunks:
    """Chunks of one preparation, in a local or remote folder. `key` is the `Header.key` of every chunk."""

    def __init__(self, folder: str, key: str) -> None:
        self._folder, self._key = folder, key
        self.remote = files.is_remote(folder)

    def path(self, number: int) -> str:
        return files.join(self._folder, f"group-{number:06d}.chunk")

    def write(self, number: int, data: bytes) -> None:
        files.write_bytes(self.path(number), data)

    def header(self, number: int) -> Header | None:
        """Return the header of a chunk that exists; None if the chunk is damaged, or of another preparation."""
        path = self.path(number)
        try:
            header = msgspec.json.decode(files.read_range(path, 0, _HEADER_BYTES), type=Header)
        except ValueError:
            return None
        return header if header.key == self._key and files.size(path) == header.end else None

    def existing_headers(self, count: int) -> list[Header | None]:
        """Return the headers of the first `count` chunks; None for one that is missing, damaged or of another preparation."""
        # a listing, because a request for each missing chunk would take long: 50 s instead of 1 s for 20,000 of them
        names = set(map(files.name_of, files.glob(files.join(glob.escape(self._folder), "*.chunk"))))
        existing = [number for number in range(count) if files.name_of(self.path(number)) in names]
        headers = dict(zip(existing, self._read_each(self.header, existing), strict=True))
        return [headers.get(number) for number in range(count)]

    def headers(self, count: int) -> tuple[Header, ...]:
        """Return the headers of the first `count` chunks. Raise a StorageError if a chunk has no valid header."""
        headers = self.existing_headers(count)
        if None in headers:
            raise StorageError(f"{self.path(headers.index(None))}: is missing or damaged. Prepare again.")
        return tuple(header for header in headers if header is not None)

    def records(self, headers: Sequence[Header]) -> Iterator[npt.NDArray[Any]]:
        """Yield the records of each chunk: arrays [records] of dtype `RECORD`."""
        sections = self._sections([(_HEADER_BYTES, header.tokens_at) for header in headers])
        return (np.frombuffer(data, RECORD) for data in sections)

    def rejected(self, headers: Sequence[Header]) -> Iterator[bytes]:
        return self._sections([(header.rejected_at, header.end) for header in headers])

    def column(self, headers: Sequence[Header], name: str) -> npt.NDArray[np.integer]:
        """Return the field `name` of the records of all chunks, [records]."""
        columns = [records[name].copy() for records in self.records(headers)]  # a view would keep all fields in memory
        return np.concatenate([np.empty(0, RECORD[name]), *columns])

    def contents(self, numbers: Sequence[int]) -> Iterator[bytes]:
        return self._read_each(lambda number: files.read_bytes(self.path(number)), numbers)

    def _sections(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes `ranges[0]` of the first chunk, then the bytes `ranges[1]` of the second chunk, and so on."""
        return self._read_each(lambda number: files.read_range(self.path(number), *ranges[number]), range(len(ranges)))

    def _read_each(self, read: Callable[[int], T], numbers: Sequence[int]) -> Iterator[T]:
        """Yield `read(number)` for each number, in order. At most `AT_ONCE` results are in memory."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
            for start in range(0, len(numbers), AT_ONCE):
                yield from threads.map(read, numbers[start : start + AT_ONCE])
