"""Materialising: packed rows, written in the order of their plan as a corpus of the format rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.corpus import (
    ROWS_FORMAT,
    ROWS_MANIFEST,
    ROWS_VERSION,
    Json,
    RowFormat,
    open_corpus,
    row_files,
    scan_rows,
)
from grain_sft.errors import CorpusError, LayoutError, StorageError
from grain_sft.layout import PackedLayout, plan_places
from grain_sft.storage import files

if TYPE_CHECKING:
    from grain_sft.source import Element, NpyDataSource

SHARD_BYTES = 1 << 30  # of rows
_CHUNK_TOKENS = 1 << 20  # read and written at once
_STATE, _LOCK = "identity.json", "writing.lock"

Progress = Callable[[str, int, int], None]


def materialize(
    layout: PackedLayout,
    output: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the rows of `layout` to the folder `output`, which `open_corpus` opens for a `MaterializedLayout`.

    The folder appears whole, by one rename; in a bucket its files appear one by one, rows.json last. The same call
    continues interrupted work shard by shard, and leaves a finished folder of the same rows unchanged.

    Args:
      layout: Packed layout of any algorithm, whose rows of all epochs are written.
      output: Folder that is new, empty, or holds the same rows; local, or a URL.
      shard_bytes: Most bytes of rows in a file, which holds at least a row.
      progress: Function of an activity, rows written, and all rows.

    Returns:
      The content of rows.json.

    Raises:
      LayoutError: The layout packs nothing, or the output holds something else.
      StorageError: Space or permission is missing, or another process is writing there.
      CorpusError, CorpusFileError: The corpus can't be read.
    """
    if not layout.plans:
        raise LayoutError(f"{layout!r}: only a PackedLayout's rows can be written out.")
    if not os.fspath(output):
        raise LayoutError("an empty path: give the folder that the rows are to be written to.")
    job = _Job(layout, as_integer("shard_bytes", shard_bytes, 1, LayoutError))
    folder = files.absolute(files.normalize(output)).rstrip("/")
    done = _finished(folder, job.key)
    if done is not None:
        return done
    stage = _stage(folder)
    with contextlib.nullcontext() if files.is_remote(stage) else files.locked(Path(stage, _LOCK)):
        done = _finished(folder, job.key)  # another process may have written it meanwhile
        if done is not None:
            shutil.rmtree(stage, ignore_errors=True)
            return done
        job.claim(stage)
        if not files.is_remote(stage):
            _check_space(stage, job)
        return _write(job, folder, stage, progress or (lambda what, done, total: None))


@dataclasses.dataclass(frozen=True)
class _Job:
    """Rows that are to be written, and their key."""

    layout: PackedLayout
    shard_bytes: int

    @functools.cached_property
    def made_of(self) -> str:
        """Content of corpus and plans. Reads all files, unless this machine has cached their hashes."""
        plans = ", ".join(plan["fingerprint"] for plan in plan_places(self.layout))
        return f"{self.layout!r} of corpus {self.layout.corpus.content_hash()}, plans {plans}"

    @property
    def key(self) -> str:
        stated = json.dumps([ROWS_VERSION, self.made_of, self.rows_per_shard, self.layout.corpus.padding_token_id])
        return f"sha256:{hashlib.sha256(stated.encode()).hexdigest()}"

    @property
    def rows_per_shard(self) -> int:
        return max(1, self.shard_bytes // self.row.itemsize)

    @property
    def loss(self) -> str:
        corpus = self.layout.corpus
        return ("float32" if corpus.has_weights else "bool") if corpus.has_loss else ""

    @functools.cached_property
    def rows(self) -> RowFormat:
        layout = self.layout
        most, has_loss = layout.statistics["max_segments"], layout.corpus.has_loss
        return RowFormat.of(layout.sequence_length, layout.mean_segments, most, has_loss, self.made_of)

    @property
    def row(self) -> np.dtype[Any]:
        return self.rows.dtype(self.layout.corpus.dtype)

    @property
    def bytes_a_row(self) -> int:
        loss = {"": 0, "bool": 1, "float32": 4}[self.loss]
        return self.row.itemsize + self.layout.sequence_length * loss

    def shards(self) -> list[range]:
        rows, most = len(self.layout), self.rows_per_shard
        return [range(begin, min(begin + most, rows)) for begin in range(0, rows, most)]

    def claim(self, stage: str) -> None:
        """Write the job's key into `stage`, and remove unfinished files: of other rows all, else temporary ones."""
        state = files.join(stage, _STATE)
        if files.exists(state):
            found = Json.load(state)
            if found.get("key") == self.key:
                if not files.is_remote(stage):
                    _remove(stage, lambda name: name.endswith(".tmp"))  # of a killed writer
                return
            if files.is_remote(stage):
                raise LayoutError(
                    f"{stage}: holds unfinished rows of something else ({found.get('made_of')}). Remove its files yourself, or "
                    "give another folder."
                )
        if not files.is_remote(stage):
            _remove(stage, lambda name: name != _LOCK)
        files.write_bytes(state, json.dumps({"key": self.key, "made_of": self.made_of}, indent=2).encode())


def _remove(stage: str, is_wanted: Callable[[str], bool]) -> None:
    for name in filter(is_wanted, os.listdir(stage)):
        os.unlink(os.path.join(stage, name))


def _write(job: _Job, folder: str, stage: str, progress: Progress) -> dict[str, Any]:
    from grain_sft.source import NpyDataSource  # only here: grain is slow to import

    source = NpyDataSource(job.layout)
    shards = job.shards()
    for number, rows in enumerate(shards):
        paths = {kind: files.join(stage, name) for kind, name in row_files(number, job.loss).items()}
        if not files.exists(paths["documents"]):  # written last
            _write_shard(job, source, rows, paths, progress)
        progress("rows", rows.stop, len(job.layout))
    corpus = job.layout.corpus
    sources = None if corpus.sources is None else job.layout.sources
    if sources is not None:
        documents = np.concatenate([plan.document for plan in job.layout.plans])
        files.write_bytes(files.join(stage, "sources.bin"), sources[documents].astype("<i8").tobytes())
    manifest = {
        "format": ROWS_FORMAT,
        "version": ROWS_VERSION,
        "key": job.key,
        "made_of": job.made_of,
        "sequence_length": job.layout.sequence_length,
        "rows": len(job.layout),
        "dtype": corpus.dtype.name,
        "positions_dtype": job.rows.positions_dtype,
        "segments_dtype": job.rows.segments_dtype,
        "most_segments": job.rows.most_segments,
        "loss": job.loss or None,
        "eos_token_id": None if corpus.eos_token_id is None else int(corpus.eos_token_id),
        "pad_token_id": job.layout.corpus.padding_token_id,
        "tokenizer": corpus.tokenizer,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "source_names": list(corpus.source_names),
        "rows_of_shards": [len(rows) for rows in shards],
    }
    path = files.join(stage, ROWS_MANIFEST)
    manifest["fingerprint"] = scan_rows(stage, Json(path, manifest)).fingerprint
    files.write_bytes(path, (json.dumps(manifest, indent=2) + "\n").encode())
    if not files.is_remote(folder):
        _publish(stage, folder)
    return manifest


def _write_shard(job: _Job, source: NpyDataSource, rows: range, paths: Mapping[str, str], progress: Progress) -> None:
    """Write the files of one shard; each appears whole, the one of documents last."""
    from grain_sft.transforms import ShiftTargets

    shift = ShiftTargets()
    step = max(1, _CHUNK_TOKENS // job.layout.sequence_length)
    with contextlib.ExitStack() as stack:
        kinds = ["documents", *(kind for kind in paths if kind != "documents")]  # the first opened is the last closed
        out = {kind: stack.enter_context(files.atomic_write(paths[kind], "wb")) for kind in kinds}
        for begin in range(rows.start, rows.stop, step):
            element = source.read(range(begin, min(begin + step, rows.stop)))
            made = np.zeros(len(element["tokens"]), job.row)
            documents = _documents(element, begin - rows.start)
            arrays = {**element, "target_segment_ids": shift.map(element)["targets_segmentation"]}
            for name in made.dtype.names or ():
                made[name] = _ends(documents, begin - rows.start, made) if name == "ends" else arrays[name]
            out["rows"].write(made.tobytes())
            out["documents"].write(documents.astype("<u8").tobytes())
            if job.loss:
                loss = element["loss_weights" if job.loss == "float32" else "loss_mask"]
                out["loss"].write(loss.astype("<f4" if job.loss == "float32" else np.uint8, copy=False).tobytes())
            progress("rows", min(begin + step, rows.stop), len(job.layout))


def _documents(element: Element, first_row: int) -> npt.NDArray[np.int64]:
    """Return start and length of every segment, int64 [segments, 2], counted from the shard's first token."""
    segments = element["segment_ids"]
    border = np.ones((len(segments), segments.shape[1] + 1), np.bool_)
    border[:, 1:-1] = segments[:, 1:] != segments[:, :-1]
    held = segments.reshape(-1) != 0
    starts = np.flatnonzero(border[:, :-1].reshape(-1) & held)
    stops = np.flatnonzero(border[:, 1:].reshape(-1) & held) + 1
    return np.stack([starts + first_row * segments.shape[1], stops - starts], axis=1)


def _ends(documents: npt.NDArray[np.int64], first_row: int, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the number of segments of each of `rows`, and their ends: int64 [rows, 1 + most of a row]."""
    length = rows.dtype["tokens"].shape[0]
    row = documents[:, 0] // length - first_row
    counts = np.bincount(row, minlength=len(rows))
    found = np.zeros((len(rows), *rows.dtype["ends"].shape), np.int64)
    found[:, 0] = counts
    number = np.arange(len(row)) - (counts.cumsum() - counts)[row]
    found[row, 1 + number] = documents.sum(axis=1) - (row + first_row) * length
    return found


def _stage(folder: str) -> str:
    """Return the folder of unfinished rows; in a bucket the output itself."""
    parent, name = os.path.split(folder)
    if not name:
        raise LayoutError(f"{folder or '/'}: is the root of the file system. Give a folder in it.")
    return folder if files.is_remote(folder) else os.path.join(parent, f".{name}.grain_sft-rows")


def _finished(folder: str, key: str) -> dict[str, Any] | None:
    """Return the content of rows.json, if the folder holds these rows; refuse any other content."""
    manifest = files.join(folder, ROWS_MANIFEST)
    if files.exists(manifest):
        found = Json.load(manifest)
        if found.get("key") == key:
            try:
                open_corpus(folder, format="rows")
            except (CorpusError, OSError) as error:
                raise LayoutError(
                    f"{folder}: holds these rows, but they are damaged ({error}) Remove the folder, and write them again."
                ) from error
            return dict(found.entries())
        raise LayoutError(
            f"{folder}: holds other rows ({found.get('made_of')}). Give another folder, or remove this one yourself."
        )
    if files.is_remote(folder) or not files.exists(folder):
        return None
    if not os.path.isdir(folder) or os.listdir(folder):
        raise LayoutError(f"{folder}: exists, and is not an empty folder. Give one that is new or empty.")
    return None


def _check_space(stage: str, job: _Job) -> None:
    written = sum(file.stat().st_size for file in Path(stage).iterdir())
    needed = len(job.layout) * job.bytes_a_row - written
    free = shutil.disk_usage(stage).free
    if needed > free:
        raise StorageError(
            f"{os.path.dirname(stage)}: has {free / 1e9:.1f} GB free, but the rows take {needed / 1e9:.1f} GB more. Give a "
            "folder on another disk."
        )


def _publish(stage: str, folder: str) -> None:
    try:
        os.rename(stage, folder)  # first: rows without a key would be taken for those of another job
        for name in (_STATE, _LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        files.sync_folder(Path(folder).parent)
    except OSError as error:
        raise StorageError(f"{folder}: can't be made ({error.strerror}).") from error
