"""Retries of remote requests after transient failures, until they succeed or their time is up."""

import asyncio
import contextvars
import errno
import math
import numbers
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

import msgspec

from grain_sft.arguments import check_type
from grain_sft.errors import GrainSftError, StorageError
from grain_sft.storage import activity

SECONDS_VARIABLE = "GRAIN_SFT_REMOTE_SECONDS"
REQUESTS_VARIABLE = "GRAIN_SFT_REMOTE_REQUESTS"
FIRST_CONTACT = 6.0
"""Seconds for all attempts at a server that has not answered this process yet. If it does not answer, the server's name is
probably wrong, or the network does not reach it."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0  # seconds; the pause doubles after each attempt
_FIRST_ATTEMPT = 10.0  # maximum seconds of the first attempt
# after these errors, no server has answered
_UNANSWERED_ERRNOS = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.EAGAIN}
# s3fs raises these for answers of a server: EBUSY for 503, EREMOTEIO for 500, EIO for unknown statuses
_ANSWERED_ERRNOS = {errno.EBUSY, errno.EIO, errno.EREMOTEIO}
# exceptions of aiohttp, requests, google-auth and gcsfs, by name because these libraries may not be installed
_CONNECTION_NAMES = {"ClientConnectionError", "EndpointConnectionError", "ConnectionError", "Timeout", "TransportError"}
_TRANSIENT_NAMES = _CONNECTION_NAMES | {"ClientError", "ChunkedEncodingError", "RefreshError", "ChecksumError"}

_jitter = random.Random()  # the user's program may have seeded the global generator
_reached: set[str] = set()  # servers that have answered this process
_inside_attempt: contextvars.ContextVar[bool] = contextvars.ContextVar("grain_sft_inside_attempt", default=False)

T = TypeVar("T")


class Limits(msgspec.Struct, frozen=True):
    """Limits of the time and the number of requests for remote files.

    Args:
      seconds: Time for which a failing request is repeated. After this time, the failure is an error.
      requests: Maximum number of concurrent requests of one read.

    Raises:
      StorageError: A value is not above zero, or `seconds` is infinite.
    """

    seconds: float = 120
    requests: int = 64

    def __post_init__(self) -> None:
        check_type("remote: seconds", self.seconds, numbers.Real, "a number")
        check_type("remote: requests", self.requests, numbers.Integral, "an integer")
        if not (self.seconds > 0 and math.isfinite(self.seconds)) or self.requests < 1:
            problem = f"remote files: {self.seconds} seconds and {self.requests} requests at once"
            fix = f"Fix `remote`, or ${SECONDS_VARIABLE} and ${REQUESTS_VARIABLE}"
            raise StorageError(f"{problem}; expected finite numbers above 0. {fix}.")

    @classmethod
    def from_environment(cls) -> Self:
        """Return the limits that $GRAIN_SFT_REMOTE_SECONDS and $GRAIN_SFT_REMOTE_REQUESTS set; else the defaults."""
        return cls(_number(SECONDS_VARIABLE, 120.0, float), _number(REQUESTS_VARIABLE, 64, int))


def _number(variable: str, default: T, kind: Callable[[str], T]) -> T:
    """Return an environment variable as a number, or `default` if it is not set."""
    text = os.environ.get(variable)
    try:
        return kind(text) if text else default
    except ValueError as error:
        expected = "an integer" if kind is int else "a number"
        raise StorageError(f"${variable} is {text!r}: expected {expected}, such as {default}. Fix or unset it.") from error


class WrongBodyError(Exception):
    """The body of a response is cut short, too long or of another range. The request is repeated."""


class RefusedError(Exception):
    """The body of a response can't be used, or the credentials are refused. The request is not repeated."""


class ReplacedError(Exception):
    """The file is gone, or has another version than the requested one."""


class RequestFailedError(Exception):
    """A request failed until its time was up."""


async def retried(
    attempt: Callable[[], Awaitable[T]], seconds: float, *, server: str, bounded: bool = True, reached: bool = False
) -> T:
    """Return the result of `attempt`. After a transient failure, call it again, until `seconds` have passed.

    An attempt may itself call `retried`. The inner call makes only one attempt, because the outer call repeats it.

    Args:
      attempt: Function that makes one request, or a few that belong together.
      seconds: Time for all attempts. A server that never answered gets at most `FIRST_CONTACT`.
      server: Server as `server_of` names it.
      bounded: Whether an attempt that takes long is cancelled and made again. The first may take 10 s, or a quarter of
        `seconds` if that is less. Each later attempt may take twice as long as the attempt before. All are also cancelled when
        the time is up.
      reached: Whether the server is known to have answered another process.

    Raises:
      RequestFailedError: The time is up.
    """
    if _inside_attempt.get():
        return await attempt()
    begin = time.monotonic()
    token = _inside_attempt.set(True)
    try:
        failures = 0
        while True:
            allowed = seconds if reached or server in _reached else min(seconds, FIRST_CONTACT)
            doublings = min(failures, 30)  # 2**1024 would overflow a float
            left = max(0.001, begin + allowed - time.monotonic())
            time_limit = min(left, min(_FIRST_ATTEMPT, seconds / 4) * 2**doublings) if bounded else None
            activity.count("remote_requests", 1)
            try:
                result = await asyncio.wait_for(attempt(), time_limit)
                _reached.add(server)
                return result
            except Exception as error:
                if not _is_unanswered(error):
                    _reached.add(server)
                if server in _reached:  # it answered this request or a concurrent one
                    allowed = seconds
                if not is_transient(error):
                    raise
                failure = error
            failures += 1
            elapsed = time.monotonic() - begin
            if allowed - elapsed < _FIRST_PAUSE:  # no time is left for another attempt
                unreached = server if allowed < seconds else None  # `allowed` is less only if the server never answered
                raise RequestFailedError(_explain(failures, elapsed, seconds, failure, unreached)) from failure
            activity.request_failed(_describe(failure))
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**doublings) * _jitter.uniform(0.5, 1.5)
            await asyncio.sleep(min(pause, (allowed - elapsed) / 2))  # at least half of the time is left for the next attempt
    finally:
        _inside_attempt.reset(token)


def _explain(attempts: int, elapsed: float, limit: float, last: Exception, unreached: str | None) -> str:
    """Return the message for a request that failed. `unreached` is the server if it never answered."""
    plural = "s" if attempts > 1 else ""
    text = f"{attempts} request{plural} failed within {elapsed:.1f} s, the last with {_describe(last)}"
    if unreached is not None:
        return f"the network does not reach {unreached}: {text}. Check the network, its name servers and its firewall"
    more_time = f"allow more than {limit:g} s with ${SECONDS_VARIABLE} or `seconds` of `remote`"
    return f"{text}. Check the network, the bucket's region and its quota, or {more_time}"


def server_of(client: Any, path: str) -> str:
    """Return the server of a URL, as error messages name it."""
    return str(getattr(client, "server", None) or "/".join(path.split("/", 3)[:3]))


def is_transient(error: BaseException) -> bool:
    """Return whether a repetition may succeed.

    These failures may pass: status 408, 429, or 5xx except 501; expired credentials of gcsfs; a lost connection; a wrong body.
    """
    if isinstance(error, (ReplacedError, RefusedError, FileNotFoundError, PermissionError, GrainSftError)):
        return False
    if isinstance(error, (WrongBodyError, RequestFailedError, EOFError)) or _is_unanswered(error):
        return True
    if status := status_of(error):
        expired = status == 401 and "Invalid Credentials" in str(error)  # gcsfs then gets new credentials
        return status in (408, 429) or (status >= 500 and status != 501) or expired  # 501: the server can't do it
    return (isinstance(error, OSError) and error.errno in _ANSWERED_ERRNOS) or _is_named(error, _TRANSIENT_NAMES)


def status_of(error: BaseException) -> int:
    """Return the HTTP status in a client's exception; 0 if it has none, as after a lost connection."""
    response = getattr(error.__cause__, "response", None)
    if isinstance(response, Mapping):  # a response of botocore
        if response.get("Error", {}).get("Code") in ("RequestTimeout", "Throttling"):  # sent by S3 with status 400
            return 408
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    for attribute in ("status", "status_code", "code"):
        status = str(getattr(error, attribute, ""))
        if status.isdecimal() and int(status) >= 300:
            return int(status)
    return 0


def _is_unanswered(error: BaseException) -> bool:
    """Return whether a request failed without an answer, or in the middle of one."""
    return (
        isinstance(error, (TimeoutError, ConnectionError, socket.gaierror))
        or (isinstance(error, OSError) and error.errno in _UNANSWERED_ERRNOS)
        or _is_named(error, _CONNECTION_NAMES)
    )


def _is_named(error: BaseException, names: set[str]) -> bool:
    """Return whether an exception's class, or a base of it, has one of `names`."""
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, WrongBodyError):
        return str(error)
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text or status_of(error) or 'no details'}"
