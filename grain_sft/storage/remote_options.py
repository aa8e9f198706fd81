"""Options for reading remote files: limits of time and requests, and the shard cache on the local disk."""

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, Self

import msgspec.structs

from grain_sft.arguments import check_type
from grain_sft.errors import ConfigError, CorpusError
from grain_sft.options import check, options_of
from grain_sft.storage import files
from grain_sft.storage.remote.retries import Limits

SHARD_CACHE_VARIABLE = "GRAIN_SFT_SHARD_CACHE"
BYTES_VARIABLE = "GRAIN_SFT_SHARD_CACHE_BYTES"
UNIT_VARIABLE = "GRAIN_SFT_SHARD_CACHE_UNIT"
DEFAULT_UNIT = "4MiB"
SMALLEST_UNIT = 1 << 15  # bytes that have one checksum in a file of the cache

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the shard cache: a local cache of remote files that all processes of the machine share.

    Args:
      folder: Folder on a local disk, for this cache alone.
      max_bytes: Maximum size of the cache: a number of bytes, or text such as `200GiB`.
      unit: Size of the blocks that are fetched and kept: a number of bytes, or text such as `4MiB`. `shard` or None means
        whole shards.
    """

    folder: str
    max_bytes: int | str
    unit: int | str | None = DEFAULT_UNIT

    def __post_init__(self) -> None:
        max_bytes = parse_bytes(self.max_bytes, "cache: max_bytes")
        unit = None if self.unit in (None, "shard") else parse_bytes(self.unit, "cache: unit (or 'shard')")
        check_type("cache: folder", self.folder, str | os.PathLike, "a path")
        folder = files.normalize(self.folder)
        if not folder or files.is_remote(folder):
            raise CorpusError(f"cache: folder is {folder!r}; expected a folder on a local disk, not a URL.")
        if unit is not None and unit < SMALLEST_UNIT:
            raise CorpusError(f"cache {folder}: unit is {unit} bytes; expected {SMALLEST_UNIT} or more.")
        # two units, because the file of one block is larger than the block, and the cache's lock file takes space too
        if max_bytes < (least := 2 * (unit or SMALLEST_UNIT)):
            raise CorpusError(f"cache {folder}: max_bytes is {max_bytes}; expected at least {least}, the size of two units.")
        # From here on, the fields have the checked values: a local path, an integer, and an integer or None.
        for name, value in (("folder", folder), ("max_bytes", max_bytes), ("unit", unit)):
            msgspec.structs.force_setattr(self, name, value)


class RemoteOptions(Limits, frozen=True, forbid_unknown_fields=True):
    """Options of reads from a bucket.

    Args:
      seconds: Time for which a failing request is repeated. After this time, the failure is an error.
      requests: Maximum number of concurrent requests of one read.
      cache: Options of the local cache of the files. None means that nothing is cached.
    """

    cache: CacheOptions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("remote: cache", self.cache, CacheOptions | None, "CacheOptions")

    @property
    def limits(self) -> Limits:
        """This object itself. Deprecated."""
        warnings.warn("RemoteOptions.limits is now RemoteOptions itself.", DeprecationWarning, stacklevel=2)
        return self

    @classmethod
    def from_environment(cls) -> Self:
        """Return the options that environment variables set.

        $GRAIN_SFT_REMOTE_SECONDS and $GRAIN_SFT_REMOTE_REQUESTS set the limits. $GRAIN_SFT_SHARD_CACHE sets the folder of the
        cache; without it, nothing is cached. $GRAIN_SFT_SHARD_CACHE_BYTES sets the maximum size of the cache, and
        $GRAIN_SFT_SHARD_CACHE_UNIT the size of its blocks.
        """
        uncached = super().from_environment()
        folder = os.environ.get(SHARD_CACHE_VARIABLE)
        if not folder:
            return uncached
        if not (max_bytes := os.environ.get(BYTES_VARIABLE)):
            problem = f"${SHARD_CACHE_VARIABLE} is {folder}, but ${BYTES_VARIABLE} is not set"
            raise CorpusError(f"{problem}. Set this variable to the maximum size of the cache.")
        unit = os.environ.get(UNIT_VARIABLE) or DEFAULT_UNIT
        return msgspec.structs.replace(uncached, cache=CacheOptions(folder, max_bytes, unit))

    @classmethod
    def of(cls, given: "RemoteOptions | Mapping[str, Any] | None") -> "RemoteOptions":
        """Return `given`, RemoteOptions or a section of a config, as RemoteOptions.

        Options that a section lacks come from environment variables. None means that all options come from them.

        Raises:
          CorpusError: The mapping has an unknown key, or an option has a wrong value.
          StorageError: `seconds` or `requests` is not above zero, `seconds` is infinite, or an environment variable
            is not a number.
          WrongTypeError: `given` has another type.
        """
        check_type("remote", given, RemoteOptions | Mapping | None, "RemoteOptions or a mapping")
        if isinstance(given, RemoteOptions):
            return given
        from_environment = cls.from_environment()
        values = dict(given or {})
        if isinstance(cache := values.get("cache"), Mapping):
            # a Python caller may give a `Path`, but `check` accepts only the types of a config
            as_text = {key: os.fspath(value) for key, value in cache.items() if isinstance(value, os.PathLike)}
            values["cache"] = {**cache, **as_text}
        try:
            check(values, options_of(RemoteOptions), "remote")
        except ConfigError as error:
            raise CorpusError(str(error)) from error
        if isinstance(cache, Mapping):
            values["cache"] = CacheOptions(**values["cache"])
        return msgspec.structs.replace(from_environment, **values)


def parse_bytes(text: object, what: str) -> int:
    """Return the number of bytes in `text`, an integer or text such as "1.5 TiB". Errors name the option `what`.

    Raises:
      CorpusError: `text` does not state a number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in _UNITS:
        raise CorpusError(f"{what} is {text!r}: expected bytes, such as 200GiB, 500GB or 1073741824.")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])
