"""Folders of unpacked Parquet files: found by the content of what was unpacked, and compared with their own hashes."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from grain_sft.corpus import content
from grain_sft.corpus.formats import parquet as unpack
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError, StorageError
from grain_sft.storage import describe, files

NAMES = ("tokens.bin", "weights.bin", "documents.idx")
"""uint32, float32, and uint64 pairs of start and length."""

_VERSION = 3
_DONE = "unpacked.json"


def unpacked(path: str, first_weights: str, cache: str) -> str:
    """The folder below `cache` in which the Parquet file `path` is unpacked, which this does where nobody has.

    The folder is named after the content of `path` and `first_weights`, and holds the hash of each of its files.

    Args:
      path: local path, or URL.
      first_weights: file of the weights of first tokens; "": they have none.
      cache: folder of all that is unpacked.

    Raises:
      MissingExtraError: pyarrow is not installed.
      CorpusFileError, CorpusError: `path` can't be read, or does not hold what OpenChat writes.
      StorageError: the folder can't be written.
    """
    stored = [describe(each) for each in (path, first_weights) if each]
    hashes = content.hashes_of(stored)
    key = hashlib.sha256("\0".join(hashes).encode()).hexdigest()[:32]
    folder = os.path.join(cache, key)
    if _is_whole(folder, key):
        return folder
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(Path(f"{cache}-locks", key)))
        except StorageError:  # no locks: then several processes may unpack it, each whole
            pass
        else:
            if _is_whole(folder, key):  # another process unpacked it meanwhile
                return folder
            for left in glob.glob(f"{glob.escape(folder)}.*.tmp"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        _unpack_to(folder, key, path, stored[0].version, first_weights)
        if content.hashes_of(stored) != hashes:
            shutil.rmtree(folder, ignore_errors=True)
            raise CorpusFileError(
                f"{path}: was written to while it was unpacked. Wait until it is complete, then open it again."
            )
    return folder


def _unpack_to(folder: str, key: str, path: str, version: str | None, first_weights: str) -> None:
    """Make the folder, whole or not at all."""
    temporary = f"{folder}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        os.makedirs(temporary)
        weights = unpack.read_first_weights(first_weights)
        with contextlib.ExitStack() as stack:
            out = [stack.enter_context(open(os.path.join(temporary, name), "wb")) for name in NAMES]
            documents = unpack.unpack(path, version, weights, out)
            for file in out:
                file.flush()
                os.fsync(file.fileno())
        if weights is not None and len(weights) != documents:
            raise CorpusError(
                f"{first_weights}: {len(weights)} weights, but {path} holds {documents} documents; expected one for each."
            )
        found = content.read_hashes([describe(os.path.join(temporary, name)) for name in NAMES])
        with files.atomic_write(os.path.join(temporary, _DONE)) as done:
            stated = {
                "version": _VERSION,
                "content": key,
                "sha256": dict(zip(NAMES, found, strict=True)),
                "metadata": unpack.stated_metadata(path, version),
            }
            json.dump({**stated, "checksum": _checksum(stated)}, done)
        _publish(temporary, folder, key)
    except GrainSftError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder}: can't be written ({error.strerror or error}). Set {files.CACHE_DIR_VARIABLE} to a folder with room."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def metadata(folder: str) -> dict[str, Any] | None:
    """Return what `grain-sft prepare` says of the corpus in the file that was unpacked into `folder`; None of a file that
    another tool wrote."""
    found: dict[str, Any] | None = json.loads(Path(folder, _DONE).read_bytes())["metadata"]
    return found


def _checksum(stated: dict[str, Any]) -> str:
    """The hash of what unpacked.json states."""
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _publish(temporary: str, folder: str, key: str) -> None:
    """Give the folder its name; one that is damaged makes room, one that another process made meanwhile stays."""
    if os.path.lexists(folder) and not _is_whole(folder, key):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        os.replace(temporary, folder)
    except OSError:
        if not _is_whole(folder, key):
            raise


def _is_whole(folder: str, key: str) -> bool:
    """Whether the folder holds what was unpacked of this content; its files are hashed, or remembered."""
    try:
        done = json.loads(files.read_bytes(os.path.join(folder, _DONE)))
        checksum = done.pop("checksum")
        if done["version"] != _VERSION or done["content"] != key or checksum != _checksum(done):
            return False
        found = content.hashes_of([describe(os.path.join(folder, name)) for name in NAMES])
        return bool(found == [done["sha256"][name] for name in NAMES])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
