"""Format olmo: parts of tokens, label masks and boundaries, as open-instruct's `convert_sft_data_for_olmocore.py` writes.

`token_ids_part_NNNN.npy` (raw uint8 to uint64), `labels_mask_part_NNNN.npy` (raw bool), `token_ids_part_NNNN.csv.gz`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import plain
from grain_sft.corpus.formats.aligned import Part
from grain_sft.corpus.formats.metadata import SPLIT, SPLIT_FORMAT, Json, Origin, read_origin
from grain_sft.corpus.formats.options import Options
from grain_sft.corpus.formats.splits import Split, corpus_of_split
from grain_sft.corpus.formats.tokenizer import eos_of_folder
from grain_sft.corpus.formats.tree import Tree
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import files

EXPECTED = "a directory with token_ids_part_NNNN.npy and labels_mask_part_NNNN.npy, or one whose train/ has them"

_TOKENS = re.compile(r"token_ids_part_(\d+)\.npy")
_MASKS = re.compile(r"labels_mask_part_(\d+)\.npy")
_ANY_TOKENS = re.compile(r"token_ids(.*)\.npy")
_ANY_MASK = re.compile(r"labels_mask(.*)\.npy")
_STATISTICS = "dataset_statistics.json"


def find(path: str, tree: Tree) -> str | None:
    """Return the folder of the parts."""
    for folder in (path, files.join(path, "train")):
        if any(_MASKS.fullmatch(name) for name in tree.names(folder)):
            return folder
    return None


def read(folder: str, options: Options, tree: Tree) -> Corpus:
    """Return the corpus of the parts, in the order of their numbers."""
    _check_whole(folder, tree.names(folder), options)
    found = split(folder, tree)
    parts = [part(path, tree) for path in found.files]
    check_masks(parts, options, tree)
    if found.continued is not None:
        parts = [each._replace(continues=each.tokens in found.continued) for each in parts]
    return corpus_of_split(found, parts, options)


def owner(path: str, tree: Tree) -> str | None:
    """Return the token file that `path` belongs to: itself, or that of a label mask."""
    name = files.name_of(path)
    if mask := _ANY_MASK.fullmatch(name):
        return files.join(files.parent(path), f"token_ids{mask[1]}.npy")
    return path if _ANY_TOKENS.fullmatch(name) else None


def part(path: str, tree: Tree) -> Part:
    """Return a token file with its label mask and its boundaries, where it has them."""
    tokens = _ANY_TOKENS.fullmatch(files.name_of(path))
    assert tokens is not None
    masks = tree.beside(path, f"labels_mask{tokens[1]}.npy")
    mask = files.join(files.parent(path), masks[0]) if masks else ""
    return Part(path, mask, boundaries=plain.boundaries_of(path, tree))


def _metadata_of_masked(folder: str, tree: Tree) -> str:
    """The metadata in a folder whose writer writes a label mask for every part; "" where there are none."""
    names = tree.names(folder)
    if _STATISTICS in names:
        return files.join(folder, _STATISTICS)
    path = files.join(folder, SPLIT)
    if SPLIT not in names:
        return ""
    data = Json.load(path)
    return path if (data.get("format"), data.get("corpus_format")) == (SPLIT_FORMAT, "olmo") else ""


def without_validation(paths: Sequence[str]) -> list[str]:
    """Return `paths` without the files of each val/ with parts beside a train/ with parts."""
    folders = {files.parent(path) for path in paths if _TOKENS.fullmatch(files.name_of(path))}
    validation = {
        folder
        for folder in folders
        if files.name_of(folder) == "val" and files.join(files.parent(folder), "train") in folders
    }
    return [path for path in paths if files.parent(path) not in validation]


def check_masks(parts: Sequence[Part], options: Options, tree: Tree) -> None:
    """Refuse parts that all lack a label mask, in a folder with label masks of other names or other parts, or with the
    metadata of a corpus that has them.

    Raises:
      CorpusError: there is such a part, and neither `label_mask_paths` nor `use_loss_mask=False` is given.
    """
    if options.use_loss_mask is False or options.masks is not None or any(each.loss for each in parts):
        return
    for each in parts:
        if not _ANY_TOKENS.fullmatch(files.name_of(each.tokens)):
            continue
        folder = files.parent(each.tokens)
        masks = sorted(name for name in tree.names(folder) if _ANY_MASK.fullmatch(name))
        metadata = _metadata_of_masked(folder, tree)
        if metadata and not masks:
            raise CorpusError(
                f"{each.tokens}: has no label mask, but {metadata} is of a corpus with label masks. Without them, all of its "
                "tokens would take loss. Copy the masks, name them with label_mask_paths, or ignore them with "
                "use_loss_mask=False."
            )
        if masks:
            raise CorpusError(
                f"{each.tokens}: has no label mask of its name, but its folder holds {masks[0]}. Without a mask, all of its "
                "tokens would take loss. Rename the mask, name it with label_mask_paths, or ignore the masks with "
                "use_loss_mask=False."
            )


def home(path: str) -> str:
    """Return the folder of the parts."""
    return files.parent(path)


def split(folder: str, tree: Tree) -> Split:
    """Return the parts of a folder, and what its metadata say."""
    names = tree.names(folder)
    root = files.parent(folder) if files.name_of(folder) in ("train", "val") else folder
    statistics = Json.load(files.join(folder, _STATISTICS)) if _STATISTICS in names else Json("", {})
    configuration = statistics.object("configuration")
    origin = read_origin(dict.fromkeys((folder, root)), tree)
    if not origin.path:
        origin = _stated(configuration)
    for place in dict.fromkeys((folder, root)):
        origin = origin if origin.eos_token_id is not None else eos_of_folder(place, tree, origin)
    stated = configuration.text("token_dtype")
    numbers = _numbered(folder, names, _TOKENS)
    paths = {number: files.join(folder, numbers[number]) for number in sorted(numbers)}
    continued = _continued(statistics)
    return Split(
        files=tuple(paths.values()),
        origin=origin,
        dtype=None if stated is None else token_dtype(stated, statistics.path),
        sources=files.join(folder, "sources.bin") if "sources.bin" in names else "",
        continued=None if continued is None else frozenset(paths[each] for each in continued if each in paths),
    )


def _stated(configuration: Json) -> Origin:
    """What the statistics of a split say that was copied without prepare.json. Those of other tools have other keys."""

    def value(key: str, kind: type) -> Any:
        found = configuration.get(key)
        return found if type(found) is kind else None

    return Origin(
        eos_token_id=value("eos_token_id", int),
        pad_token_id=value("pad_token_id", int),
        tokenizer=value("tokenizer", str),
        tokenizer_sha256=value("tokenizer_sha256", str),
    )


def _check_whole(folder: str, names: frozenset[str], options: Options) -> None:
    """Refuse a folder that lacks a part, or a sidecar that other parts have."""
    tokens, masks = _numbered(folder, names, _TOKENS), _numbered(folder, names, _MASKS)
    wanted = range(max([*tokens, *masks]) + 1)
    needed = [(tokens, "token_ids")] + ([(masks, "labels_mask")] if options.masks is None else [])
    for number in wanted:
        for found, stem in needed:
            if number not in found:
                raise CorpusError(
                    f"{folder}: lacks {stem}_part_{number:04d}.npy, but part {max([*tokens, *masks])} is there: the corpus "
                    "is not whole. Copy the missing file, or prepare it again."
                )
    boundaries = [tokens[number].removesuffix(".npy") + ".csv.gz" for number in wanted]
    missing = [name for name in boundaries if name not in names]
    if missing and len(missing) < len(boundaries):
        raise CorpusError(f"{folder}: lacks {missing[0]}, but other parts have such a file: the corpus is not whole.")


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
    """Numbers of the parts whose first document began in the part before, where that is said."""
    if statistics.get("continued_parts") is None:
        return None
    numbers = statistics.items("continued_parts")
    if not all(type(number) is int for number in numbers):
        raise CorpusError(f"{statistics.path}: continued_parts is {numbers!r}; expected a list of numbers.")
    return frozenset(numbers)
