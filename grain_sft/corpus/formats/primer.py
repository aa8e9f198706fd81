"""Format primer: the SFT token cache of niels_gpt.

A folder DIR holds `meta.json`, and for each split, "train" or "val":
  - `train_input_ids.bin`: tokens, uint16;
  - `train_labels.bin`: label of each token, int32: the token itself, or -100 where no loss is taken;
  - `train_idx.npy`: token offset where each document begins, int64;
  - a folder `train/` with links to these files: `shard_00000.bin`, `shard_00000_labels.bin` and `shard_00000_idx.npy`.
"""

import dataclasses
import re

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import SPLIT, DirectoryListing, read_metadata, warn_unknown
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_FILE = re.compile(r"(train|val)_(input_ids\.bin|labels\.bin|idx\.npy)|shard_00000(_labels\.bin|_idx\.npy|\.bin)")
_LINKS = "shard_00000"  # beginning of the links' names
_META = "meta.json"


class Primer(Format):
    """Format of one split of a cache. A split is one shard.

    The `home` of a split is the common prefix of its files' paths: `DIR/train_`, or `DIR/train/shard_00000` for the links.
    """

    expected = "a directory with train_input_ids.bin, train_labels.bin and train_idx.npy, or its train/ or val/"
    metadata_files = r"meta\.json"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        """Return the `home` of the split at `path`. If `path` is the folder DIR, this is its training split.

        An incomplete folder also has a `home`, so that `read` reports the missing file.
        """
        name = files.name_of(path)
        # `path` may be DIR, with files, or DIR/train, with links to them. The first home with tokens and labels is returned.
        homes = [files.join(path, "train_"), files.join(path, _LINKS)]
        if _FILE.fullmatch(name):
            homes = [self.home(path)]
        elif name.endswith((".bin", ".npy")):
            return None
        elif name in ("train", "val"):
            homes.append(files.join(files.parent(path), f"{name}_"))  # the files in DIR, if DIR/train has no links
        for home in homes:
            tokens, labels, _ = _files_of(home)
            if {files.name_of(tokens), files.name_of(labels)} <= listing.names(files.parent(home)):
                return home
        names = listing.names(path)
        is_incomplete = "train_input_ids.bin" in names or (_META in names and any(map(_FILE.fullmatch, names)))
        return homes[0] if is_incomplete else None

    def whole_split(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Split:
        folder = files.parent(found)
        for path in _files_of(found):
            if files.name_of(path) not in listing.names(folder):
                raise CorpusError(f"{folder}: lacks {files.name_of(path)}: the cache is incomplete. Copy that file.")
        split = self.split(found, listing)
        warn_unknown(folder, f"{SPLIT} and {_META}", split.metadata, options.eos_token_id)
        return split

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Open a split. Refuse it if its number of tokens is not that in `meta.json`."""
        corpus = super().read(found, options, listing)
        root, name = _root_and_split(found)
        meta = listing.read_json(root, _META)
        num_tokens = meta.object("splits").object(name).count("num_tokens")
        if num_tokens not in (None, corpus.num_tokens):
            problem = f"{name} has {num_tokens} tokens, but {corpus.shards[0].path} holds {corpus.num_tokens}"
            raise CorpusError(f"{meta.path}: {problem}. Copy both files again.")
        return corpus

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        if not _FILE.fullmatch(files.name_of(path)):
            return None
        tokens, labels, _ = _files_of(self.home(path))
        if path == tokens and not listing.sidecars(path, files.name_of(labels)):
            return None  # a file of another tool with the same name
        return tokens

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        tokens, labels, starts = _files_of(self.home(path))
        return TokenFile(tokens, labels, "labels", listing.sidecar(path, files.name_of(starts)), "starts")

    def home(self, path: str) -> str:
        name = files.name_of(path)
        return files.join(files.parent(path), _LINKS if name.startswith(_LINKS) else f"{name.partition('_')[0]}_")

    def split(self, home: str, listing: DirectoryListing) -> Split:
        """Return the split `home`. Its EOS id is from corpus.json if it exists, else from meta.json, else from prepare.json."""
        root, name = _root_and_split(home)
        folder = files.join(root, name)
        metadata = read_metadata((folder, root), listing)
        meta = listing.read_json(folder if listing.find(folder, _META) else root, _META)
        if not metadata.of_split:  # they are not from corpus.json
            eos = meta.object("special_token_ids").count("eot")
            metadata = metadata.filled(tokenizer_sha256=meta.get("tokenizer_sha256", str))
            metadata = metadata if eos is None else dataclasses.replace(metadata, eos_token_id=eos)
        return Split((_files_of(home)[0],), metadata, dtypes=("uint16",), sources=listing.find(root, f"{name}_sources.bin"))


def _root_and_split(home: str) -> tuple[str, str]:
    """Return the folder of the corpus and the name of the split, such as (DIR, "train")."""
    folder, stem = files.parent(home), files.name_of(home)
    if stem == _LINKS:
        return files.parent(folder), files.name_of(folder)
    return folder, stem.removesuffix("_")


def _files_of(home: str) -> tuple[str, str, str]:
    """Return the paths of the tokens, labels and starts of the split at `home`."""
    if files.name_of(home) == _LINKS:
        return f"{home}.bin", f"{home}_labels.bin", f"{home}_idx.npy"
    return f"{home}input_ids.bin", f"{home}labels.bin", f"{home}idx.npy"
