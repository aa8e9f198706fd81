"""Format olmo: parts of tokens, label masks and boundaries, as open-instruct's `convert_sft_data_for_olmocore.py` writes.

`token_ids_part_NNNN.npy` (raw uint8 to uint64), `labels_mask_part_NNNN.npy` (raw bool), `token_ids_part_NNNN.csv.gz`. A corpus
of plain documents has no masks, and its metadata says so.
"""

import re
from collections.abc import Sequence

from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.files import boundaries_of
from grain_sft.corpus.formats.metadata import (
    LABEL_MASKS,
    SPLIT,
    SPLIT_FORMAT,
    CorpusMetadata,
    DirectoryListing,
    Json,
    fill_ids,
    folders_of_split,
    read_metadata,
)
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_TOKENS = re.compile(r"token_ids_part_(\d+)\.npy")
_MASKS = re.compile(r"labels_mask_part_(\d+)\.npy")
_ANY_TOKENS = re.compile(r"token_ids(.*)\.npy")
_ANY_MASK = re.compile(r"labels_mask(.*)\.npy")
_STATISTICS = "dataset_statistics.json"


class Olmo(Format):
    """Format whose corpus is the parts in a folder, in the order of their numbers."""

    expected = (
        "a directory with token_ids_part_NNNN.npy and labels_mask_part_NNNN.npy, or one whose train/ has them; or one "
        "of plain documents, which grain-sft prepare --template text writes"
    )
    metadata_files = r"dataset_statistics\.(json|txt)"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        for folder in (path, files.join(path, "train")):
            names = listing.names(folder)
            if any(_MASKS.fullmatch(name) for name in names):
                return folder
            if any(_TOKENS.fullmatch(name) for name in names) and _stated_masks(folder, listing)[0] is False:
                return folder
        return None

    def whole_split(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Split:
        _check_whole(found, listing.names(found), options)
        return self.split(found, listing)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        name = files.name_of(path)
        if mask := _ANY_MASK.fullmatch(name):
            return files.join(files.parent(path), f"token_ids{mask[1]}.npy")
        return path if _ANY_TOKENS.fullmatch(name) else None

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        mask = files.name_of(path).replace("token_ids", "labels_mask", 1)
        return TokenFile(path, listing.sidecar(path, mask), boundaries=boundaries_of(path, listing))

    def home(self, path: str) -> str:
        return files.parent(path)

    def split(self, home: str, listing: DirectoryListing) -> Split:
        """Return the numbered parts of `home`, with metadata from prepare.json, else from the statistics and tokenizer.

        Before a gap in the numbers the last absent part is listed, too, so that no document continues across the gap.
        """
        folders = folders_of_split(home)
        path = listing.find(home, _STATISTICS)
        statistics = Json.load(path) if path else Json("", {})
        configuration = statistics.object("configuration")
        metadata = read_metadata(folders, listing)
        if not metadata.path:  # no prepare.json; values of other types in other tools' statistics are left out
            kinds = {"eos_token_id": int, "pad_token_id": int, "tokenizer": str, "tokenizer_sha256": str}
            valid = {key: configuration.get(key) for key, kind in kinds.items() if type(configuration.get(key)) is kind}
            metadata = CorpusMetadata(**{key: value for key, value in valid.items() if value != -1})  # -1: no token
        for folder in folders:
            metadata = metadata if metadata.eos_token_id is not None else fill_ids(metadata, folder, listing)
        dtype = configuration.text("token_dtype")
        numbered = _numbered(home, listing.names(home), _TOKENS)
        absent = {n - 1: f"token_ids_part_{n - 1:04d}.npy" for n in numbered if n and n - 1 not in numbered}
        paths = {number: files.join(home, name) for number, name in sorted({**numbered, **absent}.items())}
        continued = statistics.items("continued_parts")
        if not all(type(number) is int for number in continued):
            raise CorpusError(f"{statistics.path}: continued_parts is {continued!r}; expected a list of numbers.")
        states_continued = statistics.get("continued_parts") is not None
        return Split(
            files=tuple(paths.values()),
            metadata=metadata,
            dtype=None if dtype is None else token_dtype(dtype, statistics.path),
            sources=listing.find(home, "sources.bin"),
            continued=frozenset(paths[each] for each in continued if each in paths) if states_continued else None,
        )

    def check_parts(self, parts: Sequence[TokenFile], options: ReadOptions, listing: DirectoryListing) -> None:
        """Refuse parts that all lack a label mask, although their folder holds masks or its metadata states them."""
        if options.use_loss_mask is False or options.masks is not None or any(each.loss for each in parts):
            return
        for each in parts:
            if not _ANY_TOKENS.fullmatch(files.name_of(each.tokens)):
                continue
            folder = files.parent(each.tokens)
            mask = min((name for name in listing.names(folder) if _ANY_MASK.fullmatch(name)), default=None)
            has_masks, metadata = _stated_masks(folder, listing)
            if mask is not None:
                found = f"has no label mask of its name, but its folder holds {mask}"
            elif has_masks:
                found = f"has no label mask, but {metadata} is of a corpus with label masks"
            else:
                continue
            raise CorpusError(
                f"{each.tokens}: {found}. Without a mask, all of its tokens would take loss. Copy or rename the mask, name it "
                "with label_mask_paths, or ignore the masks with use_loss_mask=False."
            )

    def training_files(self, paths: Sequence[str]) -> list[str]:
        """Leave out the files of each val/ with parts that has a sibling train/ with parts."""
        folders = {files.parent(path) for path in paths if _TOKENS.fullmatch(files.name_of(path))}
        validation = {each for each in folders if files.name_of(each) == "val"}
        validation = {each for each in validation if files.join(files.parent(each), "train") in folders}
        return [path for path in paths if files.parent(path) not in validation]


def _stated_masks(folder: str, listing: DirectoryListing) -> tuple[bool | None, str]:
    """Return whether the parts of a folder have label masks, by its metadata, and the path of these.

    Metadata that state nothing are of a writer that writes a mask for every part. Without metadata, return (None, "").
    """
    found: tuple[bool | None, str] = None, ""
    for name in (SPLIT, _STATISTICS):
        if path := listing.find(folder, name):
            data = Json.load(path)
            stated = (data.object("configuration") if name == _STATISTICS else data).get(LABEL_MASKS)
            if isinstance(stated, bool):
                return stated, path
            if name == _STATISTICS or (data.get("format"), data.get("corpus_format")) == (SPLIT_FORMAT, "olmo"):
                found = True, path
    return found


def _check_whole(folder: str, names: frozenset[str], options: ReadOptions) -> None:
    """Refuse a folder that lacks a part, or a sidecar that other parts have."""
    tokens, masks = _numbered(folder, names, _TOKENS), _numbered(folder, names, _MASKS)
    last = max([*tokens, *masks])
    needs_masks = masks and options.masks is None and options.use_loss_mask is not False
    for number in range(last + 1):
        for found, stem in ((tokens, "token_ids"), (masks, "labels_mask")):
            if number not in found and (found is tokens or needs_masks):
                raise CorpusError(f"{folder}: lacks {stem}_part_{number:04d}.npy, but part {last} exists. Copy it.")
    boundaries = [name.removesuffix(".npy") + ".csv.gz" for name in tokens.values()]
    missing = [name for name in boundaries if name not in names]
    if missing and len(missing) < len(boundaries):
        raise CorpusError(f"{folder}: lacks {missing[0]}, but other parts have such a file: the corpus is not whole.")


def _numbered(folder: str, names: frozenset[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return the names that match, by their numbers, which ascend."""
    found: dict[int, str] = {}
    for name in sorted(names):
        if match := pattern.fullmatch(name):
            number = int(match[1][:18])
            if number in found:
                raise CorpusError(f"{folder}: {found[number]} and {name} are both part {number}. Remove one of them.")
            found[number] = name
    return dict(sorted(found.items()))
