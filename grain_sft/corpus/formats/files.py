"""Format files: token files given by a path, a list, a glob or a folder, each with its sidecar files.

A token file of no other format is raw tokens. `NAME.npy` may have `NAME.csv.gz`, document boundaries by Dolma's tokenizer.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grain_sft.corpus.boundaries import CUTTING_KINDS
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format, formats
from grain_sft.corpus.formats.metadata import PREPARE, SPLIT, CorpusMetadata, DirectoryListing
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile, in_threads, scan_corpus
from grain_sft.corpus.shard import TOKEN_DTYPES
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import files

TOKEN_SUFFIXES = (".npy", ".bin", ".parquet")
LIST_SUFFIXES = (".txt", ".csv", ".mix", ".json")

_BOUNDARIES = ".csv.gz"
_NO_TOKENS = re.compile(r".*\.(gz|zst|json|jsonl|txt|csv|tsv|mix|md|ya?ml|toml|log|idx|arrays)")


class Files(Format):
    """Format of token files, in order. Sidecar and metadata files among the paths are never read as tokens."""

    expected = "a token file, a folder of .npy files, a glob, or a list of these"
    rank = 2
    any_path = takes_globs = True
    metadata_files = rf"{re.escape(SPLIT)}|{re.escape(PREPARE)}|(.*\.|train_|val_)?sources\.bin"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        """Return `path`: a path of no other format is a file or a glob. An absent local path is an error."""
        if not (files.is_remote(path) or path.endswith(TOKEN_SUFFIXES) or is_glob(path) or os.path.exists(path)):
            several = f" Write several paths as a list: {path.split()}." if len(path.split()) > 1 else ""
            raise CorpusFileError(
                f"{path}: no such file. Expected a mix file, an index, a directory, a glob, a token file, or a prefix of "
                f"Megatron's .bin and .idx.{several}"
            )
        return path

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        return corpus_of_files([(path, "") for path in expand(found)], options, listing)

    def read_list(self, paths: Sequence[str], options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Open files, globs and directories in order. A prepared corpus among them stands for its training split."""
        if not paths:
            raise CorpusError("an empty list of files: a corpus has at least one.")
        found = (_training_split(path, options, listing) or expand(path) for path in paths)
        return corpus_of_files([(path, "") for some in found for path in some], options, listing)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        if path.endswith(_BOUNDARIES):
            return path.removesuffix(_BOUNDARIES) + ".npy"
        name = files.name_of(path)
        if _NO_TOKENS.fullmatch(name) and listing.sidecars(path, name):
            raise CorpusError(
                f"{path}: its name is not that of a token file. Name token files only, and open a mix or an index by itself."
            )
        return path

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        return TokenFile(path, boundaries=boundaries_of(path, listing), continues=False)


class FileFormats:
    """Formats of token files that are listed one by one, inferred from their names and neighbours."""

    def __init__(self, listing: DirectoryListing) -> None:
        self.formats, self._listing = formats(), listing

    def is_metadata(self, path: str) -> bool:
        """Return whether the file holds metadata, by its name."""
        name = files.name_of(path)
        return any(re.fullmatch(form.metadata_files, name) for form in self.formats)

    def owner(self, path: str) -> tuple[Format, str]:
        """Return the format of a file, and its token file: `path` itself, or the one whose sidecar it is."""
        owners = ((form, form.owner(path, self._listing)) for form in self.formats)
        return next((form, owner) for form, owner in owners if owner is not None)

    def find_loss(self, path: str) -> TokenFile:
        """Return the token file `path` with the loss file that its name implies, if that exists."""
        form, owner = self.owner(path)
        if owner != path or form.any_path:  # raw tokens have no loss file; listing their folder would take requests
            return TokenFile(path)
        return form.part(path, self._listing)

    def followed(self, path: str) -> str:
        """Return the target of the link `path` if only the target has sidecars, else `path`."""
        target = path if files.is_remote(path) or not os.path.islink(path) else os.path.realpath(path)
        return target if target != path and self._has_sidecars(target) and not self._has_sidecars(path) else path

    def _has_sidecars(self, path: str) -> bool:
        form, owner = self.owner(path)
        part = form.part(path, self._listing) if owner == path else TokenFile(path)
        return bool(part.loss or part.boundaries)


def corpus_of_files(sources: Sequence[tuple[str, str]], options: ReadOptions, listing: DirectoryListing) -> Corpus:
    """Return the corpus of `sources`, (path or URL, label) of each token file, in order; sidecars may be among them."""
    by_name = FileFormats(listing)
    labels = [(files.absolute(path), label) for path, label in sources]
    options.check_paths([path for path, _ in labels])  # before any file is opened
    folders = {files.parent(path) for path, _ in labels if files.is_remote(path)}
    if len(folders) > 1:
        in_threads(listing.names, folders)  # a request for each
    parts: list[TokenFile] = []
    split_of_part: list[Split] = []
    sidecars: dict[str, str] = {}
    splits: dict[tuple[Format, str], Split] = {}
    for path, label in ((by_name.followed(path), label) for path, label in labels if not by_name.is_metadata(path)):
        form, owner = by_name.owner(path)
        if owner != path:
            sidecars[path] = owner
            continue
        key = form, form.home(path)
        if key not in splits:
            splits[key] = form.split(key[1], listing)
        part = form.part(path, listing)
        continues = _continues(part, splits[key], parts[-1].tokens if parts else "")
        parts.append(part._replace(label=label, continues=continues))
        split_of_part.append(splits[key])
    tokens = {part.tokens for part in parts}
    for path, owner in sidecars.items():
        if owner not in tokens:
            raise CorpusError(f"{path}: belongs to the token file {owner}, which is not among the files. Name both.")
    if not parts:
        raise CorpusError(f"{labels[0][0]}: holds no tokens, and no other file is named. Name the token files.")
    forms = list(dict.fromkeys(form for form, _ in splits))
    for form in forms:
        if not form.takes_lists:
            form.check_parts(parts, options, listing)
        elif len(forms) > 1:
            raise CorpusError(
                f"{parts[0].tokens}: among the files are ones of another format. Expected Megatron's .bin and .idx files "
                "alone. Make a mixture of two corpora."
            )
        else:
            corpus = form.read_list([part.tokens for part in parts], options, listing)
            shards = zip(corpus.shards, parts, strict=True)
            labelled = [dataclasses.replace(shard, label=part.label) for shard, part in shards]
            return dataclasses.replace(corpus, shards=tuple(labelled))
    return scan_corpus(joined_split([part.tokens for part in parts], split_of_part, options), parts, options)


def boundaries_of(path: str, listing: DirectoryListing) -> str:
    """Return the path of the `NAME.csv.gz` of a token file; "" if it does not exist."""
    name = files.name_of(path)
    return listing.sidecar(path, name.removesuffix(".npy") + _BOUNDARIES) if name.endswith(".npy") else ""


def is_glob(path: str) -> bool:
    """Return whether `path` is a glob pattern. An existing local file is not, even if its name has brackets."""
    return glob.has_magic(path) and (files.is_remote(path) or not os.path.exists(path))


def _training_split(path: str, options: ReadOptions, listing: DirectoryListing) -> Sequence[str]:
    """Return the token files of a prepared corpus, or of the split at `path`; () for another path."""
    if not is_glob(path) and not path.endswith(TOKEN_SUFFIXES):
        for form in formats():
            home = None if form.any_path else form.detect(files.absolute(path), listing)
            if home is not None and (split := form.whole_split(home, options, listing).files):
                return split
    return ()


def expand(path: str) -> list[str]:
    """Return the files of one path, glob or folder, sorted."""
    if is_glob(path):
        found = files.glob(path)
        if not found:
            raise CorpusFileError(f"{path}: the glob matches no file.")
        return found
    if files.is_remote(path):
        if path.endswith(TOKEN_SUFFIXES) or files.is_file(path):
            return [path]
        found = files.glob(path.rstrip("/") + "/**/*.npy") or files.glob(path.rstrip("/") + "/*.npy")
    elif os.path.isdir(path):
        found = sorted(str(file) for file in Path(path).rglob("*.npy") if file.is_file())
    else:
        return [path]
    if not found:
        raise CorpusFileError(f"{path}: holds no .npy file. Give a glob, if its token files have another suffix.")
    for form in formats():
        found = form.training_files(found)
    return found


def _continues(part: TokenFile, split: Split, before: str) -> bool | None:
    """Return whether the first document of `part` began in `before`, the previous file or ""; None: EOS tokens decide.

    It can only have begun in the file that precedes `part` in `split`. If `split` does not list `part` (its folder can't be
    listed, or its name has no number), it can only have begun in a file of the same folder.
    """
    if part.boundaries_kind not in CUTTING_KINDS or part.continues is False:
        return part.continues
    predecessor = split.predecessors.get(part.tokens)
    follows = files.parent(before) == files.parent(part.tokens) if predecessor is None else predecessor == before
    if before and not follows:
        return False
    return None if split.continued is None else part.tokens in split.continued


def joined_split(paths: Sequence[str], splits: Sequence[Split], options: ReadOptions) -> Split:
    """Return one split of the token files `paths`, with the metadata that `splits`, the split of each, share."""
    firsts: dict[int, tuple[str, Split]] = {}
    for path, split in zip(paths, splits, strict=True):
        firsts.setdefault(id(split), (path, split))
    if len(firsts) == 1:
        whole = splits[0].files == tuple(paths)
        return splits[0] if whole else dataclasses.replace(splits[0], sources="")  # that of absent documents, too
    facts_of = {path: {**vars(split.metadata), "dtype": split.dtype} for path, split in firsts.values()}

    def agreed(name: str) -> Any:
        """Return the value that all splits share, None if a split lacks it; refuse different values."""
        stated = [(facts[name], path) for path, facts in facts_of.items() if facts[name] is not None]
        for value, path in stated:
            first, first_path = stated[0]
            if value != first:
                raise CorpusError(
                    f"{first_path}: its {name} is {first}, but that of {path} is {value}. All files of a corpus are made with "
                    "one tokenizer and have one dtype: open them as two corpora."
                )
        return stated[0][0] if len(stated) == len(facts_of) else None

    names = {facts["tokenizer"] for facts in facts_of.values()}
    dtypes = {tuple(split.dtypes) for split in splits}
    metadata = CorpusMetadata(
        eos_token_id=None if options.eos_token_id is not None else agreed("eos_token_id"),
        pad_token_id=agreed("pad_token_id"),
        tokenizer=names.pop() if len(names) == 1 else None,
        tokenizer_sha256=agreed("tokenizer_sha256"),
    )
    dtype = options.dtype or agreed("dtype")
    return Split(metadata=metadata, dtype=dtype, dtypes=dtypes.pop() if len(dtypes) == 1 else TOKEN_DTYPES)
