"""Format episodes: the episode-indexed dataset of `prepare_chat_sft.py` and `prepare_tool_sft.py`.

`train/` and `val/`, flat or in `shard_*/`: `tokens.bin` (uint16 or uint32), `mask.bin` (uint8) or `mask_weighted.bin`
(float32), `episodes.idx` (uint64 pairs of start and length). `segment_ids.bin` is not read.
"""

from __future__ import annotations

import dataclasses

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.aligned import Part
from grain_sft.corpus.formats.metadata import SPLIT, Json, Origin, read_origin, warn_unknown
from grain_sft.corpus.formats.options import Options
from grain_sft.corpus.formats.splits import Split, corpus_of_split
from grain_sft.corpus.formats.tree import Tree
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import files

EXPECTED = "a directory with train/shard_*/episodes.idx or train/episodes.idx, or its train/ or val/ itself"

_DTYPES = ("uint16", "uint32")
_TOKENS, _INDEX, _SEGMENTS, _SHARD = "tokens.bin", "episodes.idx", "segment_ids.bin", "shard_"
_METADATA, _TOKENIZER = "dataset_metadata.json", "tokenizer_state.json"
_EOS_KEYS = ("eot_token_id", "eos_token_id", "eot_id", "eos_id")
_MASKS = {"mask_weighted.bin": "float32", "mask.bin": "bool"}  # where both are there, weights say more


def find(path: str, tree: Tree) -> str | None:
    """The folder of the split."""
    for folder in (files.join(path, "train"), path):
        if "episodes.idx" in tree.names(folder):
            return folder
        if any("episodes.idx" in tree.names(files.join(folder, name)) for name in _shards(folder, tree)):
            return folder
    return None


def read(folder: str, options: Options, tree: Tree) -> Corpus:
    """Return the corpus of the shards, sorted by name."""
    shards = _shards(folder, tree)
    if shards and "episodes.idx" in tree.names(folder):
        raise CorpusError(
            f"{folder}: holds both episodes.idx and {shards[0]}/. Which are the dataset can't be told: remove one of them."
        )
    places = [files.join(folder, name) for name in shards] or [folder]
    parts = [part(files.join(place, _TOKENS), tree) for place in places]
    found = split(folder, tree)
    lacking = f"{SPLIT} and {files.join(files.parent(folder), _METADATA)}"
    warn_unknown(folder, lacking, found.origin, options.eos_token_id)
    return corpus_of_split(found, parts, options)


def owner(path: str, tree: Tree) -> str | None:
    """Return the `tokens.bin` that `path` belongs to: itself, or that beside it."""
    name, folder = files.name_of(path), files.parent(path)
    if name not in (_TOKENS, *_MASKS, _INDEX, _SEGMENTS):
        return None
    if not tree.beside(path, *({_INDEX, *_MASKS} if name == _TOKENS else {_INDEX, _TOKENS} - {name})):
        return None  # such a name may be anybody's
    return files.join(folder, _TOKENS)


def part(path: str, tree: Tree) -> Part:
    """Return a `tokens.bin` with its mask and its episodes.

    Raises:
      CorpusError: one of them is missing.
    """
    folder = files.parent(path)
    names = tree.beside(path, _TOKENS, _INDEX, *_MASKS)
    masks = [name for name in _MASKS if name in names]
    for name, there in (
        (_TOKENS, _TOKENS in names),
        (_INDEX, _INDEX in names),
        ("mask.bin or mask_weighted.bin", bool(masks)),
    ):
        if not there:
            raise CorpusError(
                f"{folder}: lacks {name}: the dataset is not whole. Copy it, or prepare the dataset again."
            )
    return Part(path, files.join(folder, masks[0]), _MASKS[masks[0]], files.join(folder, _INDEX), "pairs")


def home(path: str) -> str:
    """Return the folder of the split."""
    folder = files.parent(path)
    return files.parent(folder) if files.name_of(folder).startswith(_SHARD) else folder


def split(folder: str, tree: Tree) -> Split:
    """Return the shards of a split's folder, and what the metadata say."""
    root = files.parent(folder)
    places = [files.join(folder, name) for name in _shards(folder, tree)] or [folder]
    dtype = None
    if _METADATA in tree.names(root):
        path = files.join(root, _METADATA)
        name = Json.load(path).text("token_dtype")
        dtype = None if name is None else token_dtype(name, path)
    return Split(
        files=tuple(files.join(place, _TOKENS) for place in places),
        origin=_origin(folder, root, tree),
        dtype=dtype,
        dtypes=_DTYPES,
        sources=files.join(folder, "sources.bin") if "sources.bin" in tree.names(folder) else "",
    )


def _shards(folder: str, tree: Tree) -> list[str]:
    return sorted(name for name in tree.names(folder) if name.startswith(_SHARD) and "." not in name)


def _origin(folder: str, root: str, tree: Tree) -> Origin:
    """What the split's corpus.json says, or else prepare.json and the dataset's own metadata: where documents end, these
    first."""
    origin, found = read_origin((folder, root), tree), None
    if files.name_of(origin.path or root) == SPLIT:
        return origin
    for name in (_METADATA, _TOKENIZER):
        if name not in tree.names(root):
            continue
        data = Json.load(files.join(root, name))
        ids = [data.count(key) for key in _EOS_KEYS]
        found = found if found is not None else next((each for each in ids if each is not None), None)
        origin = origin.filled(pad_token_id=data.count("pad_token_id"), tokenizer_sha256=data.text("tokenizer_sha256"))
    return origin if found is None else dataclasses.replace(origin, eos_token_id=found)
