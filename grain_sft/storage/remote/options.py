"""Options of remote shards: how long failures are borne, and whether a cache on the local disk is used."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

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


class RemoteCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local copy of what was read of remote files.

    Args:
      folder: Folder on a local disk. Nothing else may be in it.
      max_bytes: Bound on its size, such as `200GiB`.
      unit: Bytes that are fetched and kept together, or `shard`.
    """

    folder: str
    max_bytes: int | str
    unit: int | str = "4MiB"


class Remote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How files in a bucket are read.

    Args:
      seconds: Time in which failing requests for a file are repeated before it is an error.
      requests: Number of requests that one read makes at once.
      cache: Local copy of what was read.
    """

    seconds: float = 120
    requests: int = 64
    cache: RemoteCache | None = None


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """A folder on a local disk that keeps what was read of remote shards, for all processes of the machine.

    Args:
      folder: Local folder, made where it is missing. Nothing else may be in it.
      max_bytes: Bound on the bytes of all files in the folder together.
      unit: Bytes that are fetched and kept together; None means whole shards.

    Raises:
      CorpusError: Sizes that no cache can have, or a folder that is a URL.
    """

    folder: str
    max_bytes: int
    unit: int | None = 4 << 20

    def __post_init__(self) -> None:
        if not self.folder or files.is_remote(self.folder):
            raise CorpusError(f"cache folder {self.folder}: expected a folder on a local disk, not a URL.")
        if self.unit is not None and self.unit < SMALLEST_UNIT:
            raise CorpusError(f"cache {self.folder}: unit is {self.unit} bytes; expected {SMALLEST_UNIT} or more.")
        if self.max_bytes < (least := 2 * (self.unit or SMALLEST_UNIT)):
            raise CorpusError(
                f"cache {self.folder}: max_bytes is {self.max_bytes}; expected at least {least}, two of its units."
            )


@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """Options of a corpus's remote shards; local ones ignore them.

    Args:
      limits: How long failures are borne, and how many requests are made at once.
      cache: Cache on a local disk; None reads every row from the bucket.
    """

    limits: Limits = dataclasses.field(default_factory=Limits.from_environment)
    cache: CacheOptions | None = None

    @classmethod
    def from_environment(cls) -> RemoteOptions:
        """Return the options of $GRAIN_SFT_REMOTE_SECONDS, $GRAIN_SFT_REMOTE_REQUESTS and $GRAIN_SFT_SHARD_CACHE.

        Raises:
          CorpusError, StorageError: A variable that can't be read, or a cache folder without a bound.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder:
            return cls()
        bound, unit = os.environ.get(BYTES_VARIABLE), os.environ.get(UNIT_VARIABLE)
        if not bound:
            raise CorpusError(f"${FOLDER_VARIABLE} is {folder}, but its bound is missing: set ${BYTES_VARIABLE}.")
        given = {"folder": folder, "max_bytes": bound, **({"unit": unit} if unit else {})}
        return cls(cache=_cache_of(msgspec.convert(given, RemoteCache)))

    @classmethod
    def of(cls, given: RemoteOptions | Mapping[str, Any] | None) -> RemoteOptions:
        """Return the options of a mapping like `Remote`, as a config has it; others are the environment's.

        Raises:
          CorpusError, StorageError: An unknown key or a wrong value.
        """
        if isinstance(given, RemoteOptions):
            return given
        options = cls.from_environment()
        if given is None:
            return options
        stated = _plain(given)
        try:
            check(stated, options_of(Remote), "remote")
        except ConfigError as error:
            raise CorpusError(str(error)) from error
        limits = {key: stated[key] for key in ("seconds", "requests") if key in stated}
        found = msgspec.convert(stated, Remote)
        cache = options.cache if "cache" not in stated else None if found.cache is None else _cache_of(found.cache)
        return cls(dataclasses.replace(options.limits, **limits), cache)


def _plain(given: object) -> Any:
    """Return a mapping with its paths, at any depth, as text."""
    if isinstance(given, Mapping):
        return {key: _plain(value) for key, value in given.items()}
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def _cache_of(given: RemoteCache) -> CacheOptions:
    unit = None if given.unit == "shard" else parse_bytes(given.unit, "cache: unit (or 'shard')")
    return CacheOptions(files.normalize(given.folder), parse_bytes(given.max_bytes, "cache: max_bytes"), unit)


def parse_bytes(text: object, what: str) -> int:
    """Return the bytes of an integer, or of text such as 500GB, 1.5 TiB or 4096.

    Raises:
      CorpusError: It is neither.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in _UNITS:
        raise CorpusError(f"{what} is {text!r}: expected bytes, such as 200GiB, 500GB or 1073741824.")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])
