"""Requests for parts of remote files: bodies that are checked, of one version."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

from grain_sft.errors import RemoteTimeoutError
from grain_sft.storage import activity
from grain_sft.storage.remote.clients import filesystem
from grain_sft.storage.remote.retries import (
    Limits,
    RefusedBodyError,
    ReplacedError,
    RequestFailedError,
    WrongBodyError,
    retried,
    server_of,
)

NO_RANGES = "its server has no ranged reads. Copy the files to one that has"

_VERSION_KEYS = (
    "generation", "ETag", "etag", "version_id", "mtime", "LastModified", "last_modified", "Last-Modified", "created",
)  # fmt: skip

T = TypeVar("T")
Job = tuple[str, str, Callable[[Any], Awaitable[T]]]
"""A URL, a part of it in words, and a function of its client."""


class Range(NamedTuple):
    """Bytes `start` to `stop` of a remote file; of `version`, as `version_of` names it, unless that is None."""

    path: str
    start: int
    stop: int
    version: str | None = None


class _Body(NamedTuple):
    """Bytes of a range, fewer where the file ends, and whether the server confirmed their version."""

    data: bytes
    confirmed: bool


class Answer:
    """Size and version of a file, where the server of a body states them."""

    size: int | None = None
    version: str | None = None


answer: contextvars.ContextVar[Answer | None] = contextvars.ContextVar("grain_sft_answer", default=None)
"""Answer that the response of the current task fills in."""


def version_of(info: Mapping[str, Any]) -> str | None:
    """Return the version in a file system's description of a file: a generation, an entity tag or a time."""
    found = next((key for key in _VERSION_KEYS if info.get(key) not in (None, "")), None)
    return None if found is None else f"{found} {info[found]}"


def fetch_bodies(ranges: Sequence[Range], limits: Limits) -> list[bytes | Exception]:
    """Return the bytes of each range, fewer where its file ends, or what the client raised.

    Where a server does not state the version that it sent, the version is asked for afterwards.
    """
    jobs = [(r.path, f"bytes {r.start} to {r.stop} ", functools.partial(_body, r, limits.seconds)) for r in ranges]
    bodies = _run_jobs(jobs, limits.requests)
    doubtful = {
        r.path for r, body in zip(ranges, bodies, strict=True) if isinstance(body, _Body) and not body.confirmed
    }
    now = dict(zip(doubtful, fetch_infos(list(doubtful), limits), strict=True)) if doubtful else {}
    return [_confirmed(wanted, body, now) for wanted, body in zip(ranges, bodies, strict=True)]


def _confirmed(
    wanted: Range, body: _Body | Exception, now: Mapping[str, Mapping[str, Any] | Exception]
) -> bytes | Exception:
    if isinstance(body, Exception) or body.confirmed:
        return body if isinstance(body, Exception) else body.data
    info = now[wanted.path]
    if isinstance(info, Exception):
        return info
    found = version_of(info)
    return body.data if found == wanted.version else ReplacedError(f"{found} came")


def fetch_infos(paths: Sequence[str], limits: Limits) -> list[Mapping[str, Any] | Exception]:
    """Return the file system's description of each file, or what the client raised."""

    async def info(path: str, client: Any) -> Mapping[str, Any]:
        return await retried(lambda: _info(client, path), limits.seconds, server=server_of(client, path), client=client)

    return _run_jobs([(path, "", functools.partial(info, path)) for path in paths], limits.requests)


def _run_jobs(jobs: Sequence[Job[T]], at_once: int) -> list[T | Exception]:
    """Return the result of each job, or what it raised."""
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


async def _info(client: Any, path: str) -> Mapping[str, Any]:
    found = await client._info(path) if client.async_impl else await asyncio.to_thread(client.info, path)
    return dict(found)


async def _body(wanted: Range, seconds: float, client: Any) -> _Body:
    path, start, stop, version = wanted

    async def attempt() -> _Body:
        body = await _checked_body(client, wanted)
        if len(body.data) < stop - start:
            size = int((await _info(client, path))["size"])
            if min(stop, size) - start > len(body.data):
                raise WrongBodyError(f"a body of {len(body.data)} bytes instead of {stop - start}")
        activity.count(remote_received_bytes=len(body.data))
        return body

    if stop <= start:
        return _Body(b"", True)
    # a server that stated the version has been reached by another process, if not by this one
    return await retried(attempt, seconds, server=server_of(client, path), client=client, reached=version is not None)


async def _checked_body(client: Any, wanted: Range) -> _Body:
    """Return the body of one request."""
    stated = Answer()
    token = answer.set(stated)
    try:
        data = await _requested(client, wanted, stated)
    except Exception as error:
        if wanted.version is not None and (isinstance(error, FileNotFoundError) or _precondition_failed(error)):
            raise ReplacedError(str(error)) from error
        raise
    finally:
        answer.reset(token)
    if len(data) > wanted.stop - wanted.start:
        raise RefusedBodyError(
            f"{len(data)} bytes came where bytes {wanted.start} to {wanted.stop} were asked for: {NO_RANGES}"
        )
    if stated.size is not None and len(data) != (expected := max(0, min(wanted.stop, stated.size) - wanted.start)):
        raise WrongBodyError(f"a body of {len(data)} bytes instead of {expected}")
    if wanted.version is None or stated.version is None or _kind(stated.version) != _kind(wanted.version):
        return _Body(data, wanted.version is None)
    if stated.version != wanted.version:
        raise ReplacedError(f"{stated.version} came")
    return _Body(data, True)


async def _requested(client: Any, wanted: Range, stated: Answer) -> bytes:
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
    """Return (bytes in the body, bytes in the file where the server states them) of an answer 206."""
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
    """Refuse a body that its store compressed, except that of a file whose name says so."""
    encoding = (stated or "").lower()
    if encoding not in ("", "identity", "aws-chunked") and not (encoding == "gzip" and path.endswith(".gz")):
        raise RefusedBodyError(
            f"it is stored with Content-Encoding {encoding}, so that its size and its bytes are not those of its content. "
            "Upload it again without (no -Z, -z or -J)"
        )


def _kind(version: str | None) -> str:
    return (version or "").partition(" ")[0]


def _precondition_failed(error: BaseException) -> bool:
    """Return whether a server answered 412, as it does where `If-Match` names another version."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    response = getattr(error.__cause__, "response", None)
    if isinstance(response, Mapping):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return str(status) == "412"
