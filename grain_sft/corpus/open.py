"""`open_corpus`: a Corpus from a path, a glob, a list of files, a mix or an index."""

import contextlib
import dataclasses
import functools
import itertools
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from grain_sft.arguments import as_paths, check_type
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import FORMATS, DirectoryListing, ReadOptions, formats
from grain_sft.corpus.formats.files import LIST_SUFFIXES, expand, is_glob
from grain_sft.corpus.formats.mix import remap_path
from grain_sft.corpus.formats.scanning import SUBSETS, Subset
from grain_sft.corpus.shard import TokenDtype, token_dtype
from grain_sft.errors import CorpusError, MissingExtraError
from grain_sft.registry import Registry
from grain_sft.storage import RemoteOptions, files, inside, outside

AUTO = "auto"

TOKENIZER_READERS: Registry[Callable[[str], Any]] = Registry(
    "tokenizer reader", CorpusError, {"any": "grain_sft.prepare:load_tokenizer"}
)
"""Loader of the tokenizers whose `sha256` `check_tokenizer` compares. It is imported only if `tokenizer` is a path."""


def open_corpus(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | float],
    *,
    format: str = AUTO,
    dtype: TokenDtype | None = None,
    eos_token_id: Annotated[int, msgspec.Meta(ge=0)] | None = None,
    path_remap: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    remote: RemoteOptions | Mapping[str, Any] | None = None,
    root: str | os.PathLike[str] | None = None,
    label_mask_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    use_loss_mask: bool | None = None,
    split: str | None = None,
    subset: Subset | None = None,
) -> Corpus:
    """Open the token files that `where` names, in order. Files are scanned unless a saved index lists them.

    Sidecar files are found by name: label masks and loss weights (OLMo-core's `labels_mask_part_NNNN.npy` for
    `token_ids_part_NNNN.npy`, and those of the other formats) and document boundaries (`NAME.csv.gz` for `NAME.npy`). A glob,
    directory or list may include sidecar files; their values are never read as tokens.

    Args:
      where: Path or paths of the corpus, local or URLs that fsspec knows (`gs://`); one of
        - a mix file: `label,path` a line, `#` comments and blank lines; relative paths start at the mix's folder (or
          at the working directory, if the first file is there and not in that folder);
        - a saved index (`Corpus.save`, `grain-sft index`, or MaxText's `olmo_grain` index), whose name ends in .json;
        - a prepared SFT corpus: its training split, or the split whose folder is given;
        - any other directory: every .npy file below it, sorted by path, without validation splits of prepared corpora and
          without folders that are links;
        - a glob: its matches, sorted;
        - one .npy or .bin file;
        - a prefix of Megatron's `.bin` and `.idx` files, one of these files, a folder of them, a list of prefixes, or a
          blend: weights and prefixes in turn, as a list (`[0.3, a, 0.7, b]`) or in one string ("0.3 a 0.7 b");
        - a list of files, globs and directories, in that order; a prepared SFT corpus is its training split here, too.
      format: Format of the files; `auto` infers it from `where`. The formats are "files", "mix", "index", those of SFT
        corpora, "olmo" (OLMo-core's parts with label masks), "episodes" (episode-indexed shards), "primer",
        "openchat" and "pairs" (preference pairs), "megatron", and "rows", which `grain-sft pack --materialize` writes.
        `package.module:Name` is a `Format` of yours.
      dtype: Dtype of headerless arrays. Files with a .npy header carry their own. The default is the dtype that an SFT
        corpus's metadata or the sizes of its files imply, else uint32, as AI2 writes, if the tokens look like it.
      eos_token_id: Token that ends a document. The default is that of the corpus's metadata.
      path_remap: Replacements of prefixes of paths. The longest prefix that matches applies. A key `{NAME}` is a
        placeholder that is filled in anywhere in a path, such as the `{TOKENIZER}` of OLMo's mixes.
      tokenizer: Name or path of the tokenizer. It fills `{TOKENIZER}` in paths and is kept in the corpus. A corpus that was
        made with another tokenizer is refused: by its hash if this is the path of a tokenizer, else by its name.
      remote: Options of reading remote files (see docs/cloud.md), such as {"seconds": 120, "requests": 64, "cache":
        {"folder": ..., "max_bytes": "200GiB", "unit": "4MiB"}}. Environment variables set those that are left out.
      root: Folder, local or a URL, that must contain all files after links are followed; for a mix or an index from an
        untrusted source. The default sets no limit, because OLMo's mixes have absolute paths.
      label_mask_paths: Label masks (a byte a token, 0 or 1), a glob or a list of files and globs, one file for each token
        file in order, as in OLMo-core's `NumpyDatasetConfig`. The default is the sidecar files.
      use_loss_mask: Whether loss masks and weights are used: false ignores them, so that every token takes loss; true
        refuses a corpus without. The default uses them where they exist, or as a saved index states.
      split: Weights of Megatron's training, validation and test splits, such as "969,30,1": each is a range of the
        sequences of every prefix, as megatron-core computes it. The default is all sequences.
      subset: Part of `split` that is opened: "train", "valid" or "test". The default is "train".

    Raises:
      CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
      CorpusError: A malformed mix, index or token file, files of different dtypes, masks for some files only or of another
        length than their tokens, another tokenizer than the corpus was made with, or a file outside of `root`.
      WrongTypeError: An argument of another type.
    """
    if isinstance(where, list | tuple) and any(isinstance(each, str | os.PathLike) for each in where):
        where = [str(each) if type(each) in (int, float) else each for each in where]  # weights of a blend
    paths = as_paths("where", where)
    check_type("format", format, str, "a string")
    check_type("tokenizer", tokenizer, str | None, "a string")
    check_type("remote", remote, RemoteOptions | Mapping | None, "RemoteOptions or a mapping")
    check_type("root", root, str | os.PathLike | None, "a path")
    _check_masks_and_split(label_mask_paths, use_loss_mask, split, subset)
    remote_options = None if remote is None else RemoteOptions.of(remote)
    remap, masks = _remap_of(path_remap, tokenizer), None
    if label_mask_paths is not None:
        named_masks = as_paths("label_mask_paths", label_mask_paths)
        masks = tuple(files.absolute(found) for path in named_masks for found in expand(remap(files.normalize(path))))
    folder = _folder_of(root)
    local_folder = None if folder is None or files.is_remote(folder) else folder
    options = ReadOptions(
        dtype=None if dtype is None else token_dtype(dtype, "dtype"),
        eos_token_id=eos_token_id,
        use_loss_mask=use_loss_mask,
        masks=masks,
        split=split,
        subset=subset or "train",
        remap=remap,
        check_paths=functools.partial(_check_inside, folder),
    )
    named = files.normalize(where) if isinstance(where, str | os.PathLike) else None
    with inside(local_folder, named or ""):
        corpus = _open_list(paths, format, options) if named is None else _open_path(named, format, options)
    # files that a format placed in a folder of its own, such as the cache, have that as their `root`
    _check_inside(folder, (file.path for file in corpus.files() if file.root is None))
    if local_folder is not None:  # the files are checked again whenever they are opened
        corpus = corpus.map_files(lambda file: dataclasses.replace(file, root=file.root or local_folder))
    _check_use(corpus, use_loss_mask, split)
    if tokenizer is not None:
        check_tokenizer(corpus, tokenizer)
        corpus = dataclasses.replace(corpus, tokenizer=corpus.tokenizer or tokenizer)
    return corpus if remote_options is None else dataclasses.replace(corpus, remote=remote_options)


def _remap_of(path_remap: Mapping[str, str] | None, tokenizer: str | None) -> Callable[[str], str]:
    """Return the function that replaces prefixes of paths, and fills in `{TOKENIZER}`."""
    check_type("path_remap", path_remap, Mapping | None, "a mapping of prefixes to their replacements")
    for text in itertools.chain.from_iterable((path_remap or {}).items()):
        check_type("path_remap: a prefix or its replacement", text, str | os.PathLike, "a string or a path")
    remaps = {files.normalize(key): files.normalize(value) for key, value in (path_remap or {}).items()}
    if tokenizer is not None:
        remaps.setdefault("{TOKENIZER}", tokenizer)
    return lambda path: files.normalize(remap_path(path, remaps))


def _check_masks_and_split(masks: object, use_loss_mask: bool | None, split: str | None, subset: str | None) -> None:
    check_type("use_loss_mask", use_loss_mask, bool | None, "True or False")
    check_type("split", split, str | None, "a string such as '969,30,1'")
    if subset is not None and (split is None or subset not in SUBSETS):
        raise CorpusError(f"subset={subset!r}: expected one of {', '.join(SUBSETS)}, with split, such as '969,30,1'.")
    if masks is not None and use_loss_mask is False:
        raise CorpusError("label_mask_paths are given, but use_loss_mask=False ignores them. Leave one of the two out.")


def _check_use(corpus: Corpus, use_loss_mask: bool | None, split: str | None) -> None:
    """Refuse arguments that the files of the corpus do not support."""
    path = corpus.shards[0].path
    if use_loss_mask and not corpus.has_loss:
        raise CorpusError(
            f"{path}: use_loss_mask=True, but this file has no loss mask. Name the masks with label_mask_paths, or leave "
            "use_loss_mask out."
        )
    if split is not None and not all(shard.boundaries and shard.boundaries.sequences for shard in corpus.shards):
        raise CorpusError(
            f"{path}: split={split!r}, but only Megatron's files are split where they are opened. Open the folder of a "
            "split, or leave split out."
        )


def _open_list(paths: Sequence[str | os.PathLike[str]], format: str, options: ReadOptions) -> Corpus:
    listing, listed = DirectoryListing(), [options.remap(files.normalize(path)) for path in paths]
    found = [form for form in formats() if form.detect_list(listed, listing)] if format == AUTO else []
    form = found[0] if found else FORMATS["files" if format == AUTO else format]()
    return form.read_list(listed, options, listing)


def _open_path(path: str, format: str, options: ReadOptions) -> Corpus:
    listing, remapped = DirectoryListing(), options.remap(path)
    may_list = path.endswith(LIST_SUFFIXES) if files.is_remote(path) else os.path.exists(path)
    path = path if may_list else remapped  # an existing mix or index is opened at the path as given
    for form in formats() if format == AUTO else [FORMATS[format]()]:
        at = path if form.lists_paths else remapped
        if is_glob(at) and not form.takes_globs:
            continue
        if not form.takes_globs and not form.lists_paths:
            at = files.absolute(at)
        found = at if form.any_path and format != AUTO else form.detect(at, listing)
        if found is not None:
            return form.read(found, options, listing)
    raise CorpusError(f"{path}: is not of the format {format}; expected {FORMATS[format].expected}.")


def _folder_of(root: str | os.PathLike[str] | None) -> str | None:
    """Return the real path or the URL of `root`, with a slash at its end; None for None."""
    if root is None:
        return None
    if not (path := files.normalize(root)):
        raise CorpusError("root is an empty path; expected a folder. Leave it out to allow files of any folder.")
    path = path if files.is_remote(path) else os.path.realpath(path)
    return path.rstrip("/") + "/"


def _check_inside(folder: str | None, paths: Iterable[str]) -> None:
    """Refuse the first path that, after links are followed, lies outside of `folder`; None allows any."""
    if folder is None:
        return
    for path in paths:
        remote = files.is_remote(path)
        with files.reading(path):  # no file can have a name with a NUL
            real = path if remote else os.path.realpath(path)
        climbs = remote and ".." in urllib.parse.unquote(path).split("/")  # clients resolve %2e%2e in URLs, too
        if climbs or not real.startswith(folder):
            raise outside(path, real, folder)


def check_tokenizer(corpus: Corpus, given: str) -> None:
    """Refuse another tokenizer than the one that the corpus was made with.

    Args:
      corpus: Corpus, with `tokenizer_sha256`, `tokenizer`, both or neither; with neither, any tokenizer passes.
      given: Path of a tokenizer, which is compared by hash; else a name, which is compared with `corpus.tokenizer`.

    Raises:
      CorpusError: It is another tokenizer, or can't be compared.
      CorpusFileError: No tokenizer exists at the path `given`.
    """
    name, sha256, where = corpus.tokenizer, corpus.tokenizer_sha256, corpus.shards[0].path
    found = None
    if sha256 is not None and files.exists(path := files.normalize(given)):
        with contextlib.suppress(MissingExtraError):
            found = TOKENIZER_READERS["any"](path).sha256
    if found is not None:
        is_same = found == sha256
    elif name is not None:
        is_same = _is_same_name(name, given)
    elif sha256 is None:
        is_same = True
    else:
        raise CorpusError(
            f"{where}: the corpus records the hash of its tokenizer ({sha256}) but not its name, so it can't be compared with "
            f"{given!r}, which is not a file. Give the path of the tokenizer, or none."
        )
    if not is_same:
        raise CorpusError(
            f"{where}: the corpus was made with the tokenizer {_facts(name, sha256)}, but {_facts(given, found)} was given. "
            "Give the corpus's tokenizer, or none."
        )


def _facts(name: str | None, sha256: str | None) -> str:
    """Return the text of those facts about a tokenizer that are known."""
    return ", ".join(text for text, fact in ((repr(name), name), (f"sha256 {sha256}", sha256)) if fact is not None)


def _is_same_name(one: str, other: str) -> bool:
    """Return whether two names or paths are of one tokenizer: equal, or one ends with the other."""
    short, long = sorted((name.rstrip("/").removeprefix("./").split("/") for name in (one, other)), key=len)
    return long[-len(short) :] == short
