"""File stamps: the size of a file and a hash of its first and last bytes. They reveal that a file was replaced."""

import dataclasses
import hashlib
from typing import Annotated

import msgspec

from grain_sft.errors import CorpusFileError
from grain_sft.storage import files
from grain_sft.storage.regular_files import inside, pread

Count = Annotated[int, msgspec.Meta(ge=0)]
"""Integer that is not negative. `msgspec` checks this when it decodes a file."""

DIGEST_BYTES = 4096  # bytes that are hashed at the start of a file's data, and at its end
MOST_HEADER_BYTES = 10_000  # longest header of a .npy file, as in `numpy.load`

LFS_POINTER = b"version https://git-lfs"
"""First bytes of a pointer of Git LFS, a small text file in place of a large file that is not fetched yet."""


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """State of a file when it was indexed.

    Attributes:
      size: Bytes of the whole file.
      digest: Result of `digest_of`.
      data_offset: Bytes before the data: 0 in a raw array, the length of the header in a .npy file.
      version: Version of a remote file, such as "generation 1712"; None for a local file, or in a store without versions.
      root: Folder that the file has to be in when it is opened; None means any folder. An index does not store it.
    """

    path: str
    size: Count
    digest: str
    data_offset: Count = 0
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)


def describe(path: str, data_offset: int = 0) -> FileStamp:
    """Return the stamp of the file as it is now. Its data begin at byte `data_offset`."""
    size, head, version = read_head(path)
    if data_offset:
        head = files.read_range(path, data_offset, data_offset + DIGEST_BYTES, version=version)
    tail = files.read_range(path, max(data_offset, size - DIGEST_BYTES), size, version=version)
    return FileStamp(path, size, digest_of(head[:DIGEST_BYTES], tail), data_offset, version)


def refuse_lfs_pointer(path: str, head: bytes) -> None:
    """Raise a CorpusFileError if a file, whose first bytes are `head`, is a pointer of Git LFS."""
    if head.startswith(LFS_POINTER):
        raise CorpusFileError(f"{path}: is a pointer of Git LFS, not the file itself. Fetch the file: git lfs pull.")


def read_whole(stored: FileStamp) -> bytes:
    """Return all bytes of a file.

    Raises:
      CorpusFileError: The file can't be read, or is not the file that `stored` describes.
    """
    with inside(stored.root):
        data = files.read_bytes(stored.path, version=stored.version)
    if len(data) != stored.size:
        raise CorpusFileError(size_change(stored, len(data)))
    head = data[stored.data_offset : stored.data_offset + DIGEST_BYTES]
    if digest_of(head, data[_tail_offset(stored) :]) != stored.digest:
        raise CorpusFileError(replaced(stored))
    return data


def read_digest(fd: int, stored: FileStamp) -> str:
    """Return the present digest of the open local file `fd`."""
    return digest_of(pread(fd, DIGEST_BYTES, stored.data_offset), pread(fd, DIGEST_BYTES, _tail_offset(stored)))


def _tail_offset(stored: FileStamp) -> int:
    return max(stored.data_offset, stored.size - DIGEST_BYTES)


def digest_of(head: bytes, tail: bytes) -> str:
    """Return the digest of the first and the last `DIGEST_BYTES` of data."""
    return hashlib.blake2b(head + b"\0" + tail, digest_size=16).hexdigest()


def size_change(stored: FileStamp, size: int) -> str:
    """Return the message for a file that has `size` bytes now, but `stored.size` when it was indexed."""
    verb = "grew" if size > stored.size else "shrank"
    problem = f"{stored.path}: the file {verb} since it was indexed: {size} bytes, expected {stored.size}"
    return f"{problem}. Restore it. Or index the corpus again and begin a new run, since the rows of an old run would differ."


def replaced(stored: FileStamp) -> str:
    """Return the message for a file of equal size whose content changed."""
    change = "the file has the size that was indexed, but other content: it was replaced"
    return f"{stored.path}: {change}. Restore it, or index the corpus again."


def read_head(path: str) -> tuple[int, bytes, str | None]:
    """Return a file's size, its first `MOST_HEADER_BYTES + DIGEST_BYTES` bytes, and its `FileStamp.version`."""
    size, version = files.size_and_version(path)
    want = MOST_HEADER_BYTES + DIGEST_BYTES
    # No bytes after the end of a remote file are requested. A local read ignores the size, because a pipe has size 0:
    # `read_range` refuses a pipe, but not if it is to read 0 bytes.
    stop = min(size, want) if files.is_remote(path) else want
    return size, files.read_range(path, 0, stop, version=version), version
