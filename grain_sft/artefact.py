"""Artefact: named arrays that take long to make, made once per machine (or once for all machines that share a bucket),
checked, and memory-mapped by whoever needs them.

One file: 16 bytes of magic and header length, a JSON header (what the arrays depend on; name, dtype, shape and place of
each; a hash of all this and of their bytes), then the arrays, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from absl import logging

from grain_sft import files, remote_files
from grain_sft.errors import CorpusFileError, StorageError

Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC, SUFFIX = b"GSFTART1", ".arrays"
"""Of the files that hold arrays: how they begin, and how they are named."""

_ALIGN = 64
_HASHED = 1 << 22  # bytes at a time
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError, SyntaxError)
"""What a header that is damaged may raise in json and numpy."""


def load_or_make(
    kind: str, depends: Mapping[str, Any], make: Callable[[], Arrays], folder: str | Path | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The arrays that `make` gives, from the cache where they are.

    Args:
      kind: folder of the cache, below `folder`.
      depends: JSON; all that the arrays depend on.
      make: called at most once per machine, under a lock, where the cache has none.
      folder: of the cache, or its URL in a bucket; None: $GRAIN_SFT_CACHE_DIR, or the user's cache. From a bucket, arrays
        are copied once per machine to the user's cache; arrays that it has not are made, and sent there.

    Where the cache can't be written to, the arrays are made in memory, with a warning.
    """
    target, shared = place(kind, depends, folder), _shared(kind, depends, folder)
    found = _open_cached(target, depends)
    if found is not None:
        return found
    made: dict[str, npt.NDArray[Any]] | None = None
    making = False
    try:
        with files.locked(target):
            found = _open_cached(target, depends)  # another process may have made it meanwhile
            if found is None and shared is not None and _fetch(shared, target):
                found = _open_cached(target, depends)
            if found is not None:
                return found
            making = True
            made = dict(make())
            save(target, depends, made)
            if shared is not None:
                _share(target, shared)
            return open_file(target)[0]
    except StorageError as error:
        if making and made is None:  # not of the cache, but of what the arrays are made from
            raise
        logging.warning("%s Working without a cache.", error)
        return dict(make()) if made is None else made


def fingerprint(depends: Mapping[str, Any]) -> str:
    """Hash of what arrays depend on."""
    return f"sha256:{hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()}"


def place(kind: str, depends: Mapping[str, Any], folder: str | Path | None = None) -> Path:
    """Where the arrays that depend on `depends` are kept on this machine, or would be; `folder` as in `load_or_make`."""
    local = None if folder is None or files.is_remote(os.fspath(folder)) else Path(folder)
    return (local or files.cache_dir()) / kind / _name(depends)


def _name(depends: Mapping[str, Any]) -> str:
    return f"{fingerprint(depends).removeprefix('sha256:')[:32]}{SUFFIX}"


def _shared(kind: str, depends: Mapping[str, Any], folder: str | Path | None) -> str | None:
    """Where a bucket has the arrays, or would have; None where none is asked for."""
    url = files.cache_url() if folder is None else os.fspath(folder)
    return files.join(url, kind, _name(depends)) if url is not None and files.is_remote(url) else None


def _fetch(url: str, target: Path) -> bool:
    """Copy arrays from a bucket; False where it has none, or does not answer."""
    try:
        if not files.is_file(url):
            return False
        with files.atomic_write(target, "wb") as file, files.remote(url):
            remote_files.download(url, file)
        return True
    except CorpusFileError as error:
        logging.warning("%s Making it on this machine.", error)
        return False


def _share(target: Path, url: str) -> None:
    try:
        files.upload(target, url)
    except (StorageError, CorpusFileError) as error:
        logging.warning("%s Other machines will make it again.", error)


def save(path: Path, depends: Mapping[str, Any], arrays: Arrays) -> None:
    """Write the arrays to `path`, whole or not at all.

    Raises:
      StorageError: no space, or no permission.
    """
    described, at = {}, 0
    for name, array in arrays.items():
        described[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "at": at}
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    checksum = _checksum(depends, described)
    for array in arrays.values():
        checksum.update(np.ascontiguousarray(array).view(np.uint8).data)
    header = json.dumps({"depends": depends, "arrays": described, "checksum": checksum.hexdigest()}).encode()
    header += b" " * (-(len(header) + 16) % _ALIGN)
    with files.atomic_write(path, "wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
            file.write(b"\0" * (-array.nbytes % _ALIGN))


def open_file(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The arrays of a file, mapped read-only, and what they depend on.

    Raises:
      StorageError: missing, damaged, or of another kind.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
            if len(start) < 16 or not start.startswith(MAGIC):
                raise ValueError("it is no file of arrays")
            size = int.from_bytes(start[8:], "little")
            if size > path.stat().st_size:
                raise ValueError("its header is cut short")
            header = json.loads(file.read(size))
        base, found = 16 + size, {}
        checksum = _checksum(header["depends"], header["arrays"])
        for name, entry in header["arrays"].items():
            shape = tuple(map(int, entry["shape"]))
            dtype = np.dtype(str(entry["dtype"]))
            if dtype.kind not in "biuf":
                raise ValueError(f"an array of {dtype}")
            if 0 in shape:
                array: npt.NDArray[Any] = np.empty(shape, dtype)
            else:
                array = np.memmap(path, dtype, "r", base + int(entry["at"]), shape)
            found[name] = array
            flat = array.reshape(-1).view(np.uint8)
            for begin in range(0, len(flat), _HASHED):
                checksum.update(flat[begin : begin + _HASHED].data)
        if checksum.hexdigest() != header["checksum"]:
            raise ValueError("its arrays are not those that were written")
        return found, dict(header["depends"])
    except OSError as error:
        raise StorageError(f"{path}: can't be opened ({error.strerror or error}).") from error
    except _DAMAGED as error:
        raise StorageError(f"{path}: damaged ({error}). Delete it; it will be made again.") from error


def _checksum(depends: Any, described: Any) -> hashlib.blake2b:
    """The hash of a file before its arrays: of what they depend on, and of what is said of each."""
    return hashlib.blake2b(json.dumps([depends, described], sort_keys=True).encode(), digest_size=16)


def _open_cached(target: Path, depends: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]] | None:
    if not target.exists():
        return None
    try:
        arrays, found = open_file(target)
    except StorageError as error:
        logging.warning("%s", error)
        return None
    if found != json.loads(json.dumps(depends)):
        logging.warning("%s: depends on other things than its name says; making it again.", target)
        with contextlib.suppress(OSError):
            target.unlink()
        return None
    return arrays
