"""Format "files": token files that a path, a list, a glob or a folder names.

The names of a token file and of the files next to it decide the format of the token file. That format finds the sidecar files.
A token file `NAME.npy` that no other format recognizes may have document boundaries of Dolma's tokenizer, `NAME.csv.gz`.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Sequence
from typing import Any

from grain_sft.corpus.boundaries import CUTTING_KINDS
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format, checked_part, errors_of, formats
from grain_sft.corpus.formats.metadata import PREPARE, SPLIT, CorpusMetadata, DirectoryListing, is_visible
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile, scan_corpus, scan_in_threads
from grain_sft.corpus.shard import TOKEN_DTYPES
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import files

TOKEN_SUFFIXES = (".npy", ".bin", ".parquet")
LIST_SUFFIXES = (".txt", ".csv", ".mix", ".json")

BOUNDARIES = ".csv.gz"
_RECORDS = "gz|xz|zip|zst|json|jsonl|txt|csv|tsv|arrow|array_record|tfrecord.*|mds|npz|pkl|pt|safetensors"
_NOT_TOKENS = re.compile(rf".*\.({_RECORDS}|mix|md|ya?ml|toml|log|py|idx|index|metadata|loss|crc|arrays)")

# names of splits in paths, such as data/train/0.npy and fineweb_val_000000.npy
_TRAINING = re.compile(r"(?<=[/_.-])train(?=[/_.-])")
_HELD_OUT = re.compile(r"(?<=[/_.-])(val|valid|validation|dev|eval|test)(?=[/_.-])")


class Files(Format):
    """Format of token files that the caller lists in order."""

    expected = "a token file, a folder of .npy files, a glob, or a list of these"
    rank = 2
    any_path = takes_globs = True
    metadata_files = rf"{re.escape(SPLIT)}|{re.escape(PREPARE)}|(.*\.|train_|val_)?sources\.bin"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        """Return `path`. A local path that does not exist is an error, because this format is tried last."""
        if not (files.is_remote(path) or path.endswith(TOKEN_SUFFIXES) or is_glob(path) or os.path.exists(path)):
            words = path.split()
            fix = f"Write several paths as a list: {words}" if len(words) > 1 else "Fix the path"
            problem = f"{path}: no such file. Expected a mix file, an index, a directory, a glob, a token file"
            raise CorpusFileError(f"{problem}, or a prefix of Megatron's .bin and .idx. {fix}.")
        return path

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        return corpus_of_files([(path, "") for path in expand(found)], options, listing)

    def read_list(self, paths: Sequence[str], options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Open files, globs and folders. The folder of a prepared corpus opens its training split."""

        def token_files(path: str) -> Sequence[str]:
            return _training_split(path, options, listing) or expand(path)

        are_remote = any(map(files.is_remote, paths))  # folders in a bucket are searched at once
        opened = scan_in_threads(token_files, paths) if are_remote else map(token_files, paths)
        return corpus_of_files([(path, "") for paths in opened for path in paths], options, listing)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        """Return `NAME.npy` for its sidecar file `NAME.csv.gz`, and `path` itself for a token file."""
        if path.endswith(BOUNDARIES):
            return path.removesuffix(BOUNDARIES) + ".npy"
        name = files.name_of(path)
        if _NOT_TOKENS.fullmatch(name) and listing.sidecars(path, name):  # a missing file is reported later
            raise CorpusError(f"{path}: not a token file's name. Name token files only; open a mix or index by itself.")
        return path

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        return TokenFile(path, boundaries=boundaries_of(path, listing), continues=False)


class FileFormats:
    """Finder of the format of each file."""

    def __init__(self, listing: DirectoryListing) -> None:
        self._formats = formats()
        self._listing = listing

    def is_metadata(self, path: str) -> bool:
        """Return whether a format has a metadata file of this name."""
        name = files.name_of(path)
        return any(re.fullmatch(form.metadata_files, name) for form in self._formats)

    def owner(self, path: str) -> tuple[Format, str]:
        """Return the format of the file `path`, and the result of `Format.owner`."""
        for form in self._formats:
            with errors_of(form):
                owner = form.owner(path, self._listing)
            if owner is not None:
                return form, owner
        raise AssertionError('format "files" takes any path')

    def part(self, path: str) -> TokenFile:
        """Return the token file `path` with the sidecar files that its name implies, if they exist."""
        form, token_file = self.owner(path)
        with errors_of(form):
            # for a result of another type, `TokenFile(*…)` raises an error, which `errors_of` reports
            return TokenFile(*form.part(path, self._listing)) if token_file == path else TokenFile(path)

    def find_loss(self, path: str) -> TokenFile:
        """Return the token file `path` with the loss file that its name implies, if that exists."""
        # formats with `any_path` have no loss files, so no folder is listed for them
        return TokenFile(path) if self.owner(path)[0].any_path else self.part(path)

    def followed(self, path: str) -> str:
        """Return the target of `path` if `path` is a link and only the target has sidecar files; else return `path`."""
        if files.is_remote(path) or not os.path.islink(path):
            return path
        target = os.path.realpath(path)
        return target if self._has_sidecars(target) and not self._has_sidecars(path) else path

    def _has_sidecars(self, path: str) -> bool:
        part = self.part(path)
        return bool(part.loss or part.boundaries)


def corpus_of_files(sources: Sequence[tuple[str, str]], options: ReadOptions, listing: DirectoryListing) -> Corpus:
    """Return the corpus of the files `sources`: (path or URL, label) of each. Sidecar files may be among them."""
    file_formats = FileFormats(listing)
    labelled = [(files.absolute(path), label) for path, label in sources]
    options.check_paths([path for path, _ in labelled])  # before any file is opened
    listing.list_at_once(path for path, _ in labelled)

    parts: list[TokenFile] = []
    splits: list[Split] = []  # the split of each of `parts`
    split_at: dict[tuple[Format, str], Split] = {}  # by format and by `Format.home` of a file
    token_file_of: dict[str, str] = {}  # for each sidecar file that the caller names, its token file
    for named_path, label in labelled:
        if file_formats.is_metadata(named_path):
            continue
        path = file_formats.followed(named_path)
        form, token_file = file_formats.owner(path)
        if token_file != path:  # `path` is a sidecar file
            token_file_of[path] = token_file
            continue
        with errors_of(form):
            home = form.home(path)
            if (form, home) not in split_at:
                split_at[form, home] = form.split(home, listing)
            part, split = checked_part(form, path, listing), split_at[form, home]
            continues = _continues(part, split, parts[-1].tokens if parts else "")
            parts.append(part._replace(label=label, continues=continues))
        splits.append(split)

    token_files = [part.tokens for part in parts]
    listed = set(token_files)
    for path, token_file in token_file_of.items():
        if token_file not in listed:
            raise CorpusError(f"{path}: belongs to the token file {token_file}, which is not among the files. Name both.")
    if not parts:
        raise CorpusError(f"{labelled[0][0]}: holds no tokens, and no other file is named. Name the token files.")
    forms = dict.fromkeys(form for form, _ in split_at)
    for form in forms:
        with errors_of(form):
            if form.takes_lists:
                if len(forms) > 1:  # `read_list` opens only files of its own format
                    raise CorpusError(f"{token_files[0]}: only some files are Megatron's. Make a mixture of two corpora.")
                corpus = form.read_list(token_files, options, listing)
                pairs = zip(corpus.shards, parts, strict=True)
                shards = tuple(dataclasses.replace(shard, label=part.label) for shard, part in pairs)
                return dataclasses.replace(corpus, shards=shards)
            form.check_parts(parts, options, listing)
    return scan_corpus(joined_split(token_files, splits, options), parts, options)


def boundaries_of(path: str, listing: DirectoryListing) -> str:
    """Return the path of the `NAME.csv.gz` next to the token file `NAME.npy`; "" if it does not exist."""
    name = files.name_of(path)
    return listing.sidecar(path, name.removesuffix(".npy") + BOUNDARIES) if name.endswith(".npy") else ""


def is_glob(path: str) -> bool:
    """Return whether `path` is a glob pattern. An existing file or folder is not a pattern, even if its name has brackets."""
    return glob.has_magic(path) and not is_visible(path)


def _training_split(path: str, options: ReadOptions, listing: DirectoryListing) -> Sequence[str]:
    """Return the token files of a split, or of the training split of a prepared corpus; () if `path` is neither."""
    if is_glob(path) or path.endswith(TOKEN_SUFFIXES):
        return ()
    for form in formats():
        with errors_of(form):
            home = None if form.any_path else form.detect(files.absolute(path), listing)
            if home is not None and (found := form.whole_split(home, options, listing).files):
                return tuple(found)
    return ()


def expand(path: str) -> list[str]:
    """Return the sorted matches of a glob, the sorted .npy files below a folder, or one file."""
    if is_glob(path):
        found = files.glob(path)
        if not found:
            raise CorpusFileError(f"{path}: the glob matches no file. Fix the pattern.")
        return found
    if files.is_remote(path):
        if path.endswith(TOKEN_SUFFIXES) or files.is_file(path):
            return [path]
        found = files.glob(f"{glob.escape(path.rstrip('/'))}/**/*.npy")
    elif os.path.isdir(path):
        path = files.absolute(path)
        found = _below(path)
    else:
        return [path]
    if not found:
        raise CorpusFileError(f"{path}: holds no .npy file. Give a glob of the training files, if they have another suffix.")
    for form in formats():
        with errors_of(form):
            found = [os.fspath(path) for path in form.training_files(found)]
    check_training(path, found)
    return found


def _below(folder: str) -> list[str]:
    """Return the sorted .npy files below a local folder. A link to another folder with such files is an error.

    Hidden files and folders, such as those of deleted files, are left out, as by globs. A link to a missing file is among the
    results. Opening it is an error.
    """
    walked = list(os.walk(folder, onerror=files.refuse_unlisted))
    searched = {os.path.realpath(each) for each, _, _ in walked}
    for link in (os.path.join(each, name) for each, names, _ in walked for name in names):
        if os.path.realpath(link) not in searched and files.glob(f"{glob.escape(link)}/**/*.npy"):
            problem = f"{link}: is a link to a folder of token files, and links are not followed"
            raise CorpusFileError(f"{problem}. Give the glob '{folder}/**/*.npy', which follows them.")
    found = (os.path.join(each, name) for each, _, names in walked for name in names if name.endswith(".npy"))
    return sorted(path for path in found if path.count("/.") == folder.count("/."))  # `folder` may be in a hidden folder


def check_training(folder: str, found: Sequence[str]) -> None:
    """Refuse files of a validation split among `found`, the token files below `folder`."""
    # The key is the path before the name of the split: "data/fineweb_" for "data/fineweb_train_0.npy".
    training = {file[: match.start()]: file for file in found for match in _TRAINING.finditer(file)}
    for file in found:
        for match in _HELD_OUT.finditer(file):
            if training_file := training.get(file[: match.start()]):
                problem = f"holds {training_file} and {file}, so a run would also train on held-out tokens"
                # the suffix of `file` is .npy or .bin
                fix = f"Give a glob of the training files, or '{folder.rstrip('/')}/**/*{file[-4:]}' for all files"
                raise CorpusError(f"{folder}: {problem}. {fix}.")
    for split in sorted({files.parent(file) for file in found} - {files.absolute(folder).rstrip("/")}):
        # `Format.training_files` removes val/ if train/ exists, so a val/ that is left has no train/ next to it
        corpus = files.parent(split)
        if files.name_of(split) == "val" and files.exists(files.join(corpus, PREPARE)):
            raise CorpusError(f"{corpus}: lacks its training split, train/. Copy it, or name {split}.")


def _continues(part: TokenFile, split: Split, before: str) -> bool | None:
    """Return whether the first document of `part` began in `before`; None if EOS tokens have to decide.

    `before` is the token file before `part` in the corpus, or "". A `part` that the split does not list is taken to follow
    `before` if both are in the same folder.
    """
    if part.boundaries_kind not in CUTTING_KINDS or part.continues is False:
        return part.continues
    predecessor = split.predecessors.get(part.tokens)
    follows = files.parent(before) == files.parent(part.tokens) if predecessor is None else predecessor == before
    if before and not follows:
        return False
    return None if split.continued is None else part.tokens in split.continued


def joined_split(paths: Sequence[str], splits: Sequence[Split], options: ReadOptions) -> Split:
    """Return one split of all `paths`, with the facts that all `splits` state. `splits[i]` is the split of `paths[i]`."""
    first_files: dict[int, tuple[str, Split]] = {}  # by the `id` of a split: its first file, and the split
    for path, split in zip(paths, splits, strict=True):
        first_files.setdefault(id(split), (path, split))
    if len(first_files) == 1:
        split = splits[0]
        if split.files != tuple(paths):  # `split.sources` lists the documents of `split.files`, not of `paths`
            split = dataclasses.replace(split, sources="")
        return split
    facts_of = {path: {**vars(split.metadata), **vars(split)} for path, split in first_files.values()}

    def common(name: str) -> Any:
        """Return a fact that all splits state; None if a split does not. Refuse different values."""
        stated = [(facts[name], path) for path, facts in facts_of.items() if facts[name] is not None]
        for value, path in stated:
            first, first_path = stated[0]
            if value != first:
                problem = f"{first_path}: its {name} is {first}, but that of {path} is {value}"
                raise CorpusError(f"{problem}. A corpus has one tokenizer and one dtype: open two corpora.")
        return stated[0][0] if len(stated) == len(facts_of) else None

    def if_equal(name: str) -> Any:
        """Return a fact that is the same in all splits; None if splits differ."""
        values = [facts[name] for facts in facts_of.values()]
        return values[0] if all(value == values[0] for value in values) else None

    eos = None if options.eos_token_id is not None else common("eos_token_id")
    metadata = CorpusMetadata(eos, common("pad_token_id"), if_equal("tokenizer"), common("tokenizer_sha256"))
    return Split(metadata=metadata, dtype=options.dtype or common("dtype"), dtypes=if_equal("dtypes") or TOKEN_DTYPES)
