"""Format episodes: the dataset that MyPT's `prepare_chat_sft.py` and `prepare_tool_sft.py` write. An episode is a document.

Each of the folders `train/` and `val/` holds one shard, or folders `shard_*/` with one shard each. The files of a shard are:
  - `tokens.bin`: uint16 or uint32;
  - `mask.bin` (uint8) or `mask_weighted.bin` (float32 weights): the loss;
  - `episodes.idx`: start and length of each document, as uint64 pairs;
  - `segment_ids.bin`, which is ignored.
"""

import dataclasses

from grain_sft.corpus.boundaries import BoundaryKind
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import SPLIT, DirectoryListing, read_metadata, warn_unknown
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
    """Format of the folder of one split, such as `train/`. Shards are sorted by name."""

    index = "episodes.idx"  # name of the boundary file of each shard
    kind: BoundaryKind = "pairs"  # its kind, as in `BoundaryFile`

    expected = "a directory with train/shard_*/episodes.idx or train/episodes.idx, or its train/ or val/"
    metadata_files = r"dataset_metadata\.json|tokenizer_state\.json"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        for split in (files.join(path, "train"), path):
            shards = _shards(split, listing)
            listing.list_at_once(files.join(shard, self.index) for shard in shards)
            if any(self.index in listing.names(folder) for folder in (split, *shards)):
                return split
        return None

    def whole_split(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Split:
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
        # Other formats use these names, too. Files next to `path` show the format.
        neighbours = {self.index, *_MASKS} if name == _TOKENS else {self.index, _TOKENS} - {name}
        return files.join(files.parent(path), _TOKENS) if listing.sidecars(path, *neighbours) else None

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        folder = files.parent(path)
        names = listing.sidecars(path, _TOKENS, self.index, *_MASKS)
        mask = next((name for name in _MASKS if name in names), "")
        for name, exists in ((_TOKENS, _TOKENS in names), (self.index, self.index in names), (_ANY_MASK, bool(mask))):
            if not exists:
                raise CorpusError(f"{folder}: lacks {name}: the dataset is incomplete. Copy that file.")
        return TokenFile(path, files.join(folder, mask), _MASKS[mask], files.join(folder, self.index), self.kind)

    def home(self, path: str) -> str:
        folder = files.parent(path)
        return files.parent(folder) if files.name_of(folder).startswith(_SHARD) else folder

    def split(self, home: str, listing: DirectoryListing) -> Split:
        """Return the split whose shards are in the folder `home`, or whose one shard is `home`.

        Both ids (EOS and padding) are from corpus.json if it exists. Otherwise, the EOS id is from the first file that states
        it: dataset_metadata.json, tokenizer_state.json, prepare.json. For the padding id, prepare.json comes first.
        """
        root = home if listing.find(home, _METADATA) else files.parent(home)
        dataset = listing.read_json(root, _METADATA)
        stated_dtype = dataset.get("token_dtype", str)
        dtype = None if stated_dtype is None else token_dtype(stated_dtype, dataset.path)
        metadata = read_metadata((home, root), listing)
        if not metadata.of_split:
            eos_ids: list[int | None] = []
            for data in (dataset, listing.read_json(root, _TOKENIZER)):
                eos_ids += [data.count(key) for key in _EOS_KEYS]
                padding, tokenizer = data.count("pad_token_id"), data.get("tokenizer_sha256", str)
                metadata = metadata.filled(pad_token_id=padding, tokenizer_sha256=tokenizer)
            eos = next((token_id for token_id in eos_ids if token_id is not None), metadata.eos_token_id)
            metadata = dataclasses.replace(metadata, eos_token_id=eos)
        paths = tuple(files.join(folder, _TOKENS) for folder in _shards(home, listing) or [home])
        return Split(paths, metadata, dtype, dtypes=("uint16", "uint32"), sources=listing.find(home, "sources.bin"))


def _shards(folder: str, listing: DirectoryListing) -> list[str]:
    names = sorted(name for name in listing.names(folder) if name.startswith(_SHARD) and "." not in name)
    return [files.join(folder, name) for name in names]
