"""Artifacts: named arrays that take long to make, made once per machine or bucket, checked, and memory-mapped.

A file has 16 bytes of magic and header length, a JSON header (what the arrays depend on; name, dtype, shape and offset of
each; a hash of all this and of their bytes, see `hashing`), and the arrays, each at a multiple of 64 bytes.
"""

import concurrent.futures
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

from grain_sft.errors import CorpusFileError, StorageError
from grain_sft.storage import files, hashing
from grain_sft.storage.regular_files import open_regular
from grain_sft.storage.remote import files as remote_files

Arrays = Mapping[str, npt.NDArray[Any]]
Check = Callable[[Arrays], None]

MAGIC, SUFFIX = b"GSFTART2", ".arrays"
"""First bytes of an artifact, and the end of its name."""

_ALIGN = 64
_DAMAGED = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError, SyntaxError, EOFError,
)  # fmt: skip
"""What a damaged header may raise in json and numpy."""


def load_or_make(
    kind: str,
    depends: Mapping[str, Any],
    make: Callable[[], Arrays],
    folder: str | Path | None = None,
    *,
    check: Check | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `make`, from the cache if it has them. Without a writable cache they are made in memory.

    Args:
      kind: Subfolder of the cache.
      depends: JSON value that names all that the arrays depend on.
      make: Function that makes the arrays; called at most once per machine, under a lock.
      folder: Folder of the cache, or its URL; None means $GRAIN_SFT_CACHE_DIR, or the user's cache. From a bucket, arrays
        are copied once per machine to the user's cache; arrays that it lacks are made, and sent there.
      check: Function that raises ValueError for arrays that `make` can't have returned; they are made again.
    """
    target, url = place(kind, depends, folder), files.cache_url() if folder is None else os.fspath(folder)
    shared = files.join(url, kind, target.name) if url is not None and files.is_remote(url) else None
    if (found := open_cached(target, depends, check)) is not None:
        return found
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(files.locked(target))
        except StorageError as error:
            logging.warning("%s Working without a cache.", error)
            return dict(make())
        if (found := open_cached(target, depends, check)) is not None:  # another process has made it meanwhile
            return found
        if shared is not None and _fetch(shared, target) and (found := open_cached(target, depends, check)) is not None:
            return found
        made = dict(make())
        try:
            save(target, depends, made)
            if shared is not None:
                _share(target, shared)
            return open_file(target)[0]
        except StorageError as error:
            logging.warning("%s Working without a cache.", error)
            return made


def open_or_write(
    target: Path, depends: Mapping[str, Any], write: Callable[[], None], check: Check | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the file `target`. If it is missing or damaged, one process of the machine calls `write` first.

    Raises:
      StorageError: The file can't be written or opened.
    """
    if (found := open_cached(target, depends, check)) is not None:
        return found
    with files.locked(target):
        if (found := open_cached(target, depends, check)) is not None:  # another process has made it meanwhile
            return found
        write()
        return open_file(target)[0]


def fingerprint(depends: Mapping[str, Any]) -> str:
    """Return the hash of the dependencies of arrays."""
    return f"sha256:{hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()}"


def place(kind: str, depends: Mapping[str, Any], folder: str | Path | None = None) -> Path:
    """Return the path of the arrays that depend on `depends` on this machine; `folder` as in `load_or_make`."""
    local = None if folder is None or files.is_remote(os.fspath(folder)) else Path(folder)
    name = f"{fingerprint(depends).removeprefix('sha256:')[:32]}{SUFFIX}"
    return (local or files.cache_dir()) / kind / name


def _fetch(url: str, target: Path) -> bool:
    """Copy arrays from a bucket if it has them and can be reached."""
    try:
        if not files.is_file(url):
            return False
        with files.atomic_write(target, "wb") as file, files.reading(url):
            remote_files.download(url, file)
        return True
    except (StorageError, CorpusFileError) as error:
        logging.warning("%s Making it on this machine.", error)
        return False


def _share(target: Path, url: str) -> None:
    """Copy arrays to a bucket if it can be reached."""
    try:
        files.upload(target, url)
    except (StorageError, CorpusFileError) as error:
        logging.warning("%s Other machines will make it again.", error)


def save(path: Path, depends: Mapping[str, Any], arrays: Arrays) -> None:
    """Write the arrays to `path`, which appears when it is complete."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
    described, at = {}, 0
    for (name, array), data in zip(arrays.items(), flat, strict=True):
        described[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "at": at}
        at += data.nbytes + -data.nbytes % _ALIGN
    blocks = [data[at : at + hashing.BLOCK] for data in flat for at in range(0, len(data), hashing.BLOCK)]
    with concurrent.futures.ThreadPoolExecutor(hashing.THREADS) as pool:
        checksum = hashing.joined(pool.map(hashing.of_block, blocks), _header_digest(depends, described))
    header = json.dumps({"depends": depends, "arrays": described, "checksum": checksum}).encode()
    header += b" " * (-(len(header) + 16) % _ALIGN)
    with files.atomic_write(path, "wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for data in flat:
            file.write(data.data)
            file.write(b"\0" * (-data.nbytes % _ALIGN))


def open_file(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the arrays of a file, mapped read-only, and what they depend on. Their checksum is compared.

    Raises:
      StorageError: The file is missing, damaged, or of another kind.
    """
    try:
        fd = open_regular(path)
    except OSError as error:
        raise StorageError(f"{path}: can't be opened ({error.strerror or error}).") from error
    try:
        return _mapped(fd)
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror or error}).") from error
    except _DAMAGED as error:
        raise StorageError(f"{path}: damaged ({error}). Delete it; it will be made again.") from error
    finally:
        os.close(fd)


def _mapped(fd: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the arrays of an open file and their dependencies, or raise one of `_DAMAGED`."""
    first = os.pread(fd, 16, 0)
    if len(first) < 16 or not first.startswith(MAGIC):
        raise ValueError("it is not a file of arrays, or has another version")
    size = int.from_bytes(first[8:], "little")
    if 16 + size > os.fstat(fd).st_size:
        raise ValueError("its header is cut short")
    header = json.loads(os.pread(fd, size, 16))
    found, ranges = {}, []
    with os.fdopen(os.dup(fd), "rb") as file:
        for name, entry in header["arrays"].items():
            shape, dtype = tuple(map(int, entry["shape"])), np.dtype(str(entry["dtype"]))
            at = 16 + size + int(entry["at"])
            if dtype.kind not in "biuf":
                raise ValueError(f"an array of {dtype}")
            if at < 0:
                raise ValueError("an array before the file's first byte")
            array: npt.NDArray[Any] = np.empty(shape, dtype) if 0 in shape else np.memmap(file, dtype, "r", at, shape)
            ranges.append((fd, at, at + array.nbytes))
            found[name] = array
    checksum = hashing.joined(hashing.blocks_of(ranges), _header_digest(header["depends"], header["arrays"]))
    if checksum != header["checksum"]:
        raise ValueError("its arrays are not those that were written")
    return found, dict(header["depends"])


def open_cached(
    target: Path, depends: Mapping[str, Any], check: Check | None = None
) -> dict[str, npt.NDArray[Any]] | None:
    """Return the arrays of a file of the cache. If it is missing, unreadable, damaged or of other arrays, return None.

    The file stays: it may be sound, and unreadable only for now or for this process. What is made next replaces it.
    """
    if not os.path.exists(target):  # `Path.exists` raises where the folder can't be searched
        return None
    try:
        arrays, found = open_file(target)
        if found != json.loads(json.dumps(depends)):
            raise StorageError(f"{target}: its dependencies do not match its name; making it again.")
        if check is not None:
            check(arrays)
        return arrays
    except ValueError as error:
        logging.warning("%s: its checksum is right, but %s; making it again.", target, error)
    except StorageError as error:
        logging.warning("%s", error)
    return None


def _header_digest(depends: Any, described: Any) -> bytes:
    """Return the hash of what a header states, which is hashed again with the arrays."""
    return hashlib.sha256(json.dumps([depends, described], sort_keys=True).encode()).digest()
