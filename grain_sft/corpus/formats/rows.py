"""Format rows: packed rows written out in order, by `grain-sft pack --materialize`.

`rows.json`, and for every shard NNNN:
  - `rows_NNNN.bin`: rows as `RowFormat` lays them out;
  - `documents_NNNN.idx`: uint64 pairs of start and length of every segment, in tokens;
  - `loss_NNNN.bin`: uint8, or float32 weights; only where the corpus states which tokens take loss.
"""

from __future__ import annotations

import concurrent.futures
import re
from typing import Any

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.documents import describe_boundaries
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing, Json
from grain_sft.corpus.formats.scanning import THREADS, ReadOptions, corpus_of
from grain_sft.corpus.loss import scan_loss
from grain_sft.corpus.shard import RowFormat, Shard, token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import describe, files

ROWS_MANIFEST = "rows.json"
ROWS_FORMAT = "grain_sft rows"
ROWS_VERSION = 4

_DTYPES = ("uint8", "uint16", "uint32")
_LOSS_KINDS = ("", "bool", "float32")
_FILE = re.compile(r"(rows|loss)_\d{4}\.bin|documents_\d{4}\.idx")


class Rows(Format):
    """The shards of a folder, by number."""

    expected = "a directory with rows.json, written by grain-sft pack --materialize"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        return path if ROWS_MANIFEST in listing.names(path) else None

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        data = Json.load(files.join(found, ROWS_MANIFEST))
        if options.use_loss_mask is False or options.masks is not None:
            name = "use_loss_mask=False" if options.masks is None else "label_mask_paths"
            raise CorpusError(
                f"{found}: {name}, but rows that `grain-sft pack --materialize` wrote hold their masks. Write the rows again "
                "from a corpus that was opened so."
            )
        if data.get("format") != ROWS_FORMAT or data.get("version") != ROWS_VERSION:
            raise CorpusError(
                f"{data.path}: says format {data.get('format')!r}, version {data.get('version')!r}; expected {ROWS_FORMAT!r}, "
                f"version {ROWS_VERSION}. Write the rows again, or read them with the grain_sft that wrote them."
            )
        corpus = scan_rows(found, data, options, listing)
        stated = data.text("fingerprint")
        if options.eos_token_id in (None, data.count("eos_token_id")) and stated != corpus.fingerprint:
            raise CorpusError(
                f"{found}: its files are not those that {ROWS_MANIFEST} was written with (their fingerprint is "
                f"{corpus.fingerprint}, expected {stated}). A file was replaced: copy the folder again, or write them again."
            )
        return corpus

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        if _FILE.fullmatch(files.name_of(path)) and listing.sidecars(path, ROWS_MANIFEST):
            raise CorpusError(
                f"{path}: a file of rows that `grain-sft pack --materialize` wrote, which hold more than tokens. Open their "
                f"folder {files.parent(path)}."
            )
        return None


def scan_rows(
    folder: str, data: Json, options: ReadOptions | None = None, listing: DirectoryListing | None = None
) -> Corpus:
    """Return the corpus of the files in `folder` that the manifest `data` describes.

    Raises:
      CorpusFileError: a file is missing or unreadable.
      CorpusError: files of other sizes.
    """
    options, listing = options or ReadOptions(), listing or DirectoryListing()
    length, name, loss = data.count("sequence_length"), data.text("dtype"), data.text("loss") or ""
    made_of = data.text("made_of")
    counts = [_whole(data.path, entry) for entry in data.items("rows_of_shards")]
    if not length or not name or not counts or not made_of or loss not in _LOSS_KINDS:
        raise CorpusError(f"{data.path}: lacks or garbles a field. It was edited or damaged: write the rows again.")
    kinds = {key: data.text(key) or "" for key in ("positions_dtype", "segments_dtype")}
    most_segments = data.count("most_segments") or 0
    for key, kind in kinds.items():
        if kind not in _DTYPES and not (most_segments and not kind):
            raise CorpusError(f"{data.path}: {key} is {kind!r}; expected one of {', '.join(_DTYPES)}.")
    dtype = token_dtype(name, data.path)
    if options.dtype not in (None, dtype):
        raise CorpusError(f"{data.path}: says dtype {name}, but dtype={options.dtype} was asked for. Leave it out.")
    row_format = RowFormat(length, kinds["positions_dtype"], kinds["segments_dtype"], most_segments, made_of)
    row = row_format.dtype(dtype)

    def scan_one(number: int) -> Shard:
        paths = {kind: files.join(folder, file) for kind, file in row_files(number, loss).items()}
        rows = describe(paths["rows"])
        tokens = counts[number] * length
        _check_size(paths["rows"], rows.size, counts[number] * row.itemsize)
        found = None if not loss else scan_loss(paths["loss"], loss)
        if found is not None:
            _check_size(paths["loss"], found.size, tokens * (1 if loss == "bool" else 4))
        boundaries = describe_boundaries(paths["documents"], "pairs")
        stride = (length, row.itemsize // dtype.itemsize)
        return Shard(paths["rows"], tokens, rows.size, 0, "", rows.digest, found, boundaries, stride, rows.version)

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(counts))) as pool:
        shards = tuple(pool.map(scan_one, range(len(counts))))
    metadata = CorpusMetadata(
        eos_token_id=data.count("eos_token_id"),
        pad_token_id=data.count("pad_token_id"),
        tokenizer=data.text("tokenizer"),
        tokenizer_sha256=data.text("tokenizer_sha256"),
        source_names=tuple(str(each) for each in data.items("source_names")),
        path=data.path,
    )
    sources = files.join(folder, "sources.bin") if "sources.bin" in listing.names(folder) else ""
    return corpus_of(shards, dtype, options, metadata, sources=sources, rows=row_format)


def row_files(number: int, loss: str) -> dict[str, str]:
    """Return the names of the files of a shard by what they hold: "rows", "documents" and, unless `loss` is "", "loss"."""
    kinds = {"rows": "bin", "loss": "bin", "documents": "idx"}
    return {kind: f"{kind}_{number:04d}.{suffix}" for kind, suffix in kinds.items() if kind != "loss" or loss}


def _whole(path: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorpusError(f"{path}: rows_of_shards holds {value!r}; expected counts of rows. Write the rows again.")
    return value


def _check_size(path: str, found: int, expected: int) -> None:
    if found != expected:
        raise CorpusError(
            f"{path}: {found} bytes, but {ROWS_MANIFEST} states {expected}. It was cut short, or is of other "
            "rows. Copy it again."
        )
