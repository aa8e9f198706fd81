"""`open_corpus`: open a corpus by a path, a glob, a list of files, a mix or an index."""

import dataclasses
import functools
import importlib
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from grain_sft.arguments import as_paths, check_type
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import FORMATS, DirectoryListing, Format, ReadOptions, errors_of, formats
from grain_sft.corpus.formats.files import LIST_SUFFIXES, expand, is_glob
from grain_sft.corpus.formats.mix import remap_path
from grain_sft.corpus.formats.scanning import SUBSETS, Subset
from grain_sft.corpus.shard import TokenDtype, token_dtype
from grain_sft.errors import CorpusError, MissingExtraError
from grain_sft.storage import RemoteOptions, files, inside, outside

AUTO = "auto"


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
    """Open the token files that `where` names, in order.

    Sidecar files hold label masks, loss weights or document boundaries. They are found by name, such as `NAME.csv.gz` for
    `NAME.npy`. If a glob, folder or list includes them, they are not read as tokens.

    Args:
      where: Path of the corpus, local or a URL that fsspec knows (`gs://`). See "What goes in" in docs/guide.md. One of:
        - a token file, a glob, or a folder (each .npy file below it);
        - the folder of a prepared corpus, or of one of its splits;
        - a mix file, or a saved index (`.json`);
        - a prefix of Megatron's files, or a blend: `[0.3, a, 0.7, b]` or "0.3 a 0.7 b";
        - a list of files, globs and folders.
      format: Format of the files; `auto` infers it from the files. Formats that list files are "files", "mix" and "index".
        Formats of SFT corpora are "olmo" (OLMo-core's parts with label masks), "episodes" (episode-indexed shards), "primer",
        "openchat" and "pairs" (preference pairs). The others are "megatron", and "rows", which `grain-sft pack --materialize`
        writes. `package.module:Name` names your own `Format`.
      dtype: Dtype of the tokens in files without a .npy header. By default, the metadata of an SFT corpus or the sizes of its
        files decide it. Other files are read as uint32. They are refused if their first bytes do not look like uint32 tokens.
      eos_token_id: Token that ends a document. The default is the EOS id in the corpus's metadata.
      path_remap: Prefixes of paths and their replacements. The longest prefix that matches applies. A key `{NAME}` is replaced
        anywhere in a path, such as the `{TOKENIZER}` of OLMo's mixes.
      tokenizer: Name or path of the tokenizer. It replaces `{TOKENIZER}` in paths and is recorded in the corpus. A corpus
        that was made with another tokenizer is refused. If `tokenizer` is a path and the corpus records the hash of its
        tokenizer, the hashes are compared. Otherwise, the names are compared.
      remote: Options of reading remote files, such as {"seconds": 120, "requests": 64}; see docs/cloud.md. Environment
        variables set options that are left out.
      root: Folder, local or a URL, that must contain all files after links are followed. Give it for a mix or an index from
        an untrusted source. The default sets no limit.
      label_mask_paths: Files of label masks, as a glob or a list of files and globs: one file for each token file, in the
        same order. A file has a byte, 0 or 1, for each token. By default, masks are found by name, next to the token
        files.
      use_loss_mask: Whether loss masks and weights are used. False ignores them, so that every token takes loss. True
        refuses a corpus without them. The default uses them where they exist, unless a saved index was made with False.
      split: Weights of Megatron's training, validation and test splits, such as "969,30,1". Each split is a range of the
        sequences of every prefix, as megatron-core computes it. The default is all sequences.
      subset: Split that is opened if `split` is given: "train", "valid" or "test". The default is "train".

    Raises:
      CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
      CorpusError: A file is malformed or outside of `root`, files do not fit together, or an argument does not fit the corpus.
      WrongTypeError: An argument has the wrong type.
    """
    check_type("format", format, str, "a string")
    check_type("tokenizer", tokenizer, str | None, "a string")
    check_type("use_loss_mask", use_loss_mask, bool | None, "True or False")
    check_type("split", split, str | None, "a string such as '969,30,1'")
    if subset is not None and (split is None or subset not in SUBSETS):
        raise CorpusError(f"subset={subset!r}: expected one of {', '.join(SUBSETS)}, and a split, such as '969,30,1'.")
    if label_mask_paths is not None and use_loss_mask is False:
        raise CorpusError("label_mask_paths are given, but use_loss_mask=False ignores them. Leave one of the two out.")
    remote_options = None if remote is None else RemoteOptions.of(remote)
    remap = _remap_of(path_remap, tokenizer)
    folder = _folder_of(root)
    options = ReadOptions(
        dtype=None if dtype is None else token_dtype(dtype, "dtype"),
        eos_token_id=eos_token_id,
        use_loss_mask=use_loss_mask,
        masks=None if label_mask_paths is None else _masks_of(label_mask_paths, remap),
        split=split,
        subset=subset or "train",
        remap=remap,
        check_paths=functools.partial(_check_inside, folder),
    )
    corpus = _open_inside(folder, where, format, options)
    path = corpus.shards[0].path
    if use_loss_mask and not corpus.has_loss:
        problem = f"{path}: use_loss_mask=True, but this file has no loss mask"
        raise CorpusError(f"{problem}. Give label_mask_paths, or leave use_loss_mask out.")
    if split is not None and not all(shard.boundaries and shard.boundaries.sequences for shard in corpus.shards):
        problem = f"{path}: split={split!r}: only Megatron's files are split when opened"
        raise CorpusError(f"{problem}. Open a split's folder, or leave split out.")
    if tokenizer is not None:
        check_tokenizer(corpus, tokenizer)
        corpus = dataclasses.replace(corpus, tokenizer=corpus.tokenizer or tokenizer)
    return corpus if remote_options is None else dataclasses.replace(corpus, remote=remote_options)


def _remap_of(path_remap: Mapping[str, str] | None, tokenizer: str | None) -> Callable[[str], str]:
    """Return a function that applies `path_remap` to a path, replaces `{TOKENIZER}` in it, and refuses a URL with a query."""
    check_type("path_remap", path_remap, Mapping | None, "a mapping of prefixes to their replacements")
    replacements = {}
    for prefix, replacement in (path_remap or {}).items():
        for text in (prefix, replacement):
            check_type("path_remap: a prefix or its replacement", text, str | os.PathLike, "a string or a path")
        replacements[files.normalize(prefix)] = files.normalize(replacement)
    if tokenizer is not None:
        replacements.setdefault("{TOKENIZER}", tokenizer)

    def remap(path: str) -> str:
        remapped = files.normalize(remap_path(path, replacements))
        if remapped.startswith(("http://", "https://")) and "?" in remapped:
            raise CorpusError(f"{remapped}: is a URL with a query; expected none. Leave it out, or download the file.")
        return remapped

    return remap


def _masks_of(given: object, remap: Callable[[str], str]) -> tuple[str, ...]:
    named = [remap(files.normalize(path)) for path in as_paths("label_mask_paths", given)]
    return tuple(files.absolute(path) for pattern in named for path in expand(pattern))


def _open_inside(folder: str | None, where: Any, format: str, options: ReadOptions) -> Corpus:
    """Return the corpus at `where`. If `folder` is given, refuse files outside of it, now and in later reads."""
    if isinstance(where, list | tuple) and any(isinstance(item, str | os.PathLike) for item in where):
        where = [str(item) if type(item) in (int, float) else item for item in where]  # numbers are weights of a blend
    paths = as_paths("where", where)
    local_folder = None if folder is None or files.is_remote(folder) else folder
    single_path = files.normalize(where) if isinstance(where, str | os.PathLike) else None
    with inside(local_folder, single_path or ""):  # the mix or the index that the caller names may be outside of `folder`
        corpus = _open_list(paths, format, options) if single_path is None else _open_path(single_path, format, options)
    check_type("the corpus that the format returns", corpus, Corpus, "a Corpus")
    # Files with a `root` need no check: their format unpacked them into the cache, which is their `root`.
    options.check_paths([file.path for file in corpus.files() if file.root is None])
    if local_folder is None:
        return corpus
    return corpus.map_files(lambda file: dataclasses.replace(file, root=file.root or local_folder))


def _open_list(paths: Sequence[str | os.PathLike[str]], format: str, options: ReadOptions) -> Corpus:
    """Open a list by the format that the caller names, else by the first that detects it, else by the format "files"."""
    listing = DirectoryListing()
    if not paths:
        raise CorpusError("the corpus is an empty list of files: a corpus has at least one file. Give its files.")
    remapped = [options.remap(files.normalize(path)) for path in paths]
    detected = (form for form in formats() if _detects_list(form, remapped, listing))
    form: Format = FORMATS.make(format) if format != AUTO else next(detected, FORMATS.make("files"))
    with errors_of(form):
        return form.read_list(remapped, options, listing)


def _detects_list(form: Format, paths: Sequence[str], listing: DirectoryListing) -> bool:
    with errors_of(form):
        return bool(form.detect_list(paths, listing))


def _open_path(path: str, format: str, options: ReadOptions) -> Corpus:
    """Open one path by the format that the caller names, else by the first format, in the order of ranks, that detects it."""
    listing = DirectoryListing()
    remapped = options.remap(path)
    # The path of a mix or an index is remapped only if it does not exist. A remote path with the suffix of a mix or an index
    # counts as existing.
    exists = path.endswith(LIST_SUFFIXES) if files.is_remote(path) else os.path.exists(path)
    list_path = path if exists else remapped
    is_pattern = functools.cache(is_glob)  # cached, because it may send a request if the path is remote
    for form in formats() if format == AUTO else [FORMATS.make(format)]:
        candidate = list_path if form.lists_paths else remapped
        if is_pattern(candidate) and not form.takes_globs:
            continue
        # Formats that take globs or list paths make paths absolute themselves: the candidate may be a glob, or the text of a
        # blend.
        if not form.takes_globs and not form.lists_paths:
            candidate = files.absolute(candidate)
        with errors_of(form):
            # no detection if the caller named a format that accepts any path
            found = candidate if form.any_path and format != AUTO else form.detect(candidate, listing)
            if found is not None:
                return form.read(found, options, listing)
    # `format` is not "auto" here: the format "files", which is tried last, accepts the path or raises an error
    if FORMATS[format].detect is Format.detect:
        raise CorpusError(f"corpus format {format} has no method `detect`. Define it.")
    problem = f"{list_path}: is not of the format {format}; expected {FORMATS[format].expected}"
    raise CorpusError(f"{problem}. Give another path or format.")


def _folder_of(root: str | os.PathLike[str] | None) -> str | None:
    """Return the real path or the URL of `root`, with a slash at its end."""
    check_type("root", root, str | os.PathLike | None, "a path")
    if root is None:
        return None
    if not files.normalize(root):
        raise CorpusError("root is an empty path; expected a folder. Leave it out to allow files of any folder.")
    return files.real_path(root).rstrip("/") + "/"


def _check_inside(folder: str | None, paths: Iterable[str]) -> None:
    """If `folder` is given, refuse the first path that lies outside of it after links are followed."""
    if folder is None:
        return
    for path in paths:
        remote = files.is_remote(path)
        with files.reading(path):  # a path with a NUL raises a CorpusFileError, not a ValueError
            real = path if remote else os.path.realpath(path)
        climbs = remote and ".." in urllib.parse.unquote(path).split("/")  # clients resolve %2e%2e in URLs, too
        if climbs or not real.startswith(folder):
            raise outside(path, real, folder)


def check_tokenizer(corpus: Corpus, given: str) -> None:
    """Refuse the tokenizer `given`, a name or a path, if the corpus was made with another tokenizer.

    If `given` is a path and the corpus records the hash of its tokenizer, hashes are compared. Otherwise, names are compared.
    A corpus that records neither accepts any tokenizer.

    Raises:
      CorpusError: `given` is another tokenizer, or can't be compared.
      CorpusFileError: The path `given` exists, but no tokenizer can be read there.
      MissingExtraError: The tokenizer at `given` needs an extra that is not installed, and its name is not the corpus's.
    """
    name, sha256, where = corpus.tokenizer, corpus.tokenizer_sha256, corpus.shards[0].path
    if name is None and sha256 is None:
        return
    given_sha256, path = None, files.normalize(given)
    if sha256 is not None and files.exists(path):
        try:
            prepare = importlib.import_module("grain_sft.prepare")  # not `import`: `prepare` imports `corpus`, a cycle
            given_sha256 = prepare.load_tokenizer(path).sha256
        except MissingExtraError:
            if name is None or not _is_same_name(name, given):  # without the extra, the same name is enough
                raise
    if given_sha256 is None and name is None:
        problem = f"{where}: the corpus records the hash of its tokenizer ({sha256}) but not its name"
        raise CorpusError(f"{problem}; {given!r} is not a path. Give the tokenizer's path, or leave tokenizer out.")
    is_same = _is_same_name(name or "", given) if given_sha256 is None else given_sha256 == sha256
    if not is_same:
        own, other = _facts(name, sha256), _facts(given, given_sha256)
        problem = f"{where}: the corpus was made with the tokenizer {own}, but {other} was given"
        raise CorpusError(f"{problem}. Give the corpus's tokenizer, or leave tokenizer out.")


def _facts(name: str | None, sha256: str | None) -> str:
    """Return a tokenizer's name and hash, if they are known, as text."""
    facts = [None if name is None else repr(name), None if sha256 is None else f"sha256 {sha256}"]
    return ", ".join(filter(None, facts))


def _is_same_name(one: str, other: str) -> bool:
    """Return whether one name or path ends with the other, such as "allenai/OLMo-2" with "OLMo-2"."""
    short, long = sorted((name.rstrip("/").removeprefix("./").split("/") for name in (one, other)), key=len)
    return long[-len(short) :] == short
