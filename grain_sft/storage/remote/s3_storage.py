"""File system of S3. Importing this module needs s3fs."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from s3fs.core import S3FileSystem

from grain_sft.storage.remote.responses import BodyHeaders, Range, check_encoding, checked_sizes
from grain_sft.storage.remote.retries import Limits, retried

_BYTES_PER_READ = 1 << 18  # bytes that are read at once from the body of a response


class S3Storage(S3FileSystem):
    """s3fs file system that repeats requests by module `retries`, and can read a range of one version of an object.

    s3fs and botocore do not repeat requests here. If they did, `retried` would not see that the server answers meanwhile.
    """

    retries = 1  # s3fs tries a request once
    server = "S3"  # name of the server in error messages

    async def _call_s3(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a request with retries. s3fs calls this for all of its requests except listings."""
        return await _repeat(super()._call_s3, method, *args, **options)

    async def _lsdir(self, *args: Any, **options: Any) -> Any:
        return await _repeat(super()._lsdir, *args, **options)

    async def read_range(self, wanted: Range, headers: BodyHeaders) -> bytes:
        """Return the bytes of a range of an object, plus one byte if the server sends more than the range.

        Set `headers` to the object's size and version.
        """
        bucket, key, version_id = self.split_path(wanted.path)
        options = dict(self.req_kw)
        if version_id:
            options["VersionId"] = version_id
        kind, _, tag = (wanted.version or "").partition(" ")
        if kind == "ETag":
            options["IfMatch"] = tag  # the server refuses an object with another tag
        byte_range = f"bytes={wanted.start}-{wanted.stop - 1}"
        response = await self._call_s3("get_object", Bucket=bucket, Key=key, Range=byte_range, **options)
        body = response["Body"]
        try:
            check_encoding(response.get("ContentEncoding"), key)
            content_range, content_length = response.get("ContentRange"), int(response["ContentLength"])
            count, headers.size = checked_sizes((wanted.start, wanted.stop), content_range, content_length)
            headers.version = f"ETag {response['ETag']}" if response.get("ETag") else None
            parts = []
            left = min(count, wanted.stop - wanted.start) + 1  # one byte more, so that the caller notices a long body
            while left > 0 and (part := await body.read(min(_BYTES_PER_READ, left))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        finally:
            body.close()

    async def _walk(self, path: str, maxdepth: int | None = None, **options: Any) -> AsyncIterator[Any]:
        """Walk as in s3fs, but raise an error if a folder exists and can't be listed: its files would be missing unnoticed."""
        async for folder in super()._walk(path, maxdepth, **{**options, "on_error": _raise_failure}):
            yield folder


def _raise_failure(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


async def _repeat(request: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    """Return `request(*args, **options)`. Repeat it after transient failures, unless an outer call of `retried` does."""
    seconds = Limits.from_environment().seconds
    return await retried(lambda: request(*args, **options), seconds, bounded=False, server=S3Storage.server)
