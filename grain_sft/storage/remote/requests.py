"""Requests for ranges of bytes of remote files, and checks of the size and the version of each body."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, TypeVar

from grain_sft.errors import CorpusFileError, RemoteTimeoutError
from grain_sft.storage import activity
from grain_sft.storage.remote import retries
from grain_sft.storage.remote.clients import filesystem
from grain_sft.storage.remote.responses import NO_RANGES, BodyHeaders, Range, body_headers

# Names that file systems give to a file's version in its description. If there are several, the first of these is taken.
_VERSION_KEYS = (
    "generation", "ETag", "etag", "version_id", "mtime", "LastModified", "last_modified", "Last-Modified", "created",
)  # fmt: skip

T = TypeVar("T")
Job = tuple[str, str, Callable[[Any], Awaitable[T]]]
"""A request: (URL, part, function). `part` is a text such as "bytes 0 to 9 "; "" means the whole file. The function makes the
request with its argument, the fsspec file system."""


def version_of(info: Mapping[str, Any]) -> str | None:
    """Return the version in a file system's description of a file, such as "generation 1712" or "ETag abc"."""
    stated = (f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key) not in (None, ""))
    return next(stated, None)


def size_of(path: str, info: Mapping[str, Any]) -> int:
    """Return the size in a file system's description of a file."""
    if info.get("size") is None:
        raise CorpusFileError(f"{path}: its server doesn't state its size. Copy the file to a server that does.")
    return int(info["size"])


def run_jobs(jobs: Sequence[Job[T]], most_at_once: int) -> list[T | Exception]:
    """Return the result or the exception of each job, in order. If the time of a job is up, raise a RemoteTimeoutError.

    Each group of consecutive jobs of one protocol, such as gs, has one client, and at most `most_at_once` concurrent jobs.
    """
    from fsspec import asyn

    activity.doing[get_ident()] = activity.REQUESTING, len(jobs)
    results: list[T | Exception] = []
    for _, group in itertools.groupby(jobs, key=lambda job: job[0].split("://", 1)[0]):
        jobs_of_client = list(group)
        client = filesystem(jobs_of_client[0][0])
        loop = client.loop if client.async_impl else asyn.get_loop()
        results += asyn.sync(loop, _run_together, client, jobs_of_client, most_at_once)
    return results


async def _run_together(client: Any, jobs: Sequence[Job[T]], most_at_once: int) -> list[T | Exception]:
    """Return the result or the exception of each job. This runs in the event loop of `client`, in fsspec's thread."""
    semaphore = asyncio.Semaphore(most_at_once)

    async def run(path: str, part: str, request: Callable[[Any], Awaitable[T]]) -> T | Exception:
        """Return the result of one request, or its exception. Raise if the time for its retries is up."""
        async with semaphore:
            try:
                with activity.open_request(f"{part}of {path}" if part else path):
                    return await request(client)
            except retries.RequestFailedError as error:
                raise RemoteTimeoutError(f"{path}: {part}can't be read: {error}.") from error
            except Exception as error:
                return error

    try:
        async with asyncio.TaskGroup() as group:  # cancels the other tasks if one raises
            tasks = [group.create_task(run(*job)) for job in jobs]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__  # the error of one request, without the group around it
    return [task.result() for task in tasks]


async def request_info(path: str, seconds: float, client: Any) -> Mapping[str, Any]:
    """Return the file system's description of a file."""

    async def attempt() -> Mapping[str, Any]:
        """Return the client's description of the file, in one request."""
        try:
            if client.async_impl:
                return dict(await client._info(path))
            return dict(await asyncio.to_thread(client.info, path))
        except FileNotFoundError as error:  # fsspec's client of http raises it for every failure
            cause = error.__cause__
            if path.startswith(("http://", "https://")) and cause is not None and retries.is_transient(cause):
                raise cause from None
            raise

    return await retries.retried(attempt, seconds, server=retries.server_of(client, path))


async def request_body(wanted: Range, seconds: float, client: Any) -> bytes:
    """Return the bytes of `wanted`, a range that is not empty; fewer if the file ends in the range."""
    path, start, stop, version = wanted

    async def attempt() -> bytes:
        """Request the range once. Refuse a body that is too short or of another version."""
        data, sent_version = await _request_once(wanted, client)
        if len(data) < stop - start:  # right only if the file ends in the range
            size = size_of(path, await request_info(path, seconds, client))
            if min(stop, size) - start > len(data):
                raise retries.WrongBodyError(f"a body of {len(data)} bytes instead of {stop - start}")
        if version is not None:
            kind, _, _ = version.partition(" ")
            if not (sent_version or "").startswith(f"{kind} "):  # another kind of version came with the body, or none
                sent_version = version_of(await request_info(path, seconds, client))
            if sent_version != version:
                raise retries.ReplacedError(f"the server sent {sent_version}")
        activity.count("remote_received_bytes", len(data))
        return data

    # A version in `wanted` came from this server, perhaps to another process. So the server is known to answer.
    return await retries.retried(attempt, seconds, server=retries.server_of(client, path), reached=version is not None)


async def _request_once(wanted: Range, client: Any) -> tuple[bytes, str | None]:
    """Request a range once, and check the size of the body. Return the body, and the version in the headers, if any."""
    _, start, stop, version = wanted
    headers = BodyHeaders()
    body_headers.set(headers)
    try:
        data = await _read_range(wanted, client, headers)
    except Exception as error:
        # status 412: the file has another version than If-Match states
        if version is not None and (isinstance(error, FileNotFoundError) or retries.status_of(error) == 412):
            raise retries.ReplacedError(str(error)) from error
        raise
    if len(data) > stop - start:
        raise retries.RefusedError(f"the server sent {len(data)} bytes instead of bytes {start} to {stop}: {NO_RANGES}")
    if headers.size is not None:
        expected = max(0, min(stop, headers.size) - start)
        if len(data) != expected:
            raise retries.WrongBodyError(f"a body of {len(data)} bytes instead of {expected}")
    return data, headers.version


async def _read_range(wanted: Range, client: Any, headers: BodyHeaders) -> bytes:
    """Request a range. If the protocol allows, ask the server to refuse the request if the file has another version.

    `S3Storage` sets the attributes of `headers`. Other clients do so through `body_headers`.
    """
    path, start, stop, version = wanted
    protocol = path.split("://", 1)[0]
    if protocol in ("s3", "s3a"):
        return bytes(await client.read_range(wanted, headers))
    kind, _, value = (version or "").partition(" ")
    options: dict[str, Any] = {}
    if protocol in ("gs", "gcs") and kind == "generation":
        options["generation"] = value
    is_weak = value.startswith("W/")  # a weak entity tag, which never matches in If-Match
    if protocol in ("http", "https") and kind == "ETag" and not is_weak:
        options["headers"] = {**client.kwargs.get("headers", {}), "If-Match": value}
    if client.async_impl:
        return bytes(await client._cat_file(path, start=start, end=stop, **options))
    return bytes(await asyncio.to_thread(client.cat_file, path, start, stop, **options))
