"""`materialize`: writes the packed rows of a layout as a corpus for `MaterializedLayout`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.corpus import Json, RowFormat, open_corpus, rows
from grain_sft.errors import CorpusError, LayoutError, StorageError
from grain_sft.layout import PackedLayout, plan_files
from grain_sft.prepare.target import Target
from grain_sft.prepare.writers.plan import whole_files
from grain_sft.progress import Progress
from grain_sft.storage import artifact, files

if TYPE_CHECKING:
    from grain_sft.source import NpyDataSource

SHARD_BYTES = 1 << 30
_CHUNK_TOKENS = 1 << 20  # tokens read and written at once


def materialize(
    layout: PackedLayout, output: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the rows of all epochs of `layout` to the folder `output`, a corpus for `MaterializedLayout`.

    A local folder appears only when it is complete. In a bucket, files appear one by one, the manifest rows.json last. After an
    interruption, the same call continues at the first unfinished shard. A finished folder of the same rows stays unchanged.

    Args:
      layout: Packed layout of any algorithm.
      output: Folder that does not exist, is empty, or holds the same rows; local, or a URL.
      shard_bytes: Maximum number of bytes of rows in a file. A file holds at least one row.
      progress: Function that is called with the text "rows", the number of rows written, and the number of all rows.

    Returns:
      The content of rows.json.

    Raises:
      LayoutError: The layout is not a `PackedLayout`, or the output holds something else.
      StorageError: The disk is too small or the folder can't be written.
      CorpusError, CorpusFileError: The corpus can't be read.
      PrepareError: The manifest of the output, rows.json, is damaged.
    """
    if not getattr(layout, "plans", ()):
        raise LayoutError(f"{layout!r}: only the rows of a PackedLayout can be written. Give one.")
    target = _Target(output)
    target.check_writable()  # before all tokens are read, for their hash
    manifest, dtype = _describe(layout, as_integer("shard_bytes", shard_bytes, 1, LayoutError))
    identity = {"key": manifest["key"], "made_of": manifest["made_of"]}
    write = functools.partial(_write, layout, manifest, dtype, target, progress or (lambda *_: None))
    result = target.produce(identity, write, overwrite=False, wait=True)
    if result.pop("already", False):
        try:
            open_corpus(target.output, format="rows")
        except (CorpusError, OSError) as error:
            problem = f"{target.output}: holds these rows, but they are damaged ({str(error).rstrip('.')})"
            raise LayoutError(f"{problem}. Remove the folder, and write them again.") from error
    return result


class _Target(Target):
    """Output folder of rows. A finished folder is never replaced."""

    manifest_name = rows.MANIFEST
    work_suffix = "rows"
    error = LayoutError

    def begin(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """See `Target.begin`. Replace unfinished work on other rows. In a bucket, that work is in the output, so refuse it."""
        super().begin(identity, overwrite=not self.remote)

    def changed(self, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        unfinished = "unfinished work on " if what == "unfinished work" else ""
        return f"{self.output}: holds {unfinished}other rows ({old.get('made_of')}). Remove the folder or give another."


def _describe(layout: PackedLayout, shard_bytes: int) -> tuple[dict[str, Any], np.dtype[Any]]:
    """Return the pair of rows.json's content, without the fingerprint, and the dtype of a row."""
    corpus, most_segments = layout.corpus, layout.statistics["max_segments"]
    loss_dtype = "float32" if corpus.has_weights else "bool"
    plans = ", ".join(plan["fingerprint"] for plan in plan_files(layout))
    made_of = f"{layout!r} of corpus {corpus.content_hash()}, plans {plans}"
    row_format = RowFormat.of(layout.sequence_length, layout.mean_segments, most_segments, corpus.has_loss, made_of)
    dtype = row_format.dtype(corpus.dtype)
    per_shard = max(1, shard_bytes // dtype.itemsize)  # rows
    manifest = {
        "format": rows.NAME,
        "version": rows.VERSION,
        "key": f"sha256:{artifact.hash_of([rows.VERSION, made_of, per_shard, corpus.padding_token_id])}",
        **dataclasses.asdict(row_format),
        "rows": len(layout),
        "dtype": corpus.dtype.name,
        "loss": loss_dtype if corpus.has_loss else None,
        "eos_token_id": None if corpus.eos_token_id is None else int(corpus.eos_token_id),
        "pad_token_id": corpus.padding_token_id,
        "tokenizer": corpus.tokenizer,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "source_names": list(corpus.source_names),
        "rows_of_shards": [min(per_shard, len(layout) - begin) for begin in range(0, len(layout), per_shard)],
    }
    return manifest, dtype


def _write(
    layout: PackedLayout, manifest: dict[str, Any], dtype: np.dtype[Any], target: Target, progress: Progress
) -> dict[str, Any]:
    """Write the missing shards, then rows.json. Return the content of rows.json."""
    from grain_sft.source import NpyDataSource  # imported late: grain is slow to import

    if not target.remote:
        loss_size = np.dtype(manifest["loss"]).itemsize if manifest["loss"] else 0
        needed = len(layout) * (dtype.itemsize + layout.sequence_length * loss_size)  # bytes of all rows
        if os.path.isdir(target.stage):
            # an interrupted call has written these bytes
            needed -= sum(entry.stat().st_size for entry in os.scandir(target.stage))
        if needed > (free := shutil.disk_usage(target.work).free):
            problem = f"has {free / 1e9:.3f} GB free, but the rows take another {needed / 1e9:.3f} GB"
            raise StorageError(f"{os.path.dirname(target.output)}: {problem}. Give a folder on another disk.")
    source = NpyDataSource(layout)
    begin = 0
    for number, count in enumerate(manifest["rows_of_shards"]):
        names = rows.row_files(number, manifest["loss"])
        # in the order that `_write_shard` expects: documents, loss if the corpus has loss, rows
        paths = [files.join(target.stage, names[kind]) for kind in sorted(names)]
        if not files.exists(paths[0]):  # `whole_files` makes the first path appear last
            _write_shard(source, range(begin, begin + count), dtype, paths, progress)
        begin += count
    # `corpus.sources` is read only for its check: the corpus's file of sources must have one source for each document
    if layout.corpus.sources is not None and (sources := layout.sources) is not None:
        documents = np.concatenate([plan.document for plan in layout.plans])
        files.write_bytes(files.join(target.stage, "sources.bin"), sources[documents].astype("<i8").tobytes())
    path = files.join(target.stage, rows.MANIFEST)
    manifest["fingerprint"] = rows.scan_rows(target.stage, Json(path, manifest)).fingerprint
    files.write_bytes(path, (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


def _write_shard(
    source: NpyDataSource, shard_rows: range, dtype: np.dtype[Any], paths: Sequence[str], progress: Progress
) -> None:
    """Write the rows `shard_rows` of the layout as one shard.

    `paths` are the files of documents, of loss (if the corpus has loss) and of rows. The file of documents appears last.
    """
    from grain_sft.transforms import ShiftTargets  # imported late, as in `_write`

    length = source.layout.sequence_length
    chunk = max(1, _CHUNK_TOKENS // length)
    with whole_files(paths) as (documents_file, *loss_file, rows_file):
        for begin in range(shard_rows.start, shard_rows.stop, chunk):
            element = source.read(range(begin, min(begin + chunk, shard_rows.stop)))
            pieces = source.layout.pieces(np.arange(begin, begin + len(element["tokens"])))
            # `row`, `segment`, `start` and `stop` are int64 [segments]. In `row`, 0 is row `begin` of the layout. In `segment`,
            # 1 is the first segment of a row.
            first = pieces.segment_begins  # index of each segment's first piece
            segment_numbers, _ = pieces.segments_and_positions
            row, segment, start = pieces.row[first], segment_numbers[first], pieces.column[first]
            stop = start + np.add.reduceat(pieces.length, first)
            # segment id of each token if the next token is in the same segment and takes loss, else 0
            arrays = {**element, "target_segment_ids": ShiftTargets().map(element)["targets_segmentation"]}
            records = np.zeros(len(element["tokens"]), dtype)
            for name in dtype.names or ():
                if name == "ends":  # [rows, 1 + most_segments]: the number of segments, then the end of each segment
                    records[name][:, 0] = np.bincount(row, minlength=len(records))
                    records[name][row, segment] = stop
                else:
                    records[name] = arrays[name]
            rows_file.write(records.tobytes())
            starts = (begin - shard_rows.start + row) * length + start  # index of a segment's first token in the shard
            documents_file.write(np.stack([starts, stop - start], axis=1).astype("<u8").tobytes())
            for file in loss_file:
                file.write(element.get("loss_weights", element["loss_mask"]).tobytes())
            progress("rows", min(begin + chunk, shard_rows.stop), len(source.layout))
