"""Reads of remote files: many ranges of bytes at once, each checked to be complete and of one version of its file."""

import functools
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from grain_sft.errors import CorpusFileError, GrainSftError, RemoteTimeoutError
from grain_sft.storage.remote import retries
from grain_sft.storage.remote.clients import NO_CREDENTIALS, filesystem, lacks_credentials
from grain_sft.storage.remote.requests import Job, request_body, request_info, run_jobs, size_of, version_of
from grain_sft.storage.remote.responses import Range
from grain_sft.storage.remote.retries import Limits, RefusedError, ReplacedError, RequestFailedError, WrongBodyError

PART_BYTES = 8 << 20  # a longer range is several requests

_DOWNLOAD_BYTES = 64 << 20  # bytes of a download held in memory at once
_READ_AHEAD = 1 << 20  # bytes that an open file requests beyond the end of a read


class RemoteFile(NamedTuple):
    """One version of a remote file."""

    path: str
    size: int
    key: str  # hash of URL, size, data offset, digest and version, which names the file's blocks in the shard cache
    version: str | None  # None if its file system has no versions


class RemotePiece(NamedTuple):
    """`size` bytes of a file from byte `offset` on. They are copied to offset `place` of the output."""

    file: RemoteFile
    offset: int
    place: int
    size: int


def fetch(ranges: Sequence[Range], limits: Limits | None = None) -> list[bytes | Exception]:
    """Return the bytes of each range, fewer at the end of a file. For a range that can't be read, return the exception.

    Raises:
      RemoteTimeoutError: The time of a request is up. The other requests are cancelled.
    """
    limits = limits or Limits.from_environment()
    parts = [(number, part) for number, whole in enumerate(ranges) for part in whole.cut(PART_BYTES)]
    jobs: list[Job[bytes]] = []
    for _, part in parts:
        request = functools.partial(request_body, part, limits.seconds)
        jobs.append((part.path, f"bytes {part.start} to {part.stop} ", request))
    bodies: list[list[bytes]] = [[] for _ in ranges]
    failures: dict[int, Exception] = {}
    for (number, _), body in zip(parts, run_jobs(jobs, limits.requests), strict=True):
        if isinstance(body, Exception):
            failures.setdefault(number, body)
        else:
            bodies[number].append(body)
    return [failures.get(number) or b"".join(of_range) for number, of_range in enumerate(bodies)]


def fetch_exactly(ranges: Sequence[Range], limits: Limits | None = None) -> list[bytes]:
    """Return all bytes of each range, or raise a CorpusFileError with the reason."""
    return [_require_whole(wanted, body, limits) for wanted, body in zip(ranges, fetch(ranges, limits), strict=True)]


def _require_whole(wanted: Range, body: bytes | Exception, limits: Limits | None) -> bytes:
    """Return `body` if it has all bytes of the range; else raise the reason."""
    path, start, stop, version = wanted
    if isinstance(body, bytes) and len(body) == stop - start:
        return body
    if isinstance(body, (GrainSftError, FileNotFoundError)):
        raise failure(path, body) from body
    size = size_of(path, infos([path], limits)[0])
    if isinstance(body, Exception) and size >= stop:  # if the file is shorter, that explains the failure better
        raise failure(path, body, f"bytes {start} to {stop} ", version or "") from body
    problem = f"{path}: has {size} bytes; expected bytes {start} to {stop}. It was cut short while in use"
    raise CorpusFileError(f"{problem}. Restore it.")


def read_pieces(pieces: Sequence[RemotePiece], out: memoryview, limits: Limits) -> None:
    """Copy all pieces to `out`. If bytes of a piece can't be read, raise a CorpusFileError."""
    ranges = [Range(file.path, offset, offset + size, file.version) for file, offset, _, size in pieces]
    bodies = fetch_exactly(ranges, limits) if ranges else []
    for piece, body in zip(pieces, bodies, strict=True):
        out[piece.place : piece.place + piece.size] = body


def infos(paths: Sequence[str], limits: Limits | None = None) -> list[Mapping[str, Any]]:
    """Return the file system's description of each file, such as its size. All are requested at once.

    Raises:
      CorpusFileError: A file is missing or can't be reached.
    """
    limits = limits or Limits.from_environment()
    jobs = [(path, "", functools.partial(request_info, path, limits.seconds)) for path in paths]
    descriptions = []
    for path, info in zip(paths, run_jobs(jobs, limits.requests), strict=True):
        if isinstance(info, Exception):
            raise failure(path, info) from info
        descriptions.append(info)
    return descriptions


def failure(path: str, error: Exception, part: str = "", version: str = "") -> GrainSftError:
    """Return the package's error for an exception of a local or remote file system.

    `part` names the bytes that were read, such as "bytes 0 to 9 "; "" means the whole file. `version` is the requested version.
    """
    if isinstance(error, GrainSftError):
        return error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        status = getattr(error.__cause__, "status", 404)  # of a web server
        refused = f", or no permission to read it (status {status})" if status in (401, 403) else ""
        fix = "Check the path, or map the paths of an index or a mix with path_remap"
        return CorpusFileError(f"{path}: no such file{refused}. {fix}.")
    if isinstance(error, ReplacedError):
        of_version = f" ({version})" if version else ""
        problem = f"{path}: the file that was opened{of_version} is gone: it was replaced or deleted while in use"
        return CorpusFileError(f"{problem}. Restore it, or index the corpus again.")
    # A client that repeats requests itself, such as s3fs, raises a transient error only after its last attempt.
    kind = RemoteTimeoutError if "://" in path and retries.is_transient(error) else CorpusFileError
    if isinstance(error, (RequestFailedError, RefusedError, WrongBodyError)):
        return kind(f"{path}: {part}can't be read: {error}.")
    found = f"({type(error).__name__}: {error})"
    if lacks_credentials(path, error):
        return CorpusFileError(f"{path}: {part}can't be read: {NO_CREDENTIALS} {found}.")
    return kind(f"{path}: {part}can't be read {found}. Check the path and its permissions.")


def read(path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
    """Return the bytes [start, stop) of a file, fewer at its end. Without `stop`, read to the end.

    All bytes are of one version: `version`, or the present version if `version` is None. If the file is replaced while its
    present version is read, the read is repeated, at most twice.
    """
    tries_left = 3
    while True:
        tries_left -= 1
        end, read_version = stop, version
        if end is None or (version is None and end - start > PART_BYTES):  # several requests must be of one version
            size, present_version = size_and_version(path)
            end, read_version = size if end is None else end, version or present_version
        (body,) = fetch([Range(path, start, end, read_version)])
        if isinstance(body, bytes):
            return body
        if version is not None or not tries_left or not isinstance(body, ReplacedError):
            raise body


def size_and_version(path: str) -> tuple[int, str | None]:
    """Return the number of bytes and the version of a file."""
    (info,) = infos([path])
    if info.get("type") == "directory":
        raise CorpusFileError(f"{path}: is a folder; expected a file. Name its files.")
    return size_of(path, info), version_of(info)


def download(path: str, file: IO[bytes]) -> None:
    """Write the bytes of the remote file `path` to `file`. All bytes are of one version, if the file system has versions."""
    size, version = size_and_version(path)
    for part in Range(path, 0, size, version).cut(_DOWNLOAD_BYTES):
        file.write(fetch_exactly([part])[0])


def open_remote(path: str, version: str | None = None) -> Any:
    """Return a file object that reads `version` of a remote file, or its present version if `version` is None."""
    from fsspec.spec import AbstractBufferedFile

    size, present = size_and_version(path)

    class OpenFile(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return fetch_exactly([Range(path, start, end, version or present)])[0]

    return OpenFile(filesystem(path), path, block_size=_READ_AHEAD, size=size)
