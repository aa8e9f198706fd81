"""Options of remote shards: how long failures are borne, and whether a cache on the local disk is used."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from grain_sft.errors import CorpusError
from grain_sft.storage import files
from grain_sft.storage.remote.retries import Limits

FOLDER_VARIABLE = "GRAIN_SFT_SHARD_CACHE"
BYTES_VARIABLE = "GRAIN_SFT_SHARD_CACHE_BYTES"
UNIT_VARIABLE = "GRAIN_SFT_SHARD_CACHE_UNIT"
DEFAULT_UNIT = 4 << 20  # bytes
SMALLEST_UNIT = 1 << 15

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


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
    unit: int | None = DEFAULT_UNIT

    def __post_init__(self) -> None:
        if files.is_remote(self.folder):
            raise CorpusError(f"cache folder {self.folder}: expected a folder on a local disk, not a URL.")
        if self.unit is not None and self.unit < SMALLEST_UNIT:
            raise CorpusError(f"cache {self.folder}: unit is {self.unit} bytes; expected {SMALLEST_UNIT} or more.")
        if self.max_bytes < (least := 2 * (self.unit or SMALLEST_UNIT)):
            raise CorpusError(
                f"cache {self.folder}: max_bytes is {self.max_bytes}; expected at least {least}, two of its units."
            )

    @classmethod
    def of(cls, given: object) -> CacheOptions:
        """Return the options of a mapping with folder, max_bytes and unit, as a config has it."""
        if not isinstance(given, Mapping):
            raise CorpusError(f"remote: cache is {given!r}; expected folder, max_bytes and unit.")
        _check_keys("remote: cache", given, ("folder", "max_bytes", "unit"))
        for key in ("folder", "max_bytes"):
            if given.get(key) in (None, ""):
                raise CorpusError(f"remote: cache has no {key}: expected folder, max_bytes and, if you like, unit.")
        unit = given.get("unit", DEFAULT_UNIT)
        return cls(
            files.normalize(str(given["folder"])),
            parse_bytes(given["max_bytes"], "cache: max_bytes"),
            None if unit == "shard" else parse_bytes(unit, "cache: unit (or 'shard')"),
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
        return cls(cache=CacheOptions.of({"folder": folder, "max_bytes": bound, **({"unit": unit} if unit else {})}))

    @classmethod
    def of(cls, given: RemoteOptions | Mapping[str, Any] | None) -> RemoteOptions:
        """Return the options of a mapping with seconds, requests and cache, as a config has it; others are the environment's.

        Raises:
          CorpusError, StorageError: An unknown key or a wrong value.
        """
        if isinstance(given, RemoteOptions):
            return given
        options = cls.from_environment()
        if given is None:
            return options
        _check_keys("remote", given, ("seconds", "requests", "cache"))
        limits = {key: given[key] for key in ("seconds", "requests") if given.get(key) is not None}
        for key, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int if key == "requests" else (int, float)):
                raise CorpusError(f"remote: {key} is {value!r}; expected a number.")
        cache = options.cache
        if "cache" in given:
            cache = None if given["cache"] is None else CacheOptions.of(given["cache"])
        return cls(dataclasses.replace(options.limits, **limits), cache)


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


def _check_keys(what: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in given:
        if key not in keys:
            raise CorpusError(f"{what}: unknown key {key!r}; expected {', '.join(keys)}.")
