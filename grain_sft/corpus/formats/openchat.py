"""Format openchat: the Parquet files of OpenChat's `generate_dataset`, `PREFIX.train.parquet` and `PREFIX.eval.parquet`.

Rows of a Parquet file can't be read at random, so each file is unpacked once, below `$GRAIN_SFT_CACHE_DIR`.
"""

from __future__ import annotations

import os

import numpy as np

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import unpacked
from grain_sft.corpus.formats.aligned import Part
from grain_sft.corpus.formats.metadata import Json, Origin, origin_of, read_origin
from grain_sft.corpus.formats.options import Options
from grain_sft.corpus.formats.splits import Split, corpus_of_split
from grain_sft.corpus.formats.tree import Tree
from grain_sft.errors import CorpusError
from grain_sft.storage import files

EXPECTED = "a .parquet file, a directory with one *.train.parquet, or the path before .train.parquet"

_SUFFIX = ".parquet"
_SPLITS = {"train": "train", "eval": "eval", "val": "eval"}  # a folder's name: the split of that name beside it


def find(path: str, tree: Tree) -> str | None:
    """The Parquet file."""
    name, folder = files.name_of(path), files.parent(path)
    if name.endswith(_SUFFIX):
        return path if name in tree.names(folder) else None
    if name.endswith((".npy", ".bin")):
        return None
    found = _of_split(path, "train", tree)
    if found is None and name in _SPLITS:
        found = _of_split(folder, _SPLITS[name], tree)
    if found is None and f"{name}.train{_SUFFIX}" in tree.names(folder):
        return f"{path.rstrip('/')}.train{_SUFFIX}"
    return found


def _of_split(folder: str, split: str, tree: Tree) -> str | None:
    found = sorted(name for name in tree.names(folder) if name.endswith(f".{split}{_SUFFIX}"))
    if len(found) > 1:
        raise CorpusError(f"{folder}: holds {found[0]} and {found[1]}. Give the path of the one that is meant.")
    return files.join(folder, found[0]) if found else None


def read(path: str, options: Options, tree: Tree) -> Corpus:
    """Return the corpus of the file's rows, as one shard of tokens."""
    if options.dtype is not None and options.dtype != np.uint32:
        raise CorpusError(f"{path}: dtype={options.dtype.name}; tokens of the format openchat are read as uint32.")
    stem, names = path.removesuffix(_SUFFIX), tree.names(files.parent(path))
    first_weights = f"{stem}.first_weights.bin" if f"{files.name_of(stem)}.first_weights.bin" in names else ""
    folder = unpacked.unpacked(path, first_weights, str(files.cache_dir() / "openchat"))
    tokens, weights, documents = (os.path.join(folder, name) for name in unpacked.NAMES)
    split = Split(
        files=(tokens,),
        origin=_origin(path, folder, tree),
        dtype=np.dtype(np.uint32),
        dtypes=("uint32",),
        sources=f"{stem}.sources.bin" if f"{files.name_of(stem)}.sources.bin" in names else "",
    )
    return corpus_of_split(split, [Part(tokens, weights, "float32", documents, "pairs")], options)


def _origin(path: str, folder: str, tree: Tree) -> Origin:
    """What prepare.json says, or the file itself, which may have been copied to where that of another corpus is."""
    beside, stated = read_origin((files.parent(path),), tree), unpacked.metadata(folder)
    if stated is None:
        return beside
    own = origin_of(Json(path, stated))
    return beside if beside.path and beside.tokenizer_sha256 == own.tokenizer_sha256 else own
