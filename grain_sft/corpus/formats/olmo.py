"""Format olmo: numbered parts, as open-instruct's `convert_sft_data_for_olmocore.py` writes them for OLMo-core.

The files of part NNNN are:
  - `token_ids_part_NNNN.npy`: tokens, raw uint8 to uint64;
  - `labels_mask_part_NNNN.npy`: label mask, raw bool, absent for a corpus of plain documents;
  - `token_ids_part_NNNN.csv.gz`: document boundaries, lines `start,end` counted from the first token of the part.
"""

import re
from collections.abc import Sequence
from typing import Any

from grain_sft.corpus.formats import CorpusMetadata, DirectoryListing, Format
from grain_sft.corpus.formats.files import boundaries_of
from grain_sft.corpus.formats.metadata import LABEL_MASKS, SPLIT, Json, fill_ids, folders_of_split, read_metadata
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_TOKENS = re.compile(r"token_ids_part_(\d+)\.npy")
_MASKS = re.compile(r"labels_mask_part_(\d+)\.npy")
# names without a number, too, for files that the caller lists
_ANY_TOKENS = re.compile(r"token_ids(.*)\.npy")
_ANY_MASK = re.compile(r"labels_mask(.*)\.npy")
_STATISTICS = "dataset_statistics.json"


class Olmo(Format):
    """Format of a folder of numbered parts. Each part is a shard, in the order of the numbers."""

    expected = (
        "a directory with token_ids_part_NNNN.npy and labels_mask_part_NNNN.npy, or with a train/ that has these files. "
        "A corpus of plain documents, which grain-sft prepare --template text writes, has no masks"
    )
    metadata_files = r"dataset_statistics\.(json|txt)"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        """Return the folder that has the parts: `path` or its subfolder train/. None if neither has them."""
        for folder in (path, files.join(path, "train")):
            names = listing.names(folder)
            has_tokens, has_masks = (any(map(pattern.fullmatch, names)) for pattern in (_TOKENS, _MASKS))
            # a folder without masks has this format only if its metadata state that the corpus has no masks
            if has_masks or (has_tokens and _stated_masks(folder, listing)[0] is False):
                return folder
        return None

    def whole_split(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Split:
        _check_whole(found, listing.names(found))
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
        """Return the parts in the folder `home`, with the metadata of corpus.json, prepare.json or dataset_statistics.json.

        An unknown EOS id is taken from the files of the tokenizer.
        """
        folders = folders_of_split(home)
        statistics = listing.read_json(home, _STATISTICS)
        configuration = statistics.object("configuration")
        metadata = read_metadata(folders, listing)
        if not metadata.path:
            metadata = _metadata_in_statistics(configuration)
        for folder in folders:
            if metadata.eos_token_id is None:
                metadata = fill_ids(metadata, folder, listing)
        stated_dtype = configuration.get("token_dtype", str)
        dtype = None if stated_dtype is None else token_dtype(stated_dtype, statistics.path)
        parts = _numbered(home, listing.names(home), _TOKENS)
        # If part 2 is missing, list it anyway, before part 3. Otherwise, a document might seem to continue from part 1 to
        # part 3.
        for number in list(parts):
            if number > 0:
                parts.setdefault(number - 1, f"token_ids_part_{number - 1:04d}.npy")
        paths = {number: files.join(home, parts[number]) for number in sorted(parts)}
        # numbers of the parts whose first document began in the part before
        numbers = statistics.get("continued_parts", list[int])
        continued = None if numbers is None else frozenset(paths[number] for number in numbers if number in paths)
        sources = listing.find(home, "sources.bin")
        return Split(tuple(paths.values()), metadata, dtype, sources=sources, continued=continued)

    def check_parts(self, parts: Sequence[TokenFile], options: ReadOptions, listing: DirectoryListing) -> None:
        """Refuse parts without label masks if their folder holds masks, or if its metadata state that masks exist.

        If some of `parts` have masks, nothing is refused here, because `scan_corpus` compares the parts.
        """
        if options.use_loss_mask is False or options.masks is not None or any(part.loss for part in parts):
            return
        tokens = [part.tokens for part in parts if _ANY_TOKENS.fullmatch(files.name_of(part.tokens))]
        # reversed, so that the first file of each folder is assigned last
        first_of_folder = {files.parent(path): path for path in reversed(tokens)}
        for folder, path in first_of_folder.items():
            masks = sorted(name for name in listing.names(folder) if _ANY_MASK.fullmatch(name))
            has_masks, metadata = _stated_masks(folder, listing)
            if masks:
                problem = f"lacks its label mask, but its folder holds {masks[0]}"
            elif has_masks:
                problem = f"has no label mask, but {metadata} is of a corpus with label masks"
            else:
                continue
            fix = "Copy or rename the mask, give label_mask_paths, or ignore masks with use_loss_mask=False"
            raise CorpusError(f"{path}: {problem}. Without a mask, all of its tokens would take loss. {fix}.")

    def training_files(self, paths: Sequence[str]) -> list[str]:
        """Return `paths` without those in DIR/val, if both DIR/val and DIR/train have parts."""
        folders = {files.parent(path) for path in paths if _TOKENS.fullmatch(files.name_of(path))}
        training = [folder for folder in folders if files.name_of(folder) == "train"]
        validation = {files.join(files.parent(folder), "val") for folder in training}
        return [path for path in paths if files.parent(path) not in validation & folders]


def _stated_masks(folder: str, listing: DirectoryListing) -> tuple[bool | None, str]:
    """Return whether the parts of a folder have label masks, and the metadata file that states it; (None, "") if none does.

    Metadata of this format without the key `LABEL_MASKS` count as True: tools that omit the key always write masks.
    """
    implied: tuple[bool | None, str] = None, ""  # the result if no file has the key
    for name in (SPLIT, _STATISTICS):
        data = listing.read_json(folder, name)
        if not data.path:
            continue
        stated = (data.object("configuration") if name == _STATISTICS else data).get(LABEL_MASKS)
        if isinstance(stated, bool):
            return stated, data.path
        if name == _STATISTICS or data.get("corpus_format") == "olmo":
            implied = True, data.path
    return implied


def _metadata_in_statistics(configuration: Json) -> CorpusMetadata:
    """Return the metadata in dataset_statistics.json. Values of wrong types, which other tools write, are left out."""
    kinds = {"eos_token_id": int, "pad_token_id": int, "tokenizer": str, "tokenizer_sha256": str}
    stated = {key: configuration.get(key) for key in kinds}
    # -1: the tokenizer has no such token
    valid: dict[str, Any] = {key: value for key, value in stated.items() if type(value) is kinds[key] and value != -1}
    return CorpusMetadata(**valid)


def _check_whole(folder: str, names: frozenset[str]) -> None:
    """Refuse a folder that lacks a token file, or boundaries that other parts have. `scan_corpus` refuses a missing mask."""
    tokens, masks = _numbered(folder, names, _TOKENS), _numbered(folder, names, _MASKS)
    last = max([*tokens, *masks])
    for number in range(last + 1):
        if number not in tokens:
            raise CorpusError(f"{folder}: lacks token_ids_part_{number:04d}.npy, but part {last} exists. Copy it.")
    boundaries = [name.removesuffix(".npy") + ".csv.gz" for name in tokens.values()]
    missing = [name for name in boundaries if name not in names]
    if missing and len(missing) < len(boundaries):
        raise CorpusError(f"{folder}: lacks {missing[0]}, but other parts have such a file. Copy it.")


def _numbered(folder: str, names: frozenset[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return the names that match `pattern`, by the number in its group 1, ascending."""
    by_number: dict[int, str] = {}
    for name in sorted(names):
        if match := pattern.fullmatch(name):
            number = int(match[1][:18])  # at most 18 digits, because `int` refuses very long numbers
            if number in by_number:
                raise CorpusError(f"{folder}: {by_number[number]} and {name} are both part {number}. Remove one.")
            by_number[number] = name
    return dict(sorted(by_number.items()))
