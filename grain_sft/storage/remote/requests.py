"""Requests for parts of remote files: each body is checked and of one version."""

import asyncio
import contextvars
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

from grain_sft.errors import CorpusFileError, RemoteTimeoutError
from grain_sft.storage import activity
from grain_sft.storage.remote.clients import filesystem
from grain_sft.storage.remote.retries import (
    RefusedBodyError,
    ReplacedError,
    RequestFailedError,
    WrongBodyError,
    is_transient,
    retried,
    server_of,
    status_of,
)

NO_RANGES = "its server has no ranged reads. Copy the files to one that has"

_VERSION_KEYS = (
    "generation", "ETag", "etag", "version_id", "mtime", "LastModified", "last_modified", "Last-Modified", "created",
)  # fmt: skip

T = TypeVar("T")
Job = tuple[str, str, Callable[[Any], Awaitable[T]]]
"""URL, description of the requested part, and function of the URL's client that makes the request."""


class Range(NamedTuple):
    """Bytes `start` to `stop` of a remote file, of the given `version` (see `version_of`) unless that is None."""

    path: str
    start: int
    stop: int
    version: str | None = None


class Answer:
    """Size and version of a file, where the server of a body states them."""

    size: int | None = None
    version: str | None = None


answer: contextvars.ContextVar[Answer | None] = contextvars.ContextVar("grain_sft_answer", default=None)
"""Holder that the current task's response fills in."""


def version_of(info: Mapping[str, Any]) -> str | None:
    """Return the version in a file system's description of a file: a generation, an entity tag or a time."""
    return next((f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key) not in (None, "")), None)


def size_of(path: str, info: Mapping[str, Any]) -> int:
    """Return the size in a file system's description of a file."""
    if info.get("size") is None:
        raise CorpusFileError(f"{path}: its server doesn't state its size. Copy the file to one that does.")
    return int(info["size"])


def run_jobs(jobs: Sequence[Job[T]], at_once: int) -> list[T | Exception]:
    """Return the result or the exception of each job. A request whose time is up ends all jobs."""
    from fsspec import asyn

    activity.doing[get_ident()] = activity.REQUESTING, len(jobs)
    found: list[T | Exception] = []
    for _, group in itertools.groupby(jobs, key=lambda job: job[0].split("://", 1)[0]):
        mine = list(group)
        client = filesystem(mine[0][0])
        loop = client.loop if client.async_impl else asyn.get_loop()
        found += asyn.sync(loop, _run_together, client, mine, at_once)
    return found


async def _run_together(client: Any, jobs: Sequence[Job[T]], at_once: int) -> list[T | Exception]:
    gate = asyncio.Semaphore(at_once)

    async def one(path: str, part: str, job: Callable[[Any], Awaitable[T]]) -> T | Exception:
        async with gate:
            try:
                with activity.open_request(f"{part and part + 'of '}{path}"):
                    return await job(client)
            except RequestFailedError as error:
                raise RemoteTimeoutError(f"{path}: {part}can't be read: {error}.") from error
            except Exception as error:
                return error

    tasks = [asyncio.ensure_future(one(*job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request_info(path: str, seconds: float, client: Any) -> Mapping[str, Any]:
    """Return the file system's description of a file."""

    async def attempt() -> Mapping[str, Any]:
        try:
            return dict(await client._info(path) if client.async_impl else await asyncio.to_thread(client.info, path))
        except FileNotFoundError as error:  # fsspec's client of http makes it of every failure
            cause = error.__cause__
            if path.startswith(("http://", "https://")) and cause is not None and is_transient(cause):
                raise cause from None
            raise

    return await retried(attempt, seconds, server=server_of(client, path))


async def request_body(wanted: Range, seconds: float, client: Any) -> bytes:
    """Return the bytes of a range, which is not empty; fewer where the file ends."""
    path, start, stop, version = wanted

    async def attempt() -> bytes:
        data, sent = await _request_once(wanted, client)
        if len(data) < stop - start:
            size = size_of(path, await request_info(path, seconds, client))
            if min(stop, size) - start > len(data):
                raise WrongBodyError(f"a body of {len(data)} bytes instead of {stop - start}")
        if version is not None:
            if _kind(sent) != _kind(version):  # the server stated another kind of version with the body, or none
                sent = version_of(await request_info(path, seconds, client))
            if sent != version:
                raise ReplacedError(f"the server sent {sent}")
        activity.count("remote_received_bytes", len(data))
        return data

    # a version was stated by the server, which this or another process has reached
    return await retried(attempt, seconds, server=server_of(client, path), reached=version is not None)


async def _request_once(wanted: Range, client: Any) -> tuple[bytes, str | None]:
    """Return the body of one request, whose size was checked, and its version, where the server states one."""
    _, start, stop, version = wanted
    stated = Answer()
    token = answer.set(stated)
    try:
        data = await _read_range(wanted, client, stated)
    except Exception as error:
        if version is not None and (isinstance(error, FileNotFoundError) or status_of(error) == 412):
            raise ReplacedError(str(error)) from error
        raise
    finally:
        answer.reset(token)
    if len(data) > stop - start:
        raise RefusedBodyError(f"the server sent {len(data)} bytes instead of bytes {start} to {stop}: {NO_RANGES}")
    if stated.size is not None and len(data) != (expected := max(0, min(stop, stated.size) - start)):
        raise WrongBodyError(f"a body of {len(data)} bytes instead of {expected}")
    return data, stated.version


async def _read_range(wanted: Range, client: Any, stated: Answer) -> bytes:
    """Request a range from a client, with the file's version as a condition if the client supports conditions."""
    path, start, stop, version = wanted
    protocol, value = path.split("://", 1)[0], (version or "").partition(" ")[2]
    if protocol in ("s3", "s3a"):
        return bytes(await client.read_range(wanted, stated))
    options: dict[str, Any] = {}
    if protocol in ("gs", "gcs") and _kind(version) == "generation":
        options["generation"] = value
    if protocol in ("http", "https") and _kind(version) == "ETag" and not value.startswith("W/"):
        options["headers"] = {**client.kwargs.get("headers", {}), "If-Match": value}
    if client.async_impl:
        return bytes(await client._cat_file(path, start=start, end=stop, **options))
    return bytes(await asyncio.to_thread(client.cat_file, path, start, stop, **options))


def check_range(content_range: str | None, start: int, stop: int) -> tuple[int, int | None]:
    """Return the size of the body of an answer 206, and the size of the file, None if the answer does not state it."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", (content_range or "").strip())
    if found is not None:
        begin, end = int(found.group(1)), int(found.group(2)) + 1
        size = None if found.group(3) == "*" else int(found.group(3))
        if size is not None and size <= start:
            return 0, size
        if begin == start and begin < end and end == (min(stop, end) if size is None else min(stop, size)):
            return end - begin, size
    raise WrongBodyError(f"an answer of {content_range or 'an unstated range'} instead of bytes {start}-{stop - 1}")


def check_encoding(stated: str | None, path: str = "") -> None:
    """Refuse a body that the store compressed, unless the file's name has the suffix of the compression."""
    encoding = (stated or "").lower()
    if encoding not in ("", "identity", "aws-chunked") and not (encoding == "gzip" and path.endswith(".gz")):
        raise RefusedBodyError(
            f"it is stored with Content-Encoding {encoding}, so its size and bytes are not those of its content. "
            "Upload it again uncompressed (without -Z, -z and -J)"
        )


def _kind(version: str | None) -> str:
    """Return the kind of a version, such as "generation" or "ETag"."""
    return (version or "").partition(" ")[0]
