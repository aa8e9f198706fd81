"""Retries of remote requests after transient failures, until they succeed or the time is up.

The pause before the next try doubles, up to 8 s, with jitter. No value of a batch depends on the jitter.
"""

import asyncio
import contextvars
import errno
import math
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

import msgspec

from grain_sft.errors import GrainSftError, StorageError
from grain_sft.storage import activity

SECONDS_VARIABLE = "GRAIN_SFT_REMOTE_SECONDS"
REQUESTS_VARIABLE = "GRAIN_SFT_REMOTE_REQUESTS"
FIRST_CONTACT = 6.0  # seconds for a server that never answered this process: likely a wrong name, proxy or network

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0  # seconds
_FIRST_ATTEMPT = 10.0  # most seconds of the first attempt, or a quarter of all if less; doubled for each later one
_UNANSWERED_ERRNOS = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.EAGAIN}
# s3fs raises these for answers: EBUSY for 503, EREMOTEIO (EIO on macOS) for 500, EIO for statuses that it does not know
_ANSWERED_ERRNOS = {errno.EBUSY, errno.EIO, getattr(errno, "EREMOTEIO", errno.EIO)}
# classes of aiohttp, requests, google-auth and gcsfs by name: none of these is imported here
_CONNECTION_NAMES = {"ClientConnectionError", "EndpointConnectionError", "ConnectionError", "Timeout", "TransportError"}
_TRANSIENT_NAMES = _CONNECTION_NAMES | {"ClientError", "ChunkedEncodingError", "RefreshError", "ChecksumError"}

_jitter = random.Random()  # its own, so that no other random numbers depend on failures
_reached: set[str] = set()  # servers that have answered this process
_inside_attempt: contextvars.ContextVar[bool] = contextvars.ContextVar("grain_sft_inside_attempt", default=False)
"""Whether this task runs inside an attempt, which `retried` repeats as a whole."""

T = TypeVar("T")


class Limits(msgspec.Struct, frozen=True):
    """Limits of the time and the number of requests for remote files.

    Args:
      seconds: Time for a request and its repetitions. A failure after it is an error.
      requests: Maximum number of concurrent requests of one read.

    Raises:
      StorageError: A value is not above zero.
    """

    seconds: float = 120
    requests: int = 64

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)) or self.requests < 1:
            raise StorageError(
                f"remote files: {self.seconds} seconds and {self.requests} requests at once; expected more than 0 of both."
            )

    @classmethod
    def from_environment(cls) -> Self:
        """Return the limits that $GRAIN_SFT_REMOTE_SECONDS and $GRAIN_SFT_REMOTE_REQUESTS set; raise StorageError if wrong."""
        return cls(_number(SECONDS_VARIABLE, 120.0, float), _number(REQUESTS_VARIABLE, 64, int))


def _number(variable: str, default: T, kind: Callable[[str], T]) -> T:
    text = os.environ.get(variable)
    try:
        return kind(text) if text else default
    except ValueError as error:
        raise StorageError(f"${variable} is {text!r}: expected a number, such as {default}.") from error


class WrongBodyError(Exception):
    """A body that is cut, too long or of another range. The next one may be right."""


class RefusedBodyError(Exception):
    """A body that another request would not change."""


class ReplacedError(Exception):
    """A file that is gone, or of another version than the requested one."""


class RequestFailedError(Exception):
    """A request that failed until its time was up."""


async def retried(
    attempt: Callable[[], Awaitable[T]], seconds: float, *, server: str, bounded: bool = True, reached: bool = False
) -> T:
    """Return the result of `attempt`, called again after transient failures until `seconds` have passed.

    Inside another attempt, call `attempt` once: the outer attempt is repeated as a whole.

    Args:
      attempt: One request, or a few that belong together.
      seconds: Time for all attempts. A server that never answered this process gets at most `FIRST_CONTACT`.
      server: Server as `server_of` names it.
      bounded: Whether an attempt that takes too long is cancelled and made again.
      reached: Whether the server answered another process, so that it gets all of `seconds`.

    Raises:
      RequestFailedError: The time is up.
    """
    if _inside_attempt.get():
        return await attempt()
    begin = time.monotonic()
    end = begin + seconds
    token = _inside_attempt.set(True)
    try:
        number = 0  # of failed attempts
        while True:
            answered = reached or server in _reached
            deadline = end if answered else min(end, begin + FIRST_CONTACT)
            attempt_limit = min(_FIRST_ATTEMPT, seconds / 4) * 2 ** min(number, 30)
            activity.count("remote_requests", 1)
            try:
                left = max(0.001, deadline - time.monotonic())
                found = await asyncio.wait_for(attempt(), min(left, attempt_limit) if bounded else None)
                _reached.add(server)
                return found
            except Exception as error:
                if not _is_unanswered(error):
                    _reached.add(server)
                    deadline = end
                if not is_transient(error):
                    raise
                last, reason = error, _describe(error)
            now = time.monotonic()
            if deadline - now < _FIRST_PAUSE:
                unreached = "" if answered or deadline == end else server
                raise RequestFailedError(_explain(number + 1, now - begin, seconds, reason, unreached)) from last
            activity.request_failed(reason)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(number, 30)) * _jitter.uniform(0.5, 1.5)
            await asyncio.sleep(min(pause, (deadline - now) / 2))
            number += 1
    finally:
        _inside_attempt.reset(token)


def _explain(attempts: int, seconds: float, limit: float, last: str, unreached: str) -> str:
    """Return the message for a request that was given up; `unreached` is a server that never answered this process."""
    text = f"{attempts} request{'s' if attempts > 1 else ''} failed within {seconds:.1f} s, the last with {last}"
    if unreached:
        return f"the network does not reach {unreached}: {text}. Check the network, its name servers and its firewall"
    return (
        f"{text}. Check the network, the bucket's region and its quota, or allow more than {limit:g} s with "
        f"${SECONDS_VARIABLE} or `seconds` of `remote`"
    )


def server_of(client: Any, path: str) -> str:
    """Return the server of a URL, as error messages name it."""
    return str(getattr(client, "server", None) or "/".join(path.split("/", 3)[:3]))


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later: after 408, 429, 5xx, a broken connection, no answer, a short body."""
    if isinstance(error, (ReplacedError, RefusedBodyError, FileNotFoundError, PermissionError, GrainSftError)):
        return False
    if isinstance(error, (WrongBodyError, EOFError)) or _is_unanswered(error):
        return True
    if status := status_of(error):
        expired = status == 401 and "Invalid Credentials" in str(error)  # gcsfs gets new ones
        return status in (408, 429) or status >= 500 or expired
    return (isinstance(error, OSError) and error.errno in _ANSWERED_ERRNOS) or _is_named(error, _TRANSIENT_NAMES)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the answer that a client made an exception of, 0 if it states none."""
    response = getattr(error.__cause__, "response", None)
    if isinstance(response, Mapping):  # botocore's
        if response.get("Error", {}).get("Code") in ("RequestTimeout", "Throttling"):  # S3 sends them with 400
            return 408
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    stated = (str(getattr(error, key, "")) for key in ("status", "status_code", "code"))
    return next((int(status) for status in stated if status.isdecimal() and int(status) >= 300), 0)


def _is_unanswered(error: BaseException) -> bool:
    """Return whether a request failed before any server answered it."""
    return (
        isinstance(error, (TimeoutError, ConnectionError, socket.gaierror))
        or (isinstance(error, OSError) and error.errno in _UNANSWERED_ERRNOS)
        or _is_named(error, _CONNECTION_NAMES)
    )


def _is_named(error: BaseException, names: set[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _describe(error: BaseException) -> str:
    """Return a failure in a few words."""
    if isinstance(error, (TimeoutError, WrongBodyError)):
        return "no answer in time" if isinstance(error, TimeoutError) else str(error)
    code = getattr(error, "status", None) or getattr(error, "code", None)
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text or code or 'no details'}"
