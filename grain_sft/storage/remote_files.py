"""Remote files: many reads at once, each tried again until all its bytes are here or its time is up.

A request that fails with 408, 429 or 5xx, on a broken connection, or whose body is shorter than it should be is made
again after a pause that doubles, up to 8 s, with jitter. The jitter decides when bytes come, never which.

gcsfs makes requests again by itself, up to half a minute and without a word about why; here it makes each request once,
and the pauses, the total time and the message are those of remote_requests, for listings and metadata as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

from grain_sft.errors import CorpusFileError, GrainSftError, MissingExtraError, RemoteTimeoutError, StorageError
from grain_sft.storage import google_credentials
from grain_sft.storage.remote_bodies import Range, RefusedBodyError, ReplacedError, WrongBodyError, version_of

SECONDS_VARIABLE = "GRAIN_SFT_REMOTE_SECONDS"
REQUESTS_VARIABLE = "GRAIN_SFT_REMOTE_REQUESTS"
DEFAULT_SECONDS = 120.0
DEFAULT_REQUESTS = 64

PART_BYTES = 8 << 20  # a longer range is several requests

_AT_ONCE_IN_MEMORY = 64 << 20  # bytes, of a download

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long and how widely remote files are asked for.

    Attributes:
      seconds: from the first request for some bytes until what keeps failing is an error.
      requests: at most so many of one read at once.

    Raises:
      StorageError: not above zero.
    """

    seconds: float = DEFAULT_SECONDS
    requests: int = DEFAULT_REQUESTS

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)) or self.requests < 1:
            raise StorageError(
                f"remote files: {self.seconds} seconds and {self.requests} requests at once; expected more than 0 of both."
            )

    @classmethod
    def from_environment(cls) -> Limits:
        """Of $GRAIN_SFT_REMOTE_SECONDS and $GRAIN_SFT_REMOTE_REQUESTS, or the defaults: 120 and 64.

        Raises:
          StorageError: not a number.
        """
        return cls(_number(SECONDS_VARIABLE, DEFAULT_SECONDS, float), _number(REQUESTS_VARIABLE, DEFAULT_REQUESTS, int))


class RequestFailedError(Exception):
    """A request that was made again and again, until its time was up.

    Args:
      unreached: server that has never answered this process; "" where it has.
    """

    def __init__(self, attempts: int, seconds: float, limit: float, last: str, unreached: str = "") -> None:
        requests = (
            f"{attempts} request{'s' if attempts > 1 else ''} failed within {seconds:.1f} s, the last with {last}"
        )
        if unreached:
            super().__init__(
                f"the network does not reach {unreached}: {requests}. Check the network, its name servers and its firewall"
            )
            return
        super().__init__(
            f"{requests}. "
            f"Check the network, the bucket's region and its quota; a longer time than {limit:g} s is given with "
            f"${SECONDS_VARIABLE}"
        )


def filesystem(path: str) -> Any:
    """The fsspec file system that serves the URL `path`. fsspec and gcsfs are imported here, on first use. Options, such
    as credentials, are fsspec's own: $FSSPEC_GS='{"requester_pays": true}' or a file in ~/.config/fsspec.

    It keeps no listings: a size or a glob that is remembered would hide that a file has changed.

    Raises:
      CorpusFileError: fsspec knows no such protocol.
      MissingExtraError: its package is not installed.
    """
    import fsspec

    from grain_sft.storage.gcs_client import asked_once

    protocol = path.split("://", 1)[0]
    try:
        kind = fsspec.get_filesystem_class(protocol)
        if protocol in ("http", "https"):
            return fsspec.filesystem(
                protocol, use_listings_cache=False, client_kwargs=_session("client_kwargs", protocol)
            )
        if protocol not in ("gs", "gcs"):
            return fsspec.filesystem(protocol, use_listings_cache=False)
        options = google_credentials.options(_configured("gs", "gcs"))
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")  # gcsfs looks there once
        if emulator:
            options["endpoint_url"] = emulator
        return asked_once(kind)(
            use_listings_cache=False, session_kwargs=_session("session_kwargs", "gs", "gcs"), **options
        )
    except ImportError as error:
        if protocol in ("s3", "s3a"):
            raise MissingExtraError.of(f"{path}: reading it", "s3fs", "s3") from error
        raise MissingExtraError(f"{path}: reading it needs another package: {error}") from error
    except ValueError as error:
        raise CorpusFileError(f"{path}: fsspec knows no file system for {protocol}:// ({error}).") from error


def _configured(*protocols: str) -> dict[str, Any]:
    """Options of a file system in fsspec's own configuration, such as $FSSPEC_GS."""
    from fsspec.config import conf

    return {key: value for protocol in protocols for key, value in conf.get(protocol, {}).items()}


def _session(key: str, *protocols: str) -> dict[str, Any]:
    """Options of an aiohttp session whose responses are checked, with those that the user configured."""
    from grain_sft.storage.checked_response import SESSION, CheckedResponse

    given = dict(_configured(*protocols).get(key, {}))
    headers = {**given.get("headers", {}), **SESSION["headers"]}
    return {**given, "headers": headers, "response_class": CheckedResponse}


def fetch(ranges: Sequence[Range], limits: Limits | None = None) -> list[bytes | Exception]:
    """The bytes of each range, fewer where its file ends before, or what its client raised; all at once.

    Raises:
      CorpusFileError: one kept failing until its time was up.
    """
    limits = limits or Limits.from_environment()
    parts: list[Range] = []
    counts = []
    for each in ranges:
        cut = _parts(each)
        parts += cut
        counts.append(len(cut))
    from grain_sft.storage import remote_requests

    found = remote_requests.bodies(parts, limits)
    if len(parts) == len(ranges):
        return found
    joined: list[bytes | Exception] = []
    position = iter(found)
    for count in counts:
        pieces = list(itertools.islice(position, count))
        failed = next((piece for piece in pieces if isinstance(piece, Exception)), None)
        joined.append(failed or b"".join(piece for piece in pieces if isinstance(piece, bytes)))
    return joined


def fetch_exactly(ranges: Sequence[Range], limits: Limits | None = None) -> list[bytes]:
    """All bytes of each range.

    Raises:
      CorpusFileError: a file is missing, was replaced, has fewer bytes, or kept failing until its time was up.
    """
    bodies = []
    for wanted, body in zip(ranges, fetch(ranges, limits), strict=True):
        path, start, stop, _, version = wanted
        if isinstance(body, bytes) and len(body) == stop - start:
            bodies.append(body)
            continue
        if isinstance(body, (GrainSftError, FileNotFoundError)):
            raise failure(path, body) from body
        info = infos([path], limits)[0]
        if isinstance(info, Exception):
            raise failure(path, info) from info
        if isinstance(body, ReplacedError) and int(info["size"]) >= stop:
            raise CorpusFileError(gone(path, version)) from body
        if isinstance(body, Exception) and int(info["size"]) >= stop:
            raise failure(path, body, f"bytes {start} to {stop} ") from body
        raise CorpusFileError(
            f"{path}: asked for {stop - start} bytes at byte {start}, but the file has {info['size']}: "
            "it was cut short while in use."
        )
    return bodies


def failure(path: str, error: Exception, part: str = "") -> GrainSftError:
    """The sentence for what a client raised when it was asked for a file, or a part of it."""
    if isinstance(error, GrainSftError):
        return error
    if isinstance(error, FileNotFoundError):
        return CorpusFileError(
            f"{path}: no such file. Check the path, or map it to where the data are with path_remap."
        )
    if isinstance(error, ReplacedError):
        return CorpusFileError(gone(path, None))
    if isinstance(error, RequestFailedError):
        return RemoteTimeoutError(f"{path}: {part}can't be read: {error}.")
    if isinstance(error, (RefusedBodyError, WrongBodyError)):
        return CorpusFileError(f"{path}: {part}can't be read: {error}.")
    text = f"{type(error).__name__}: {error}"
    if google_credentials.refused(path, error, _configured("gs", "gcs")):
        return CorpusFileError(f"{path}: {part}can't be read: {google_credentials.MISSING} ({text}).")
    return CorpusFileError(f"{path}: {part}can't be read ({text}).")


def gone(path: str, version: str | None) -> str:
    """The sentence for a file that is no longer the version that was opened."""
    return (
        f"{path}: the file that was opened ({version or 'of another version'}) is gone: it was replaced or deleted while "
        "in use. Restore it, or index the corpus again."
    )


def read(path: str, start: int | None = None, stop: int | None = None, *, version: str | None = None) -> bytes:
    """The whole of a file as it is now, or bytes `start` to `stop` of it: fewer at its end.

    Args:
      version: of the file; another one is an error. None: any, but one.

    Raises: as its client does, or CorpusFileError when it kept failing.
    """
    limits = Limits.from_environment()
    for last in (False, False, True):
        if start is None or stop is None:
            (info,) = infos([path], limits)
            if isinstance(info, Exception):
                raise info
            wanted = Range(path, 0, size_of(path, info), version=version or version_of(info))
        else:
            wanted = Range(path, start, stop, version=version)
        (body,) = fetch([wanted], limits)
        if isinstance(body, bytes):
            return body
        if last or version is not None or not isinstance(body, ReplacedError):  # else: replaced between two requests
            raise body
    raise AssertionError


def size_of(path: str, info: Mapping[str, Any]) -> int:
    """Bytes of a file that its file system described.

    Raises:
      FileNotFoundError: `path` is a folder.
      CorpusFileError: the file system doesn't know.
    """
    if info.get("type") == "directory":
        raise FileNotFoundError(path)
    if info.get("size") is None:
        raise CorpusFileError(f"{path}: its server doesn't state its size. Copy the file to one that does.")
    return int(info["size"])


def download(path: str, file: IO[bytes]) -> None:
    """Append a remote file, of one version, to an open one, some at a time.

    Raises: as its client does, or CorpusFileError when it kept failing or was replaced meanwhile.
    """
    (info,) = infos([path])
    if isinstance(info, Exception):
        raise info
    size, version = size_of(path, info), version_of(info)
    for start in range(0, size, _AT_ONCE_IN_MEMORY):
        stop = min(size, start + _AT_ONCE_IN_MEMORY)
        file.write(fetch_exactly([Range(path, start, stop, version=version)])[0])


def infos(paths: Sequence[str], limits: Limits | None = None) -> list[Mapping[str, Any] | Exception]:
    """What its file system says of each file, such as its size, or what its client raised; all at once.

    Raises:
      CorpusFileError: one kept failing until its time was up.
    """
    from grain_sft.storage import remote_requests

    return remote_requests.infos(paths, limits or Limits.from_environment())


def _parts(whole: Range) -> list[Range]:
    """`whole`, or what it is cut into where it is long."""
    if whole.stop - whole.start <= PART_BYTES or whole.least is not None:
        return [whole]
    borders = [*range(whole.start, whole.stop, PART_BYTES), whole.stop]
    return [whole._replace(start=start, stop=stop) for start, stop in itertools.pairwise(borders)]


def _number(variable: str, default: T, kind: Callable[[str], T]) -> T:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return kind(text)
    except ValueError as error:
        raise StorageError(f"${variable} is {text!r}: expected a number, such as {default}.") from error
