"""A remote file as an open file, for libraries that read one themselves."""

from __future__ import annotations

import io
from typing import Any

from grain_sft.storage import files, remote_files
from grain_sft.storage.remote_bodies import Range

_BUFFER = 1 << 20  # bytes of one request, where fewer are asked for


def open_remote(path: str, version: str | None = None) -> io.BufferedReader:
    """Open a remote file for reading; all bytes are of one version.

    Args:
      path: URL.
      version: version of the file; None: that of now.

    Raises:
      CorpusFileError: the file is missing or unreadable.
    """
    size, now = files.size_and_version(path)
    return io.BufferedReader(_Ranges(path, size, version or now), _BUFFER)


class _Ranges(io.RawIOBase):
    """Reads a remote file by its ranges."""

    def __init__(self, path: str, size: int, version: str | None) -> None:
        super().__init__()
        self._path, self._size, self._version = path, size, version
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._offset = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence])
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._size, self._offset + len(view))
        if stop <= self._offset:
            return 0
        (data,) = remote_files.fetch_exactly([Range(self._path, self._offset, stop, version=self._version)])
        view[: len(data)] = data
        self._offset = stop
        return len(data)
