"""Format primer: the SFT token cache of niels_gpt.

`{train,val}_input_ids.bin` (uint16), `{train,val}_labels.bin` (int32, -100 where no loss is taken), `{train,val}_idx.npy`
(int64 starts), `meta.json`; in `{train,val}/` links to them.
"""

from __future__ import annotations

import dataclasses
import re

from grain_sft import files
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.aligned import Part, scan_parts
from grain_sft.corpus.formats.metadata import Json, Origin, read_origin
from grain_sft.corpus.formats.options import Options, corpus_of
from grain_sft.corpus.formats.tree import Tree
from grain_sft.errors import CorpusError

EXPECTED = "a directory with train_input_ids.bin, train_labels.bin and train_idx.npy, or its train/ or val/"

_FILE = re.compile(r"(train|val)_(?:input_ids\.bin|labels\.bin|idx\.npy)")
_LINK = re.compile(r"shard_00000(?:_labels\.bin|_idx\.npy|\.bin)")
_META = "meta.json"


def find(path: str, tree: Tree) -> str | None:
    """What the names of the split's files begin with."""
    name, folder = files.name_of(path), files.parent(path)
    if name.endswith((".bin", ".npy")):
        match = _FILE.fullmatch(name)
        if _LINK.fullmatch(name) and files.name_of(folder) in ("train", "val"):
            folder, split = files.parent(folder), files.name_of(folder)
        elif match:
            split = match.group(1)
        else:
            return None
        siblings = {f"{split}_input_ids.bin", f"{split}_labels.bin"}
        return files.join(folder, f"{split}_") if siblings <= tree.names(folder) else None
    names = tree.names(path)
    if "train_input_ids.bin" in names or (_META in names and any(_FILE.fullmatch(each) for each in names)):
        return files.join(path, "train_")
    if name in ("train", "val") and f"{name}_input_ids.bin" in tree.names(folder):
        return files.join(folder, f"{name}_")
    return None


def read(prefix: str, options: Options, tree: Tree) -> Corpus:
    """The split whose files begin with `prefix`, as one shard."""
    root = files.parent(prefix)
    names, stem = tree.names(root), files.name_of(prefix)
    paths = []
    for suffix in ("input_ids.bin", "labels.bin", "idx.npy"):
        if stem + suffix not in names:
            raise CorpusError(
                f"{root}: lacks {stem}{suffix}: the cache is not whole. Copy it, or prepare the cache again."
            )
        paths.append(prefix + suffix)
    origin, tokens = _origin(root, stem.removesuffix("_"), tree)
    shards, dtype = scan_parts([Part(paths[0], paths[1], "labels", paths[2], "starts")], options.dtype, ("uint16",))
    if tokens is not None and tokens != shards[0].num_tokens:
        raise CorpusError(
            f"{files.join(root, _META)}: {stem.removesuffix('_')} has {tokens} tokens, but {paths[0]} holds "
            f"{shards[0].num_tokens}. A file was cut short, or is of another corpus."
        )
    sources = prefix + "sources.bin" if stem + "sources.bin" in names else ""
    return corpus_of(shards, dtype, options, origin, sources)


def _origin(root: str, split: str, tree: Tree) -> tuple[Origin, int | None]:
    """What prepare.json and meta.json say, and the split's number of tokens in meta.json."""
    origin = read_origin(root, tree)
    if _META not in tree.names(root):
        return origin, None
    meta = Json.load(files.join(root, _META))
    eos, sha = meta.object("special_token_ids").count("eot"), meta.text("tokenizer_sha256")
    if eos is not None:
        origin = dataclasses.replace(origin, eos_token_id=eos)
    if origin.tokenizer_sha256 is None:
        origin = dataclasses.replace(origin, tokenizer_sha256=sha)
    counts = meta.object("splits").object(split)
    counts.count("num_examples")
    return origin, counts.count("num_tokens")
