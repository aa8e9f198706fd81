"""s3fs with reads that take a condition and a bound. Imports s3fs."""

from s3fs.core import S3FileSystem

from grain_sft.storage.remote.requests import NO_RANGES, Answer, Range, check_encoding, check_range
from grain_sft.storage.remote.retries import RefusedBodyError

_READ = 1 << 18  # bytes of a body at once


class S3Storage(S3FileSystem):
    """s3fs's file system."""

    async def read_range(self, wanted: Range, stated: Answer) -> bytes:
        """Return the body of a range of an object, and record in `stated` the size and version that the server states."""
        bucket, key, version_id = self.split_path(wanted.path)
        options = {**self.req_kw, **({"VersionId": version_id} if version_id else {})}
        kind, _, tag = (wanted.version or "").partition(" ")
        if kind == "ETag":
            options["IfMatch"] = tag
        asked = f"bytes={wanted.start}-{wanted.stop - 1}"
        found = await self._call_s3("get_object", Bucket=bucket, Key=key, Range=asked, **options)
        body = found["Body"]
        try:
            check_encoding(found.get("ContentEncoding"), key)
            if found.get("ContentRange") is None and wanted.start:
                raise RefusedBodyError(NO_RANGES)
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
