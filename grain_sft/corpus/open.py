"""`open_corpus`: from whatever names token files to a Corpus."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grain_sft import files
from grain_sft.corpus import formats, index
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.mix import parse_mix, remap_path, resolve_relative
from grain_sft.corpus.remote_options import RemoteOptions
from grain_sft.corpus.root import Root
from grain_sft.corpus.scan import scan_shards
from grain_sft.corpus.shard import token_dtype
from grain_sft.corpus.stored import MAGIC
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError
from grain_sft.regular_files import read_regular

FORMATS = ("auto", "files", "mix", "index", *formats.FORMATS)

_TOKEN_SUFFIXES = (".npy", ".bin", ".parquet")
_LIST_SUFFIXES = (".txt", ".csv", ".mix", ".json")
_MASK_PREFIX = "labels_mask"


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
) -> Corpus:
    """The token files that `where` names, in order: scanned, or as an index remembers them.

    Args:
      where: one of
        - a mix file: `label,path` a line, `#` comments and blank lines; relative paths start at the mix's folder (or
          at the working directory, if the first file is there and not beside the mix);
        - a saved index (`Corpus.save`, `grain-sft index`, or MaxText's `olmo_grain` index): name ends in .json;
        - a prepared SFT corpus (below): its training split, or the split whose folder is given;
        - any other directory: every .npy file below it, sorted by path;
        - a glob: its matches, sorted;
        - one .npy or .bin file;
        - a list of files, globs and directories, in that order.
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
      tokenizer: name of the tokenizer; the same as `path_remap={"{TOKENIZER}": tokenizer}`, and kept in the corpus.
      remote: how rows of remote files are read (see docs/cloud.md): {"seconds": 120, "requests": 64, "cache": {"folder":
        ..., "max_bytes": "200GiB", "unit": "4MiB"}}, or RemoteOptions; what is not given is as the environment says.
      root: a folder, local or a URL, that all files have to lie in, for a mix or an index that others have written; links
        are followed. None: they may lie anywhere, as the absolute paths of OLMo's mixes do.

    Raises:
      CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
      CorpusError: a malformed mix, index or token file, files of different dtypes, or one outside of `root`.
    """
    options = None if remote is None else RemoteOptions.of(remote)
    bound = None if root is None else Root(root)
    corpus = _open(where, format, dtype, eos_token_id, path_remap, tokenizer, bound)
    if bound is not None:
        bound.check_corpus(corpus)
    return corpus if options is None else dataclasses.replace(corpus, remote=options)


def _open(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str,
    dtype: object,
    eos_token_id: int | None,
    path_remap: Mapping[str, str] | None,
    tokenizer: str | None,
    root: Root | None,
) -> Corpus:
    if format not in FORMATS:
        raise CorpusError(f"format={format!r}: expected one of {', '.join(FORMATS)}.")
    remaps = {files.normalize(key): files.normalize(value) for key, value in (path_remap or {}).items()}
    if tokenizer is not None:
        remaps.setdefault("{TOKENIZER}", tokenizer)

    def remap(path: str) -> str:
        return files.normalize(remap_path(path, remaps))

    options = formats.Options(None if dtype is None else token_dtype(dtype, "dtype"), eos_token_id, tokenizer)
    if isinstance(where, str | os.PathLike):
        return _open_path(files.normalize(where), format, options, remap, root)
    items = list(where)
    if format not in ("auto", "files"):
        raise CorpusError(f"format={format!r} takes one path, not a list of {len(items)}.")
    _check_list(items)
    return _scan([(found, "") for item in items for found in _expand(remap(files.normalize(item)))], options, root)


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
        return index.load(
            path,
            files.read_text(path),
            dtype=options.dtype,
            eos_token_id=options.eos_token_id,
            tokenizer=options.tokenizer,
            remap=remap,
        )
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
    return scan_shards(sources, options.dtype, eos_token_id=options.eos_token_id, tokenizer=options.tokenizer)


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
    masked = [file for file in found if os.path.basename(file).startswith(_MASK_PREFIX)]
    if masked:
        raise CorpusError(
            f"{path}: holds label masks ({os.path.relpath(masked[0], path)}), so loss is not taken on all of its tokens. "
            "An SFT corpus is opened by itself, as the path of its own folder; its tokens alone, loss taken on all of "
            "them, are the glob token_ids_part_*.npy."
        )
    return found
