"""Format olmo: parts of tokens, label masks and boundaries, as open-instruct's `convert_sft_data_for_olmocore.py` writes.

`token_ids_part_NNNN.npy` (raw uint8 to uint64), `labels_mask_part_NNNN.npy` (raw bool), `token_ids_part_NNNN.csv.gz`.
"""

from __future__ import annotations

import re

from grain_sft import files
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.aligned import Part, scan_parts
from grain_sft.corpus.formats.metadata import Json, read_origin
from grain_sft.corpus.formats.options import Options, corpus_of
from grain_sft.corpus.formats.tokenizer import eos_of_folder
from grain_sft.corpus.formats.tree import Tree
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError

EXPECTED = "a directory with token_ids_part_NNNN.npy and labels_mask_part_NNNN.npy, or one whose train/ has them"

_TOKENS = re.compile(r"token_ids_part_(\d+)\.npy")
_MASKS = re.compile(r"labels_mask_part_(\d+)\.npy")
_STATISTICS = "dataset_statistics.json"


def find(path: str, tree: Tree) -> str | None:
    """The folder of the parts."""
    for folder in (path, files.join(path, "train")):
        if any(_MASKS.fullmatch(name) for name in tree.names(folder)):
            return folder
    return None


def read(folder: str, options: Options, tree: Tree) -> Corpus:
    """The parts, in the order of their numbers."""
    names = tree.names(folder)
    root = files.parent(folder) if files.name_of(folder) in ("train", "val") else folder
    origin = read_origin(root, tree)
    if not origin.path and root != folder:
        origin = read_origin(folder, tree)
    if origin.eos_token_id is None:
        for place in dict.fromkeys((folder, root)):
            origin = origin if origin.eos_token_id is not None else eos_of_folder(place, tree, origin)
    statistics = Json.load(files.join(folder, _STATISTICS)) if _STATISTICS in names else Json("", {})
    stated = statistics.object("configuration").text("token_dtype")
    dtype = options.dtype or (None if stated is None else token_dtype(stated, statistics.path))
    shards, dtype = scan_parts(_parts(folder, names, _continued(statistics)), dtype)
    sources = files.join(folder, "sources.bin") if "sources.bin" in names else ""
    return corpus_of(shards, dtype, options, origin, sources)


def _parts(folder: str, names: frozenset[str], continues: frozenset[int] | None) -> list[Part]:
    tokens, masks = _numbered(folder, names, _TOKENS), _numbered(folder, names, _MASKS)
    wanted = range(max([*tokens, *masks]) + 1)
    for number in wanted:
        for found, stem in ((tokens, "token_ids"), (masks, "labels_mask")):
            if number not in found:
                raise CorpusError(
                    f"{folder}: lacks {stem}_part_{number:04d}.npy, but part {max([*tokens, *masks])} is there: the corpus "
                    "is not whole. Copy the missing file, or prepare it again."
                )
    boundaries = [tokens[number].removesuffix(".npy") + ".csv.gz" for number in wanted]
    missing = [name for name in boundaries if name not in names]
    if missing and len(missing) < len(boundaries):
        raise CorpusError(f"{folder}: lacks {missing[0]}, but other parts have such a file: the corpus is not whole.")
    return [
        Part(
            files.join(folder, tokens[number]),
            files.join(folder, masks[number]),
            "bool",
            "" if missing else files.join(folder, boundaries[number]),
            "csv",
            None if continues is None else number in continues,
        )
        for number in wanted
    ]


def _numbered(folder: str, names: frozenset[str], pattern: re.Pattern[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in sorted(names):
        if match := pattern.fullmatch(name):
            number = int(match.group(1)[:18])
            if number in found:
                raise CorpusError(f"{folder}: {found[number]} and {name} are both part {number}. Remove one of them.")
            found[number] = name
    return found


def _continued(statistics: Json) -> frozenset[int] | None:
    """The parts whose first document began in the part before, where that is said."""
    if statistics.get("continued_parts") is None:
        return None
    numbers = statistics.items("continued_parts")
    if not all(type(number) is int for number in numbers):
        raise CorpusError(f"{statistics.path}: continued_parts is {numbers!r}; expected a list of numbers.")
    return frozenset(numbers)
