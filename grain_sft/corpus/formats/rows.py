"""Format rows: a folder with the rows of a packed layout, in order, as `grain-sft pack --materialize` writes it.

A folder holds the manifest `rows.json`, and for each shard NNNN:
  - `rows_NNNN.bin`: rows as `RowFormat` lays them out;
  - `documents_NNNN.idx`: start and length of every segment, in tokens, as uint64 pairs;
  - `loss_NNNN.bin`: uint8 masks or float32 weights, only if the packed corpus has loss files.
If the packed corpus has sources, `sources.bin` holds the source of each segment of all shards.
"""

import dataclasses
import re
from typing import Annotated, Literal

import msgspec

from grain_sft.corpus.boundaries import describe_boundaries
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing, Json
from grain_sft.corpus.formats.scanning import ReadOptions, corpus_of, scan_in_threads
from grain_sft.corpus.loss import scan_loss
from grain_sft.corpus.row_format import Positive, RowFormat
from grain_sft.corpus.shard import Shard, TokenDtype, token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import FileStamp, describe, files

MANIFEST = "rows.json"
NAME = "grain_sft rows"
VERSION = 4

_FILE = re.compile(r"(rows|loss)_\d{4,}\.bin|documents_\d{4,}\.idx")


class Rows(Format):
    """Format of a folder of materialized rows."""

    expected = "a directory with rows.json, written by grain-sft pack --materialize"
    metadata_files = re.escape(MANIFEST)

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        return path if MANIFEST in listing.names(path) else None

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Return the corpus of the folder `found`. Refuse it if its fingerprint is not the one in its manifest."""
        data = Json.load(files.join(found, MANIFEST))
        if options.use_loss_mask is False or options.masks is not None:
            name = "use_loss_mask=False" if options.masks is None else "label_mask_paths"
            raise CorpusError(f"{found}: {name}, but rows hold their masks. Pack the corpus again, opened with {name}.")
        if data.get("format") != NAME or data.get("version") != VERSION:
            problem = f"{data.path}: states format {data.get('format')!r}, version {data.get('version')!r}"
            raise CorpusError(f"{problem}; expected {NAME!r}, version {VERSION}. Write the rows again.")
        corpus = scan_rows(found, data, options, listing)
        # The manifest's fingerprint includes the manifest's EOS id. The caller may give another id.
        actual = dataclasses.replace(corpus, eos_token_id=data.count("eos_token_id")).fingerprint
        expected = data.get("fingerprint", str)
        if actual != expected:
            problem = f"{found}: the fingerprint of its files is {actual}, but {MANIFEST} states {expected}"
            raise CorpusError(f"{problem}. A file was replaced: copy the folder again, or write the rows again.")
        return corpus

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        """Refuse a file of materialized rows, because only their folder can be opened. Return None for other files."""
        if _FILE.fullmatch(files.name_of(path)) and listing.sidecars(path, MANIFEST):
            raise CorpusError(f"{path}: a file of materialized rows. Open their folder {files.parent(path)}.")
        return None


class _Manifest(msgspec.Struct):
    """Fields of rows.json that describe the files, except the fields of `RowFormat`."""

    dtype: TokenDtype
    rows_of_shards: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    loss: Literal["bool", "float32"] | None = None  # kind of the loss files; None without loss files


def scan_rows(folder: str, data: Json, options: ReadOptions | None = None, listing: DirectoryListing | None = None) -> Corpus:
    """Return the corpus of the files in `folder` that the manifest `data` describes."""
    options, listing = options or ReadOptions(), listing or DirectoryListing()
    manifest, rows = data.convert(_Manifest), data.convert(RowFormat)
    if not rows.most_segments and not (rows.positions_dtype and rows.segments_dtype):
        raise CorpusError(f"{data.path}: lacks positions_dtype or segments_dtype. Write the rows again.")
    dtype = token_dtype(manifest.dtype, data.path)
    options.check_dtype(data.path, dtype)
    length = rows.sequence_length
    try:
        row_bytes = rows.dtype(dtype).itemsize
    except ValueError as error:  # numpy limits the size of a dtype
        problem = f"{data.path}: rows of {length} tokens and {rows.most_segments} segments are too large ({error})"
        raise CorpusError(f"{problem}. Write the rows again.") from error

    def scan_shard(number: int, num_rows: int) -> Shard:
        """Return shard `number` of `num_rows` rows. Refuse a file whose size does not fit this number."""
        paths = {kind: files.join(folder, name) for kind, name in row_files(number, manifest.loss).items()}
        stamp = describe(paths["rows"])
        _check_size(stamp, num_rows * row_bytes)
        loss = None
        if manifest.loss is not None:
            loss = scan_loss(paths["loss"], manifest.loss)
            _check_size(loss, num_rows * length * loss.encoding.dtype.itemsize)
        boundaries = describe_boundaries(paths["documents"], "pairs")
        row = (length, row_bytes // dtype.itemsize)  # in tokens, as in `Shard.row`
        return Shard(**vars(stamp), num_tokens=num_rows * length, loss=loss, boundaries=boundaries, row=row)

    counts = manifest.rows_of_shards
    shards = tuple(scan_in_threads(scan_shard, range(len(counts)), counts))
    sources = listing.find(folder, "sources.bin")
    sources_file = describe(sources) if sources else None
    return corpus_of(shards, dtype, CorpusMetadata.of(data), options.eos_token_id, sources_file=sources_file, rows=rows)


def row_files(number: int, loss: str | None) -> dict[str, str]:
    """Return the file names of a shard by kind: "rows", "documents" and, if `loss` is given, "loss"."""
    kinds = {"rows": "bin", "loss": "bin", "documents": "idx"}
    return {kind: f"{kind}_{number:04d}.{suffix}" for kind, suffix in kinds.items() if kind != "loss" or loss}


def _check_size(file: FileStamp, expected: int) -> None:
    if file.size != expected:
        raise CorpusError(f"{file.path}: {file.size} bytes, but {MANIFEST} states {expected}. Copy it again.")
