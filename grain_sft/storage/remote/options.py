"""Options of remote shards: the time for retries, and the cache on the local disk."""

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import msgspec.structs

from grain_sft.errors import ConfigError, CorpusError
from grain_sft.options import check, options_of
from grain_sft.storage import files
from grain_sft.storage.remote.retries import Limits

FOLDER_VARIABLE = "GRAIN_SFT_SHARD_CACHE"
BYTES_VARIABLE = "GRAIN_SFT_SHARD_CACHE_BYTES"
UNIT_VARIABLE = "GRAIN_SFT_SHARD_CACHE_UNIT"
SMALLEST_UNIT = 1 << 15

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local cache of remote files, shared by all processes of the machine.

    Args:
      folder: Folder on a local disk. Nothing else may be in it.
      max_bytes: Maximum size of the cache, such as `200GiB`.
      unit: Size of a block, which is fetched and kept as a whole, or `shard` for whole shards.
    """

    folder: str
    max_bytes: int | str
    unit: int | str | None = "4MiB"

    def __post_init__(self) -> None:
        """Convert the sizes to bytes and check them. A unit of None means whole shards."""
        max_bytes = parse_bytes(self.max_bytes, "cache: max_bytes")
        whole = self.unit in (None, "shard")
        unit = None if whole else parse_bytes(self.unit, "cache: unit (or 'shard')")
        if not self.folder or files.is_remote(self.folder):
            raise CorpusError(f"cache folder {self.folder}: expected a folder on a local disk, not a URL.")
        if unit is not None and unit < SMALLEST_UNIT:
            raise CorpusError(f"cache {self.folder}: unit is {unit} bytes; expected {SMALLEST_UNIT} or more.")
        if max_bytes < (least := 2 * (unit or SMALLEST_UNIT)):
            raise CorpusError(
                f"cache {self.folder}: max_bytes is {max_bytes}; expected at least {least}, two of its units."
            )
        for name, value in {"folder": files.normalize(self.folder), "max_bytes": max_bytes, "unit": unit}.items():
            msgspec.structs.force_setattr(self, name, value)


class RemoteOptions(Limits, frozen=True, forbid_unknown_fields=True):
    """Options of reads from a bucket.

    Args:
      seconds: Time for which failing requests for a file are repeated before the failure is an error.
      requests: Number of concurrent requests of one read.
      cache: Local cache of the files; None for none.
    """

    cache: CacheOptions | None = None

    @property
    def limits(self) -> Limits:
        """Former attribute that held `seconds` and `requests`."""
        warnings.warn("RemoteOptions.limits is now RemoteOptions itself.", DeprecationWarning, stacklevel=2)
        return self

    @classmethod
    def from_environment(cls) -> Self:
        """Return the options of $GRAIN_SFT_REMOTE_SECONDS, $GRAIN_SFT_REMOTE_REQUESTS and $GRAIN_SFT_SHARD_CACHE."""
        folder, bound = os.environ.get(FOLDER_VARIABLE), os.environ.get(BYTES_VARIABLE)
        if folder and not bound:
            raise CorpusError(f"${FOLDER_VARIABLE} is {folder}, but its bound is missing: set ${BYTES_VARIABLE}.")
        unit = [given] if (given := os.environ.get(UNIT_VARIABLE)) else []
        cache = CacheOptions(folder, bound, *unit) if folder and bound else None
        return msgspec.structs.replace(super().from_environment(), cache=cache)

    @classmethod
    def of(cls, given: "RemoteOptions | Mapping[str, Any] | None") -> "RemoteOptions":
        """Return the options of a mapping, as in a config. The environment gives those that are left out.

        Raises:
          CorpusError, StorageError: An unknown key or a wrong value.
        """
        if isinstance(given, RemoteOptions):
            return given
        options, stated = cls.from_environment(), dict(given or {})
        cache = stated.get("cache")
        if isinstance(cache, Mapping):
            cache = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in cache.items()}
            stated["cache"] = cache
        try:
            check(stated, options_of(RemoteOptions), "remote")
        except ConfigError as error:
            raise CorpusError(str(error)) from error
        if cache:
            stated["cache"] = CacheOptions(**cache)
        return msgspec.structs.replace(options, **stated)


def parse_bytes(text: object, what: str) -> int:
    """Return the bytes of an integer, or of text such as 500GB, 1.5 TiB or 4096."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in _UNITS:
        raise CorpusError(f"{what} is {text!r}: expected bytes, such as 200GiB, 500GB or 1073741824.")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])
