"""Format index: a JSON file that lists a corpus's files, written by `Corpus.save` or by MaxText's `olmo_grain`."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.files import FileFormats, corpus_of_files
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing, Json
from grain_sft.corpus.formats.mix import head_of
from grain_sft.corpus.formats.scanning import ReadOptions, TokenFile, check_loss, check_masks, corpus_of, scan_in_threads
from grain_sft.corpus.index_writer import INDEX_FORMAT, INDEX_VERSION, MAXTEXT_VERSION, maxtext_fingerprint
from grain_sft.corpus.loss import scan_loss
from grain_sft.corpus.shard import Shard, TokenDtype, token_dtype
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import MANY_THREADS, Count, FileStamp, file_stamp, files, identify

_EXPECTED = " Expected an index or token files. Make a corpus of chats or texts with `grain-sft prepare`."
_DAMAGED = "The index is damaged: build it again."
_EDITED = "It was edited or damaged: build it again with `grain-sft index`."


class Index(Format):
    """Format of a saved index: a file whose name ends in .json, or a local text file that begins with "{"."""

    expected = "an index that `grain-sft index` or MaxText wrote"
    rank = 0
    any_path = lists_paths = True

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        head = b"" if files.is_remote(path) else head_of(path) or b""
        is_json = path.endswith(".json") or (head.startswith(b"{") and b"\0" not in head)
        return path if is_json else None

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Open this project's index or MaxText's. Refuse `options` with another dtype or EOS id than the index states."""
        data = Json.load(found, _EXPECTED)
        if options.split is not None:
            raise CorpusError(f"{found}: split={options.split!r}: an index takes no split. Build the index with this split.")
        if data.get("format") == INDEX_FORMAT:
            corpus = _read_own(data, options)
        elif {"format_version", "files"} <= data.data.keys():
            corpus = _read_maxtext(data, options, listing)
        else:
            raise CorpusError(f"{found}: not an index of grain_sft or MaxText. Make one with `grain-sft index`.")
        options.check_dtype(found, corpus.dtype)
        eos = options.eos_token_id
        if eos is not None and corpus.eos_token_id not in (None, eos):
            raise CorpusError(f"{found}: has eos_token_id {corpus.eos_token_id}, but {eos} was given. Leave eos_token_id out.")
        return corpus if eos is None else dataclasses.replace(corpus, eos_token_id=eos)


class _OwnIndex(msgspec.Struct):
    """Fields of this project's index besides those of `CorpusMetadata`. `eos_token_id` is in both: here it is required."""

    version: int
    fingerprint: str
    dtype: TokenDtype
    eos_token_id: Count | None
    shards: Annotated[tuple[Shard, ...], msgspec.Meta(min_length=1)]
    sources: FileStamp | None = None
    use_loss_mask: bool | None = None
    weights: tuple[float, ...] = ()
    signed: bool = False


def _read_own(data: Json, options: ReadOptions) -> Corpus:
    """Return the corpus of this project's index, without scanning its files."""
    path = data.path
    if data.data.get("version", INDEX_VERSION) != INDEX_VERSION:  # `convert` refuses an index without a version
        problem = f"{path}: index version {data.get('version')!r}; expected {INDEX_VERSION}"
        raise CorpusError(f"{problem}. Build it again with `grain-sft index`.")
    index = data.convert(_OwnIndex, _DAMAGED)
    folder = files.parent(path)

    def locate(file: Any) -> Any:
        """Return `file` with its present path. A relative path starts at the folder of the index."""
        present = options.remap(file.path)
        if not files.is_remote(present) and not os.path.isabs(present):
            absolute = files.join(folder, present)
            absolute = absolute if files.is_remote(path) else os.path.normpath(absolute)
            # the absolute path is remapped only if `path_remap` did not change the relative path
            present = options.remap(absolute) if present == file.path else absolute
        version = file.version if present == file.path else None  # a copy has a version of its own
        # an edited index may state `root`, which only `open_corpus` sets: remove it
        return dataclasses.replace(file, path=present, version=version, root=None)

    metadata = CorpusMetadata.of(data, _DAMAGED)
    fields: dict[str, Any] = {"sources_file": index.sources, "weights": index.weights, "signed": index.signed}
    corpus = corpus_of(index.shards, token_dtype(index.dtype, path), metadata, **fields)
    corpus = corpus.map_files(locate)
    _check_own(path, index.fingerprint, corpus)
    return _choose_loss(path, index.use_loss_mask, _pinned(corpus), options)


def _pinned(corpus: Corpus) -> Corpus:
    """Return `corpus` with the present versions of remote files whose version is unknown."""
    unknown = {file.path: file for file in corpus.files() if files.is_remote(file.path) and file.version is None}
    if not unknown:
        return corpus
    versions = {file.path: file.version for file in identify(list(unknown.values()))}
    return corpus.map_files(lambda file: dataclasses.replace(file, version=versions.get(file.path, file.version)))


def _check_own(path: str, fingerprint: str, corpus: Corpus) -> None:
    """Refuse an index whose entries contradict each other or the sizes of local files."""
    dtype = corpus.dtype.name
    for number, shard in enumerate(corpus.shards):
        shard_has = f"{path}: shard {number} ({shard.path}) has {shard.num_tokens} {dtype} tokens"
        if shard.row is not None:  # only files of materialized rows have `row`, and no index lists such files
            raise CorpusError(f"{path}: shard {number} ({shard.path}) has `row`; expected no such key. {_EDITED}")
        bytes_after = shard.size - shard.data_offset - shard.num_tokens * corpus.dtype.itemsize
        # a shard that is a range of sequences may have bytes after it
        is_range = shard.boundaries is not None and shard.boundaries.sequences is not None
        if bytes_after < 0 or (bytes_after and not is_range):
            raise CorpusError(f"{shard_has} after {shard.data_offset} bytes, but its size is {shard.size}. {_DAMAGED}")
        if shard.loss is not None and shard.loss.count != shard.num_tokens:
            raise CorpusError(f"{shard_has}, but its loss file has {shard.loss.count} values. {_DAMAGED}")
    if fingerprint != corpus.fingerprint:
        problem = f"{path}: the fingerprint in the index ({fingerprint}) is not that of its entries"
        raise CorpusError(f"{problem} ({corpus.fingerprint}). {_EDITED}")

    def check_sizes(local: Sequence[FileStamp]) -> None:
        """Refuse the first of `local` that is missing or has another size than the index states."""
        for file in local:
            try:
                size = os.stat(file.path).st_size
            except (OSError, ValueError) as error:  # ValueError: a path with a NUL
                problem = f"{file.path}: can't be found ({error}), but the index {path} lists it"
                raise CorpusFileError(f"{problem}. If the data moved, give path_remap; else, build the index again.") from error
            if size != file.size:
                raise CorpusFileError(f"{file_stamp.size_change(file, size)} Index: {path}.")

    local = [file for file in corpus.files() if not files.is_remote(file.path)]
    # Each thread checks its part of the files in one call. A call for each file would take longer than its check.
    scan_in_threads(check_sizes, [local[first::MANY_THREADS] for first in range(MANY_THREADS)])


def _choose_loss(path: str, indexed: bool | None, corpus: Corpus, options: ReadOptions) -> Corpus:
    """Return the corpus of the index at `path` with the loss files that `options` ask for.

    `indexed` is `use_loss_mask` in the index: True if the index lists loss files, False if its corpus ignored them. It is
    None if no loss files existed, or if grain_sft 0.1.0 wrote the index.
    """
    tokens = [shard.path for shard in corpus.shards]
    uses_loss = indexed if options.use_loss_mask is None else options.use_loss_mask
    if options.masks is not None:
        check_masks(tokens, options.masks)
        # the given masks are used, and the corpus's own loss files are ignored
        return dataclasses.replace(_with_loss(corpus, list(map(TokenFile, tokens, options.masks))), ignores_loss=True)
    if uses_loss is False:
        shards = tuple(dataclasses.replace(shard, loss=None) for shard in corpus.shards)
        return dataclasses.replace(corpus, shards=shards, ignores_loss=indexed is False or corpus.has_loss)
    if corpus.has_loss:
        return corpus
    find_loss = FileFormats(DirectoryListing()).find_loss
    # Some formats list the folder of a file. These calls for one file of each folder list all folders of a bucket at once.
    scan_in_threads(find_loss, {files.parent(path): path for path in tokens if files.is_remote(path)}.values())
    parts = list(map(find_loss, tokens))
    with_loss = [part for part in parts if part.loss]
    if not with_loss:
        return corpus
    # Masks exist that the index does not list: it is out of date, or was saved from a corpus that ignored its masks.
    first, without_loss = with_loss[0], [part.tokens for part in parts if not part.loss]
    if indexed is not False:
        problem = f"{path}: lists {first.tokens} without its loss mask {first.loss}. Build the index again"
    elif without_loss:
        problem = f"{without_loss[0]}: has no loss mask, but {first.tokens} has {first.loss}. Give the missing mask"
    else:
        return _with_loss(corpus, parts)
    raise CorpusError(f"{problem}, or ignore the masks with use_loss_mask=False.")


def _with_loss(corpus: Corpus, parts: Sequence[TokenFile]) -> Corpus:
    """Return `corpus` with the loss files of `parts`, which has a `TokenFile` for each shard."""

    def scan(shard: Shard, part: TokenFile) -> Shard:
        loss = scan_loss(part.loss, part.loss_kind)
        check_loss(shard, loss, corpus.dtype)
        return dataclasses.replace(shard, loss=loss)

    return dataclasses.replace(corpus, shards=tuple(scan_in_threads(scan, corpus.shards, parts)))


class _MaxTextFile(msgspec.Struct):
    """Entry of one token file in MaxText's index, without the fields that follow from the sequence length."""

    path: str
    label: str
    n_tokens: Count


class _MaxTextIndex(msgspec.Struct):
    """MaxText's index, without its sums."""

    sequence_length: Count
    dtype: str
    tokenizer: str
    fingerprint: str
    files: list[_MaxTextFile]


def _read_maxtext(data: Json, options: ReadOptions, listing: DirectoryListing) -> Corpus:
    """Return the corpus of MaxText's index. Token files are scanned, because it lists no sidecar files."""
    path, version = data.path, data.get("format_version")
    if version != MAXTEXT_VERSION:
        problem = f"{path}: MaxText's format version {version!r}; version {MAXTEXT_VERSION!r} can be read"
        raise CorpusError(f"{problem}. Build the index with MaxText 0.2.5.")
    index = data.convert(_MaxTextIndex, _DAMAGED)
    expected = maxtext_fingerprint(index.sequence_length, index.dtype, index.tokenizer, data.get("files"))
    if index.fingerprint != expected:
        problem = f"{path}: the fingerprint in MaxText's index ({index.fingerprint}) is not that of its entries"
        raise CorpusError(f"{problem} ({expected}). {_EDITED}")
    if not index.files:
        raise CorpusError(f"{path}: the index lists no file. Build it again.")
    sources = [(options.remap(entry.path), entry.label) for entry in index.files]
    corpus = corpus_of_files(sources, dataclasses.replace(options, dtype=token_dtype(index.dtype, path)), listing)
    if len(corpus.shards) != len(index.files):
        raise CorpusError(f"{path}: lists files that hold no tokens, such as label masks. Build the index again.")
    for shard, entry in zip(corpus.shards, index.files, strict=True):
        if shard.num_tokens != entry.n_tokens:
            verb = "shrank" if shard.num_tokens < entry.n_tokens else "grew"
            problem = f"{shard.path}: the file {verb}: {shard.num_tokens} tokens, but MaxText's index {path} lists"
            raise CorpusFileError(f"{problem} {entry.n_tokens}. Restore the file, or build the index again.")
    return dataclasses.replace(corpus, tokenizer=index.tokenizer or corpus.tokenizer)
