"""HTTP responses with bounded bodies. The module needs aiohttp, so only clients that use aiohttp import it."""

import re

import aiohttp

from grain_sft.storage.remote.requests import NO_RANGES, answer, check_encoding, check_range
from grain_sft.storage.remote.retries import RefusedBodyError, WrongBodyError

_LARGEST_LISTING, _LARGEST_ANSWER = 16 << 20, 1 << 20
"""Most bytes of a page of a listing, and of a response that is neither a page nor a part of a file."""


class CheckedResponse(aiohttp.ClientResponse):
    """A response with a bounded body, whose headers have to match the requested range."""

    async def read(self) -> bytes:
        """Return the body; refuse one that is longer than expected."""
        if self._body is not None:
            return self._body
        parts, size = [], 0
        try:
            limit = self._largest() if self.status in (200, 206) else _LARGEST_ANSWER
            while part := await self.content.readany():
                size += len(part)
                if size > limit:
                    raise WrongBodyError(f"a body of more than {limit} bytes, the most that were expected")
                parts.append(part)
        except BaseException:
            self.close()
            raise
        self._body = b"".join(parts)
        return self._body

    def _largest(self) -> int:
        """Check the headers of the response and return the maximum size of its body."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        if asked is None:
            one = self.url.path.startswith("/storage/v1/") and self.url.query.get("maxResults", "1") == "1"
            return _LARGEST_ANSWER if one and not self.url.path.endswith("/o") else _LARGEST_LISTING
        for header in ("Content-Encoding", "x-goog-stored-content-encoding"):
            check_encoding(self.headers.get(header))
        start, stop = int(asked.group(1)), int(asked.group(2)) + 1
        if self.status == 206:
            count, size = check_range(self.headers.get("Content-Range"), start, stop)
        elif start == 0 and self.content_length is not None and self.content_length <= stop:
            count = size = self.content_length
        else:
            raise RefusedBodyError(NO_RANGES)
        stated = answer.get()
        if stated is not None:
            generation, tag = (self.headers.get(header) for header in ("x-goog-generation", "ETag"))
            stated.size = size
            stated.version = f"generation {generation}" if generation else f"ETag {tag}" if tag else None
        return count
