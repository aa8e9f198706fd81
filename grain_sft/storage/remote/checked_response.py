"""Response class for aiohttp. Importing this module needs aiohttp."""

import re

import aiohttp

from grain_sft.storage.remote.responses import body_headers, check_encoding, checked_sizes
from grain_sft.storage.remote.retries import WrongBodyError

_LARGEST_OTHER = 16 << 20  # maximum bytes of a response that is not a part of a file, such as a page of a listing


class CheckedResponse(aiohttp.ClientResponse):
    """HTTP response that refuses a body longer than expected, and headers that do not match the requested range."""

    async def read(self) -> bytes:
        """Return the body. Raise WrongBodyError as soon as more bytes arrive than expected."""
        if self._body is not None:
            return self._body
        parts, size = [], 0
        try:
            limit = self._checked_limit() if self.status in (200, 206) else _LARGEST_OTHER
            while part := await self.content.readany():
                size += len(part)
                if size > limit:
                    raise WrongBodyError(f"expected a body of at most {limit} bytes, found a longer one")
                parts.append(part)
        except BaseException:
            self.close()
            raise
        self._body = b"".join(parts)
        return self._body

    def _checked_limit(self) -> int:
        """Return the largest accepted size of the body. If a part of a file was requested, check and record the headers."""
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        if requested is None:
            return _LARGEST_OTHER
        # Google's server may decompress a file that is stored compressed. Then only the second header states the encoding.
        for header in ("Content-Encoding", "x-goog-stored-content-encoding"):
            check_encoding(self.headers.get(header))
        wanted = int(requested.group(1)), int(requested.group(2)) + 1
        content_range = self.headers.get("Content-Range", "") if self.status == 206 else None
        count, size = checked_sizes(wanted, content_range, self.content_length)
        if (headers := body_headers.get()) is not None:
            headers.size = size
            if generation := self.headers.get("x-goog-generation"):
                headers.version = f"generation {generation}"
            elif tag := self.headers.get("ETag"):
                headers.version = f"ETag {tag}"
        return count
