"""Format episodes: the episode-indexed dataset of `prepare_chat_sft.py` and `prepare_tool_sft.py`.

`train/` and `val/`, or folders `shard_*/` in them, hold `tokens.bin` (uint16 or uint32), `mask.bin` (uint8) or
`mask_weighted.bin` (float32), and `episodes.idx` (uint64 pairs of start and length). `segment_ids.bin` is ignored.
"""

import dataclasses

from grain_sft.corpus.boundaries import BoundaryKind
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import SPLIT, DirectoryListing, Json, read_metadata, warn_unknown
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile
from grain_sft.corpus.loss import LossKind
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_TOKENS, _SEGMENTS, _SHARD = "tokens.bin", "segment_ids.bin", "shard_"
_METADATA, _TOKENIZER = "dataset_metadata.json", "tokenizer_state.json"
_EOS_KEYS = ("eot_token_id", "eos_token_id", "eot_id", "eos_id")
_MASKS: dict[str, LossKind] = {"mask_weighted.bin": "float32", "mask.bin": "bool"}  # the first that exists is read
_ANY_MASK = "mask.bin or mask_weighted.bin"


class Episodes(Format):
    """Format whose corpus is the shards of a split, sorted by name.

    Attributes:
      index, kind: Name and kind of the boundary file of each shard.
    """

    index = "episodes.idx"
    kind: BoundaryKind = "pairs"

    expected = "a directory with train/shard_*/episodes.idx or train/episodes.idx, or its train/ or val/ itself"
    metadata_files = r"dataset_metadata\.json|tokenizer_state\.json"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        for folder in (files.join(path, "train"), path):
            if any(self.index in listing.names(each) for each in (folder, *_shards(folder, listing))):
                return folder
        return None

    def whole_split(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Split:
        """Return the split at `found`, with a warning if no metadata state its ids."""
        shards = _shards(found, listing)
        if shards and self.index in listing.names(found):
            raise CorpusError(f"{found}: holds both {self.index} and {files.name_of(shards[0])}/. Remove one of them.")
        split = self.split(found, listing)
        lacks = f"{SPLIT} and {files.join(files.parent(found), _METADATA)}"
        warn_unknown(found, lacks, split.metadata, options.eos_token_id)
        return split

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        name = files.name_of(path)
        if name not in (_TOKENS, *_MASKS, self.index, _SEGMENTS):
            return None
        neighbours = {self.index, *_MASKS} if name == _TOKENS else {self.index, _TOKENS} - {name}
        # Files of other formats may have this name, but not these neighbours.
        return files.join(files.parent(path), _TOKENS) if listing.sidecars(path, *neighbours) else None

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        folder = files.parent(path)
        names = listing.sidecars(path, _TOKENS, self.index, *_MASKS)
        mask = next((name for name in _MASKS if name in names), "")
        lacking = [name for name in (_TOKENS, self.index) if name not in names] + ([] if mask else [_ANY_MASK])
        if lacking:
            raise CorpusError(f"{folder}: lacks {lacking[0]}: the dataset is incomplete. Copy that file.")
        return TokenFile(path, files.join(folder, mask), _MASKS[mask], files.join(folder, self.index), self.kind)

    def home(self, path: str) -> str:
        folder = files.parent(path)
        return files.parent(folder) if files.name_of(folder).startswith(_SHARD) else folder

    def split(self, home: str, listing: DirectoryListing) -> Split:
        """Return the split with the shards in `home`, or with `home` as its one shard if it holds none.

        The EOS id is the one in the dataset's metadata, else the one in the tokenizer's.
        """
        root = home if listing.find(home, _METADATA) else files.parent(home)
        path = listing.find(root, _METADATA)
        dtype = Json.load(path).text("token_dtype") if path else None
        metadata, ids = read_metadata((home, root), listing), []
        for each in () if metadata.of_split else filter(None, (path, listing.find(root, _TOKENIZER))):
            data = Json.load(each)
            ids += [number for key in _EOS_KEYS if (number := data.count(key)) is not None]
            padding, tokenizer = data.count("pad_token_id"), data.text("tokenizer_sha256")
            metadata = metadata.filled(pad_token_id=padding, tokenizer_sha256=tokenizer)
        return Split(
            files=tuple(files.join(each, _TOKENS) for each in _shards(home, listing) or [home]),
            metadata=dataclasses.replace(metadata, eos_token_id=ids[0]) if ids else metadata,
            dtype=None if dtype is None else token_dtype(dtype, path),
            dtypes=("uint16", "uint32"),
            sources=listing.find(home, "sources.bin"),
        )


def _shards(folder: str, listing: DirectoryListing) -> list[str]:
    names = sorted(name for name in listing.names(folder) if name.startswith(_SHARD) and "." not in name)
    return [files.join(folder, name) for name in names]
