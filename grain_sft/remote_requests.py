"""Requests for remote files, made again until they succeed or their time is up."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from grain_sft import metrics
from grain_sft.errors import CorpusFileError, GrainSftError, RemoteTimeoutError
from grain_sft.remote_files import Limits, Range, RequestFailedError, filesystem
from grain_sft.watching.requests import failed, open_request

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0  # seconds
_FIRST_ATTEMPT = 10.0  # seconds, or a quarter of the total time where that is less; the next ones twice as long

_jitter = random.Random()  # its own, so that nobody's random numbers depend on failures
_deadline: contextvars.ContextVar[tuple[float, float] | None] = contextvars.ContextVar(
    "grain_sft_deadline", default=None
)
"""When the time of what this task does is up, and how long it had."""
_TRANSIENT_ERRNOS = {
    errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH,
    errno.ENETUNREACH, errno.ENETRESET, errno.EBUSY, errno.EIO, errno.EAGAIN,
}  # fmt: skip
_TRANSIENT_NAMES = {
    "ClientError",
    "ConnectionError",
    "Timeout",
    "ChunkedEncodingError",
    "RefreshError",
    "ChecksumError",
}
"""Of aiohttp, requests, google-auth and gcsfs, by name: none of these is imported here."""

T = TypeVar("T")

Job = tuple[str, str, Callable[[Any], Awaitable[T]]]
"""A URL, of what part of it, and what is asked of it, given its client."""


class _ShortBodyError(Exception):
    """A body with fewer bytes than asked for, though the file has them."""


def bodies(ranges: Sequence[Range], limits: Limits) -> list[bytes | Exception]:
    """The bytes of each range, as many as there are, or what its client raised."""
    jobs = [(r.path, f"bytes {r.start} to {r.stop} ", functools.partial(_body, r, limits.seconds)) for r in ranges]
    return _each(jobs, limits)


def whole(paths: Sequence[str], limits: Limits) -> list[bytes | Exception]:
    """The bytes of each file, or what its client raised."""
    return _each([(path, "", functools.partial(_whole, path, limits.seconds)) for path in paths], limits)


def infos(paths: Sequence[str], limits: Limits) -> list[Mapping[str, Any] | Exception]:
    """What its file system says of each file, or what its client raised."""
    return _each([(path, "", functools.partial(_info, path, limits.seconds)) for path in paths], limits)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: 408, 429, 5xx, a broken connection, no answer, a short body."""
    if isinstance(error, (RequestFailedError, FileNotFoundError, PermissionError, GrainSftError)):
        return False
    for key in ("status", "status_code", "code"):
        status = getattr(error, key, None)
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int) and status >= 300:
            expired = status == 401 and "Invalid Credentials" in str(error)  # gcsfs gets new ones
            return status in (408, 429) or status >= 500 or expired
    if isinstance(error, (_ShortBodyError, TimeoutError, ConnectionError, EOFError)):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


def _each(jobs: Sequence[Job[T]], limits: Limits) -> list[T | Exception]:
    """What each job comes to, or what it raised; all at once.

    Raises:
      RemoteTimeoutError: the time of one was up.
    """
    from fsspec import asyn

    found: list[T | Exception] = []
    for _, group in itertools.groupby(jobs, key=lambda job: job[0].split("://", 1)[0]):
        mine = list(group)
        client = filesystem(mine[0][0])
        loop = client.loop if client.async_impl else asyn.get_loop()
        found += asyn.sync(loop, _gather, client, mine, limits)
    return found


async def _gather(client: Any, jobs: Sequence[Job[T]], limits: Limits) -> list[T | Exception]:
    """Run the jobs, so many at once; what one raises is its result, but the first whose time is up ends all."""
    gate = asyncio.Semaphore(limits.requests)

    async def one(path: str, part: str, job: Callable[[Any], Awaitable[T]]) -> T | Exception:
        async with gate:
            try:
                with open_request(f"{part and part + 'of '}{path}"):
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


async def _body(wanted: Range, seconds: float, client: Any) -> bytes:
    """The bytes of one range, as many as there are of it."""
    path, start, stop, least, generation = wanted
    count = stop - start
    least = count if least is None else least
    options = {} if generation is None else {"generation": generation}

    async def attempt() -> bytes:
        body = bytes(await _cat(client, path, start, stop, **options))
        if len(body) > count:
            raise CorpusFileError(
                f"{path}: {len(body)} bytes came where bytes {start} to {stop} were asked for: its server has no ranged "
                "reads. Copy the files to one that has."
            )
        if len(body) < least:
            size = int((await _stat(client, path))["size"])
            if min(stop, size) - start > len(body):
                raise _ShortBodyError(f"a body of {len(body)} bytes instead of {count}")
        metrics.received(len(body))
        return body

    if count <= 0:
        return b""
    return await _retried(attempt, seconds, bounded=not _retries(client), asks=not _retries(client))


async def _whole(path: str, seconds: float, client: Any) -> bytes:
    body = bytes(
        await _retried(lambda: _cat(client, path), seconds, bounded=not _retries(client), asks=not _retries(client))
    )
    metrics.received(len(body))
    return body


async def _info(path: str, seconds: float, client: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = await _retried(
        lambda: _stat(client, path), seconds, bounded=not _retries(client), asks=not _retries(client)
    )
    return found


async def _cat(client: Any, path: str, start: int | None = None, stop: int | None = None, **options: Any) -> Any:
    if client.async_impl:
        return await client._cat_file(path, start=start, end=stop, **options)
    return await asyncio.to_thread(client.cat_file, path, start, stop)


async def _stat(client: Any, path: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (
        await client._info(path) if client.async_impl else await asyncio.to_thread(client.info, path)
    )
    return found


async def _retried(
    attempt: Callable[[], Awaitable[T]], seconds: float, *, bounded: bool = True, asks: bool = True
) -> T:
    """What `attempt` returns, made again after transient failures until `seconds`, or the task's deadline, are over.

    Args:
      bounded: an attempt that takes too long is given up and made again.
      asks: an attempt is one request; else its own are counted.
    """
    begin = time.monotonic()
    deadline, seconds = _deadline.get() or (begin + seconds, seconds)
    token = _deadline.set((deadline, seconds))  # for gcsfs's own requests within this one
    try:
        for number in itertools.count(1):
            left = max(0.001, deadline - time.monotonic())
            longest = min(left, min(_FIRST_ATTEMPT, seconds / 4) * 2 ** min(number - 1, 30))
            if asks:
                metrics.requested()
            try:
                return await asyncio.wait_for(attempt(), longest if bounded else None)
            except Exception as error:
                if not is_transient(error):
                    raise
                last = error
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(number - 1, 30)) * _jitter.uniform(0.5, 1.5)
            now = time.monotonic()
            left = deadline - now
            if left < _FIRST_PAUSE:
                raise RequestFailedError(number, now - begin, seconds, _said(last)) from last
            metrics.retried()
            failed(_said(last))
            await asyncio.sleep(min(pause, left / 2))
        raise AssertionError
    finally:
        _deadline.reset(token)


def _retries(client: Any) -> bool:
    """Whether a client of `filesystem` makes each request again itself."""
    return bool(getattr(client, "retried_by_grain_sft", False))


@functools.cache
def asked_once(kind: Any) -> Any:
    """A kind of gcsfs file system whose requests are made again as this module does it; the kind itself, where gcsfs's
    own way can't be taken out."""
    request = getattr(getattr(kind, "_request", None), "__wrapped__", None)
    if request is None:
        return kind

    async def _request(self: Any, method: str, path: str, *args: Any, **options: Any) -> Any:
        once = functools.partial(request, self, method, path, *args, **options)
        with open_request(f"{method} {path}"):
            return await _retried(once, Limits.from_environment().seconds, bounded=method.upper() == "GET")

    async def _call(self: Any, method: str, path: str, *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            try:
                return await kind._call(self, method, path, *args, **options)
            except json.JSONDecodeError as error:
                raise _ShortBodyError(f"an answer of {len(error.doc)} characters that breaks off") from error

        return await _retried(once, Limits.from_environment().seconds, bounded=False, asks=False)

    added = {"_request": _request, "_call": _call, "retried_by_grain_sft": True}
    return type(kind.__name__, (kind,), added)


def _said(error: BaseException) -> str:
    """A failure in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, _ShortBodyError):
        return str(error)
    code = getattr(error, "status", None) or getattr(error, "code", None)
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text or code or 'no more is known'}"
