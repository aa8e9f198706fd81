"""Checks that the body of a server's response is the requested range of bytes."""

import contextvars
import re
from typing import NamedTuple

from grain_sft.storage.remote.retries import RefusedError, WrongBodyError

NO_RANGES = "its server can't send a range of bytes. Copy the files to a server with ranged reads"


class Range(NamedTuple):
    """Bytes `start` to `stop - 1` of a version of a remote file.

    `version` is a result of `requests.version_of`; None means the present version.
    """

    path: str
    start: int
    stop: int
    version: str | None = None

    def cut(self, size: int) -> list["Range"]:
        """Return the parts of the range, in order. Each has `size` bytes, except the last, which may have fewer."""
        starts = range(self.start, self.stop, size)
        return [self._replace(start=start, stop=min(start + size, self.stop)) for start in starts]


class BodyHeaders:
    """Size and version of a file, from the headers of a response for a part of it; None if the headers do not state them."""

    size: int | None = None
    version: str | None = None


body_headers: contextvars.ContextVar[BodyHeaders | None] = contextvars.ContextVar("grain_sft_headers", default=None)
"""Headers of the current task's response. `CheckedResponse` sets them, because fsspec's clients return only bodies."""


def checked_sizes(wanted: tuple[int, int], content_range: str | None, content_length: int | None) -> tuple[int, int | None]:
    """Return the size of the body and the size of the file, from the headers of a response.

    The size of the file is None if it is unknown, as in "bytes 0-9/*".

    Args:
      wanted: The requested range: first byte, and last byte + 1.
      content_range: Header Content-Range of a response with status 206 (a part of the file). None for status 200 (all of it).
      content_length: Header Content-Length; None if the response lacks it.

    Raises:
      WrongBodyError: The body is not the requested range.
      RefusedError: The server ignored the range and sent the whole file. This is accepted only if the range begins at byte 0
        and the file ends within it.
    """
    start, stop = wanted
    if content_range is None:
        if start == 0 and content_length is not None and content_length <= stop:
            return content_length, content_length
        raise RefusedError(NO_RANGES)
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range.strip(), re.IGNORECASE)
    if match is not None:
        sent_start, sent_stop = int(match.group(1)), int(match.group(2)) + 1
        size = None if match.group(3) == "*" else int(match.group(3))
        if size is not None and size <= start:  # the range begins after the end of the file
            return 0, size
        # if the file's size is unknown, a shorter body is accepted: the file may end there
        is_full = sent_stop <= stop if size is None else sent_stop == min(stop, size)
        if sent_start == start and sent_start < sent_stop and is_full:
            return sent_stop - sent_start, size
    raise WrongBodyError(f"an answer of {content_range or 'an unstated range'} instead of bytes {start}-{stop - 1}")


def check_encoding(content_encoding: str | None, path: str = "") -> None:
    """Raise RefusedError if a body is compressed. Only a file whose name ends with .gz may have Content-Encoding gzip."""
    encodings = {encoding.strip() for encoding in (content_encoding or "").lower().split(",")}
    if encodings - {"", "identity", "aws-chunked"} - ({"gzip"} if path.endswith(".gz") else set()):
        problem = f"it is stored with Content-Encoding {content_encoding}"
        fix = "Upload it again uncompressed (with gsutil or gcloud: without -Z, -z and -J)"
        raise RefusedError(f"{problem}, so its size and bytes are not those of its content. {fix}")
