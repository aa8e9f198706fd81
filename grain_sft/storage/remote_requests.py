"""Requests for remote files, made again until they succeed or their time is up."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import itertools
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, TypeVar

from grain_sft.errors import GrainSftError, RemoteTimeoutError
from grain_sft.storage import activity
from grain_sft.storage.activity import open_request, request_failed
from grain_sft.storage.remote_bodies import (
    Body,
    Range,
    RefusedBodyError,
    ReplacedError,
    WrongBodyError,
    read_body,
    version_of,
)
from grain_sft.storage.remote_files import Limits, RequestFailedError, filesystem

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0  # seconds
_FIRST_ATTEMPT = 10.0  # seconds, or a quarter of the total time where that is less; the next ones twice as long
_FIRST_CONTACT = 6.0  # seconds for a server that this process has never reached: a name, proxy or network is wrong

_jitter = random.Random()  # its own, so that nobody's random numbers depend on failures
_deadline: contextvars.ContextVar[tuple[float, float] | None] = contextvars.ContextVar(
    "grain_sft_deadline", default=None
)
"""When the time of what this task does is up, and how long it had."""
_patient: contextvars.ContextVar[bool] = contextvars.ContextVar("grain_sft_patient", default=False)
"""Whether a server that this process has not reached yet has all the time of `_deadline`."""
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
    "TransportError",
}
"""Of aiohttp, requests, google-auth and gcsfs, by name: none of these is imported here."""
_CONNECTION_NAMES = {"ClientConnectionError", "EndpointConnectionError", "ConnectionError", "Timeout", "TransportError"}
reached: set[str] = set()
"""Servers that have answered this process."""

T = TypeVar("T")

Job = tuple[str, str, Callable[[Any], Awaitable[T]]]
"""A URL, of what part of it, and what is asked of it, given its client."""


def bodies(ranges: Sequence[Range], limits: Limits) -> list[bytes | Exception]:
    """Return the bytes of each range, fewer where its file ends before, or what its client raised.

    Where a server does not say which version it sent, the version is asked for afterwards.
    """
    jobs = [(r.path, f"bytes {r.start} to {r.stop} ", functools.partial(_body, r, limits.seconds)) for r in ranges]
    found = _each(jobs, limits)
    unconfirmed = {
        wanted.path: None
        for wanted, body in zip(ranges, found, strict=True)
        if isinstance(body, Body) and not body.confirmed
    }
    now = dict(zip(unconfirmed, infos(list(unconfirmed), limits), strict=True)) if unconfirmed else {}
    return [_of_version(wanted, body, now.get(wanted.path)) for wanted, body in zip(ranges, found, strict=True)]


def _of_version(wanted: Range, body: Body | Exception, now: Mapping[str, Any] | Exception | None) -> bytes | Exception:
    if isinstance(body, Exception) or body.confirmed or now is None:
        return body if isinstance(body, Exception) else body.data
    if isinstance(now, Exception):
        return now
    return body.data if version_of(now) == wanted.version else ReplacedError(f"{version_of(now)} came")


def infos(paths: Sequence[str], limits: Limits) -> list[Mapping[str, Any] | Exception]:
    """What its file system says of each file, or what its client raised."""
    return _each([(path, "", functools.partial(_info, path, limits.seconds)) for path in paths], limits)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: 408, 429, 5xx, a broken connection, no answer, a short body."""
    never = (RequestFailedError, ReplacedError, RefusedBodyError, FileNotFoundError, PermissionError, GrainSftError)
    if isinstance(error, never):
        return False
    for key in ("status", "status_code", "code"):
        status = getattr(error, key, None)
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int) and status >= 300:
            expired = status == 401 and "Invalid Credentials" in str(error)  # gcsfs gets new ones
            return status in (408, 429) or status >= 500 or expired
    if isinstance(error, (WrongBodyError, TimeoutError, ConnectionError, EOFError, socket.gaierror)):
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
    activity.doing[get_ident()] = activity.REQUESTING, len(jobs)
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


async def _body(wanted: Range, seconds: float, client: Any) -> Body:
    """Return the bytes of one range, fewer where its file ends before."""
    path, start, stop, least, version = wanted
    count = stop - start
    least = count if least is None else least

    async def attempt() -> Body:
        body = await read_body(client, wanted)
        if len(body.data) < least:
            size = int((await _stat(client, path))["size"])
            if min(stop, size) - start > len(body.data):
                raise WrongBodyError(f"a body of {len(body.data)} bytes instead of {count}")
        activity.count(received_bytes=len(body.data))
        return body

    if count <= 0:
        return Body(b"", True)
    with contextlib.ExitStack() as stack:
        if version is not None:  # its server was reached when the version was found out
            token = _patient.set(True)
            stack.callback(_patient.reset, token)
        return await retried(
            attempt, seconds, bounded=not _retries(client), asks=not _retries(client), server=server_of(client, path)
        )


async def _info(path: str, seconds: float, client: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = await retried(
        lambda: _stat(client, path),
        seconds,
        bounded=not _retries(client),
        asks=not _retries(client),
        server=server_of(client, path),
    )
    return found


async def _stat(client: Any, path: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (
        await client._info(path) if client.async_impl else await asyncio.to_thread(client.info, path)
    )
    return found


async def retried(
    attempt: Callable[[], Awaitable[T]], seconds: float, *, server: str, bounded: bool = True, asks: bool = True
) -> T:
    """Return what `attempt` returns, called again after transient failures until `seconds`, or the task's deadline, are
    over; only for `_FIRST_CONTACT` seconds where `server` has never answered.

    Args:
      bounded: whether an attempt that takes too long is given up and made again.
      asks: whether an attempt is one request; else its own are counted.
    """
    begin = time.monotonic()
    last_moment, seconds = _deadline.get() or (begin + seconds, seconds)
    token = _deadline.set((last_moment, seconds))  # for gcsfs's own requests within this one
    try:
        for number in itertools.count(1):
            known = server in reached or _patient.get()
            deadline = last_moment if known else min(last_moment, begin + _FIRST_CONTACT)
            left = max(0.001, deadline - time.monotonic())
            longest = min(left, min(_FIRST_ATTEMPT, seconds / 4) * 2 ** min(number - 1, 30))
            if asks:
                activity.count(requests=1)
            try:
                found = await asyncio.wait_for(attempt(), longest if bounded else None)
                reached.add(server)
                return found
            except Exception as error:
                if not isinstance(error, RequestFailedError) and not _no_answer(error):
                    reached.add(server)
                    deadline = last_moment
                if not is_transient(error):
                    raise
                last = error
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(number - 1, 30)) * _jitter.uniform(0.5, 1.5)
            now = time.monotonic()
            left = deadline - now
            if left < _FIRST_PAUSE:
                unreached = "" if known or deadline == last_moment else server
                raise RequestFailedError(number, now - begin, seconds, _said(last), unreached) from last
            request_failed(_said(last))
            await asyncio.sleep(min(pause, left / 2))
        raise AssertionError
    finally:
        _deadline.reset(token)


def _no_answer(error: BaseException) -> bool:
    """Whether a request failed before any server answered it."""
    if isinstance(error, (TimeoutError, ConnectionError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    return any(kind.__name__ in _CONNECTION_NAMES for kind in type(error).__mro__)


def server_of(client: Any, path: str) -> str:
    """Return the server of a URL, as `reached` names it."""
    return str(getattr(client, "_location", None) or "/".join(path.split("/", 3)[:3]))


def _retries(client: Any) -> bool:
    """Whether a client of `filesystem` makes each request again itself."""
    return bool(getattr(client, "retried_by_grain_sft", False))


def _said(error: BaseException) -> str:
    """A failure in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, WrongBodyError):
        return str(error)
    code = getattr(error, "status", None) or getattr(error, "code", None)
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text or code or 'no more is known'}"
