"""Format openchat: the Parquet files of OpenChat's `generate_dataset`, `PREFIX.train.parquet` and `PREFIX.eval.parquet`.

Rows of a Parquet file can't be read at random, so each file is unpacked once, below `$GRAIN_SFT_CACHE_DIR`, to a folder that
is named after its content. An artifact beside it has the hashes of the unpacked files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format, parquet
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing, Json, parse_metadata, read_metadata
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile, scan_corpus
from grain_sft.errors import CorpusError, CorpusFileError, StorageError
from grain_sft.storage import artifact, describe, files

_SUFFIX = ".parquet"
_SPLITS = {"train": "train", "eval": "eval", "val": "eval"}  # by the name of a folder that the split would have
_NAMES = ("tokens.bin", "weights.bin", "documents.idx")  # uint32, float32, and uint64 pairs of start and length
_VERSION = 4


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
        unpacked, stated = _unpacked(found, listing.find(parent, f"{stem}.first_weights.bin"))
        tokens, weights, documents = unpacked
        split = Split(
            files=(tokens,),
            metadata=_read_metadata(found, stated, listing),
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


def _read_metadata(path: str, stated: dict[str, Any] | None, listing: DirectoryListing) -> CorpusMetadata:
    """Return prepare.json, or what the file itself states, which may be next to the prepare.json of another corpus."""
    sidecar = read_metadata((files.parent(path),), listing)
    if stated is None:
        return sidecar
    own = parse_metadata(Json(path, stated))
    return sidecar if sidecar.path and sidecar.tokenizer_sha256 == own.tokenizer_sha256 else own


def _unpacked(path: str, first_weights: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return the files of `_NAMES` that the Parquet file is unpacked to, and the metadata that it states.

    They are made where no process has made them, or where they are damaged.

    Args:
      path: Local path, or URL.
      first_weights: File of the weights of first tokens; "": they have none.
    """
    stamps = [describe(each) for each in (path, first_weights) if each]
    hashes = content.hashes_of(stamps)
    key = hashlib.sha256("\0".join(hashes).encode()).hexdigest()[:32]
    unpacked = [str(files.cache_dir() / "openchat" / key / name) for name in _NAMES]

    def hash_unpacked() -> list[list[int]]:
        return [list(bytes.fromhex(each)) for each in content.hashes_of([describe(name) for name in unpacked])]

    def make() -> artifact.Arrays:
        weights = parquet.read_first_weights(first_weights)
        try:
            with contextlib.ExitStack() as stack:
                out = [stack.enter_context(files.atomic_write(name, "wb")) for name in unpacked]
                documents = parquet.unpack(path, stamps[0].version, weights, out)
                if weights is not None and len(weights) != documents:
                    raise CorpusError(f"{first_weights}: {len(weights)} weights, but {documents} documents in {path}.")
        except StorageError as error:
            raise StorageError(f"{error} Set {files.CACHE_DIR_VARIABLE} to a folder with room.") from error
        stated = json.dumps(parquet.stated_metadata(path, stamps[0].version)).encode()
        if content.hashes_of(stamps) != hashes:
            raise CorpusFileError(f"{path}: was written to while it was unpacked. Wait until it is complete.")
        return {"sha256": np.array(hash_unpacked(), np.uint8), "metadata": np.frombuffer(stated, np.uint8)}

    def check(arrays: artifact.Arrays) -> None:
        try:
            found = hash_unpacked()
        except CorpusFileError as error:
            raise ValueError(error) from error
        if found != arrays["sha256"].tolist():
            raise ValueError("its files are not those that were unpacked")

    depends = {"openchat": _VERSION, "content": key}
    arrays = artifact.load_or_make("openchat", depends, make, files.cache_dir(), check=check)
    return unpacked, json.loads(arrays["metadata"].tobytes())
