"""Remote files: many ranges read at once, each of one version, checked and complete."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from grain_sft.errors import CorpusFileError, GrainSftError, RemoteTimeoutError
from grain_sft.storage.remote.clients import NO_CREDENTIALS, lacks_credentials
from grain_sft.storage.remote.requests import Range, fetch_bodies, fetch_infos, version_of
from grain_sft.storage.remote.retries import Limits, RefusedBodyError, ReplacedError, RequestFailedError, WrongBodyError

PART_BYTES = 8 << 20  # a longer range is several requests

_DOWNLOAD_BYTES = 64 << 20  # of a download, in memory at once
_BUFFER = 1 << 20  # bytes of one request of an open file, where fewer are asked for


class RemoteFile(NamedTuple):
    """One version of a remote file."""

    path: str
    size: int
    key: str  # hash of URL, size, digest and version
    version: str | None  # where its file system has any


class RemotePiece(NamedTuple):
    """`size` bytes of a file from byte `offset` on, and their offset in the output."""

    file: RemoteFile
    offset: int
    place: int
    size: int


def fetch(ranges: Sequence[Range], limits: Limits | None = None) -> list[bytes | Exception]:
    """Return the bytes of each range, fewer where its file ends, or what its client raised; all at once."""
    parts = [
        [whole._replace(start=at, stop=min(at + PART_BYTES, whole.stop)) for at in range(*whole[1:3], PART_BYTES)]
        for whole in ranges
    ]
    found = iter(fetch_bodies(list(itertools.chain(*parts)), limits or Limits.from_environment()))
    joined: list[bytes | Exception] = []
    for each in parts:
        bodies = list(itertools.islice(found, len(each)))
        failed = next((body for body in bodies if isinstance(body, Exception)), None)
        joined.append(failed or b"".join(body for body in bodies if isinstance(body, bytes)))
    return joined


def fetch_exactly(ranges: Sequence[Range], limits: Limits | None = None) -> list[bytes]:
    """Return all bytes of each range, or raise a CorpusFileError that says why one can't be had."""
    found = fetch(ranges, limits)
    return [_whole(wanted, body, limits) for wanted, body in zip(ranges, found, strict=True)]


def _whole(wanted: Range, body: bytes | Exception, limits: Limits | None) -> bytes:
    path, start, stop, version = wanted
    if isinstance(body, bytes) and len(body) == stop - start:
        return body
    if isinstance(body, (GrainSftError, FileNotFoundError)):
        raise failure(path, body) from body
    (info,) = infos([path], limits)
    if isinstance(info, Exception):
        raise failure(path, info) from info
    if isinstance(body, Exception) and int(info["size"]) >= stop:
        if isinstance(body, ReplacedError):
            raise CorpusFileError(_gone(path, version)) from body
        raise failure(path, body, f"bytes {start} to {stop} ") from body
    raise CorpusFileError(
        f"{path}: asked for {stop - start} bytes at byte {start}, but the file has {info['size']}: "
        "it was cut short while in use."
    )


def read_pieces(pieces: Sequence[RemotePiece], out: memoryview, limits: Limits) -> None:
    """Copy all pieces to `out`."""
    ranges = [Range(file.path, offset, offset + size, file.version) for file, offset, _, size in pieces]
    bodies = fetch_exactly(ranges, limits) if ranges else []
    for piece, body in zip(pieces, bodies, strict=True):
        out[piece.place : piece.place + piece.size] = body


def infos(paths: Sequence[str], limits: Limits | None = None) -> list[Mapping[str, Any] | Exception]:
    """Return the file system's description of each file, such as its size, or what its client raised; all at once."""
    return fetch_infos(paths, limits or Limits.from_environment())


def failure(path: str, error: Exception, part: str = "") -> GrainSftError:
    """Return the error for what a remote or local file system raised when it was asked for a file, or a part of it."""
    if isinstance(error, GrainSftError):
        return error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CorpusFileError(f"{path}: no such file. Check the path; files of a corpus are mapped with path_remap.")
    if isinstance(error, ReplacedError):
        return CorpusFileError(_gone(path, None))
    if isinstance(error, (RequestFailedError, RefusedBodyError, WrongBodyError)):
        kind = RemoteTimeoutError if isinstance(error, RequestFailedError) else CorpusFileError
        return kind(f"{path}: {part}can't be read: {error}.")
    reason = f": {NO_CREDENTIALS}" if lacks_credentials(path, error) else ""
    return CorpusFileError(f"{path}: {part}can't be read{reason} ({type(error).__name__}: {error}).")


def _gone(path: str, version: str | None) -> str:
    return (
        f"{path}: the file that was opened ({version or 'of another version'}) is gone: it was replaced or deleted while "
        "in use. Restore it, or index the corpus again."
    )


def read(path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
    """Return bytes `start` to `stop` of a file, fewer at its end; all of `version`, or of any one version."""
    for tries in range(3):
        size, now = (stop, None) if stop is not None else size_and_version(path)
        (body,) = fetch([Range(path, start, size, version or now)])
        if isinstance(body, bytes):
            return body
        if (
            tries == 2 or version is not None or not isinstance(body, ReplacedError)
        ):  # else: replaced between two requests
            raise body
    raise AssertionError


def size_and_version(path: str) -> tuple[int, str | None]:
    """Return the number of bytes and the version of a file."""
    (info,) = infos([path])
    if isinstance(info, Exception):
        raise info
    if info.get("type") == "directory":
        raise FileNotFoundError(path)
    if info.get("size") is None:
        raise CorpusFileError(f"{path}: its server doesn't state its size. Copy the file to one that does.")
    return int(info["size"]), version_of(info)


def download(path: str, file: IO[bytes]) -> None:
    """Append a remote file, of one version, to an open one."""
    size, version = size_and_version(path)
    for start in range(0, size, _DOWNLOAD_BYTES):
        file.write(fetch_exactly([Range(path, start, min(size, start + _DOWNLOAD_BYTES), version)])[0])


def open_remote(path: str, version: str | None = None) -> io.BufferedReader:
    """Open a remote file for libraries that read one themselves; all bytes are of `version`, or of that of now."""
    try:
        size, now = size_and_version(path)
    except Exception as error:  # clients raise their own kinds
        raise failure(path, error) from error
    return io.BufferedReader(_Ranges(path, size, version or now), _BUFFER)


class _Ranges(io.RawIOBase):
    """Raw file that reads a remote one by its ranges."""

    def __init__(self, path: str, size: int, version: str | None) -> None:
        super().__init__()
        self._path, self._size, self._version, self._offset = path, size, version, 0

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
        (data,) = fetch_exactly([Range(self._path, self._offset, stop, self._version)])
        view[: len(data)] = data
        self._offset = stop
        return len(data)
