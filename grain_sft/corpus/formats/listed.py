"""Token files that are named one by one (lists, globs, mixes, MaxText's index), with the sidecars that belong to each."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import episodes, olmo, plain, primer
from grain_sft.corpus.formats.aligned import Part
from grain_sft.corpus.formats.metadata import PREPARE, SPLIT, Origin
from grain_sft.corpus.formats.options import Options
from grain_sft.corpus.formats.splits import Split, corpus_of_split
from grain_sft.corpus.formats.tree import Tree
from grain_sft.corpus.scan import THREADS
from grain_sft.corpus.shard import TOKEN_DTYPES
from grain_sft.errors import CorpusError
from grain_sft.storage import files

_METADATA = re.compile(
    rf"{re.escape(SPLIT)}|{re.escape(PREPARE)}|dataset_statistics\.(json|txt)|dataset_metadata\.json|tokenizer_state\.json"
    r"|meta\.json|(.*[._])?sources\.bin|.*\.first_weights\.bin"
)
"""Names of files that hold no tokens, for each format."""
_ROWS = re.compile(r"(rows|loss)_\d{4}\.bin|documents_\d{4}\.idx")
_NO_TOKENS = re.compile(r".*\.(gz|zst|json|jsonl|txt|csv|md|yaml|idx|arrays)")

T = TypeVar("T")


class _Format(Protocol):
    """What a format says of single files."""

    def owner(self, path: str, tree: Tree) -> str | None:
        """Return the token file that `path` belongs to: itself, or the one whose sidecar it is; None: of another format."""

    def part(self, path: str, tree: Tree) -> Part:
        """Return a token file with its sidecars."""

    def home(self, path: str) -> str:
        """Return the folder, or the beginning of the paths, of a token file's split."""

    def split(self, home: str, tree: Tree) -> Split:
        """Return the split that is there."""


_FORMATS: tuple[_Format, ...] = (olmo, episodes, primer, plain)  # modules


class _Listed(NamedTuple):
    """A token file of the list."""

    part: Part
    split: Split


def corpus_of_files(sources: Sequence[tuple[str, str]], options: Options, tree: Tree) -> Corpus:
    """Return the corpus of token files, in order, each with its sidecars.

    Sidecars and metadata among them are read as what they are, never as tokens.

    Args:
      sources: (absolute path or URL, label) of each file.

    Raises:
      CorpusFileError: a file is missing or unreadable.
      CorpusError: a sidecar whose tokens are not among the files, or files that don't fit together.
    """
    _list_folders([path for path, _ in sources], tree)
    listed: list[_Listed] = []
    sidecars: dict[str, str] = {}
    splits: dict[tuple[_Format, str], Split] = {}
    for path, label in sources:
        if is_metadata(path):
            continue
        _refuse_others(path, tree)
        path = _followed(path, tree)
        form, owner = _owner(path, tree)
        if owner != path:
            sidecars[path] = owner
            continue
        key = form, form.home(path)
        if key not in splits:
            splits[key] = form.split(key[1], tree)
        listed.append(_Listed(form.part(path, tree)._replace(label=label), splits[key]))
    _check_sidecars(sidecars, {each.part.tokens for each in listed})
    if not listed:
        raise CorpusError(f"{sources[0][0]}: holds no tokens, and no other file is named. Name the token files.")
    olmo.check_masks([each.part for each in listed], options, tree)
    return corpus_of_split(_joined(listed, options), _with_continuations(listed), options)


def is_metadata(path: str) -> bool:
    """Return whether a file holds metadata of a corpus by its name."""
    return _METADATA.fullmatch(files.name_of(path)) is not None


def split_files(path: str, tree: Tree) -> list[str]:
    """Return the token files, in order, of the split that a prepared SFT corpus's path stands for; [] for other paths."""
    for form in (olmo, episodes, primer):
        found = form.find(path, tree)
        if found is not None:
            return list(form.split(found, tree).files)
    return []


def find_loss(path: str, tree: Tree) -> tuple[str, str]:
    """Return the loss file that belongs to a token file by its name, and its kind; ("", "") where there is none."""
    form = next((form for form in _FORMATS if form is not plain and form.owner(path, tree) == path), None)
    found = None if form is None else form.part(path, tree)
    return (found.loss, found.kind) if found is not None and found.loss else ("", "")


def _owner(path: str, tree: Tree) -> tuple[_Format, str]:
    """The format of a file, and the token file that it belongs to."""
    return next((form, owner) for form in _FORMATS if (owner := form.owner(path, tree)) is not None)


def _followed(path: str, tree: Tree) -> str:
    """What the link `path` leads to, where that file has sidecars and the link has none; else `path`."""
    if files.is_remote(path) or not os.path.islink(path):
        return path
    target = os.path.realpath(path)
    return target if _has_sidecars(target, tree) and not _has_sidecars(path, tree) else path


def _has_sidecars(path: str, tree: Tree) -> bool:
    form, owner = _owner(path, tree)
    if owner != path:
        return False
    found = form.part(path, tree)
    return bool(found.loss or found.boundaries)


def _list_folders(paths: Sequence[str], tree: Tree) -> None:
    """List remote folders at once: each is a request."""
    folders = list(dict.fromkeys(files.parent(path) for path in paths if files.is_remote(path)))
    if len(folders) > 1:
        with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(folders))) as pool:
            list(pool.map(tree.names, folders))


def _refuse_others(path: str, tree: Tree) -> None:
    """Refuse files that are known to hold something else than raw tokens."""
    name = files.name_of(path)
    if name.endswith(".parquet"):
        raise CorpusError(
            f"{path}: a Parquet file among token files. A corpus in format openchat is opened by the path of one file."
        )
    if _ROWS.fullmatch(name) and tree.beside(path, "rows.json"):
        raise CorpusError(
            f"{path}: a file of rows that `grain-sft pack --materialize` wrote, which hold more than tokens. Open their folder "
            f"{files.parent(path)}."
        )
    if _NO_TOKENS.fullmatch(name) and not name.endswith((".csv.gz", "episodes.idx")) and tree.beside(path, name):
        raise CorpusError(
            f"{path}: is not a file of tokens by its name. Give a pattern that matches the token files only."
        )


def _check_sidecars(sidecars: Mapping[str, str], tokens: set[str]) -> None:
    for path, owner in sidecars.items():
        if owner not in tokens:
            raise CorpusError(
                f"{path}: belongs to the token file {owner}, which is not among the files. It holds no tokens: name that file "
                "too, or leave this one out."
            )


def _with_continuations(listed: Sequence[_Listed]) -> list[Part]:
    """The parts; each says whether its first document began in the part before, which it may only where that is the part
    before in their corpus, too."""
    found: list[Part] = []
    places = {id(split): {path: at for at, path in enumerate(split.files)} for _, split in listed}
    before = ""
    for part, split in listed:
        at = places[id(split)].get(part.tokens, -1)
        follows = not before or (split.files[at - 1] == before if at > 0 else False)
        if before and at < 0:  # the folder can't be listed, or the file has no number: EOS tokens say
            follows = files.parent(before) == files.parent(part.tokens)
        continues = part.continues
        if part.boundaries_kind == "csv" and continues is not False:
            continues = False
            if follows:
                continues = None if split.continued is None else part.tokens in split.continued
        found.append(part._replace(continues=continues))
        before = part.tokens
    return found


def _joined(listed: Sequence[_Listed], options: Options) -> Split:
    """One split of all files: what their splits agree on."""
    firsts: dict[int, _Listed] = {}
    for each in listed:
        firsts.setdefault(id(each.split), each)
    found = [(each.part.tokens, each.split) for each in firsts.values()]
    if len(found) == 1:
        split = found[0][1]
        whole = split.files == tuple(part.tokens for part, _ in listed)
        return split if whole else dataclasses.replace(split, sources="")  # which documents are left out is not known
    origins = [(path, split.origin) for path, split in found]
    names = {origin.tokenizer for _, origin in origins}
    eos = None
    if options.eos_token_id is None:
        eos = _agreed("eos_token_id", [(path, origin.eos_token_id) for path, origin in origins])
    origin = Origin(
        eos_token_id=eos,
        pad_token_id=_agreed("pad_token_id", [(path, origin.pad_token_id) for path, origin in origins]),
        tokenizer=names.pop() if len(names) == 1 else None,
        tokenizer_sha256=_agreed("tokenizer_sha256", [(path, origin.tokenizer_sha256) for path, origin in origins]),
    )
    dtype = options.dtype or _agreed("dtype", [(path, split.dtype) for path, split in found])
    formats = {tuple(split.dtypes) for _, split in found}
    return Split(origin=origin, dtype=dtype, dtypes=formats.pop() if len(formats) == 1 else TOKEN_DTYPES)


def _agreed(name: str, stated: Sequence[tuple[str, T | None]]) -> T | None:
    """The value that all of `stated`, by token file, have; None where some have none.

    Raises:
      CorpusError: two have different values.
    """
    values = {value: path for path, value in reversed(stated) if value is not None}
    if len(values) > 1:
        (one, first), (other, second) = list(values.items())[-2:]
        raise CorpusError(
            f"{second}: its {name} is {other}, but that of {first} is {one}. All files of a corpus are made with one "
            "tokenizer and have one dtype: open them as two corpora."
        )
    return stated[0][1] if all(value is not None for _, value in stated) else None
