"""Format rows: packed rows written out in order, by `grain-sft pack --materialize`.

`rows.json`, and for every shard NNNN: `rows_NNNN.bin` (for each row its tokens, its positions, its segment ids, and the
segment ids of its targets, 0 where no loss is taken: uint8, uint16 or uint32; then nothing until a multiple of 8 bytes; where
rows.json says `most_segments`, a row has instead of positions and segment ids how many segments it holds and where each ends,
int64, and segment ids of its targets only where not every token takes loss),
`documents_NNNN.idx` (uint64 pairs of start and length, of every segment, in tokens) and, where the corpus says which tokens
take loss, `loss_NNNN.bin` (uint8, or float32 weights).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

from grain_sft.corpus.boundaries import describe_boundaries
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.metadata import Json, Origin
from grain_sft.corpus.formats.options import Options, corpus_of
from grain_sft.corpus.formats.tree import Tree
from grain_sft.corpus.loss import scan_loss
from grain_sft.corpus.row_format import RowFormat
from grain_sft.corpus.scan import THREADS
from grain_sft.corpus.shard import Shard, token_dtype
from grain_sft.errors import CorpusError
from grain_sft.storage import describe, files

EXPECTED = "a directory with rows.json, written by grain-sft pack --materialize"
MANIFEST = "rows.json"
FORMAT = "grain_sft rows"
VERSION = 4
PLACE_DTYPES = ("uint8", "uint16", "uint32")
LOSS_KINDS = ("", "bool", "float32")


def find(path: str, tree: Tree) -> str | None:
    """The folder itself."""
    return path if MANIFEST in tree.names(path) else None


def read(folder: str, options: Options, tree: Tree) -> Corpus:
    """The shards, by number."""
    data = Json.load(files.join(folder, MANIFEST))
    if options.use_loss_mask is False or options.masks is not None:
        name = "use_loss_mask=False" if options.masks is None else "label_mask_paths"
        raise CorpusError(
            f"{folder}: {name}, but rows that `grain-sft pack --materialize` wrote hold their masks. Write the rows again from "
            "a corpus that was opened so."
        )
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise CorpusError(
            f"{data.path}: says format {data.get('format')!r}, version {data.get('version')!r}; expected {FORMAT!r}, version "
            f"{VERSION}. Write the rows again, or read them with the grain_sft that wrote them."
        )
    corpus = scan(folder, data, options, tree)
    stated = data.text("fingerprint")
    if options.eos_token_id in (None, data.count("eos_token_id")) and stated != corpus.fingerprint:
        raise CorpusError(
            f"{folder}: its files are not those that {MANIFEST} was written with (their fingerprint is "
            f"{corpus.fingerprint}, it says {stated}). A file was replaced: copy the folder again, or write the rows again."
        )
    return corpus


def scan(folder: str, data: Json, options: Options, tree: Tree) -> Corpus:
    """The corpus of the files in `folder`, of which `data` says what rows.json does.

    Raises:
      CorpusFileError: a file is missing or unreadable.
      CorpusError: files of other sizes.
    """
    length, name, loss = data.count("sequence_length"), data.text("dtype"), data.text("loss") or ""
    made_of = data.text("made_of")
    counts = [_whole(data.path, entry) for entry in data.items("rows_of_shards")]
    if not length or not name or not counts or not made_of or loss not in LOSS_KINDS:
        raise CorpusError(f"{data.path}: lacks or garbles a field. It was edited or damaged: write the rows again.")
    kinds = {key: data.text(key) or "" for key in ("positions_dtype", "segments_dtype")}
    most_segments = data.count("most_segments") or 0
    for key, kind in kinds.items():
        if kind not in PLACE_DTYPES and not (most_segments and not kind):
            raise CorpusError(f"{data.path}: {key} is {kind!r}; expected one of {', '.join(PLACE_DTYPES)}.")
    dtype = token_dtype(name, data.path)
    if options.dtype not in (None, dtype):
        raise CorpusError(f"{data.path}: says dtype {name}, but dtype={options.dtype} was asked for. Leave it out.")

    ready = RowFormat(length, kinds["positions_dtype"], kinds["segments_dtype"], most_segments, made_of)
    row = ready.dtype(dtype)

    def scan_one(number: int) -> Shard:
        paths = {kind: files.join(folder, file) for kind, file in shard_files(number, loss).items()}
        rows = describe(paths["rows"])
        tokens = counts[number] * length
        _check_size(paths["rows"], rows.size, counts[number] * row.itemsize)
        found = None if not loss else scan_loss(paths["loss"], loss)
        if found is not None:
            _check_size(paths["loss"], found.size, tokens * (1 if loss == "bool" else 4))
        boundaries = describe_boundaries(paths["documents"], "pairs")
        apart = (length, row.itemsize // dtype.itemsize)
        return Shard(paths["rows"], tokens, rows.size, 0, "", rows.digest, found, boundaries, apart, rows.version)

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(counts))) as pool:
        shards = tuple(pool.map(scan_one, range(len(counts))))
    origin = Origin(
        eos_token_id=data.count("eos_token_id"),
        pad_token_id=data.count("pad_token_id"),
        tokenizer=data.text("tokenizer"),
        tokenizer_sha256=data.text("tokenizer_sha256"),
        source_names=tuple(str(each) for each in data.items("source_names")),
        path=data.path,
    )
    sources = files.join(folder, "sources.bin") if "sources.bin" in tree.names(folder) else ""
    return dataclasses.replace(corpus_of(shards, dtype, options, origin, sources), rows=ready)


def shard_files(number: int, loss: str) -> dict[str, str]:
    """Names of the files of a shard, by what they hold."""
    kinds = {"rows": "bin", "loss": "bin", "documents": "idx"}
    return {kind: f"{kind}_{number:04d}.{suffix}" for kind, suffix in kinds.items() if kind != "loss" or loss}


def _whole(path: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorpusError(f"{path}: rows_of_shards holds {value!r}; expected counts of rows. Write the rows again.")
    return value


def _check_size(path: str, found: int, expected: int) -> None:
    if found != expected:
        raise CorpusError(
            f"{path}: {found} bytes, but {MANIFEST} says {expected}. It was cut short, or is of other rows: copy it again."
        )
