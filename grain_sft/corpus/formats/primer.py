"""Format primer: the SFT token cache of niels_gpt: `{train,val}_input_ids.bin` (uint16), `{train,val}_labels.bin` (int32,
-100 where no loss is taken), `{train,val}_idx.npy` (int64 starts), `meta.json`; in `{train,val}/` links to them.
"""

from __future__ import annotations

import dataclasses
import re

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import SPLIT, DirectoryListing, Json, read_metadata, warn_unknown
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_FILE = re.compile(r"(train|val)_(?:input_ids\.bin|labels\.bin|idx\.npy)")
_LINK = re.compile(r"shard_00000(?:_labels\.bin|_idx\.npy|\.bin)")
_LINKS = "shard_00000"
_META = "meta.json"


class Primer(Format):
    """One split, located by what the paths of its files begin with, as one shard."""

    expected = "a directory with train_input_ids.bin, train_labels.bin and train_idx.npy, or its train/ or val/"
    metadata_files = r"meta\.json"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        name, folder = files.name_of(path), files.parent(path)
        if name.endswith((".bin", ".npy")):
            match = _FILE.fullmatch(name)
            if _LINK.fullmatch(name) and files.name_of(folder) in ("train", "val"):
                folder, split = files.parent(folder), files.name_of(folder)
            elif match:
                split = match[1]
            else:
                return None
            if {f"{split}_input_ids.bin", f"{split}_labels.bin"} <= listing.names(folder):
                return files.join(folder, f"{split}_")
            return self.home(path) if _LINK.fullmatch(name) and self.owner(path, listing) else None
        names = listing.names(path)
        if "train_input_ids.bin" in names or (_META in names and any(_FILE.fullmatch(each) for each in names)):
            return files.join(path, "train_")
        if name in ("train", "val") and f"{name}_input_ids.bin" in listing.names(folder):
            return files.join(folder, f"{name}_")
        if {f"{_LINKS}.bin", f"{_LINKS}_labels.bin"} <= names:  # copied alone, as files
            return files.join(path, _LINKS)
        return None

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        root, name = files.parent(found), files.name_of(found).removesuffix("_")
        for path in _files_of(found):
            if files.name_of(path) not in listing.names(root):
                raise CorpusError(f"{root}: lacks {files.name_of(path)}: the cache is not whole. Copy it.")
        split = self.split(found, listing)
        warn_unknown(root, f"{SPLIT} and {_META}", split.metadata, options.eos_token_id)
        corpus = self.read_split(split, options, listing)
        if meta := listing.find(root, _META):
            counts = Json.load(meta).object("splits").object(name)
            counts.count("num_examples")
            if counts.count("num_tokens") not in (None, corpus.num_tokens):
                raise CorpusError(
                    f"{meta}: {name} has {counts.count('num_tokens')} tokens, but {corpus.shards[0].path} holds "
                    f"{corpus.num_tokens}. A file was cut short, or is of another corpus."
                )
        return corpus

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        name = files.name_of(path)
        if not (_FILE.fullmatch(name) or _LINK.fullmatch(name)):
            return None
        tokens, labels, _ = _files_of(self.home(path))
        if path == tokens and not listing.sidecars(path, files.name_of(labels)):
            return None  # other tools may write a file of this name
        return tokens

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        tokens, labels, starts = _files_of(self.home(path))
        return TokenFile(tokens, labels, "labels", listing.sidecar(path, files.name_of(starts)), "starts")

    def home(self, path: str) -> str:
        name = files.name_of(path)
        stem = _LINKS if _LINK.fullmatch(name) else f"{name.partition('_')[0]}_"
        return files.join(files.parent(path), stem)

    def split(self, home: str, listing: DirectoryListing) -> Split:
        root, stem = files.parent(home), files.name_of(home)
        folder = root if stem == _LINKS else files.join(root, stem.removesuffix("_"))
        root = files.parent(folder)
        metadata = read_metadata((folder, root), listing)
        path = listing.find(folder, _META) or listing.find(root, _META)
        if path and not metadata.of_split:
            meta = Json.load(path)
            eos = meta.object("special_token_ids").count("eot")
            metadata = metadata.filled(tokenizer_sha256=meta.text("tokenizer_sha256"))
            metadata = metadata if eos is None else dataclasses.replace(metadata, eos_token_id=eos)
        return Split(
            files=(_files_of(home)[0],),
            metadata=metadata,
            dtypes=("uint16",),
            sources=listing.find(root, f"{files.name_of(folder)}_sources.bin"),
        )


def _files_of(prefix: str) -> tuple[str, str, str]:
    """Return the paths of tokens, labels and starts."""
    if files.name_of(prefix) == _LINKS:
        return f"{prefix}.bin", f"{prefix}_labels.bin", f"{prefix}_idx.npy"
    return f"{prefix}input_ids.bin", f"{prefix}labels.bin", f"{prefix}idx.npy"
