"""`Range`, a range of bytes of a remote file, and checks of the headers of a response to a request for a range."""

import contextvars
import re
from typing import NamedTuple

from grain_sft.storage.remote.retries import RefusedBodyError, WrongBodyError

NO_RANGES = "its server has no ranged reads. Copy the files to one that has"


class Range(NamedTuple):
    """Bytes `start` to `stop` of a remote file, of the given `version` (see `requests.version_of`) unless that is None."""

    path: str
    start: int
    stop: int
    version: str | None = None


class BodyHeaders:
    """Size and version of a file, from the headers of a response that has a part of it; None for what the headers lack."""

    size: int | None = None
    version: str | None = None


body_headers: contextvars.ContextVar[BodyHeaders | None] = contextvars.ContextVar("grain_sft_headers", default=None)
"""Headers of the response to the current task's request. `CheckedResponse` sets them; fsspec's clients return only the body."""


def checked_sizes(
    wanted: tuple[int, int], content_range: str | None, content_length: int | None
) -> tuple[int, int | None]:
    """Check the headers of a response to a request for a range of bytes.

    Args:
      wanted: The requested range: first byte, and last byte + 1.
      content_range: Content-Range of a response with status 206; None for the whole file, status 200.
      content_length: Content-Length, None if unknown.

    Returns:
      Size of the body, and size of the file. The size of the file is None if the headers lack it ("bytes 0-9/*").

    Raises:
      WrongBodyError: The body is another range.
      RefusedBodyError: The server sent the whole file, and the range is less than that, or the file's size is unknown.
    """
    start, stop = wanted
    if content_range is None:
        if start == 0 and content_length is not None and content_length <= stop:
            return content_length, content_length
        raise RefusedBodyError(NO_RANGES)
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range.strip(), re.IGNORECASE)
    if match is not None:
        sent_start, sent_stop = int(match.group(1)), int(match.group(2)) + 1
        size = None if match.group(3) == "*" else int(match.group(3))
        if size is not None and size <= start:  # the range begins after the end of the file
            return 0, size
        # without the file's size, a shorter body may end where the file ends
        is_full = sent_stop <= stop if size is None else sent_stop == min(stop, size)
        if sent_start == start and sent_start < sent_stop and is_full:
            return sent_stop - sent_start, size
    raise WrongBodyError(f"an answer of {content_range or 'an unstated range'} instead of bytes {start}-{stop - 1}")


def check_encoding(content_encoding: str | None, path: str = "") -> None:
    """Raise RefusedBodyError for a body with a Content-Encoding, except gzip of a file whose name ends with .gz."""
    encodings = {encoding.strip() for encoding in (content_encoding or "").lower().split(",")}
    if encodings - {"", "identity", "aws-chunked"} - ({"gzip"} if path.endswith(".gz") else set()):
        raise RefusedBodyError(
            f"it is stored with Content-Encoding {content_encoding}, so its size and bytes are not those of its content. "
            "Upload it again uncompressed (without -Z, -z and -J)"
        )
