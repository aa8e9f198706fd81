"""Artifacts: files of named arrays that take long to make. Each is made once per machine or bucket, and then memory-mapped.

The file of an artifact has, in this order:
- the 8 bytes of `MAGIC`, and the length of the header as 8 bytes;
- the header, as JSON: `depends` (the inputs and options from which the arrays were made), `arrays` (dtype, shape and offset of
  each array, counted from the end of the header), and `checksum` (the hash of `depends`, `arrays` and the arrays' bytes);
- the arrays, each aligned to 64 bytes.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from absl import logging

from grain_sft.errors import CorpusFileError, StorageError
from grain_sft.storage import files, hashing
from grain_sft.storage.regular_files import open_regular
from grain_sft.storage.remote import files as remote_files
from grain_sft.storage.threads import in_threads

Arrays = Mapping[str, npt.NDArray[Any]]
Check = Callable[[Arrays], None]  # raises ValueError or CorpusFileError if the arrays are wrong

MAGIC = b"GSFTART2"
SUFFIX = ".arrays"
_HEADER_START = 16  # bytes: the magic, and the length of the header
_ALIGN = 64


def load_or_make(
    kind: str,
    depends: Mapping[str, Any],
    make: Callable[[], Arrays],
    folder: str | Path | None = None,
    *,
    check: Check | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an artifact from the cache. If the cache lacks them, make and store them.

    If the cache can't be written to, return the arrays in memory.

    Args:
      kind: Subfolder of the cache.
      depends: JSON value with every input and option from which the arrays are made. Its hash is the name of the file.
      make: Function that makes the arrays. Only one process of a machine calls it at a time.
      folder: Folder or URL of the cache. None means $GRAIN_SFT_CACHE_DIR if it is set, else the user's cache. Arrays from a URL
        are downloaded into the user's cache. Arrays that the URL lacks are made, and then uploaded.
      check: Function that raises an error if cached arrays are wrong (see `Check`). `make` then makes them again.
    """
    target = place(kind, depends, folder)
    if (arrays := open_cached(target, depends, check)) is not None:
        return arrays
    cache = files.cache_url() if folder is None else os.fspath(folder)
    url = files.join(cache, kind, target.name) if cache is not None and files.is_remote(cache) else None
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(files.locked(target))
        except StorageError as error:
            logging.warning("%s Working without a cache.", error)
            return dict(make())
        arrays = open_cached(target, depends, check)  # another process may have made the file meanwhile
        if arrays is None and url is not None:
            with _warning("Making it on this machine."):
                if files.is_file(url):
                    with files.atomic_write(target, "wb") as file, files.reading(url):
                        remote_files.download(url, file)
            arrays = open_cached(target, depends, check)
        if arrays is not None:
            return arrays
        arrays = dict(make())
        with _warning("Working without a cache."):
            save(target, depends, arrays)
            if url is not None:
                with _warning("Other machines will make it again."):
                    files.upload(target, url)
            return open_file(target)[0]
        return arrays  # these are in memory: `_warning` has caught an error of `save` or `open_file`


@contextlib.contextmanager
def _warning(consequence: str) -> Iterator[None]:
    """Log a StorageError or CorpusFileError in this context as a warning that ends with `consequence`."""
    try:
        yield
    except (StorageError, CorpusFileError) as error:
        logging.warning("%s %s", error, consequence)


def open_or_write(
    target: Path, depends: Mapping[str, Any], write: Callable[[], None], check: Check | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the artifact `target`. If the file is missing, damaged or fails `check`, call `write` first.

    `write` writes the file. Only one process of the machine calls it at a time.

    Raises:
      StorageError: The file can't be written or opened.
    """
    if (arrays := open_cached(target, depends, check)) is not None:
        return arrays
    with files.locked(target):
        arrays = open_cached(target, depends, check)
        if arrays is None:
            write()
            arrays, _ = open_file(target)
        return arrays


def hash_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def place(kind: str, depends: Mapping[str, Any], folder: str | Path | None = None) -> Path:
    """Return the local path at which `load_or_make` stores the artifact with these arguments."""
    cache = files.cache_dir() if folder is None or files.is_remote(os.fspath(folder)) else Path(folder)
    return cache / kind / f"{hash_of(depends)[:32]}{SUFFIX}"


def save(path: Path, depends: Mapping[str, Any], arrays: Arrays) -> None:
    """Write `arrays` to the artifact `path`. `depends` is as in `load_or_make`."""
    contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
    described = {}
    offset = 0  # from the end of the header
    for (name, array), content in zip(arrays.items(), contents, strict=True):
        described[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "at": offset}
        offset += content.nbytes + _padding(content.nbytes)
    blocks = []
    for content in contents:
        blocks += [content[start : start + hashing.BLOCK] for start in range(0, len(content), hashing.BLOCK)]
    checksum = hashing.joined(in_threads(hashing.of_block, blocks), bytes.fromhex(hash_of([depends, described])))
    header = json.dumps({"depends": depends, "arrays": described, "checksum": checksum}).encode()
    header += b" " * _padding(_HEADER_START + len(header))
    with files.atomic_write(path, "wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for content in contents:
            file.write(content.data)
            file.write(b"\0" * _padding(content.nbytes))


def _padding(size: int) -> int:
    """Return the number of bytes from `size` to the next multiple of 64."""
    return -size % _ALIGN


def open_file(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the arrays of an artifact's file, mapped read-only, and its `depends`. Check the checksum first.

    Raises:
      StorageError: The file is missing, damaged, or not the file of an artifact.
    """
    try:
        with open(open_regular(path), "rb") as file:
            return _mapped(file)
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror or error}). Check the path and the disk.") from error
    except Exception as error:  # for a damaged header, json and numpy raise many kinds of exceptions
        raise StorageError(f"{path}: damaged ({error}). If it is in the cache, delete it.") from error


def _mapped(file: IO[bytes]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the arrays and the `depends` of an open file. A damaged file raises an exception other than OSError."""
    start = file.read(_HEADER_START)
    if len(start) < _HEADER_START or not start.startswith(MAGIC):
        raise ValueError("it is not a file of arrays, or has another version")
    header_size = int.from_bytes(start[len(MAGIC) :], "little")
    header_end = _HEADER_START + header_size
    if header_end > os.fstat(file.fileno()).st_size:
        raise ValueError("its header is cut short")
    header = json.loads(file.read(header_size))
    arrays, ranges = {}, []
    for name, entry in header["arrays"].items():
        shape, dtype = tuple(map(int, entry["shape"])), np.dtype(str(entry["dtype"]))
        offset = header_end + int(entry["at"])
        if dtype.kind not in "biuf":
            raise ValueError(f"its array {name!r} has dtype {dtype}; expected numbers or booleans")
        is_empty = 0 in shape  # zero bytes can't be mapped
        array: npt.NDArray[Any] = np.empty(shape, dtype) if is_empty else np.memmap(file, dtype, "r", offset, shape)
        ranges.append((file.fileno(), offset, offset + array.nbytes))
        arrays[name] = array
    header_hash = bytes.fromhex(hash_of([header["depends"], header["arrays"]]))
    checksum = hashing.joined(hashing.of_blocks(ranges), header_hash)
    if checksum != header["checksum"]:
        raise ValueError("its arrays are not those that were written")
    return arrays, dict(header["depends"])


def open_cached(target: Path, depends: Mapping[str, Any], check: Check | None = None) -> dict[str, npt.NDArray[Any]] | None:
    """Return the arrays of the cached file `target`, or None if the file is missing.

    If the file is unusable or fails `check`, log a warning and return None.
    """
    if not os.path.exists(target):  # `Path.exists` raises where the folder can't be searched
        return None
    try:
        arrays, stored_depends = open_file(target)
        if stored_depends != json.loads(json.dumps(depends)):  # through JSON, because tuples are lists in the file
            raise StorageError(f"{target}: its dependencies do not match its name; making it again.")
        if check is not None:
            check(arrays)
        return arrays
    except (ValueError, CorpusFileError) as error:
        logging.warning("%s: its checksum is right, but %s; making it again.", target, error)
    except StorageError as error:
        logging.warning("%s", error)
    return None
