"""Bodies of remote files: one version, the bytes that were asked for, or an error."""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_VERSION_KEYS = (
    "generation", "ETag", "etag", "version_id", "mtime", "LastModified", "last_modified", "Last-Modified", "created",
)  # fmt: skip
_READ = 1 << 18  # bytes of a body of S3 at once


class Range(NamedTuple):
    """Bytes `start` to `stop` of a remote file.

    Attributes:
      path: URL.
      start, stop: offsets in the file.
      least: number of bytes that have to come (None: all), unless the file ends before.
      version: version of the file, as `version_of` names it; another version is a `ReplacedError`. None: any.
    """

    path: str
    start: int
    stop: int
    least: int | None = None
    version: str | None = None


class Body(NamedTuple):
    """Bytes of a range.

    Attributes:
      data: the bytes, fewer where the file ends before.
      confirmed: whether the server said that they are of the version that was asked for.
    """

    data: bytes
    confirmed: bool


class WrongBodyError(Exception):
    """A body that is cut, too long or of another range. The next one may be right."""


class RefusedBodyError(Exception):
    """A body that can't be right, however often it is asked for."""


class ReplacedError(Exception):
    """A file that no longer is the version that was asked for, or is gone."""


class Answer:
    """Values that a server states about a body: the file's size and version."""

    def __init__(self) -> None:
        self.size: int | None = None
        self.version: str | None = None


answer: contextvars.ContextVar[Answer | None] = contextvars.ContextVar("grain_sft_answer", default=None)
"""Answer that the response of the current task fills in; see `checked_response`."""


def version_of(info: Mapping[str, Any]) -> str | None:
    """Return the version in a file system's description of a file: a generation, an entity tag or a time."""
    found = next((key for key in _VERSION_KEYS if info.get(key) not in (None, "")), None)
    return None if found is None else f"{found} {info[found]}"


async def read_body(client: Any, wanted: Range) -> Body:
    """Return the bytes of a range.

    Raises:
      ReplacedError: the file is of another version.
      WrongBodyError: the body is cut, too long or of another range.
      RefusedBodyError: the server sends compressed bodies, or has no ranged reads.
      Exception: the client's own.
    """
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
    count = wanted.stop - wanted.start
    if len(data) > count:
        raise RefusedBodyError(
            f"{len(data)} bytes came where bytes {wanted.start} to {wanted.stop} were asked for: its server has no ranged "
            "reads. Copy the files to one that has"
        )
    if stated.size is not None and len(data) != (expected := max(0, min(wanted.stop, stated.size) - wanted.start)):
        raise WrongBodyError(f"a body of {len(data)} bytes instead of {expected}")
    if None not in (stated.version, wanted.version) and _kind(stated.version) == _kind(wanted.version):
        if stated.version != wanted.version:
            raise ReplacedError(f"{stated.version} came")
        return Body(data, True)
    return Body(data, wanted.version is None)


def check_range(content_range: str | None, start: int, stop: int) -> tuple[int, int | None]:
    """Return (bytes in the body, bytes in the file where the server states them) of an answer 206.

    Raises:
      WrongBodyError: the answer is of another range.
    """
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
    """Check that a body is not compressed by its store, except that of a file whose name says so.

    Raises:
      RefusedBodyError: the body is compressed.
    """
    encoding = (stated or "").lower()
    if encoding not in ("", "identity", "aws-chunked") and not (encoding == "gzip" and path.endswith(".gz")):
        raise RefusedBodyError(
            f"it is stored with Content-Encoding {encoding}, so that its size and its bytes are not those of its content. "
            "Upload it again without (no -Z, -z or -J)"
        )


async def cat(client: Any, path: str, start: int, stop: int, **options: Any) -> bytes:
    """Return what fsspec's `cat_file` reads of a file, in a thread where the client has no coroutines."""
    if client.async_impl:
        return bytes(await client._cat_file(path, start=start, end=stop, **options))
    return bytes(await asyncio.to_thread(client.cat_file, path, start, stop, **options))


async def _requested(client: Any, wanted: Range, stated: Answer) -> bytes:
    path, start, stop, _, version = wanted
    protocol, value = path.split("://", 1)[0], (version or "").partition(" ")[2]
    if protocol in ("s3", "s3a") and hasattr(client, "_call_s3"):
        return await _s3(client, wanted, stated)
    options: dict[str, Any] = {}
    if protocol in ("gs", "gcs") and _kind(version) == "generation":
        options["generation"] = value
    if protocol in ("http", "https") and _kind(version) == "ETag" and not value.startswith("W/"):
        options["headers"] = {**client.kwargs.get("headers", {}), "If-Match": value}
    return await cat(client, path, start, stop, **options)


async def _s3(client: Any, wanted: Range, stated: Answer) -> bytes:
    bucket, key, version_id = client.split_path(wanted.path)
    options = dict(client.req_kw)
    if version_id:
        options["VersionId"] = version_id
    if _kind(wanted.version) == "ETag":
        options["IfMatch"] = str(wanted.version).partition(" ")[2]
    asked = f"bytes={wanted.start}-{wanted.stop - 1}"
    found = await client._call_s3("get_object", Bucket=bucket, Key=key, Range=asked, **options)
    body = found["Body"]
    try:
        check_encoding(found.get("ContentEncoding"), key)
        if found.get("ContentRange") is None and wanted.start:
            raise RefusedBodyError("its server has no ranged reads. Copy the files to one that has")
        count = int(found["ContentLength"])
        if found.get("ContentRange") is not None:
            count, stated.size = check_range(found["ContentRange"], wanted.start, wanted.stop)
        stated.version = f"ETag {found['ETag']}" if found.get("ETag") else None
        parts, left = [], min(count, wanted.stop - wanted.start) + 1
        while left > 0 and (part := await body.read(min(_READ, left))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        body.close()


def _kind(version: str | None) -> str:
    return (version or "").partition(" ")[0]


def _precondition_failed(error: BaseException) -> bool:
    """Whether a server answered 412, as it does where `If-Match` names another version."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    response = getattr(error.__cause__, "response", None)
    if isinstance(response, Mapping):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return str(status) == "412"
