"""Plans that OLMo-core's `NumpyPackedFSLDataset` (3.0.0) left in its work directory, read as they are.

For each group of source files, below `dataset-common/`, raw uint64:
  document-indices-L-HASH.npy       (first token, token after the last) of each piece of a document, longest first,
                                    counted through the group's files;
  instance-offsets-L-HASH.npy       (first, one after the last) entry of the next file, for each row;
  documents-by-instance-L-HASH.npy  numbers of pieces, row after row.
HASH is of the group's paths and sizes and of what decides the packing; see `_group_hash`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, Documents, Shard, part_by_part
from grain_sft.errors import LayoutError, StorageError
from grain_sft.layout.packing import PackingOptions
from grain_sft.layout.pieces import Ints
from grain_sft.layout.plan import finder_of, plan_columns
from grain_sft.storage import files, read_regular

_NAMES = ("document-indices", "instance-offsets", "documents-by-instance")


@dataclasses.dataclass(frozen=True)
class OlmoPlan:
    """Where the files of a plan are.

    Attributes:
      folder: `dataset-common` of the work directory.
      hashes: of each group of source files.
      digest: of all bytes of these files.
    """

    folder: Path
    hashes: tuple[str, ...]
    digest: str


def find_plan(
    corpus: Corpus,
    options: PackingOptions,
    work_dir: Path,
    paths: Sequence[str] | None = None,
    use_array_if_local: bool | None = None,
) -> OlmoPlan:
    """The plan that OLMo-core made of these files.

    Args:
      options: its sequence length, long documents and source groups.
      work_dir: OLMo-core's.
      paths: of the token files as OLMo-core was given them; None: the corpus's.
      use_array_if_local: as OLMo-core was given it.

    Raises:
      LayoutError: no such plan, or token files that OLMo-core does not read.
      CorpusFileError: boundary files that the hash needs can't be read.
      StorageError: the plan can't be read.
    """
    folder, size = work_dir / "dataset-common", options.source_group_size
    names = [shard.path for shard in corpus.shards] if paths is None else list(paths)
    if len(names) != len(corpus.shards):
        raise LayoutError(f"paths: {len(names)} of them, but the corpus has {len(corpus.shards)} token files.")
    for shard in corpus.shards:
        if shard.data_offset:
            raise LayoutError(
                f"{shard.path}: has a .npy header, which OLMo-core takes for tokens. Its plan can't be used."
            )
    hashes = []
    for first in range(0, len(names), size):
        some = names[first : first + size]
        found = _group_hash(some, corpus.shards[first : first + size], options.long_documents, use_array_if_local)
        for name in _NAMES:
            path = folder / f"{name}-{options.sequence_length}-{found}.npy"
            if not path.is_file():
                raise LayoutError(
                    f"{path}: no such file. OLMo-core 3.0.0 would have written it for {_listed(some)} of "
                    f"{_listed([str(shard.size) for shard in corpus.shards[first : first + size]])} bytes, "
                    f"sequence_length={options.sequence_length}, long_documents={options.long_documents!r} and "
                    f"source_group_size={size}; the folder has {_lengths_in(folder)}. If OLMo-core was given other paths "
                    "to the same files, give those as paths."
                )
        hashes.append(found)
    plan = OlmoPlan(folder, tuple(hashes), "")
    return dataclasses.replace(plan, digest=_digest(_read_all(plan, options.sequence_length)))


def read_plan(plan: OlmoPlan, corpus: Corpus, options: PackingOptions) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a plan, as `make_plan` gives them.

    Raises:
      LayoutError: the files are damaged, or of other documents.
      StorageError: they can't be read.
    """
    documents = finder_of(corpus, options).documents
    borders = np.cumsum([0, *(shard.num_tokens for shard in corpus.shards)])
    groups = _read_all(plan, options.sequence_length)
    if _digest(groups) != plan.digest:
        raise LayoutError(f"{plan.folder}: the plan is no longer the one that was opened. Make the layout again.")
    starts, stops, ends, rows = [], [], [], 0
    for group, (indices, offsets, chosen) in enumerate(groups):
        first = group * options.source_group_size
        last = min(first + options.source_group_size, len(corpus.shards))
        where = f"{plan.folder}: plan {plan.hashes[group][:12]}"
        start, stop, row_ends = _check(where, indices, offsets, chosen, options.sequence_length)
        if (stop > borders[last] - borders[first]).any():
            raise LayoutError(
                f"{where}: a document ends at token {int(stop.max())}, but its files have "
                f"{int(borders[last] - borders[first])}. It was made of other files."
            )
        starts.append(start + borders[first])
        stops.append(stop + borders[first])
        ends.append(row_ends + rows)
        rows += len(start)
    start, stop = np.concatenate(starts), np.concatenate(stops)
    where = f"{plan.folder}: the plan"
    if options.boundaries == "eos" or not all(shard.boundaries for shard in corpus.shards):
        document = _documents_of(where, start, stop, documents, options)
    else:  # part by part: to OLMo-core, a document that goes on in the next part is two
        _documents_of(where, start, stop, part_by_part(corpus), options)
        document = np.searchsorted(documents.start, start, side="right") - 1
    return plan_columns(documents, document, start, stop - start, np.concatenate(ends))


def _read_all(plan: OlmoPlan, length: int) -> list[list[npt.NDArray[np.uint64]]]:
    """The three arrays of every group."""
    return [_read(plan, length, group) for group in range(len(plan.hashes))]


def _digest(groups: list[list[npt.NDArray[np.uint64]]]) -> str:
    digest = hashlib.sha256()
    for arrays in groups:
        for array in arrays:
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.data)
    return f"sha256:{digest.hexdigest()}"


def _read(plan: OlmoPlan, length: int, group: int) -> list[npt.NDArray[np.uint64]]:
    """The three arrays of a group, flat."""
    arrays = []
    for name in _NAMES:
        path = plan.folder / f"{name}-{length}-{plan.hashes[group]}.npy"
        try:
            data = read_regular(path)
        except OSError as error:
            raise StorageError(f"{path}: can't be read ({error.strerror or error}).") from error
        width = 8 if name == _NAMES[2] else 16
        if len(data) == 1:  # which OLMo-core writes where there is nothing to write
            data = b""
        if len(data) % width:
            raise LayoutError(
                f"{path}: {len(data)} bytes is no multiple of {width}. It was cut short; delete the plan."
            )
        arrays.append(np.frombuffer(data, "<u8"))
    return arrays


def _check(
    where: str,
    indices: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    chosen: npt.NDArray[np.uint64],
    length: int,
) -> tuple[Ints, Ints, Ints]:
    """(start, stop) of the pieces, row after row, and the number of pieces up to each row's end."""
    limit = np.uint64(1 << 62)
    if any(len(array) and array.max() >= limit for array in (indices, offsets, chosen)):
        raise LayoutError(f"{where}: holds a number beyond 2**62: it is damaged, or no array of uint64.")
    begins, ends = offsets.astype(np.int64).reshape(-1, 2).T
    wrong = (begins != np.concatenate([[0], ends])[: len(begins)]) | (ends <= begins)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise LayoutError(
            f"{where}: row {row} holds entries {begins[row]} to {ends[row]}; expected some, from "
            f"{ends[row - 1] if row else 0} on. It is damaged."
        )
    if (int(ends[-1]) if len(ends) else 0) != len(chosen):
        raise LayoutError(
            f"{where}: its rows hold {ends[-1] if len(ends) else 0} documents, but {len(chosen)} are listed."
        )
    start, stop = indices.astype(np.int64).reshape(-1, 2).T
    if len(chosen) != len(start) or (np.bincount(np.minimum(chosen, len(start)).astype(np.int64)) != 1).any():
        raise LayoutError(f"{where}: not every one of its {len(start)} documents is in just one row. It is damaged.")
    size = stop - start
    if (size < 1).any() or (size > length).any():
        number = int(np.flatnonzero((size < 1) | (size > length))[0])
        raise LayoutError(
            f"{where}: document {number} is tokens {start[number]} to {stop[number]}; expected 1 to {length} of them."
        )
    order = chosen.astype(np.int64)
    totals = np.cumsum(size[order])
    held = np.diff(totals[ends - 1], prepend=0)
    if (held > length).any():
        row = int(np.flatnonzero(held > length)[0])
        raise LayoutError(f"{where}: row {row} holds {held[row]} tokens; expected {length} at most. It is damaged.")
    return start[order], stop[order], ends


def _documents_of(where: str, start: Ints, stop: Ints, documents: Documents, options: PackingOptions) -> Ints:
    """The document of each piece; every document is there, as it is or as far as a row holds it."""
    most = options.sequence_length
    number = np.searchsorted(documents.start, start, side="right") - 1
    if not len(documents) or (number < 0).any():
        wrong = number < 0
    else:
        before = start - documents.start[number]
        allowed = np.minimum(documents.length[number] - before, most)
        wrong = (before % most != 0) | (stop - start != allowed)
        if options.long_documents == "truncate":
            wrong |= before > 0
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise LayoutError(
            f"{where} holds tokens {start[at]} to {stop[at]}, counted through the corpus, which are no document of it, nor "
            "the part of one that fits into a row. It was made of other tokens, or with another EOS, BOS or boundaries."
        )
    pieces = np.bincount(number, minlength=len(documents))
    expected = np.ones(len(documents), np.int64)
    if options.long_documents == "fragment":
        expected = -(-documents.length // most)
    if (pieces != expected).any():
        at = int(np.flatnonzero(pieces != expected)[0])
        raise LayoutError(
            f"{where} holds document {at} of the corpus in {pieces[at]} pieces; expected {expected[at]}. It was made of other "
            "tokens, or with another EOS, BOS or boundaries."
        )
    return number


def _group_hash(paths: Sequence[str], shards: Sequence[Shard], long_documents: str, use_array: bool | None) -> str:
    """The hash in the names of a group's files: as `NumpyDatasetBase._get_indices_path` makes it."""
    parts = [part for path, shard in zip(paths, shards, strict=True) for part in (path, str(shard.size))]
    parts += [long_documents, "uint64"]
    if use_array is not None:
        parts.append(f"use_array_if_local={use_array}")
    for path, shard in zip(paths, shards, strict=True):
        if from_boundaries([path], use_array):
            file = shard.boundaries
            beside = file.path if file is not None and file.kind == "csv" else shard.path.replace(".npy", ".csv.gz")
            parts.append(f"metadata={path},sha256={hashlib.sha256(files.read_bytes(beside)).hexdigest()}")
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def from_boundaries(paths: Sequence[str], use_array_if_local: bool | None) -> bool:
    """Whether OLMo-core took the documents of these files from `.csv.gz` files, not from EOS tokens."""
    return use_array_if_local is False or any(re.match("[a-z0-9]+://", path.replace("file://", "")) for path in paths)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, and {len(names) - 3} more,"


def _lengths_in(folder: Path) -> str:
    """Which plans a folder has."""
    if not folder.is_dir():
        return "no plan, for it does not exist"
    found: dict[str, int] = {}
    for path in folder.glob(f"{_NAMES[1]}-*.npy"):
        length = path.name.removeprefix(f"{_NAMES[1]}-").split("-")[0]
        found[length] = found.get(length, 0) + 1
    if not found:
        return "no plan"
    return "plans of sequence_length " + ", ".join(f"{length} ({count})" for length, count in sorted(found.items()))
