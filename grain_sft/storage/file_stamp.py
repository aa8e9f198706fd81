"""File stamps: size, hash of both ends, and version of a file. They reveal a replaced file."""

import ast
import dataclasses
import hashlib
import os
from typing import Annotated

import msgspec

from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import files
from grain_sft.storage.locks import ForkSafeLock
from grain_sft.storage.regular_files import inside, open_regular, pread

Count = Annotated[int, msgspec.Meta(ge=0)]

MAGIC = b"\x93NUMPY"
DIGEST_BYTES = 4096  # hashed at each end of a file's data

_HEADER_LIMIT = 1 << 16  # bytes; numpy's own headers of 1-D integer arrays take 128
_PARSING = ForkSafeLock()  # CPython 3.11 counts the parser's depth for all threads together, and raises SystemError


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """State of a file when it was indexed.

    Attributes:
      path: Path or URL.
      size: Bytes of the whole file.
      digest: Hash of the first and last bytes of the data; see `digest_of`.
      data_offset: Bytes before the data: 0 in a raw array, the length of the header in a .npy file.
      version: Version of a remote file, such as "generation 1712"; None for a local one, or a store without versions.
      root: Folder that the file has to be in whenever it is opened; None means any. It is not saved.
    """

    path: str
    size: Count
    digest: str
    data_offset: Count = 0
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)


def describe(path: str, data_offset: int = 0) -> FileStamp:
    """Return the stamp of the present file, whose data begin at byte `data_offset`."""
    size, head, version = read_head(path)
    if data_offset:
        head = files.read_range(path, data_offset, data_offset + DIGEST_BYTES, version=version)
    tail = files.read_range(path, max(data_offset, size - DIGEST_BYTES), size, version=version)
    return FileStamp(path, size, digest_of(head[:DIGEST_BYTES], tail), data_offset, version)


def read_whole(stored: FileStamp) -> bytes:
    """Return all bytes of a stamped file."""
    with inside(stored.root):
        data = files.read_bytes(stored.path, version=stored.version)
    if len(data) != stored.size:
        raise CorpusFileError(size_change(stored, len(data)))
    tail = max(stored.data_offset, stored.size - DIGEST_BYTES)
    if digest_of(data[stored.data_offset : stored.data_offset + DIGEST_BYTES], data[tail:]) != stored.digest:
        raise CorpusFileError(replaced(stored))
    return data


def read_digest(fd: int, stored: FileStamp) -> str:
    """Return the digest of the open local file `fd`, to be compared with `stored.digest`."""
    tail_start = max(stored.data_offset, stored.size - DIGEST_BYTES)
    return digest_of(pread(fd, DIGEST_BYTES, stored.data_offset), pread(fd, DIGEST_BYTES, tail_start))


def digest_of(head: bytes, tail: bytes) -> str:
    """Return the digest of the first and the last `DIGEST_BYTES` of data."""
    return hashlib.blake2b(head + b"\0" + tail, digest_size=16).hexdigest()


def size_change(stored: FileStamp, found: int) -> str:
    """Return the message for a file whose size changed after it was indexed."""
    verb = "shrank" if found < stored.size else "grew"
    return (
        f"{stored.path}: the file {verb} since it was indexed: {found} bytes, expected {stored.size}. "
        "Restore it, or index the corpus again (and then don't resume an old run on it: its rows move)."
    )


def replaced(stored: FileStamp) -> str:
    """Return the message for a file of equal size whose content changed."""
    return (
        f"{stored.path}: the file has the size that was indexed, but other content: it was replaced. "
        "Restore it, or index the corpus again."
    )


def read_head(path: str) -> tuple[int, bytes, str | None]:
    """Return the size of a file, its first bytes, and the version of a remote one."""
    want = DIGEST_BYTES + 128
    if files.is_remote(path):
        size, version = files.size_and_version(path)
        return size, files.read_range(path, 0, min(size, want), version=version), version
    with files.reading(path):
        fd = open_regular(path)
        try:
            return os.fstat(fd).st_size, pread(fd, want, 0), None
        finally:
            os.close(fd)


def npy_header(path: str, head: bytes, size: int, version: str | None = None) -> tuple[object, tuple[object, ...], int]:
    """Return (dtype as the header states it, shape, bytes before the data) of a .npy file.

    Raises:
      CorpusError: The header is damaged, or of a version that numpy does not write.
    """
    written = list(head[len(MAGIC) : len(MAGIC) + 2])
    if written not in ([1, 0], [2, 0], [3, 0]):
        raise CorpusError(f"{path}: .npy format version {written}; versions [1, 0], [2, 0] and [3, 0] can be read.")
    start = len(MAGIC) + (4 if written[0] == 1 else 6)
    if len(head) < start:
        raise CorpusError(f"{path}: the .npy header breaks off after {size} bytes.")
    length = int.from_bytes(head[len(MAGIC) + 2 : start], "little")
    offset = start + length
    if length > _HEADER_LIMIT or offset > size:
        raise CorpusError(
            f"{path}: the .npy header claims {length} bytes, but the file has {size} and a header of a token array "
            f"at most {_HEADER_LIMIT}. The file is damaged."
        )
    text = head[start:offset] if offset <= len(head) else files.read_range(path, start, offset, version=version)
    try:
        with _PARSING.lock:
            header = ast.literal_eval(text.decode("utf-8" if written[0] == 3 else "latin1"))
        descr, shape = header["descr"], tuple(header["shape"])
        header["fortran_order"]  # required, but meaningless for one dimension
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CorpusError(f"{path}: the .npy header at byte {len(MAGIC) + 2} can't be parsed ({error}).") from error
    return descr, shape, offset
