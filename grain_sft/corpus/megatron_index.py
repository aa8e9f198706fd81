"""Megatron's index files: the `.idx` that lists the sequences and documents of the tokens in a `.bin`.

A sequence is consecutive tokens of the `.bin`. A document is a group of consecutive sequences, often only one.

All values are little-endian. S is the number of sequences.

  byte 0        magic `MMIDIDX\\0\\0`
  byte 9        version: uint64, 1
  byte 17       code of the tokens' dtype: uint8
  byte 18       number of sequences, S: uint64
  byte 26       number of documents plus 1: uint64 (some writers leave out the plus 1)
  byte 34       number of tokens of each sequence: int32 [S]
  34 + 4 * S    pointers, the first byte of each sequence in the `.bin`: int64 [S]
  34 + 12 * S   document index, the first sequence of each document, and S as last entry: int64

Source: megatron-core 0.16.1, `megatron/core/datasets/indexed_dataset.py`.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.array_file import first_true
from grain_sft.errors import CorpusError
from grain_sft.types import Array, Ints

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # bytes 0 to 33
HEADER_BYTES = _HEADER.size
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Dtypes of tokens by their codes."""

_WRITE_AGAIN = "Copy the file again, or write it again."
_DAMAGED = f"The file is damaged. {_WRITE_AGAIN}"


class IndexHeader(NamedTuple):
    """Header of an index."""

    stored: np.dtype[np.integer]  # dtype of the tokens in the `.bin`, signed or unsigned
    sequences: int  # number of sequences
    entries: int  # number of entries of the document index, at least 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Unsigned dtype of the same width as `stored`. Tokens are read with this dtype."""
        return np.dtype(f"u{self.stored.itemsize}")

    @property
    def pointers_at(self) -> int:
        """Byte of the index at which the pointers begin."""
        return HEADER_BYTES + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        """Byte of the index at which the document index begins."""
        return HEADER_BYTES + 12 * self.sequences


def parse_header(path: str, head: bytes, size: int) -> IndexHeader:
    """Return the header of an index of `size` bytes whose first `HEADER_BYTES` bytes are `head`."""
    if len(head) < HEADER_BYTES:
        raise CorpusError(f"{path}: ends at byte {size}; expected a header of {HEADER_BYTES} bytes. {_WRITE_AGAIN}")
    if not head.startswith(MAGIC):
        problem = f"{path}: byte 0: expected the magic {MAGIC!r} of a Megatron index, found {head[:9]!r}"
        raise CorpusError(f"{problem}. Give the prefix of a .bin and an .idx that Megatron's preprocess_data wrote.")
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != VERSION:
        raise CorpusError(f"{path}: byte 9: version {version}; expected {VERSION}. {_WRITE_AGAIN}")
    if code not in CODES:
        raise CorpusError(f"{path}: byte 17: dtype code {code}; expected 1 to 5 or 8. {_WRITE_AGAIN}")
    stored = np.dtype(CODES[code])
    if stored.kind == "f":
        raise CorpusError(f"{path}: byte 17: dtype code {code} is {stored}; expected integers. Give token ids.")
    document_bytes = size - HEADER_BYTES - 12 * sequences
    valid = (8 * documents, 8 * documents + 8)  # byte 26 has the number of entries or, in some files, one less
    if document_bytes - sequences in valid and document_bytes not in valid:
        problem = f"{path}: byte {size - sequences}: one byte per sequence follows the document index"
        raise CorpusError(f"{problem}, so the data are multimodal. Expected text. Write it without --multimodal.")
    if document_bytes not in valid:
        stated = f"its header (bytes 18 and 26) states {sequences} sequences and {documents} documents"
        expected = HEADER_BYTES + 12 * sequences + valid[0]
        raise CorpusError(f"{path}: {size} bytes, but {stated}; expected {expected} or 8 more. {_WRITE_AGAIN}")
    if not document_bytes:
        raise CorpusError(f"{path}: byte 26: the document index has no entry; expected at least one. {_WRITE_AGAIN}")
    return IndexHeader(stored, sequences, document_bytes // 8)


def encode(dtype: np.dtype[Any], sizes: Array) -> Iterator[bytes]:
    """Yield the bytes of an index, in parts, for documents of one sequence each. Document i has `sizes[i]` tokens."""
    code = next(code for code, name in CODES.items() if name == dtype.name)
    yield _HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1)
    yield sizes.astype("<i4").tobytes()
    yield ((np.cumsum(sizes, dtype=np.int64) - sizes) * dtype.itemsize).astype("<i8").tobytes()
    yield np.arange(len(sizes) + 1, dtype="<i8").tobytes()


def check_sizes(path: str, sizes: npt.NDArray[np.int32]) -> None:
    """Refuse a negative number in `sizes`, the number of tokens of each sequence."""
    if (i := first_true(sizes < 0)) is not None:
        raise CorpusError(f"{path}: byte {HEADER_BYTES + 4 * i}: sequence {i} has {sizes[i]} tokens. {_DAMAGED}")


def parse(
    path: str, data: bytes, num_tokens: int, sequences: tuple[int, int] | None, *, by_sequence: bool
) -> tuple[Ints, Ints]:
    """Return the token offset and the length of each document, or of each sequence, in a range of sequences.

    Both are int64 [documents] or [sequences]. Offsets count from the first token of the range. A document that crosses a
    border of the range is cut at the border.

    Args:
      data: All bytes of the index.
      num_tokens: Number of tokens that the range must have.
      sequences: The range, as a pair: its first sequence, and the sequence after its last. None for all sequences.
      by_sequence: Whether sequences are returned instead of documents.
    """
    header = parse_header(path, data[:HEADER_BYTES], len(data))
    count, itemsize = header.sequences, header.dtype.itemsize
    sizes: Array = np.frombuffer(data, "<i4", count, HEADER_BYTES)
    pointers = np.frombuffer(data, "<i8", count, header.pointers_at)
    document_index = np.frombuffer(data, "<i8", header.entries, header.documents_at)
    token_bounds = np.zeros(count + 1, np.int64)  # first token of each sequence, and the number of tokens
    np.cumsum(sizes, dtype=np.int64, out=token_bounds[1:])
    _check_pointers(path, header, pointers, token_bounds[:-1] * itemsize)
    _check_document_index(path, header, document_index)
    first, stop = sequences or (0, count)
    if not 0 <= first <= stop <= count or token_bounds[stop] - token_bounds[first] != num_tokens:
        found = token_bounds[min(stop, count)] - token_bounds[min(first, count)]
        problem = f"{path}: sequences {first} to {stop} of {count} hold {found} tokens; expected {num_tokens}"
        raise CorpusError(f"{problem}. The file belongs to other tokens, or was replaced. {_WRITE_AGAIN}")
    if by_sequence:
        start, end = token_bounds[first:stop], token_bounds[first + 1 : stop + 1]
    else:
        first_sequences, stops = _documents_in_range(document_index[:-1], document_index[1:], first, stop, count)
        start, end = token_bounds[first_sequences], token_bounds[stops]
    return start - token_bounds[first], end - start


def _documents_in_range(begin: Ints, end: Ints, first: int, stop: int, count: int) -> tuple[Ints, Ints]:
    """Return the first sequence and the stop of each document in the range [first, stop): int64 [documents] each.

    Document i has the sequences [begin[i], end[i]) of `count` in all. It is clipped to the range: with the range [5, 10), the
    document [3, 7) becomes [5, 7).
    """
    in_range = (begin < stop) & (end > first)
    # An empty document at sequence 5 belongs to the range that begins at 5, not to the range that stops at 5. An empty
    # document at the end of the index belongs to the last range.
    at_border = begin == first
    if stop == count:
        at_border |= begin == stop
    in_range |= (begin == end) & at_border
    return begin[in_range].clip(first, stop), end[in_range].clip(first, stop)


def _check_pointers(path: str, header: IndexHeader, pointers: Ints, expected: Ints) -> None:
    """Refuse `pointers` unless each sequence begins in the `.bin` where the sequence before it ends."""
    if (i := first_true(pointers != expected)) is not None:
        problem = f"{path}: byte {header.pointers_at + 8 * i}: sequence {i} begins at byte {pointers[i]} of the .bin"
        raise CorpusError(f"{problem}; expected {expected[i]}, after the tokens of the earlier sequences. {_DAMAGED}")


def _check_document_index(path: str, header: IndexHeader, entries: Ints) -> None:
    """Refuse a document index that does not ascend from 0 to the number of sequences.

    Two equal entries are valid: the document between them is empty.
    """
    wrong = np.append(entries[:1] != 0, entries[1:] < entries[:-1]) | (entries > header.sequences)
    wrong[-1] |= entries[-1] != header.sequences
    if (i := first_true(wrong)) is not None:
        problem = f"{path}: byte {header.documents_at + 8 * i}: entry {i} of the document index is {entries[i]}"
        expected = f"expected entries that ascend from 0 to {header.sequences}, the number of sequences"
        raise CorpusError(f"{problem}; {expected}. {_DAMAGED}")
