"""Content hashes of files. A file's hash is the SHA-256 of the hashes of its 4 MiB blocks. Each thread hashes 1 GB/s."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from grain_sft.errors import CorpusFileError
from grain_sft.storage import files
from grain_sft.storage.file_stamp import FileStamp, size_change
from grain_sft.storage.regular_files import inside, open_regular, pread
from grain_sft.storage.remote.files import fetch_exactly
from grain_sft.storage.remote.responses import Range
from grain_sft.storage.threads import in_threads

BLOCK = 1 << 22  # bytes
_BLOCKS_AT_ONCE = 16  # blocks of a remote file that are fetched together


def joined(block_hashes: Iterable[bytes], prefix: bytes = b"") -> str:
    """Return the hash, in hexadecimal digits, of `prefix` followed by the hashes of blocks."""
    return hashlib.sha256(prefix + b"".join(block_hashes)).hexdigest()


def of_block(data: Any) -> bytes:
    """Return the SHA-256 of a buffer, such as a block: 32 bytes."""
    return hashlib.sha256(data).digest()


def of_bytes(data: bytes) -> str:
    """Return the hash of a file whose bytes are `data`."""
    return joined(of_block(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))


def of_file(file: FileStamp) -> str:
    """Return the hash of the bytes of a local or remote file from `data_offset` on.

    Raises:
      CorpusFileError: The file can't be read, or its size is not `file.size`.
    """
    if files.is_remote(file.path):
        ranges = Range(file.path, file.data_offset, file.size, file.version).cut(BLOCK)
        block_hashes: list[bytes] = []
        for first in range(0, len(ranges), _BLOCKS_AT_ONCE):
            block_hashes += map(of_block, fetch_exactly(ranges[first : first + _BLOCKS_AT_ONCE]))
        return joined(block_hashes)
    with files.reading(file.path), inside(file.root), os.fdopen(open_regular(file.path), "rb", 0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != file.size:
            raise CorpusFileError(size_change(file, size))
        try:
            return joined(of_blocks([(opened.fileno(), file.data_offset, size)]))
        except EOFError as error:
            raise CorpusFileError(f"{file.path}: cut short while read ({error}). Wait until it is complete.") from error


def of_blocks(ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """Return the hash of each 4 MiB block of each range, in order.

    Args:
      ranges: Tuples (descriptor of an open file, first byte, last byte + 1).

    Raises:
      OSError: A file can't be read.
      EOFError: A file ends before the end of its range.
    """

    def hash_at(fd: int, offset: int, stop: int) -> bytes:
        data = pread(fd, min(BLOCK, stop - offset), offset)
        if offset + len(data) < min(offset + BLOCK, stop):
            raise EOFError(f"it ends at byte {offset + len(data)}")
        return of_block(data)

    blocks = [(fd, offset, stop) for fd, start, stop in ranges for offset in range(start, stop, BLOCK)]
    return list(in_threads(lambda block: hash_at(*block), blocks))
