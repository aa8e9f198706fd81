"""Options of remote files: limits of time and requests, and the cache on the local disk."""

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, Self

import msgspec.structs

from grain_sft.errors import ConfigError, CorpusError
from grain_sft.options import check, options_of
from grain_sft.storage import files
from grain_sft.storage.remote.retries import Limits

SHARD_CACHE_VARIABLE = "GRAIN_SFT_SHARD_CACHE"
BYTES_VARIABLE = "GRAIN_SFT_SHARD_CACHE_BYTES"
UNIT_VARIABLE = "GRAIN_SFT_SHARD_CACHE_UNIT"
SMALLEST_UNIT = 1 << 15

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local cache of remote files, shared by all processes of the machine.

    Args:
      folder: Folder on a local disk, for this cache alone.
      max_bytes: Maximum size of the cache in bytes, or text such as `200GiB`.
      unit: Size of the blocks that are fetched and kept, in bytes or text such as `4MiB`. `shard` or None means whole shards.
    """

    folder: str
    max_bytes: int | str
    unit: int | str | None = "4MiB"

    def __post_init__(self) -> None:
        """Convert the sizes to bytes and check them."""
        max_bytes = parse_bytes(self.max_bytes, "cache: max_bytes")
        whole = self.unit in (None, "shard")
        unit = None if whole else parse_bytes(self.unit, "cache: unit (or 'shard')")
        if not self.folder or files.is_remote(self.folder):
            raise CorpusError(f"cache: folder is {self.folder!r}; expected a folder on a local disk, not a URL.")
        if unit is not None and unit < SMALLEST_UNIT:
            raise CorpusError(f"cache {self.folder}: unit is {unit} bytes; expected {SMALLEST_UNIT} or more.")
        if max_bytes < (least := 2 * (unit or SMALLEST_UNIT)):
            raise CorpusError(
                f"cache {self.folder}: max_bytes is {max_bytes}; expected at least {least}, the size of two units."
            )
        for name, value in {"folder": files.normalize(self.folder), "max_bytes": max_bytes, "unit": unit}.items():
            msgspec.structs.force_setattr(self, name, value)


class RemoteOptions(Limits, frozen=True, forbid_unknown_fields=True):
    """Options of reads from a bucket.

    Args:
      seconds: Time for which failing requests for a file are repeated before the failure is an error.
      requests: Maximum number of concurrent requests of one read.
      cache: Local cache of the files. None means that nothing is cached.
    """

    cache: CacheOptions | None = None

    @property
    def limits(self) -> Limits:
        """Return the options themselves, which have `seconds` and `requests` now. Deprecated."""
        warnings.warn("RemoteOptions.limits is now RemoteOptions itself.", DeprecationWarning, stacklevel=2)
        return self

    @classmethod
    def from_environment(cls) -> Self:
        """Return the options of $GRAIN_SFT_REMOTE_SECONDS and _REQUESTS, and $GRAIN_SFT_SHARD_CACHE, its _BYTES and _UNIT."""
        folder, max_bytes = os.environ.get(SHARD_CACHE_VARIABLE), os.environ.get(BYTES_VARIABLE)
        if folder and not max_bytes:
            raise CorpusError(
                f"${SHARD_CACHE_VARIABLE} is {folder}, but ${BYTES_VARIABLE}, its maximum size, is not set. Set it."
            )
        unit = [given] if (given := os.environ.get(UNIT_VARIABLE)) else []
        cache = CacheOptions(folder, max_bytes, *unit) if folder and max_bytes else None
        return msgspec.structs.replace(super().from_environment(), cache=cache)

    @classmethod
    def of(cls, given: "RemoteOptions | Mapping[str, Any] | None") -> "RemoteOptions":
        """Return `given`, or the options of a mapping, such as a config's. The environment gives those that are missing.

        Raises:
          CorpusError: An unknown key or a wrong value.
          StorageError: `seconds` or `requests` is not above zero, or not a number in the environment.
        """
        if isinstance(given, RemoteOptions):
            return given
        options, stated = cls.from_environment(), dict(given or {})
        cache = stated.get("cache")
        if isinstance(cache, Mapping):
            paths = {key: os.fspath(value) for key, value in cache.items() if isinstance(value, os.PathLike)}
            stated["cache"] = {**cache, **paths}
        try:
            check(stated, options_of(RemoteOptions), "remote")
        except ConfigError as error:
            raise CorpusError(str(error)) from error
        if isinstance(cache, Mapping):
            stated["cache"] = CacheOptions(**stated["cache"])
        return msgspec.structs.replace(options, **stated)


def parse_bytes(text: object, what: str) -> int:
    """Return the number of bytes that an integer, or text such as 500GB, 1.5 TiB or 4096, states for the option `what`."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in _UNITS:
        raise CorpusError(f"{what} is {text!r}: expected bytes, such as 200GiB, 500GB or 1073741824.")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])
