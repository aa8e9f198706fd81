"""Content hashes of a corpus's files, so that what is derived from their bytes is found by their bytes alone.

A full hash reads every byte, some 1 GB/s a core. So this machine remembers the hashes of files by what changes whenever one
is written to: device, inode, size, and the times of the last change of bytes and of metadata; of an object in a bucket its
URL, size, and generation or entity tag. A file that was written to within the last two seconds is not remembered: another
write could leave its times as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusFileError
from grain_sft.storage import Range, StampedFile, files, hashing, inside, open_regular, remote_files, size_change
from grain_sft.storage import artifact as artefact

PREFIX = "content-sha256:"
"""Of every hash of content that is shown, so that none is taken for a fingerprint of a file's ends."""

_VERSION = 1
_SETTLED = 2.0  # seconds after which a file's times tell whether it was written to again
_REMEMBERED_FROM = 1 << 20  # bytes of all files; fewer are hashed as fast as they are looked up
_AT_ONCE = 16 * hashing.BLOCK  # of a remote file
_VERSIONS = ("generation", "ETag", "etag", "version_id")

Stamps = list[list[Any]]
Read = Callable[[], list[str]]


class _ChangedError(Exception):
    """Files that changed while they were hashed: the hashes are right for the bytes that were read."""

    def __init__(self, hashes: list[str]) -> None:
        super().__init__()
        self.hashes = hashes


def hashes_of(stored: Sequence[StampedFile], read: Read | None = None, *, of: str = "bytes") -> list[str]:
    """The hash of each file's data, remembered from when they were hashed last.

    Args:
      stored: the files.
      read: gives the hashes by reading all files; None: this does.
      of: what `read` hashes, where that is not the bytes from `data_offset` on.

    Raises:
      CorpusFileError: a file is missing, unreadable, or of another size.
    """
    read = read or (lambda: read_hashes(stored))
    depends = _depends(stored, of)
    if depends is None:
        return read()

    def make() -> dict[str, npt.NDArray[Any]]:
        hashes = read()
        if _depends(stored, of) != depends:
            raise _ChangedError(hashes)
        return {"sha256": np.array([list(bytes.fromhex(each)) for each in hashes], np.uint8)}

    try:
        return _listed(artefact.load_or_make("content", depends, make, _folder(stored), check=_check(len(stored))))
    except _ChangedError as changed:
        return changed.hashes


def recall(stored: Sequence[StampedFile], *, of: str = "bytes") -> list[str] | None:
    """The hashes, where this machine remembers them or the files are small; None where many bytes would have to be read."""
    if sum(file.size for file in stored) < _REMEMBERED_FROM and of == "bytes":
        return read_hashes(stored)
    depends = _depends(stored, of)
    if depends is None:
        return None
    found = artefact.find("content", depends, _folder(stored), check=_check(len(stored)))
    return None if found is None else _listed(found)


def read_hashes(stored: Sequence[StampedFile]) -> list[str]:
    """The hash of each file's bytes from `data_offset` on, read now.

    Raises:
      CorpusFileError: a file is missing, unreadable, or of another size.
    """
    return [_read_remote(file) if files.is_remote(file.path) else _read_local(file) for file in stored]


def _read_local(file: StampedFile) -> str:
    try:
        with inside(file.root):
            fd = open_regular(file.path)
        try:
            status = os.fstat(fd)
            if status.st_size != file.size:
                raise CorpusFileError(size_change(file, status.st_size))
            return hashing.joined(hashing.blocks_of([(fd, file.data_offset, file.size)]))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, CorpusFileError):
            raise
        raise CorpusFileError(f"{file.path}: can't be read ({error.strerror or error}).") from error
    except EOFError as error:
        raise CorpusFileError(f"{file.path}: was cut short while it was read: {error}.") from error


def _read_remote(file: StampedFile) -> str:
    blocks: list[bytes] = []
    for start in range(file.data_offset, file.size, _AT_ONCE):
        ranges = [
            Range(file.path, at, min(at + hashing.BLOCK, file.size), version=file.version)
            for at in range(start, min(start + _AT_ONCE, file.size), hashing.BLOCK)
        ]
        blocks += map(hashing.of_block, remote_files.fetch_exactly(ranges))
    return hashing.joined(blocks)


def _depends(stored: Sequence[StampedFile], of: str) -> Mapping[str, Any] | None:
    """What tells these files from others and from what they may become; None where nothing does, or few bytes are theirs."""
    if sum(file.size for file in stored) < _REMEMBERED_FROM:
        return None
    stamps: Stamps = []
    remote = [file.path for file in stored if files.is_remote(file.path) and file.version is None]
    infos = dict(zip(remote, remote_files.infos(remote), strict=True)) if remote else {}
    now = time.time()
    for file in stored:
        if files.is_remote(file.path):
            version = _version(infos[file.path], file.size) if file.version is None else file.version
            if version.partition(" ")[0] not in _VERSIONS:
                return None
            stamps.append([file.path, version, file.size, file.data_offset])
            continue
        try:
            status = os.stat(file.path)
        except OSError:
            return None  # reading it says why
        if now - max(status.st_mtime, status.st_ctime) < _SETTLED or status.st_size != file.size:
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        stamps.append([status.st_dev, status.st_ino, *times, file.size, file.data_offset])
    return {"content": _VERSION, "of": of, "files": stamps}


def _version(info: Mapping[str, Any] | Exception, size: int) -> str:
    """What no other bytes of a remote file will ever have; "" where its file system knows nothing of that kind."""
    if isinstance(info, Exception) or info.get("size") != size:
        return ""
    return next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key)), "")


def _folder(stored: Sequence[StampedFile]) -> Any:
    """Where the hashes are kept: those of remote files with all that machines share, if anything is."""
    return None if all(files.is_remote(file.path) for file in stored) else files.cache_dir()


def _check(count: int) -> artefact.Check:
    def check(arrays: artefact.Arrays) -> None:
        found = arrays.get("sha256")
        if found is None or found.dtype != np.uint8 or found.shape != (count, 32):
            raise ValueError(f"it does not hold {count} hashes")

    return check


def _listed(arrays: artefact.Arrays) -> list[str]:
    return [bytes(each).hex() for each in arrays["sha256"]]
