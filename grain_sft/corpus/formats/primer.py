"""Format primer: the SFT token cache of niels_gpt.

`{train,val}_input_ids.bin` (uint16), `{train,val}_labels.bin` (int32, -100 where no loss is taken), `{train,val}_idx.npy`
(int64 starts), `meta.json`; in `{train,val}/` links to them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.aligned import Part
from grain_sft.corpus.formats.metadata import SPLIT, Json, Origin, read_origin, warn_unknown
from grain_sft.corpus.formats.options import Options
from grain_sft.corpus.formats.splits import Split, corpus_of_split
from grain_sft.corpus.formats.tree import Tree
from grain_sft.errors import CorpusError
from grain_sft.storage import files

EXPECTED = "a directory with train_input_ids.bin, train_labels.bin and train_idx.npy, or its train/ or val/"

_FILE = re.compile(r"(train|val)_(?:input_ids\.bin|labels\.bin|idx\.npy)")
_LINK = re.compile(r"shard_00000(?:_labels\.bin|_idx\.npy|\.bin)")
_LINKS = "shard_00000"
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
        if siblings <= tree.names(folder):
            return files.join(folder, f"{split}_")
        return home(path) if _LINK.fullmatch(name) and owner(path, tree) else None
    names = tree.names(path)
    if "train_input_ids.bin" in names or (_META in names and any(_FILE.fullmatch(each) for each in names)):
        return files.join(path, "train_")
    if name in ("train", "val") and f"{name}_input_ids.bin" in tree.names(folder):
        return files.join(folder, f"{name}_")
    if {f"{_LINKS}.bin", f"{_LINKS}_labels.bin"} <= names:  # copied alone, as files
        return files.join(path, _LINKS)
    return None


def read(prefix: str, options: Options, tree: Tree) -> Corpus:
    """Return the corpus of the split whose files begin with `prefix`, as one shard."""
    root = files.parent(prefix)
    tokens, *sidecars = _files_of(prefix)
    for path in (tokens, *sidecars):
        if files.name_of(path) not in tree.names(root):
            raise CorpusError(
                f"{root}: lacks {files.name_of(path)}: the cache is not whole. Copy it, or prepare the cache again."
            )
    found = split(prefix, tree)
    warn_unknown(root, f"{SPLIT} and {_META}", found.origin, options.eos_token_id)
    corpus = corpus_of_split(found, [part(tokens, tree)], options)
    stated = _stated_tokens(root, files.name_of(prefix).removesuffix("_"), tree)
    if stated is not None and stated != corpus.num_tokens:
        raise CorpusError(
            f"{files.join(root, _META)}: {files.name_of(prefix).removesuffix('_')} has {stated} tokens, but {tokens} holds "
            f"{corpus.num_tokens}. A file was cut short, or is of another corpus."
        )
    return corpus


def owner(path: str, tree: Tree) -> str | None:
    """Return the token file that `path` belongs to: itself, or that of labels or of starts."""
    match = _FILE.fullmatch(files.name_of(path)) or _LINK.fullmatch(files.name_of(path))
    if match is None:
        return None
    tokens, labels, _ = _files_of(home(path))
    if path == tokens and not tree.beside(path, files.name_of(labels)):
        return None  # such a name may be anybody's
    return tokens


def part(path: str, tree: Tree) -> Part:
    """Return a token file with its labels and starts."""
    tokens, labels, starts = _files_of(home(path))
    has_starts = tree.beside(path, files.name_of(starts))
    return Part(tokens, labels, "labels", starts if has_starts else "", "starts")


def home(path: str) -> str:
    """Return what the paths of the split's files begin with."""
    name = files.name_of(path)
    stem = _LINKS if _LINK.fullmatch(name) else f"{name.partition('_')[0]}_"
    return files.join(files.parent(path), stem)


def split(prefix: str, tree: Tree) -> Split:
    """Return the split whose files begin with `prefix`, and what the metadata say."""
    folder, stem = files.parent(prefix), files.name_of(prefix)
    name = files.name_of(folder) if stem == _LINKS else stem.removesuffix("_")
    root = files.parent(folder) if stem == _LINKS else folder
    sources = files.join(root, f"{name}_sources.bin")
    return Split(
        files=(_files_of(prefix)[0],),
        origin=_origin((folder if stem == _LINKS else files.join(folder, name), root), tree),
        dtypes=("uint16",),
        sources=sources if files.name_of(sources) in tree.names(root) else "",
    )


def _files_of(prefix: str) -> tuple[str, str, str]:
    """Tokens, labels and starts."""
    if files.name_of(prefix) == _LINKS:
        return f"{prefix}.bin", f"{prefix}_labels.bin", f"{prefix}_idx.npy"
    return f"{prefix}input_ids.bin", f"{prefix}labels.bin", f"{prefix}idx.npy"


def _origin(folders: Sequence[str], tree: Tree) -> Origin:
    """What corpus.json says, or else prepare.json and meta.json: where documents end, this first."""
    origin = read_origin(folders, tree)
    if files.name_of(origin.path or _META) == SPLIT:
        return origin
    for folder in folders:
        if _META in tree.names(folder):
            meta = Json.load(files.join(folder, _META))
            eos = meta.object("special_token_ids").count("eot")
            if eos is not None:
                origin = dataclasses.replace(origin, eos_token_id=eos)
            return origin.filled(tokenizer_sha256=meta.text("tokenizer_sha256"))
    return origin


def _stated_tokens(root: str, name: str, tree: Tree) -> int | None:
    """How many tokens meta.json says that a split has."""
    if _META not in tree.names(root):
        return None
    counts = Json.load(files.join(root, _META)).object("splits").object(name)
    counts.count("num_examples")
    return counts.count("num_tokens")
