"""Format openchat: the Parquet files of OpenChat's `generate_dataset`, `PREFIX.train.parquet` and `PREFIX.eval.parquet`.

Rows of a Parquet file can't be read at random, so the file is unpacked once, to arrays in `$GRAIN_SFT_CACHE_DIR`. A row of the
file is a batch of sequences, and each sequence is a document.

OpenChat stores a token's label and weight at the token before it. So a Parquet file has no place for the weight of a document's
first token. `grain-sft prepare` writes these weights to `PREFIX.train.first_weights.bin`, unless all of them are 0. The
unpacked weights are at the token itself.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import content
from grain_sft.corpus.array_file import first_true
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing, Json, is_visible, parse_metadata, read_metadata
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile, scan_corpus
from grain_sft.corpus.loss import KINDS, scan_loss
from grain_sft.corpus.shard import Dtype
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError, StorageError, import_extra, shortened
from grain_sft.storage import artifact, describe, files, inside_also, open_remote, read_whole
from grain_sft.types import Array, Ints

METADATA_KEY = "grain_sft"
"""Key in the metadata of the Parquet schema, for the JSON that other formats store in corpus.json."""

_SUFFIX = ".parquet"
_SPLITS = {"train": "train", "eval": "eval", "val": "eval"}  # DIR/val means the split "eval" in DIR
_NAMES = ("tokens.bin", "weights.bin", "documents.idx")  # uint32, float32, and uint64 pairs of start and length
_VERSION = 4  # of the unpacked files: with another version, a file is unpacked again
_ROWS_AT_ONCE = 1024
_BUFFER = 1 << 20  # bytes of a column that are read at once
# Columns of OpenChat's files: those with a list in each row, then all that must exist.
_LISTS = ("seqlens", "nz_input_ids", "nz_position_ids", "nz_shifted_label_ids", "nz_shifted_loss_weights")
_COLUMNS = ("total_length", "num_seqs", *_LISTS)
_FLOATS = ("num_seqs", "nz_shifted_loss_weights")  # columns that may hold floats


class OpenChat(Format):
    """Format of one Parquet file, which is one shard."""

    expected = "a .parquet file, a directory with one *.train.parquet, or the path before .train.parquet"
    metadata_files = r".*\.first_weights\.bin"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        """Return the Parquet file that `path` names.

        A folder DIR names its training split. DIR/val names the split "eval" of DIR. PREFIX names PREFIX.train.parquet.
        """
        name, folder = files.name_of(path), files.parent(path)
        if name.endswith(_SUFFIX):
            return path if listing.sidecars(path, name) else None
        if name.endswith((".npy", ".bin")):
            return None
        file = _of_split(path, "train", listing)
        if file is None and name in _SPLITS:
            file = _of_split(folder, _SPLITS[name], listing)
        # not by `listing`, because the parent of a folder in a bucket may hold very many files
        of_prefix = files.join(folder, f"{name}.train{_SUFFIX}")
        return file or (of_prefix if is_visible(of_prefix) else None)

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Unpack the Parquet file `found` to the cache, and return the corpus of the unpacked files."""
        dtype: Dtype = np.dtype(np.uint32)
        options.check_dtype(found, dtype)
        stem = files.name_of(found).removesuffix(_SUFFIX)
        cache = os.path.realpath(files.cache_dir()) + "/"
        with inside_also(cache):  # the unpacked files are in the cache, which may be outside of `open_corpus(root=)`
            unpacked, own_metadata = _unpacked(found, listing.sidecar(found, f"{stem}.first_weights.bin"))
            tokens, weights, documents = unpacked
            sources = listing.sidecar(found, f"{stem}.sources.bin")
            split = Split((tokens,), _read_metadata(found, own_metadata, listing), dtype, sources=sources)
            corpus = scan_corpus(split, [TokenFile(tokens, weights, "float32", documents, boundaries_kind="pairs")], options)
        return corpus.map_files(lambda file: dataclasses.replace(file, root=cache) if file.path in unpacked else file)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        """Refuse a Parquet file, which can't be one of several token files. Return None for a file of another format."""
        if path.endswith(_SUFFIX) and listing.sidecars(path, files.name_of(path)):  # false if `path` is missing
            raise CorpusError(f"{path}: a Parquet file among token files. Open it by itself.")
        return None


def _of_split(folder: str, split: str, listing: DirectoryListing) -> str | None:
    """Return the only Parquet file of a split in a folder; None if the folder has none."""
    names = sorted(name for name in listing.names(folder) if name.endswith(f".{split}{_SUFFIX}"))
    if len(names) > 1:
        raise CorpusError(f"{folder}: holds {names[0]} and {names[1]}. Give the path of one of them.")
    return files.join(folder, names[0]) if names else None


def _read_metadata(path: str, own_metadata: dict[str, Any] | None, listing: DirectoryListing) -> CorpusMetadata:
    """Return the metadata of a Parquet file: its own, or those of its folder.

    The folder's metadata are returned if the file has none (`own_metadata` is None), or if the file and the folder state the
    same tokenizer.
    """
    of_folder = read_metadata((files.parent(path),), listing)
    if own_metadata is None:
        return of_folder
    own = parse_metadata(Json(path, own_metadata))
    return of_folder if of_folder.path and of_folder.tokenizer_sha256 == own.tokenizer_sha256 else own


def _unpacked(path: str, first_weights: str) -> tuple[list[str], dict[str, Any] | None]:
    """Unpack a Parquet file to the cache if necessary. Return the paths of the unpacked files, and the Parquet file's metadata.

    `first_weights` is the path of a file with the weights of the documents' first tokens; "" if these weights are 0.
    """
    stamps = [describe(file) for file in (path, first_weights) if file]
    hashes = content.hashes_of(stamps)
    key = hashlib.sha256("\0".join(hashes).encode()).hexdigest()[:32]
    unpacked = [str(files.cache_dir() / "openchat" / key / name) for name in _NAMES]

    def hash_unpacked() -> list[list[int]]:
        return [list(bytes.fromhex(text)) for text in content.hashes_of([describe(name) for name in unpacked])]

    def make() -> artifact.Arrays:
        """Write the files `unpacked`, and return their hashes and the metadata of the Parquet file."""
        weights: npt.NDArray[np.float32] | None = None
        if first_weights:
            file = scan_loss(first_weights, "float32")
            weights = np.frombuffer(read_whole(file), "<f4", offset=file.data_offset)
        try:
            with contextlib.ExitStack() as stack:
                out = [stack.enter_context(files.atomic_write(name, "wb")) for name in unpacked]
                documents = _unpack(path, stamps[0].version, weights, out)
                if weights is not None and len(weights) != documents:
                    problem = f"{first_weights}: {len(weights)} weights, but {documents} documents in {path}"
                    raise CorpusError(f"{problem}. Copy both files again.")
        except StorageError as error:
            raise StorageError(f"{error} Set {files.CACHE_DIR_VARIABLE} to a folder with room.") from error
        metadata = json.dumps(_own_metadata(path, stamps[0].version)).encode()
        if content.hashes_of(stamps) != hashes:
            raise CorpusFileError(f"{path}: was written to while it was unpacked. Wait until it is complete.")
        return {"sha256": np.array(hash_unpacked(), np.uint8), "metadata": np.frombuffer(metadata, np.uint8)}

    def check(arrays: artifact.Arrays) -> None:
        """Raise an error, so that `make` is called again, if an unpacked file is missing or has another hash."""
        if hash_unpacked() != arrays["sha256"].tolist():
            raise ValueError("its files are not those that were unpacked")

    depends = {"openchat": _VERSION, "content": key}
    arrays = artifact.load_or_make("openchat", depends, make, files.cache_dir(), check=check)
    return unpacked, json.loads(arrays["metadata"].tobytes())


class _Rows(NamedTuple):
    """Consecutive rows of a Parquet file."""

    first: int  # number of the first row, counted from 1
    lengths: dict[str, Ints]  # number of values in each row, int64 [rows], by the name of a column in `_LISTS`
    values: dict[str, Array]  # values of all rows, joined, by the name of a column


def _own_metadata(path: str, version: str | None) -> dict[str, Any] | None:
    """Return the metadata that `grain-sft prepare` wrote into the file; None if another tool wrote it."""
    with _open_parquet(path, version) as file:
        raw = (file.schema_arrow.metadata or {}).get(METADATA_KEY.encode(), b"null")
    with contextlib.suppress(ValueError):
        metadata = json.loads(raw)
        return metadata if isinstance(metadata, dict) else None
    return None


def _unpack(path: str, version: str | None, first_weights: Array | None, out: Sequence[IO[bytes]]) -> int:
    """Write tokens, weights and documents of all rows to the three files `out`, and return the number of documents.

    `first_weights` are the weights of the documents' first tokens, float32 [documents]; None if they are 0.
    """
    num_tokens = num_documents = 0  # in the rows before `rows`
    for rows in _read_rows(path, version):
        _check_rows(path, rows)
        length = rows.values["seqlens"].astype(np.int64)
        starts = np.cumsum(length) - length
        weights = np.zeros(int(length.sum()), "<f4")
        # The first token of a sequence gets the last weight of the sequence before, which `_check_rows` has found to be 0.
        weights[1:] = rows.values["nz_shifted_loss_weights"][:-1]
        if first_weights is not None:
            firsts = first_weights[num_documents : num_documents + len(length)]
            if len(firsts) == len(length):  # else `_unpacked` raises an error
                weights[starts[length > 0]] = firsts[length > 0]
        out[0].write(rows.values["nz_input_ids"].astype("<u4").tobytes())
        out[1].write(weights.tobytes())
        out[2].write(np.stack([starts + num_tokens, length], axis=1).astype("<u8").tobytes())
        num_tokens += len(weights)
        num_documents += len(length)
    return num_documents


def _check_rows(path: str, rows: _Rows) -> None:
    """Refuse rows with an invalid value, or with columns that don't fit together."""
    values, counts = rows.values, rows.lengths["nz_input_ids"]
    length = values["seqlens"].astype(np.int64)
    row_of_sequence = np.repeat(np.arange(len(counts)), rows.lengths["seqlens"])
    if (length < 0).any():
        raise _damaged(path, rows.first + int(row_of_sequence[length < 0][0]), "seqlens holds a negative length")
    sums = np.bincount(row_of_sequence, weights=length, minlength=len(counts)).astype(np.int64)
    # Each entry has numbers that must equal `counts`, the tokens of each row. Its key begins the message if they do not.
    counts_by_fact = {"seqlens add up to": sums, "total_length is": values["total_length"]}
    counts_by_fact |= {f"{name} has the length": rows.lengths[name] for name in _LISTS[1:]}
    for fact, other_counts in counts_by_fact.items():
        if (row := first_true(other_counts != counts)) is not None:
            problem = f"{fact} {other_counts[row]}, but nz_input_ids has the length {counts[row]}"
            raise _damaged(path, rows.first + row, problem)
    starts = np.cumsum(length) - length
    ids, labels, weights = values["nz_input_ids"], values["nz_shifted_label_ids"], values["nz_shifted_loss_weights"]
    is_last = np.zeros(len(ids), np.bool_)
    is_last[(starts + length - 1)[length > 0]] = True
    positions = np.arange(len(ids)) - np.repeat(starts, length)
    invalid_weights = KINDS["float32"].find_invalid(weights.astype(np.float32), ids)
    wrong_labels = (weights[:-1] != 0) & (labels[:-1] != ids[1:])
    for invalid, problem in (
        (values["nz_position_ids"] != positions, "nz_position_ids don't count from 0 in a sequence"),
        ((ids < 0) | (ids >= 1 << 31), "nz_input_ids holds a token id that is negative or above int32"),
        (invalid_weights, "nz_shifted_loss_weights holds a weight that is negative or not finite"),
        (is_last & (weights != 0), "nz_shifted_loss_weights is not 0 at the last token of a sequence"),
        (wrong_labels, "a label of nz_shifted_label_ids takes loss, but is not the next token"),
    ):
        if (value := first_true(invalid)) is not None:
            row = int(np.searchsorted(np.cumsum(counts), value, side="right"))
            raise _damaged(path, rows.first + row, problem)


def _damaged(path: str, row: int, problem: str) -> CorpusError:
    return CorpusError(f"{path}: row {row}: {problem}. The file is damaged, or not OpenChat's: copy it again.")


@contextlib.contextmanager
def _open_parquet(path: str, version: str | None) -> Iterator[Any]:
    """Open a local or remote Parquet file as a pyarrow `ParquetFile` in the context."""
    pyarrow = import_extra("pyarrow", f"{path}: reading Parquet", "pyarrow", "parquet")
    from pyarrow import parquet

    opened: Any = open_remote(path, version) if files.is_remote(path) else pyarrow.OSFile(path)
    with opened as source:
        yield parquet.ParquetFile(source, buffer_size=_BUFFER, page_checksum_verification=True)


def _read_rows(path: str, version: str | None) -> Iterator[_Rows]:
    """Yield all rows of a Parquet file, up to `_ROWS_AT_ONCE` at once."""
    first = 1
    try:
        with _open_parquet(path, version) as file:
            names = file.schema_arrow.names
            for name in _COLUMNS:
                if names.count(name) != 1:
                    found = f"{names.count(name)} columns are named {name}"
                    fix = "Write texts or conversations as a corpus with `grain-sft prepare`"
                    raise CorpusError(f"{path}: {found}; expected one each of {', '.join(_COLUMNS)}. {fix}.")
            for group in range(file.num_row_groups):  # one iterator over all groups would keep all groups in memory
                for batch in file.iter_batches(_ROWS_AT_ONCE, [group], columns=list(_COLUMNS), use_threads=False):
                    yield _decode(path, first, batch)
                    first += batch.num_rows
            if first - 1 != file.metadata.num_rows:  # pyarrow yields the rows of some damaged files up to the damage
                raise CorpusError(f"{path}: {first - 1} rows; expected {file.metadata.num_rows}. Copy the file again.")
    except GrainSftError:
        raise
    except Exception as error:  # for damaged files, pyarrow raises its own errors, MemoryErrors and OSErrors
        text = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        raise CorpusError(f"{path}: can't be read as Parquet after row {first - 1} ({text}). Copy the file again.") from error


def _decode(path: str, first: int, batch: Any) -> _Rows:
    """Return a pyarrow `RecordBatch` as rows. `first` is the number of its first row. Refuse columns of other types."""
    from pyarrow import types

    rows = _Rows(first, {}, {})
    for name in _COLUMNS:
        column = inner = batch.column(batch.schema.get_field_index(name))
        if name in _LISTS:
            if not (types.is_list(column.type) or types.is_large_list(column.type)):
                raise CorpusError(f"{path}: column {name} is {column.type}; expected lists of numbers. Fix the file.")
            inner = column.flatten()
            rows.lengths[name] = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        if not (types.is_integer(inner.type) or (name in _FLOATS and types.is_floating(inner.type))):
            raise CorpusError(f"{path}: column {name} holds {inner.type}; expected numbers. Fix the file.")
        if column.null_count or inner.null_count:
            raise CorpusError(f"{path}: column {name} lacks a value in some rows from {first} on. Fix the file.")
        rows.values[name] = inner.to_numpy(zero_copy_only=False)
    return rows
