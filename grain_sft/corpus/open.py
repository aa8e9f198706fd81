"""`open_corpus`: a Corpus from a path, a glob, a list of files, a mix or an index."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grain_sft.arguments import as_paths, check_type
from grain_sft.corpus import formats, index
from grain_sft.corpus.allowed_root import Root
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.made_with import check_tokenizer
from grain_sft.corpus.mix import parse_mix, remap_path, resolve_relative
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError
from grain_sft.storage import MAGIC, RemoteOptions, files, read_regular

FORMATS = ("auto", "files", "mix", "index", *formats.FORMATS)

_TOKEN_SUFFIXES = (".npy", ".bin", ".parquet")
_LIST_SUFFIXES = (".txt", ".csv", ".mix", ".json")


def open_corpus(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str = "auto",
    dtype: object = None,
    eos_token_id: int | None = None,
    path_remap: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    remote: RemoteOptions | Mapping[str, Any] | None = None,
    root: str | os.PathLike[str] | None = None,
    label_mask_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    use_loss_mask: bool | None = None,
) -> Corpus:
    """Open the token files that `where` names, in order: scanned, or as an index remembers them.

    Sidecar files are found by their names, however the token files are named: label masks and loss weights (OLMo-core's
    `labels_mask_part_NNNN.npy` beside `token_ids_part_NNNN.npy`, and those of the other formats) and document boundaries
    (`NAME.csv.gz` beside `NAME.npy`). A glob, directory or list that matches sidecars too reads them as sidecars.

    Args:
      where: one of
        - a mix file: `label,path` a line, `#` comments and blank lines; relative paths start at the mix's folder (or
          at the working directory, if the first file is there and not beside the mix);
        - a saved index (`Corpus.save`, `grain-sft index`, or MaxText's `olmo_grain` index): name ends in .json;
        - a prepared SFT corpus (below): its training split, or the split whose folder is given;
        - any other directory: every .npy file below it, sorted by path, without the validation splits of prepared corpora;
        - a glob: its matches, sorted;
        - one .npy or .bin file;
        - a list of files, globs and directories (a prepared SFT corpus is its training split here, too), in that order.
        Local paths, or URLs that fsspec knows (`gs://`).
      format: "auto" tells these apart; "files", "mix", "index", or a format of SFT corpora insists. These are "olmo"
        (OLMo-core's parts with label masks), "episodes" (episode-indexed shards), "primer" and "openchat"; "rows" is
        what `grain-sft pack --materialize` writes.
      dtype: of headerless arrays: "uint8", "uint16", "uint32" or "uint64". Files with a .npy header carry their own.
        None: headerless arrays are taken as uint32, as AI2 writes them, and refused if they don't look it; in an SFT
        corpus the width is what its metadata or the sizes of its files say.
      eos_token_id: the token that ends a document; None: an SFT corpus's own, where it says it.
      path_remap: {prefix: replacement}, the longest prefix wins; and {"{NAME}": text} to fill a placeholder anywhere
        in a path, such as the `{TOKENIZER}` of OLMo's mixes.
      tokenizer: name or path of the tokenizer; the same as `path_remap={"{TOKENIZER}": tokenizer}`, and kept in the corpus.
        A corpus that was made with another tokenizer is refused: by its hash where this is the path of a tokenizer, else
        by its name.
      remote: how rows of remote files are read (see docs/cloud.md): {"seconds": 120, "requests": 64, "cache": {"folder":
        ..., "max_bytes": "200GiB", "unit": "4MiB"}}, or RemoteOptions; what is not given is as the environment says.
      root: a folder, local or a URL, that all files have to lie in, for a mix or an index that others have written; links
        are followed. None: they may lie anywhere, as the absolute paths of OLMo's mixes do.
      label_mask_paths: label masks (a byte a token, 0 or 1): a glob, or a list of files and globs, one file for each token
        file in order, as in OLMo-core's `NumpyDatasetConfig`. None: the masks that are found beside the token files.
      use_loss_mask: False: ignore loss masks and weights, so that every token takes loss. True: refuse a corpus without.
        None: use them where they are, or as a saved index remembers.

    Raises:
      CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
      CorpusError: a malformed mix, index or token file, files of different dtypes, masks for some files only or of another
        length than their tokens, another tokenizer than the corpus was made with, or a file outside of `root`.
      WrongTypeError: an argument of another type.
    """
    _check_types(where, format, path_remap, tokenizer, remote, root, use_loss_mask)
    options = None if remote is None else RemoteOptions.of(remote)
    bound = None if root is None else Root(root)
    if format not in FORMATS:
        raise CorpusError(f"format={format!r}: expected one of {', '.join(FORMATS)}.")
    if label_mask_paths is not None and use_loss_mask is False:
        raise CorpusError("label_mask_paths are given, but use_loss_mask=False ignores them. Leave one of the two out.")
    remaps = {files.normalize(key): files.normalize(value) for key, value in (path_remap or {}).items()}
    if tokenizer is not None:
        remaps.setdefault("{TOKENIZER}", tokenizer)

    def remap(path: str) -> str:
        return files.normalize(remap_path(path, remaps))

    formats_options = formats.Options(
        None if dtype is None else token_dtype(dtype, "dtype"),
        eos_token_id,
        tokenizer,
        use_loss_mask,
        None if label_mask_paths is None else _expand_masks(label_mask_paths, remap),
    )
    with contextlib.nullcontext() if bound is None else bound.opening(where):
        corpus = _open(where, format, formats_options, remap, bound)
    if bound is not None:
        corpus = bound.bound(corpus)
    if use_loss_mask and not corpus.has_loss:
        raise CorpusError(
            f"{corpus.shards[0].path}: use_loss_mask=True, but no loss mask is beside this file. Name the masks with "
            "label_mask_paths, or leave use_loss_mask out."
        )
    if tokenizer is not None:
        check_tokenizer(corpus, tokenizer)
        corpus = dataclasses.replace(corpus, tokenizer=corpus.tokenizer or tokenizer)
    return corpus if options is None else dataclasses.replace(corpus, remote=options)


def _check_types(
    where: object,
    format: object,
    path_remap: object,
    tokenizer: object,
    remote: object,
    root: object,
    use_loss_mask: object,
) -> None:
    """Refuse arguments of other types, which would fail somewhere with a message about something else."""
    as_paths("where", where)
    for name, value, kind, expected in (
        ("format", format, str, "a string"),
        ("path_remap", path_remap, Mapping | None, "a mapping of prefixes to their replacements"),
        ("tokenizer", tokenizer, str | None, "a string"),
        ("remote", remote, RemoteOptions | Mapping | None, "RemoteOptions or a mapping"),
        ("root", root, str | os.PathLike | None, "a path"),
        ("use_loss_mask", use_loss_mask, bool | None, "True or False"),
    ):
        check_type(name, value, kind, expected)
    for key, text in path_remap.items() if isinstance(path_remap, Mapping) else ():
        for each in (key, text):
            check_type("path_remap: a prefix or its replacement", each, str | os.PathLike, "a string or a path")


def _expand_masks(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], remap: Callable[[str], str]
) -> tuple[str, ...]:
    found: list[str] = []
    for item in as_paths("label_mask_paths", paths):
        path = remap(files.normalize(item))
        matches = files.glob(path) if _is_glob(path) else [path]
        if not matches:
            raise CorpusFileError(f"{path}: label_mask_paths: the glob matches no file.")
        found += map(files.absolute, matches)
    return tuple(found)


def _open(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str,
    options: formats.Options,
    remap: Callable[[str], str],
    root: Root | None,
) -> Corpus:
    if isinstance(where, str | os.PathLike):
        return _open_path(files.normalize(where), format, options, remap, root)
    items = list(where)
    if format not in ("auto", "files"):
        raise CorpusError(f"format={format!r} takes one path, not a list of {len(items)}.")
    _check_list(items)
    return _scan([(found, "") for item in items for found in _expand_item(remap(files.normalize(item)))], options, root)


def _open_path(
    path: str, format: str, options: formats.Options, remap: Callable[[str], str], root: Root | None
) -> Corpus:
    """What one path names."""
    if not files.is_remote(path) and not os.path.exists(path):
        path = remap(path)
        found = _open_format("files", path, options) if format == "auto" else None  # such as val, which is no folder
        if found is not None:
            return found
    kind = _tell(path) if format == "auto" else format
    if kind == "index":
        return index.load(path, files.read_text(path), options, remap)
    if kind == "mix":
        entries = parse_mix(path, files.read_text(path))
        paths = resolve_relative(path, [remap(entry) for entry, _ in entries])
        return _scan(list(zip(paths, (label for _, label in entries), strict=True)), options, root)
    if kind != "files" or format == "auto":
        found = _open_format(kind, remap(path), options)
        if found is not None:
            return found
    return _scan([(each, "") for each in _expand(remap(path))], options, root)


def _scan(sources: list[tuple[str, str]], options: formats.Options, root: Root | None) -> Corpus:
    """The corpus of these (path, label) pairs."""
    sources = [(files.absolute(path), label) for path, label in sources]
    if root is not None:  # before one of them is looked into
        root.check(path for path, _ in sources)
    return formats.corpus_of_files(sources, options, formats.Tree())


def _open_format(kind: str, path: str, options: formats.Options) -> Corpus | None:
    """The SFT corpus at `path`: of the format `kind` or, if that is "files", of the first that finds one there."""
    path, tree = files.absolute(path), formats.Tree()
    if kind == "files" and _is_glob(path):
        return None
    for each in formats.FORMATS.values() if kind == "files" else [formats.FORMATS[kind]]:
        found = each.find(path, tree)
        if found is not None:
            return each.read(found, options, tree)
    if kind != "files":
        raise CorpusError(f"{path}: is not of the format {kind}; expected {formats.FORMATS[kind].expected}.")
    return None


def _check_list(items: Sequence[str | os.PathLike[str]]) -> None:
    if not items:
        raise CorpusError("an empty list of files: a corpus has at least one.")
    for item in items:
        if formats.is_metadata(os.fspath(item)):
            continue
        if os.fspath(item).endswith(_LIST_SUFFIXES) and os.path.isfile(item):
            raise CorpusError(f"{item}: a mix or an index, in a list of files. Open it by itself.")


def _tell(path: str) -> str:
    """Which of index, mix and files `path` is, by its name; a local file of another name is looked into."""
    if index.is_index(path):
        return "index"
    if path.endswith(_TOKEN_SUFFIXES) or _is_glob(path):
        return "files"
    if files.is_remote(path):
        return "mix" if path.endswith(_LIST_SUFFIXES) else "files"
    if os.path.isdir(path):
        return "files"
    try:
        head = read_regular(path, 0, 512)
    except GrainSftError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise CorpusFileError(
            f"{path}: can't be opened ({error}). Expected a mix file, an index, a directory, a glob or a token file."
        ) from error
    if head.lstrip()[:1] == b"{":
        return "index"
    return "files" if head.startswith(MAGIC) or b"\0" in head else "mix"


def _is_glob(path: str) -> bool:
    """Whether `path` is a pattern; a local file whose own name has brackets is none."""
    return glob.has_magic(path) and (files.is_remote(path) or not os.path.exists(path))


def _expand_item(path: str) -> list[str]:
    """The token files that one path of a list stands for: of a prepared SFT corpus its training split, as by itself."""
    if not _is_glob(path) and not path.endswith(_TOKEN_SUFFIXES):
        found = formats.split_files(files.absolute(path), formats.Tree())
        if found:
            return found
    return _expand(path)


def _expand(path: str) -> list[str]:
    """The token files that one path, glob or directory stands for, sorted."""
    if _is_glob(path):
        found = files.glob(path)
        if not found:
            raise CorpusFileError(f"{path}: the glob matches no file.")
        return found
    if files.is_remote(path):
        if path.endswith(_TOKEN_SUFFIXES) or files.is_file(path):
            return [path]
        found = files.glob(path.rstrip("/") + "/**/*.npy") or files.glob(path.rstrip("/") + "/*.npy")
    elif os.path.isdir(path):
        found = sorted(str(file) for file in Path(path).rglob("*.npy") if file.is_file())
    else:
        return [path]
    if not found:
        raise CorpusFileError(f"{path}: holds no .npy file. Give a glob, if its token files have another suffix.")
    return formats.without_validation(found)
