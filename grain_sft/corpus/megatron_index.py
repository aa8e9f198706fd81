"""Megatron's index files: the `.idx` that lists the sequences and documents of the tokens in a `.bin`.

All values are little-endian. Byte 0: magic `MMIDIDX\\0\\0`; 9: version, uint64 1; 17: code of the dtype, uint8; 18: number of
sequences, uint64; 26: number of documents, uint64; 34: number of tokens of each sequence, int32; first byte of each
sequence in the `.bin`, int64; document index, int64: the first sequence of each document, and the number of sequences at
its end. Source: megatron-core 0.16.1, `megatron/core/datasets/indexed_dataset.py`.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError

Ints = npt.NDArray[np.int64]

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, numbers of sequences and documents
HEADER_BYTES = _HEADER.size
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Dtypes of tokens by their codes."""

_WRITE_AGAIN = "Copy the file again, or write it again."


class IndexHeader(NamedTuple):
    """Facts in the first bytes of an index.

    Attributes:
      dtype: Unsigned dtype of the width of the tokens.
      signed: Whether tokens are stored as signed integers.
      sequences: Number of sequences.
      entries: Number of entries of the document index, at least 1.
    """

    dtype: np.dtype[np.unsignedinteger]
    signed: bool
    sequences: int
    entries: int

    @property
    def stored(self) -> str:
        """Name of the dtype of the tokens in the `.bin`."""
        return self.dtype.name.removeprefix("u") if self.signed else self.dtype.name

    @property
    def pointers_at(self) -> int:
        """Offset of the sequences' first bytes in the index, in bytes."""
        return HEADER_BYTES + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        """Offset of the document index, in bytes."""
        return HEADER_BYTES + 12 * self.sequences


def parse_header(path: str, head: bytes, size: int) -> IndexHeader:
    """Return the header of an index of `size` bytes whose first `HEADER_BYTES` are `head`.

    The document index has as many entries as the header states documents, or one more: `size` decides.

    Raises:
      CorpusError: The file is not an index of tokens, or is cut short or appended to.
    """
    if len(head) < HEADER_BYTES:
        raise CorpusError(f"{path}: ends at byte {size}; expected a header of {HEADER_BYTES} bytes. {_WRITE_AGAIN}")
    if not head.startswith(MAGIC):
        raise CorpusError(
            f"{path}: byte 0: expected the magic {MAGIC!r} of a Megatron index, found {head[:9]!r}. Give the prefix of a "
            ".bin and an .idx that Megatron's preprocess_data wrote."
        )
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != VERSION:
        raise CorpusError(f"{path}: byte 9: version {version}; expected {VERSION}. {_WRITE_AGAIN}")
    if code not in CODES:
        raise CorpusError(f"{path}: byte 17: dtype code {code}; expected 1 to 5 or 8. {_WRITE_AGAIN}")
    stored = np.dtype(CODES[code])
    if stored.kind == "f":
        raise CorpusError(f"{path}: byte 17: dtype code {code} is {stored}; expected integers. It holds no token ids.")
    listed, rest = 8 * documents, size - HEADER_BYTES - 12 * sequences
    if rest - sequences in (listed, listed + 8) and rest not in (listed, listed + 8):
        raise CorpusError(
            f"{path}: byte {size - sequences}: one byte per sequence follows the document index, so the data are multimodal. "
            "Expected text. Write the text alone, without --multimodal."
        )
    if rest not in (listed, listed + 8):
        raise CorpusError(
            f"{path}: {size} bytes, but its header (bytes 18 and 26) states {sequences} sequences and {documents} documents; "
            f"expected {HEADER_BYTES + 12 * sequences + listed} or 8 more. It was cut short or damaged. {_WRITE_AGAIN}"
        )
    if not rest:
        raise CorpusError(f"{path}: byte 26: the document index has no entry; expected at least one. {_WRITE_AGAIN}")
    return IndexHeader(np.dtype(f"u{stored.itemsize}"), stored.kind == "i", sequences, rest // 8)


def encode(dtype: np.dtype[Any], sizes: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield the parts of an index as megatron-core writes it, of documents of one sequence each, of `sizes` tokens."""
    code = next(code for code, name in CODES.items() if name == dtype.name)
    yield _HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1)
    yield sizes.astype("<i4").tobytes()
    yield ((np.cumsum(sizes, dtype=np.int64) - sizes) * dtype.itemsize).astype("<i8").tobytes()
    yield np.arange(len(sizes) + 1, dtype="<i8").tobytes()


def check_sizes(path: str, sizes: npt.NDArray[np.int32], first: int) -> None:
    """Refuse negative numbers of tokens. `sizes[0]` belongs to the sequence with number `first`."""
    if len(sizes) and sizes.min() < 0:
        at = int(np.flatnonzero(sizes < 0)[0])
        raise CorpusError(
            f"{path}: byte {HEADER_BYTES + 4 * (first + at)}: sequence {first + at} has {sizes[at]} tokens; expected 0 or "
            f"more. The file is damaged. {_WRITE_AGAIN}"
        )


def parse(
    path: str, data: bytes, num_tokens: int, sequences: tuple[int, int] | None, *, by_sequence: bool
) -> tuple[Ints, Ints]:
    """Return first token and length of each document, int64 [documents], or of each sequence, int64 [sequences].

    Args:
      path: Path of the index, for messages.
      data: All bytes of the index.
      num_tokens: Number of tokens in the sequences of the range.
      sequences: Range of sequences, from whose first token starts are counted; None: all. Its ends cut through documents.
      by_sequence: Whether sequences are returned instead of documents.

    Raises:
      CorpusError: The index is damaged, or is of other tokens.
    """
    header = parse_header(path, data[:HEADER_BYTES], len(data))
    count, itemsize = header.sequences, header.dtype.itemsize
    sizes: npt.NDArray[Any] = np.frombuffer(data, "<i4", count, HEADER_BYTES)
    pointers = np.frombuffer(data, "<i8", count, header.pointers_at)
    borders = np.frombuffer(data, "<i8", header.entries, header.documents_at)
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(sizes, dtype=np.int64, out=bounds[1:])
    _check_pointers(path, header, pointers, bounds[:-1] * itemsize)
    _check_borders(path, header, borders)
    first, stop = sequences or (0, count)
    if not 0 <= first <= stop <= count or bounds[stop] - bounds[first] != num_tokens:
        raise CorpusError(
            f"{path}: sequences {first} to {stop} hold {bounds[min(stop, count)] - bounds[min(first, count)]} tokens, of "
            f"{count} sequences; expected {num_tokens}. The file is of other tokens, or was replaced. {_WRITE_AGAIN}"
        )
    if by_sequence:
        begin, end = bounds[first:stop], bounds[first + 1 : stop + 1]
    elif stop - first == count:
        begin, end = bounds[borders[:-1]], bounds[borders[1:]]
    else:
        begins, ends = borders[:-1], borders[1:]
        inside = (begins < stop) & (ends > first)
        # a document without sequences is in the range that begins where it is, or in the last range
        at_border = (begins == first) | (begins == stop) if stop == count else begins == first
        inside |= (begins == ends) & at_border
        begin, end = (bounds[each[inside].clip(first, stop)] for each in (begins, ends))
    return begin - bounds[first], end - begin


def _check_pointers(path: str, header: IndexHeader, pointers: Ints, expected: Ints) -> None:
    """Refuse sequences that do not follow each other in the `.bin`."""
    if (pointers != expected).any():
        at = int(np.flatnonzero(pointers != expected)[0])
        raise CorpusError(
            f"{path}: byte {header.pointers_at + 8 * at}: sequence {at} begins at byte {pointers[at]} of the .bin; expected "
            f"{expected[at]}, after the tokens of those before it. The file is damaged. {_WRITE_AGAIN}"
        )


def _check_borders(path: str, header: IndexHeader, borders: Ints) -> None:
    """Refuse a document index that does not ascend from 0 to the number of sequences."""
    wrong = np.append(borders[:1] != 0, borders[1:] < borders[:-1]) | (borders > header.sequences)
    wrong[-1] |= borders[-1] != header.sequences
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorpusError(
            f"{path}: byte {header.documents_at + 8 * at}: entry {at} of the document index is {borders[at]}; expected entries "
            f"that ascend from 0 to {header.sequences}, the number of sequences. The file is damaged. {_WRITE_AGAIN}"
        )
