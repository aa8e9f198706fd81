"""Format openchat: the Parquet files of OpenChat's `generate_dataset`, `PREFIX.train.parquet` and `PREFIX.eval.parquet`.

Rows of a Parquet file can't be read at random, so each file is unpacked once, below `$GRAIN_SFT_CACHE_DIR`. The folder is
named after the content of the file, and holds the hash of each of its own files.
"""

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

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format, parquet
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing, Json, parse_metadata, read_metadata
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile, scan_corpus
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError, StorageError
from grain_sft.storage import FileStamp, describe, files

_SUFFIX = ".parquet"
_SPLITS = {"train": "train", "eval": "eval", "val": "eval"}  # by the name of a folder that the split would have
_NAMES = ("tokens.bin", "weights.bin", "documents.idx")  # uint32, float32, and uint64 pairs of start and length
_VERSION = 3
_DONE = "unpacked.json"


class OpenChat(Format):
    """The rows of one file, as one shard of tokens."""

    expected = "a .parquet file, a directory with one *.train.parquet, or the path before .train.parquet"
    metadata_files = r".*\.first_weights\.bin"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        name, folder = files.name_of(path), files.parent(path)
        if name.endswith(_SUFFIX):
            return path if name in listing.names(folder) else None
        if name.endswith((".npy", ".bin")):
            return None
        found = _of_split(path, "train", listing)
        if found is None and name in _SPLITS:
            found = _of_split(folder, _SPLITS[name], listing)
        if found is None and f"{name}.train{_SUFFIX}" in listing.names(folder):
            return f"{path.rstrip('/')}.train{_SUFFIX}"
        return found

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        if options.dtype is not None and options.dtype != np.uint32:
            raise CorpusError(f"{found}: dtype={options.dtype.name}; tokens of the format openchat are read as uint32.")
        parent, stem = files.parent(found), files.name_of(found).removesuffix(_SUFFIX)
        folder = _unpacked(found, listing.find(parent, f"{stem}.first_weights.bin"))
        tokens, weights, documents = (os.path.join(folder, name) for name in _NAMES)
        split = Split(
            files=(tokens,),
            metadata=_read_metadata(found, folder, listing),
            dtype=np.dtype(np.uint32),
            dtypes=("uint32",),
            sources=listing.find(parent, f"{stem}.sources.bin"),
        )
        return scan_corpus(split, [TokenFile(tokens, weights, "float32", documents, "pairs")], options)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        if path.endswith(_SUFFIX):
            raise CorpusError(f"{path}: a Parquet file among token files. Open it by itself.")
        return None


def _of_split(folder: str, split: str, listing: DirectoryListing) -> str | None:
    found = sorted(name for name in listing.names(folder) if name.endswith(f".{split}{_SUFFIX}"))
    if len(found) > 1:
        raise CorpusError(f"{folder}: holds {found[0]} and {found[1]}. Give the path of one of them.")
    return files.join(folder, found[0]) if found else None


def _read_metadata(path: str, folder: str, listing: DirectoryListing) -> CorpusMetadata:
    """Return prepare.json, or the metadata in the file itself, which may be next to the prepare.json of another corpus."""
    sidecar = read_metadata((files.parent(path),), listing)
    stated: dict[str, Any] | None = json.loads(Path(folder, _DONE).read_bytes())["metadata"]
    if stated is None:
        return sidecar
    own = parse_metadata(Json(path, stated))
    return sidecar if sidecar.path and sidecar.tokenizer_sha256 == own.tokenizer_sha256 else own


def _unpacked(path: str, first_weights: str) -> str:
    """Return the folder in which the Parquet file is unpacked, and unpack it where no process has.

    Args:
      path: Local path, or URL.
      first_weights: File of the weights of first tokens; "": they have none.
    """
    cache = str(files.cache_dir() / "openchat")
    stamps = [describe(each) for each in (path, first_weights) if each]
    hashes = content.hashes_of(stamps)
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
        _unpack_to(folder, key, path, stamps[0].version, first_weights)
        if content.hashes_of(stamps) != hashes:
            shutil.rmtree(folder, ignore_errors=True)
            raise CorpusFileError(f"{path}: was written to while it was unpacked. Wait until it is complete.")
    return folder


def _unpack_to(folder: str, key: str, path: str, version: str | None, first_weights: str) -> None:
    """Make the folder, whole or not at all."""
    temporary = f"{folder}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        os.makedirs(temporary)
        weights = parquet.read_first_weights(first_weights)
        with contextlib.ExitStack() as stack:
            out = [stack.enter_context(open(os.path.join(temporary, name), "wb")) for name in _NAMES]
            documents = parquet.unpack(path, version, weights, out)
            for file in out:
                file.flush()
                os.fsync(file.fileno())
        if weights is not None and len(weights) != documents:
            raise CorpusError(f"{first_weights}: {len(weights)} weights, but {documents} documents in {path}.")
        stated = {
            "version": _VERSION,
            "content": key,
            "sha256": dict(zip(_NAMES, content.read_hashes(_stamps(temporary)), strict=True)),
            "metadata": parquet.stated_metadata(path, version),
        }
        with files.atomic_write(os.path.join(temporary, _DONE)) as done:
            json.dump({**stated, "checksum": _checksum(stated)}, done)
        if os.path.lexists(folder) and not _is_whole(folder, key):
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one makes room
        try:
            os.replace(temporary, folder)
        except OSError:
            if not _is_whole(folder, key):  # one that another process made meanwhile stays
                raise
    except GrainSftError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder}: can't be written ({error.strerror or error}). Set {files.CACHE_DIR_VARIABLE} to a folder with room."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_whole(folder: str, key: str) -> bool:
    """Return whether the folder holds the unpacked files of this content; their hashes are computed, or cached."""
    try:
        done = json.loads(files.read_bytes(os.path.join(folder, _DONE)))
        checksum = done.pop("checksum")
        if (done["version"], done["content"], _checksum(done)) != (_VERSION, key, checksum):
            return False
        return content.hashes_of(_stamps(folder)) == list(done["sha256"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _stamps(folder: str) -> list[FileStamp]:
    return [describe(os.path.join(folder, name)) for name in _NAMES]


def _checksum(stated: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
