"""Format episodes: the episode-indexed dataset of `prepare_chat_sft.py` and `prepare_tool_sft.py`.

`train/` and `val/`, flat or in `shard_*/`: `tokens.bin` (uint16 or uint32), `mask.bin` (uint8) or `mask_weighted.bin`
(float32), `episodes.idx` (uint64 pairs of start and length). `segment_ids.bin` is not read.
"""

from __future__ import annotations

import dataclasses

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import (
    SPLIT,
    CorpusMetadata,
    DirectoryListing,
    Json,
    read_metadata,
    warn_unknown,
)
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile
from grain_sft.corpus.loss import LossKind
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_DTYPES = ("uint16", "uint32")
_TOKENS, _INDEX, _SEGMENTS, _SHARD = "tokens.bin", "episodes.idx", "segment_ids.bin", "shard_"
_METADATA, _TOKENIZER = "dataset_metadata.json", "tokenizer_state.json"
_EOS_KEYS = ("eot_token_id", "eos_token_id", "eot_id", "eos_id")
_MASKS: dict[str, LossKind] = {"mask_weighted.bin": "float32", "mask.bin": "bool"}  # where both exist, weights say more


class Episodes(Format):
    """The shards of a split, sorted by name."""

    expected = "a directory with train/shard_*/episodes.idx or train/episodes.idx, or its train/ or val/ itself"
    metadata_files = r"dataset_metadata\.json|tokenizer_state\.json"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        for folder in (files.join(path, "train"), path):
            if any(_INDEX in listing.names(each) for each in _folders(folder, listing)):
                return folder
        return None

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        shards = _folders(found, listing)[1:]
        if shards and _INDEX in listing.names(found):
            raise CorpusError(
                f"{found}: holds both episodes.idx and {files.name_of(shards[0])}/. Either may be the dataset: remove one."
            )
        lacking = f"{SPLIT} and {files.join(files.parent(found), _METADATA)}"
        split = self.split(found, listing)
        warn_unknown(found, lacking, split.metadata, options.eos_token_id)
        return self.read_split(split, options, listing)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        name = files.name_of(path)
        if name not in (_TOKENS, *_MASKS, _INDEX, _SEGMENTS):
            return None
        if not listing.sidecars(path, *({_INDEX, *_MASKS} if name == _TOKENS else {_INDEX, _TOKENS} - {name})):
            return None  # such a name may be anybody's
        return files.join(files.parent(path), _TOKENS)

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        folder = files.parent(path)
        names = listing.sidecars(path, _TOKENS, _INDEX, *_MASKS)
        masks = [name for name in _MASKS if name in names]
        for name, exists in (
            (_TOKENS, _TOKENS in names),
            (_INDEX, _INDEX in names),
            ("mask.bin or mask_weighted.bin", bool(masks)),
        ):
            if not exists:
                raise CorpusError(
                    f"{folder}: lacks {name}: the dataset is not whole. Copy it, or prepare the dataset again."
                )
        return TokenFile(path, files.join(folder, masks[0]), _MASKS[masks[0]], files.join(folder, _INDEX), "pairs")

    def home(self, path: str) -> str:
        folder = files.parent(path)
        return files.parent(folder) if files.name_of(folder).startswith(_SHARD) else folder

    def split(self, home: str, listing: DirectoryListing) -> Split:
        root = files.parent(home)
        dtype = None
        if _METADATA in listing.names(root):
            path = files.join(root, _METADATA)
            name = Json.load(path).text("token_dtype")
            dtype = None if name is None else token_dtype(name, path)
        return Split(
            files=tuple(files.join(each, _TOKENS) for each in _folders(home, listing)[1:] or [home]),
            metadata=_read_metadata(home, root, listing),
            dtype=dtype,
            dtypes=_DTYPES,
            sources=files.join(home, "sources.bin") if "sources.bin" in listing.names(home) else "",
        )


def _folders(folder: str, listing: DirectoryListing) -> list[str]:
    """Return the folder itself, then its shards."""
    names = sorted(name for name in listing.names(folder) if name.startswith(_SHARD) and "." not in name)
    return [folder, *(files.join(folder, name) for name in names)]


def _read_metadata(folder: str, root: str, listing: DirectoryListing) -> CorpusMetadata:
    """Return the split's corpus.json, or else prepare.json and the dataset's own metadata, of which the EOS id is taken."""
    metadata, eos = read_metadata((folder, root), listing), None
    if files.name_of(metadata.path or root) == SPLIT:
        return metadata
    for name in (_METADATA, _TOKENIZER):
        if name not in listing.names(root):
            continue
        data = Json.load(files.join(root, name))
        ids = [data.count(key) for key in _EOS_KEYS]
        eos = eos if eos is not None else next((each for each in ids if each is not None), None)
        metadata = metadata.filled(
            pad_token_id=data.count("pad_token_id"), tokenizer_sha256=data.text("tokenizer_sha256")
        )
    return metadata if eos is None else dataclasses.replace(metadata, eos_token_id=eos)
