"""Format episodes: the episode-indexed dataset of `prepare_chat_sft.py` and `prepare_tool_sft.py`.

`train/` and `val/`, flat or in `shard_*/`: `tokens.bin` (uint16 or uint32), `mask.bin` (uint8) or `mask_weighted.bin`
(float32), `episodes.idx` (uint64 pairs of start and length). `segment_ids.bin` is not read.
"""

from __future__ import annotations

import dataclasses

from grain_sft import files
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.aligned import Part, scan_parts
from grain_sft.corpus.formats.metadata import Json, Origin, read_origin
from grain_sft.corpus.formats.options import Options, corpus_of
from grain_sft.corpus.formats.tree import Tree
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError

EXPECTED = "a directory with train/shard_*/episodes.idx or train/episodes.idx, or its train/ or val/ itself"

_DTYPES = ("uint16", "uint32")
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
    """The shards, sorted by name."""
    shards = _shards(folder, tree)
    if shards and "episodes.idx" in tree.names(folder):
        raise CorpusError(
            f"{folder}: holds both episodes.idx and {shards[0]}/. Which are the dataset can't be told: remove one of them."
        )
    parts = [_part(files.join(folder, name), tree) for name in shards] or [_part(folder, tree)]
    root = files.parent(folder)
    origin = _origin(root, tree)
    dtype = options.dtype
    if dtype is None and _METADATA in tree.names(root):
        path = files.join(root, _METADATA)
        name = Json.load(path).text("token_dtype")
        dtype = None if name is None else token_dtype(name, path)
    found, dtype = scan_parts(parts, dtype, _DTYPES)
    sources = files.join(folder, "sources.bin") if "sources.bin" in tree.names(folder) else ""
    return corpus_of(found, dtype, options, origin, sources)


def _shards(folder: str, tree: Tree) -> list[str]:
    return sorted(name for name in tree.names(folder) if name.startswith("shard_") and "." not in name)


def _part(folder: str, tree: Tree) -> Part:
    names = tree.names(folder)
    masks = [name for name in _MASKS if name in names]
    for name, there in (
        ("tokens.bin", "tokens.bin" in names),
        ("episodes.idx", "episodes.idx" in names),
        ("mask.bin or mask_weighted.bin", bool(masks)),
    ):
        if not there:
            raise CorpusError(
                f"{folder}: lacks {name}: the dataset is not whole. Copy it, or prepare the dataset again."
            )
    return Part(
        files.join(folder, "tokens.bin"),
        files.join(folder, masks[0]),
        _MASKS[masks[0]],
        files.join(folder, "episodes.idx"),
        "pairs",
    )


def _origin(root: str, tree: Tree) -> Origin:
    """What the dataset's own metadata and prepare.json say; where documents end, the metadata before."""
    origin, found = read_origin(root, tree), None
    for name in (_METADATA, _TOKENIZER):
        if name not in tree.names(root):
            continue
        data = Json.load(files.join(root, name))
        ids = [data.count(key) for key in _EOS_KEYS]
        found = found if found is not None else next((each for each in ids if each is not None), None)
        pad, sha = data.count("pad_token_id"), data.text("tokenizer_sha256")
        origin = dataclasses.replace(
            origin,
            pad_token_id=pad if origin.pad_token_id is None else origin.pad_token_id,
            tokenizer_sha256=sha if origin.tokenizer_sha256 is None else origin.tokenizer_sha256,
        )
    return origin if found is None else dataclasses.replace(origin, eos_token_id=found)
